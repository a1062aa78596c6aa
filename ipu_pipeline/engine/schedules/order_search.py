"""Search for an order with a short step under a memory limit: dispatching rules, and their annealing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ipu_pipeline.engine.schedules.order_problems import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    Order,
    OrderProblem,
    Step,
    as_order,
    as_rows,
    find_bound,
    find_caps,
    find_peaks,
    find_step_time,
    find_tails,
    fits,
)
from ipu_pipeline.engine.schedules.schedule_arguments import named_schedules
from ipu_pipeline.engine.schedules.timetables import ActionKind, Rows, ScheduleError

# Dispatching: a device that is free takes the most urgent action that it can do.
#
# A forward is done only if its device can still finish all that it has begun, one micro-batch after the
# other (the banker's algorithm: Dijkstra, EWD 623). As all devices can do so in the same order of
# micro-batches, they never wait for each other's memory for ever.

# By kind and stage, how urgent each micro-batch is: the less, the more urgent.
Urgency: TypeAlias = "Sequence[Sequence[Sequence[float]]]"


@dataclass(frozen=True)
class Rule:
    """A rule by which devices choose.

    Attributes:
      base: how urgent the actions are, in micro-batches.
      inputs: for each stage, how many micro-batches later its input gradients are that urgent.
      weights: the same of weight gradients.
      patience: for each device, when it waits for a more urgent action that is on its way: if another one
        would hold that up by more than this share of the other one's time. 1 is never, 0 always.
      most: for each stage, the most micro-batches in flight (gone forward, and their input gradients not
        done).
    """

    base: Urgency
    inputs: Sequence[float]
    weights: Sequence[float]
    patience: Sequence[float]
    most: Sequence[int]


def dispatch(problem: OrderProblem, rule: Rule) -> tuple[float, Order]:
    """Makes an order by a rule; returns how long its step takes as well."""
    num_stages, count, ipus = problem.num_stages, problem.num_micro_batches, problem.device_mapping
    stages, last = range(num_stages), num_stages - 1
    times, patience, fused = problem.times, rule.patience, problem.is_fused
    forward, inputs, weights = times[FORWARD], times[INPUTS], times[WEIGHTS]
    for_forward = rule.base[FORWARD]
    for_inputs = _delay(rule.base[INPUTS], rule.inputs)
    for_weights = _delay(rule.base[WEIGHTS], rule.weights)
    held_bytes, between = problem.num_held_bytes, problem.num_between_bytes
    # The devices' state: bytes that are free, actions done, arrivals of inputs, and when each is free.
    room = list(problem.num_free_bytes)
    is_limited = problem.num_bytes_per_ipu is not None
    down, up = (*problem.forward_transfers, 0.0), (0.0, *problem.backward_transfers)
    forwards_done, inputs_done, weights_done = ([0] * num_stages for _kind in range(3))
    arrived: list[list[float]] = [[] for _stage in stages]
    arrived[0] = [0.0] * count
    returned: list[list[float]] = [[] for _stage in stages]
    free = [0.0] * problem.num_ipus
    order: list[list[Step]] = [[] for _ipu in free]
    chosen: list[tuple[float, int, int]] = [(math.inf, 0, 0)] * len(free)

    def choose(ipu: int) -> tuple[float, int, int]:
        """The begin, kind and stage of a device's next action."""
        now = free[ipu]
        can: list[tuple[float, float, int, int, float]] = []  # urgency, ready, kind, stage, time
        for stage in problem.stages_of[ipu]:
            number = weights_done[stage]
            if number < inputs_done[stage]:
                can.append((for_weights[stage][number], now, WEIGHTS, stage, weights[stage]))
            number = inputs_done[stage]
            fits = not is_limited or between[stage] - held_bytes[stage] <= room[ipu]
            if number < forwards_done[stage] and number < len(returned[stage]) and fits:
                ready = max(now, returned[stage][number])
                can.append((for_inputs[stage][number], ready, INPUTS, stage, inputs[stage]))
            number = forwards_done[stage]
            if number in (count, len(arrived[stage]), inputs_done[stage] + rule.most[stage]):
                continue
            if is_limited and not _is_safe(
                problem, ipu, stage, room[ipu], forwards_done, inputs_done, weights_done
            ):
                continue
            ready = max(now, arrived[stage][number])
            can.append((for_forward[stage][number], ready, FORWARD, stage, forward[stage]))
        # The most urgent one that is worth waiting for.
        if not can:
            return math.inf, 0, 0
        if len(can) > 1:
            can.sort()
            first = min(ready for _urgency, ready, *_details in can)
            for best in can:
                _urgency, ready, kind, stage, _time = best
                if ready <= first:
                    return ready, kind, stage
                alternative = min((o for o in can if o[1] <= first), default=best)
                if first + alternative[4] - ready > patience[ipu] * alternative[4]:
                    return ready, kind, stage
        _urgency, ready, kind, stage, _time = can[0]
        return ready, kind, stage

    # The device that can begin first does its action, and chooses again, as does the one that it sends to.
    for ipu in range(len(free)):
        chosen[ipu] = choose(ipu)
    while True:
        ipu = min(range(len(free)), key=chosen.__getitem__)
        begin, kind, stage = chosen[ipu]
        if begin == math.inf:
            break
        end = begin + times[kind][stage]
        free[ipu] = end
        order[ipu].append((kind, stage))
        touched = ipu
        if kind == FORWARD:
            forwards_done[stage] += 1
            room[ipu] -= held_bytes[stage]
            if stage < last:
                target, time, touched = arrived[stage + 1], down[stage], ipus[stage + 1]
                target.append(max(end, target[-1] if target else end) + time)
            elif fused:  # the program does these as well
                kind = INPUTS
                order[ipu].append((kind, stage))
            else:
                returned[stage].append(end)
        elif kind == WEIGHTS:
            weights_done[stage] += 1
            room[ipu] += between[stage]
        if kind == INPUTS:
            inputs_done[stage] += 1
            room[ipu] -= between[stage] - held_bytes[stage]
            if stage:
                target, time, touched = returned[stage - 1], up[stage], ipus[stage - 1]
                target.append(max(end, target[-1] if target else end) + time)
        chosen[ipu] = choose(ipu)
        if touched != ipu:
            chosen[touched] = choose(touched)
    return problem.find_end(free), tuple(map(tuple, order))


def _delay(urgency: Sequence[Sequence[float]], later: Sequence[float]) -> list[list[float]]:
    return [[value + more for value in values] for values, more in zip(urgency, later, strict=True)]


def _is_safe(
    problem: OrderProblem,
    ipu: int,
    stage: int,
    room: float,
    forwards_done: Sequence[int],
    inputs_done: Sequence[int],
    weights_done: Sequence[int],
) -> bool:
    """Whether a device can still finish all that it has begun after one more forward of a stage."""
    held_bytes, between = problem.num_held_bytes, problem.num_between_bytes
    if room < (max(held_bytes[stage], between[stage]) if problem.is_both(stage) else held_bytes[stage]):
        return False
    room -= held_bytes[stage]
    stages = problem.stages_of[ipu]
    room += sum((inputs_done[s] - weights_done[s]) * between[s] for s in stages)
    if len(stages) == 1:
        return room >= between[stage] - held_bytes[stage]
    counts = {s: forwards_done[s] + (s == stage) for s in stages}
    first = min(inputs_done[s] for s in stages)
    for micro_batch in range(first, max(counts.values())):
        flying = [s for s, number in counts.items() if inputs_done[s] <= micro_batch < number]
        missing = sum(held_bytes[s] for s, number in counts.items() if micro_batch >= number)
        if missing > room:
            return False
        now = room - missing  # all forwards done; then back through the stages that are not done
        for s in reversed(stages):
            if inputs_done[s] <= micro_batch:
                now -= between[s] - held_bytes[s]
                if now < 0:
                    return False
                now += between[s]
        room += sum(held_bytes[s] for s in flying)
    return True


# The search: named schedules first, then simple rules, of which the best is changed at random; better
# results, at first also slightly worse ones, are kept (threshold accepting: Dueck and Scheuer, 1990). It
# ends after a number of orders, not of seconds, so that it is deterministic; or with an order that
# reaches the lower bound.

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
        quality = "the best there is" if self.gap <= _SAME else f"at most {self.gap:.1%} above the best"
        return "searched" + ("" if self.name == "searched" else f" (as {self.name})") + f", {quality}"


@dataclass(frozen=True)
class _Candidate:
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


def _get_time(candidate: _Candidate) -> float:
    return candidate.step_time


def _follow_named(problem: OrderProblem) -> Iterator[_Candidate]:
    """The schedules with names that fit."""
    for name, function in named_schedules().items():
        with contextlib.suppress(ScheduleError):
            rows = function(problem.num_stages, problem.num_micro_batches, problem.device_mapping)
            named_order = as_order(rows)
            for order in (named_order, _settle(problem, named_order)):
                if fits(problem, order):
                    yield _Candidate(find_step_time(problem, order), order, name)


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
        [[unit * (tail + time) for tail in row] for row, time in zip(tails, times, strict=False)]
        for tails, times in zip(find_tails(problem), problem.times, strict=True)
    ]
    for base, inputs, weights, patience in (
        (by_number, (-count, 0, count), (-2 * count, 0, 3, 2 * count), (1.0, 0.5, 0.0)),
        (by_tail, (0,), (0, 3, 2 * count), (1.0, 0.8, 0.5, 0.2, 0.0)),
    ):
        for input_delay, weight_delay, share in itertools.product(inputs, weights, patience):
            shares = (share,) * problem.num_ipus
            yield Rule(base, (input_delay,) * number, (weight_delay,) * number, shares, most)


def _follow_rules(problem: OrderProblem, bound: float, enough: float) -> _Candidate:
    """Changes the best simple rule at random, and keeps what is better or little worse."""
    tried = [(_Candidate(*dispatch(problem, rule)), rule) for rule in _make_simple(problem, bound)]
    best, rule = min(tried, key=lambda pair: pair[0].step_time)
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
        candidate = _Candidate(*dispatch(problem, changed))
        if candidate.step_time < now + threshold * (1 - number / num_left) * chance.random():
            now, rule = candidate.step_time, changed
        best = min(best, candidate, key=_get_time)
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
