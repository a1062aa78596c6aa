"""Searches for an order with a short step under a memory limit, with a lower bound. No JAX.

It starts with the named schedules, and with dispatching by simple rules. The best rule is then changed at
random, and better results, at first also slightly worse ones, are kept (threshold accepting: Dueck and
Scheuer, 1990). The search is deterministic: it ends after a number of orders, not of seconds, or as soon as
an order takes no longer than the lower bound (`order_bounds`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ipu_pipeline.engine.schedules.actions import ActionKind, Rows, ScheduleError
from ipu_pipeline.engine.schedules.dispatching import Rule, Urgency, dispatch
from ipu_pipeline.engine.schedules.named import named_schedules
from ipu_pipeline.engine.schedules.order_bounds import find_bound, find_caps, find_tails
from ipu_pipeline.engine.schedules.order_problems import (
    INPUTS,
    WEIGHTS,
    Order,
    OrderProblem,
    Step,
    as_order,
    as_rows,
    find_peaks,
    find_step_time,
    fits,
)

__all__ = ["Searched", "search"]

_MOST_ORDERS = 1_000  # that are tried
_MOST_ACTIONS = 500_000  # in all of them together: about two seconds
_THRESHOLD = 0.01  # of the bound: how much worse a rule may be in the beginning
_SAME = 1e-9  # step times that differ by less, as a share, are the same


@dataclass(frozen=True)
class Searched:
    """The best order found, and how good it is.

    Example:
      >>> costs = engine.Costs.of(2, forward=[1.0, 2.0], backward=[2.0, 4.0])
      >>> searched = schedules.search(engine.Scenario(costs, num_micro_batches=4).problem())
      >>> searched.step_time, searched.bound, searched.gap
      (25.0, 25.0, 0.0)

    Attributes:
      rows: the schedule; every stage has a split backward.
      step_time: the time of a step, in the problem's unit.
      bound: a lower bound for the step time of any order under the limit; no order need reach it.
      reason: the source of the bound, in words.
      name: the name of the schedule if it is a named one; otherwise "searched".
      num_peak_bytes: the most bytes that each device holds.
    """

    rows: Rows = field(repr=False)
    step_time: float
    bound: float
    reason: str
    name: str
    num_peak_bytes: tuple[int, ...]

    @property
    def gap(self) -> float:
        """The most by which the step time may exceed the shortest one, as a share of the bound."""
        return self.step_time / self.bound - 1.0 if self.bound else 0.0

    def __str__(self) -> str:
        """Describes the result, such as "searched, at most 2.1% above the best"."""
        told = "the best there is" if self.gap <= _SAME else f"at most {self.gap:.1%} above the best"
        return "searched" + ("" if self.name == "searched" else f" (as {self.name})") + f", {told}"


@dataclass(frozen=True)
class _Known:
    """An order that fits."""

    step_time: float
    order: Order
    name: str = "searched"


def search(problem: OrderProblem) -> Searched:
    """Searches for an order with a short step.

    The result is never slower than a named schedule that fits. Its `gap` is the most that it may lack.

    Example:
      >>> costs = engine.Costs.of(2, forward=[1.0, 2.0], backward=[2.0, 4.0])
      >>> scenario = engine.Scenario(costs, num_micro_batches=4)
      >>> searched = schedules.search(scenario.problem())
      >>> searched.step_time == searched.bound  # no order takes less
      True

    Args:
      problem: the stages, the times of their actions, and the limit of bytes.

    Returns:
      The order and its bound.
    """
    bound, reason = find_bound(problem)
    enough = bound * (1 + _SAME)
    # Of equal ones the first is the best: a name says more than a search. Sequential fits always.
    best = min(_follow_named(problem), key=_get_time)
    if best.step_time > enough:
        best = min(best, _follow_rules(problem, bound, enough), key=_get_time)
    bound = best.step_time if best.step_time <= enough else bound
    peaks = find_peaks(problem, best.order)
    return Searched(as_rows(best.order), best.step_time, bound, reason, best.name, peaks)


def _get_time(known: _Known) -> float:
    return known.step_time


def _follow_named(problem: OrderProblem) -> Iterator[_Known]:
    """The schedules with names that fit."""
    for name, function in named_schedules().items():
        with contextlib.suppress(ScheduleError):
            rows = function(problem.num_stages, problem.num_micro_batches, problem.device_mapping)
            given = as_order(rows)
            for order in (given, _settle(problem, given)):
                if fits(problem, order):
                    yield _Known(find_step_time(problem, order), order, name)


def _settle(problem: OrderProblem, order: Order) -> Order:
    """Moves input gradients that take no time to where they keep no other action waiting."""
    last = problem.num_stages - 1
    settled = []
    for row in order:
        steps: list[Step] = []
        for step in row:
            kind, stage = step
            if kind == INPUTS and not problem.times[INPUTS][stage]:
                continue
            if kind == WEIGHTS and not problem.times[INPUTS][stage] and not problem.is_both(stage):
                steps.append((INPUTS, stage))
            steps.append(step)
            if problem.is_both(stage) and kind not in (INPUTS, WEIGHTS):
                steps.append((INPUTS, last))
        settled.append(tuple(steps))
    return tuple(settled)


def _make_simple(problem: OrderProblem, bound: float) -> Iterator[Rule]:
    """Rules that are the same for all stages.

    What comes first is an earlier micro-batch, or what has more to come after it, by the lower bound.
    """
    number, count = problem.num_stages, problem.num_micro_batches
    most = tuple(cap.flying for cap in find_caps(problem))
    by_number: Urgency = [[range(count)] * number] * len(ActionKind)
    unit = -count / bound if bound else 0.0
    by_tail: Urgency = [
        [[unit * (tail + time) for tail in own] for own, time in zip(tails, times, strict=False)]
        for tails, times in zip(find_tails(problem), problem.times, strict=True)
    ]
    for base, inputs, weights, patience in (
        (by_number, (-count, 0, count), (-2 * count, 0, 3, 2 * count), (1.0, 0.5, 0.0)),
        (by_tail, (0,), (0, 3, 2 * count), (1.0, 0.8, 0.5, 0.2, 0.0)),
    ):
        for one, other, share in itertools.product(inputs, weights, patience):
            yield Rule(base, (one,) * number, (other,) * number, (share,) * problem.num_ipus, most)


def _follow_rules(problem: OrderProblem, bound: float, enough: float) -> _Known:
    """Changes the best simple rule at random, and keeps what is better or little worse."""
    tried = [(_Known(*dispatch(problem, rule)), rule) for rule in _make_simple(problem, bound)]
    best, rule = min(tried, key=lambda one: one[0].step_time)
    num_actions = 3 * problem.num_stages * problem.num_micro_batches
    num_left = min(_MOST_ORDERS, _MOST_ACTIONS // num_actions) - len(tried)
    chance = random.Random(0)  # noqa: S311  # the same for every search
    most = rule.most
    now, threshold = best.step_time, _THRESHOLD * best.step_time
    for number in range(num_left):
        if best.step_time <= enough:
            break
        changed = rule
        for _change in range(chance.choice((1, 1, 2, 3))):
            changed = _change_one(problem, changed, most, chance)
        found = _Known(*dispatch(problem, changed))
        if found.step_time < now + threshold * (1 - number / num_left) * chance.random():
            now, rule = found.step_time, changed
        best = min(best, found, key=_get_time)
    return best


def _change_one(problem: OrderProblem, rule: Rule, most: Sequence[int], chance: random.Random) -> Rule:
    """Changes one number of a rule."""
    name = chance.choice(("inputs", "inputs", "weights", "weights", "patience", "most"))
    values = list(getattr(rule, name))
    place = chance.randrange(len(values))
    if name == "patience":
        values[place] = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))
    elif name == "most":
        values[place] = chance.choice((max(1, values[place] - 1), values[place] + 1, most[place]))
        values[place] = min(values[place], most[place])
    else:
        count = problem.num_micro_batches
        near, far = values[place] + chance.gauss(0, 1), chance.choice((-2 * count, 2 * count))
        values[place] = chance.choice((near, near, far, chance.uniform(-10, 10)))
    return dataclasses.replace(rule, **{name: tuple(values)})
