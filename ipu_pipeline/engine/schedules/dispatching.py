"""Makes an order by dispatching: a device that is free takes the most urgent action that it can do. No JAX.

A forward is done only if its device can still finish all that it has begun: one micro-batch after the
other, each through all stages of the device (the banker's algorithm: Dijkstra, EWD 623). As all devices can
do so in the same order of micro-batches, they never wait for each other's memory for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ipu_pipeline.engine.schedules.order_problems import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    Order,
    OrderProblem,
    Step,
)

__all__ = ["Rule", "Urgency", "dispatch"]

# By kind and stage, how urgent each micro-batch is: the less, the more urgent.
Urgency: TypeAlias = "Sequence[Sequence[Sequence[float]]]"


@dataclass(frozen=True)
class Rule:
    """How a device chooses.

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
    held, between = problem.num_held_bytes, problem.num_between_bytes
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
            fits = not is_limited or between[stage] - held[stage] <= room[ipu]
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
        if not can:
            return math.inf, 0, 0
        if len(can) > 1:
            can.sort()
            first = min(ready for _urgency, ready, *_rest in can)
            for best in can:  # the most urgent one that is worth waiting for
                _urgency, ready, kind, stage, _time = best
                if ready <= first:
                    return ready, kind, stage
                other = min((o for o in can if o[1] <= first), default=best)
                if first + other[4] - ready > patience[ipu] * other[4]:
                    return ready, kind, stage
        _urgency, ready, kind, stage, _time = can[0]
        return ready, kind, stage

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
            room[ipu] -= held[stage]
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
            room[ipu] -= between[stage] - held[stage]
            if stage:
                target, time, touched = returned[stage - 1], up[stage], ipus[stage - 1]
                target.append(max(end, target[-1] if target else end) + time)
        chosen[ipu] = choose(ipu)
        if touched != ipu:
            chosen[touched] = choose(touched)
    return problem.find_end(free), tuple(map(tuple, order))


def _delay(urgency: Sequence[Sequence[float]], later: Sequence[float]) -> list[list[float]]:
    return [[own + more for own in values] for values, more in zip(urgency, later, strict=True)]


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
    held, between = problem.num_held_bytes, problem.num_between_bytes
    if room < (max(held[stage], between[stage]) if problem.is_both(stage) else held[stage]):
        return False
    room -= held[stage]
    own = problem.stages_of[ipu]
    room += sum((inputs_done[s] - weights_done[s]) * between[s] for s in own)
    if len(own) == 1:
        return room >= between[stage] - held[stage]
    done = [forwards_done[s] + (s == stage) for s in own]
    first = min(inputs_done[s] for s in own)
    for micro_batch in range(first, max(done)):
        flying = [s for s, number in zip(own, done, strict=True) if inputs_done[s] <= micro_batch < number]
        missing = sum(held[s] for s, number in zip(own, done, strict=True) if micro_batch >= number)
        if missing > room:
            return False
        now = room - missing  # all forwards done; then back through the stages that are not done
        for s in reversed(own):
            if inputs_done[s] <= micro_batch:
                now -= between[s] - held[s]
                if now < 0:
                    return False
                now += between[s]
        room += sum(held[s] for s in flying)
    return True
