"""Finds the order with the smallest step time and proves it, by branch and bound. No JAX.

Of all actions that could be next, one would end first. On its device, either it is next, or one that begins
before that end: else it could go first without delaying anything (Giffler and Thompson, "Algorithms for
solving production-scheduling problems", 1960). An action that takes memory may not fit in earlier, though.
Where that can matter, there is another branch, in which it waits until its device has done something else.

A branch ends where its bound, as in `order_bounds`, is no less than the best time that is known. It also
ends where the same actions have been done before, and nothing was free or there later than now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.order_bounds import find_caps, find_preemptive, find_tails
from ipu_pipeline.engine.schedules.order_problems import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    Order,
    OrderProblem,
    Step,
)

__all__ = ["Proof", "prove"]

_MOST_ALIKE = 30  # of the same actions done, so many states are remembered


@dataclass(frozen=True)
class Proof:
    """What branch and bound found.

    Attributes:
      step_time: the smallest step time that is known.
      order: an order that takes it; None if none is better than what was known before.
      is_complete: whether no order is better.
    """

    step_time: float
    order: Order | None
    is_complete: bool


def prove(problem: OrderProblem, known: float, least: float, num_nodes: int) -> Proof:
    """Looks for an order that is faster than a known one.

    Args:
      problem: the problem.
      known: the step time of the known order.
      least: a lower bound: an order that takes this is the best one.
      num_nodes: how many branches are looked at; then it gives up.
    """
    return _Search(problem, known, least, num_nodes).run()


@dataclass(eq=False)
class _State:
    """What has been done so far, and when.

    Attributes:
      arrived: for each stage, when the inputs of its forwards are there.
      returned: the same of its input gradients.
      ends: when its input gradients ended.
      done: by kind and stage, how many micro-batches are done.
      free: when each device is free.
      room: the bytes that each device has left.
      rows: the order so far.
      barred: for each device, what waits until it has done something else.
    """

    arrived: list[list[float]]
    returned: list[list[float]]
    ends: list[list[float]]
    done: list[list[int]]
    free: list[float]
    room: list[float]
    rows: list[list[Step]]
    barred: list[frozenset[Step]]

    @classmethod
    def start(cls, problem: OrderProblem) -> _State:
        """The state before the first action."""
        stages, ipus = range(problem.num_stages), range(problem.num_ipus)
        return cls(
            [[0.0] * problem.num_micro_batches, *([] for _stage in stages[1:])],
            [[] for _stage in stages],
            [[] for _stage in stages],
            [[0 for _stage in stages] for _kind in range(4)],
            [0.0 for _ipu in ipus],
            list(problem.num_free_bytes),
            [[] for _ipu in ipus],
            [frozenset() for _ipu in ipus],
        )

    def copy(self) -> _State:
        """A copy that can be changed."""
        return _State(
            [own.copy() for own in self.arrived],
            [own.copy() for own in self.returned],
            [own.copy() for own in self.ends],
            [own.copy() for own in self.done],
            self.free.copy(),
            self.room.copy(),
            [row.copy() for row in self.rows],
            self.barred.copy(),
        )


class _Search:
    def __init__(self, problem: OrderProblem, known: float, least: float, num_nodes: int) -> None:
        self.problem, self.best, self.least = problem, known, least
        self.num_left = num_nodes
        self.order: Order | None = None
        self.tails, self.caps = find_tails(problem), find_caps(problem)
        self.margin = 1e-9 * least
        self.seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        is_limited = problem.num_bytes_per_ipu is not None
        held, between = problem.num_held_bytes, problem.num_between_bytes
        self.may_wait = [
            is_limited and (len(own) > 1 or any(between[s] > held[s] for s in own))
            for own in problem.stages_of
        ]

    def run(self) -> Proof:
        """Follows branches, depth first, the best bound first."""
        pending = [(0.0, _State.start(self.problem))]
        while pending and self.best > self.least + self.margin:
            bound, state = pending.pop()
            if bound < self.best - self.margin:
                pending += self._branch(state)
                if self.num_left <= 0:
                    return Proof(self.best, self.order, is_complete=False)
        return Proof(self.best, self.order, is_complete=True)

    def _branch(self, state: _State) -> list[tuple[float, _State]]:
        """The states that may be next with their bounds, the most promising last."""
        problem = self.problem
        best, ipu, first = math.inf, -1, (0, 0)
        able: list[list[tuple[float, Step]]] = []
        for own, stages in enumerate(problem.stages_of):
            able.append([])
            for stage in stages:
                for step, ready in self._find_able(state, stage, own):
                    begin = max(state.free[own], ready)
                    end = begin + problem.times[step[0]][stage]
                    able[own].append((begin, step))
                    if end < best:
                        best, ipu, first = end, own, step
        if ipu < 0:
            if state.done[WEIGHTS] == [problem.num_micro_batches] * problem.num_stages:
                time = problem.find_end(state.free)
                if time < self.best - self.margin:
                    self.best, self.order = time, tuple(map(tuple, state.rows))
            return []
        found = []
        kind, stage = first
        takes = kind == FORWARD or problem.num_between_bytes[stage] > problem.num_held_bytes[stage]
        if takes and kind != WEIGHTS and self.may_wait[ipu]:
            after = state.copy()
            after.barred[ipu] |= {first}
            found.append((self._find_bound(after), 2, after))
        for begin, step in able[ipu]:
            if begin < best or step == first:
                after = state.copy()
                self._do(after, ipu, step)
                self.num_left -= 1
                bound = self._find_bound(after)
                if bound < self.best - self.margin and not self._is_dominated(after):
                    found.append((bound, step[0] == WEIGHTS, after))
        found.sort(key=lambda one: one[:2], reverse=True)
        return [(bound, after) for bound, _place, after in found]

    def _find_able(self, state: _State, stage: int, ipu: int) -> Iterator[tuple[Step, float]]:
        problem, room = self.problem, state.room[ipu]
        forwards, _none, inputs, weights = (done[stage] for done in state.done)
        held, between = problem.num_held_bytes[stage], problem.num_between_bytes[stage]
        step = WEIGHTS, stage
        if weights < inputs and step not in state.barred[ipu]:
            yield step, 0.0
        step, returned = (INPUTS, stage), state.returned[stage]
        if (
            inputs < min(forwards, len(returned))
            and between - held <= room
            and step not in state.barred[ipu]
        ):
            yield step, returned[inputs]
        step, arrived = (FORWARD, stage), state.arrived[stage]
        needed = max(held, between) if problem.is_both(stage) else held
        if forwards < len(arrived) and needed <= room and step not in state.barred[ipu]:
            yield step, arrived[forwards]

    def _do(self, state: _State, ipu: int, step: Step) -> None:
        """Does an action."""
        problem, (kind, stage) = self.problem, step
        number = state.done[kind][stage]
        begin = state.free[ipu]
        if kind != WEIGHTS:
            begin = max(begin, (state.arrived if kind == FORWARD else state.returned)[stage][number])
        end = state.free[ipu] = begin + problem.times[kind][stage]
        state.barred[ipu] = frozenset()
        state.done[kind][stage] += 1
        state.rows[ipu].append(step)
        held, between = problem.num_held_bytes[stage], problem.num_between_bytes[stage]
        if kind == WEIGHTS:
            state.room[ipu] += between
        elif kind == INPUTS:
            state.room[ipu] -= between - held
            state.ends[stage].append(end)
            if stage:
                _send(state.returned[stage - 1], end, problem.backward_transfers[stage - 1])
        else:
            state.room[ipu] -= held
            if stage + 1 < problem.num_stages:
                _send(state.arrived[stage + 1], end, problem.forward_transfers[stage])
            else:
                state.returned[stage].append(end)
                if problem.is_fused:
                    self._do(state, ipu, (INPUTS, stage))

    def _is_dominated(self, state: _State) -> bool:
        """Whether the same was done before, with nothing later; remembers the state if not."""
        if any(state.barred):
            return False
        forwards, _none, inputs, weights = state.done
        moments = list(state.free)
        for lists, done, links in (
            (state.arrived, forwards, (0.0, *self.problem.forward_transfers)),
            (state.returned, inputs, (*self.problem.backward_transfers, 0.0)),
        ):
            for own, number, link in zip(lists, done, links, strict=True):
                moments += own[number:]
                if link and number == len(own):
                    moments += own[-1:]  # the next result comes after it
        found = tuple(moments)
        alike = self.seen.setdefault((*forwards, *inputs, *weights), [])
        for other in alike:
            if all(a <= b for a, b in zip(other, found, strict=True)):
                return True
        if len(alike) < _MOST_ALIKE:
            alike.append(found)
        return False

    def _find_bound(self, state: _State) -> float:
        """A lower bound of what begins so."""
        problem, caps = self.problem, self.caps
        number, last = problem.num_stages, problem.num_stages - 1
        times, ipus = problem.times, problem.device_mapping
        forward, inputs = times[FORWARD], times[INPUTS]
        down, up = (*problem.forward_transfers, 0.0), (0.0, *problem.backward_transfers)
        now = [state.free[ipu] for ipu in ipus]
        sent = [own[-1] if own else 0.0 for own in state.arrived]
        given = [own[-1] if own else 0.0 for own in state.returned]
        after_forward, after_inputs = now.copy(), now.copy()
        ends = [list(own) for own in state.ends]
        jobs: list[list[tuple[float, float, float]]] = [[] for _ipu in state.free]
        for micro_batch in range(min(state.done[INPUTS]), problem.num_micro_batches):
            back = [0.0] * number
            for stage in range(number):
                if micro_batch < state.done[FORWARD][stage]:
                    continue
                begin = after_forward[stage]
                arrived = state.arrived[stage]
                ready = arrived[micro_batch] if micro_batch < len(arrived) else sent[stage]
                begin = max(begin, ready)
                flying = micro_batch - caps[stage].flying
                if flying >= 0:
                    begin = max(begin, ends[stage][flying])
                end = after_forward[stage] = back[stage] = begin + forward[stage]
                tail = self.tails[FORWARD][stage][micro_batch]
                jobs[ipus[stage]].append((begin, forward[stage], tail))
                if stage < last and micro_batch >= len(state.arrived[stage + 1]):
                    sent[stage + 1] = max(sent[stage + 1], end) + down[stage]
            for stage in reversed(range(number)):
                if micro_batch < state.done[INPUTS][stage]:
                    continue
                returned = state.returned[stage]
                ready = returned[micro_batch] if micro_batch < len(returned) else given[stage]
                begin = max(after_inputs[stage], back[stage], ready)
                end = after_inputs[stage] = begin + inputs[stage]
                ends[stage].append(end)
                tail = self.tails[INPUTS][stage][micro_batch]
                if inputs[stage]:
                    jobs[ipus[stage]].append((begin, inputs[stage], tail))
                elif end + tail >= self.best:
                    return end + tail
                if stage and micro_batch >= len(state.returned[stage - 1]):
                    given[stage - 1] = max(given[stage - 1], end) + up[stage]
        bound = problem.find_end(state.free)
        for stage, time in enumerate(times[WEIGHTS]):
            if time:
                tails, free = self.tails[WEIGHTS][stage], now[stage]
                jobs[ipus[stage]] += [
                    (max(free, ends[stage][n]), time, tails[n])
                    for n in range(state.done[WEIGHTS][stage], problem.num_micro_batches)
                ]
        for own in jobs:
            if own:
                bound = max(bound, find_preemptive(own))
                if bound >= self.best:
                    break
        return bound


def _send(arrivals: list[float], end: float, time: float) -> None:
    arrivals.append(max(end, arrivals[-1] if arrivals else 0.0) + time)
