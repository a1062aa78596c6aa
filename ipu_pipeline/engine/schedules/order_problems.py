"""What an order is made for: times, bytes and a limit; and the cost of an order. No JAX.

A device follows its row, and waits at an action until its inputs are there: a forward needs the stage
before to have gone forward, input gradients need the stage's own forward and the input gradients of the
stage after, weight gradients the stage's input gradients. Results take their time on a link, which sends
one after another while devices compute. That is `free_running`, but for actions that take no time: here
they wait in their row like any other, so that memory is free when the row says so.

Every stage is halved. A whole backward is input gradients and, directly after them, weight gradients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ipu_pipeline.engine.schedules.actions import Action, ActionKind, Rows, number_actions

__all__ = [
    "FORWARD",
    "INPUTS",
    "WEIGHTS",
    "Order",
    "OrderProblem",
    "Step",
    "as_order",
    "as_rows",
    "find_peaks",
    "find_step_time",
    "fits",
]

FORWARD, INPUTS, WEIGHTS = ActionKind.FORWARD, ActionKind.INPUT_GRADIENTS, ActionKind.WEIGHT_GRADIENTS

Step: TypeAlias = "tuple[int, int]"  # the kind and the stage; the micro-batch is the next one
Order: TypeAlias = "tuple[tuple[Step, ...], ...]"  # a row per device


@dataclass(frozen=True, kw_only=True)
class OrderProblem:
    """Stages one after another, with their costs for a micro-batch, from a `Scenario`.

    Attributes:
      num_micro_batches: micro-batches per weight update.
      forward: the time of each stage's forward.
      input_gradients: the time of each stage's input gradients; 0 if it has none.
      weight_gradients: the time of each stage's weight gradients.
      device_mapping: the device of each stage, from 0.
      forward_transfers: the time of each stage's transfer forward, except the last stage's.
      backward_transfers: the time of each stage's transfer back, except the first stage's.
      updates: the time of each stage's update, after the last action of its device.
      is_fused: whether the last stage's forward and input gradients are one program, where the forward is.
      num_held_bytes: the bytes that each stage holds per micro-batch from the start of its forward to the
        end of its input gradients.
      num_between_bytes: the bytes that it holds from then to the end of its weight gradients.
      num_constant_bytes: the bytes that each device always holds.
      num_bytes_per_ipu: the most bytes that a device may hold; None: no limit.
    """

    num_micro_batches: int
    forward: tuple[float, ...]
    input_gradients: tuple[float, ...]
    weight_gradients: tuple[float, ...]
    device_mapping: tuple[int, ...]
    forward_transfers: tuple[float, ...]
    backward_transfers: tuple[float, ...]
    updates: tuple[float, ...]
    is_fused: bool
    num_held_bytes: tuple[int, ...]
    num_between_bytes: tuple[int, ...]
    num_constant_bytes: tuple[int, ...]
    num_bytes_per_ipu: int | None

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @property
    def num_ipus(self) -> int:
        """The number of devices, including those without a stage."""
        return len(self.num_constant_bytes)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, in order."""
        stages = range(self.num_stages)
        return tuple(
            tuple(s for s in stages if self.device_mapping[s] == ipu) for ipu in range(self.num_ipus)
        )

    @cached_property
    def times(self) -> tuple[tuple[float, ...], ...]:
        """By kind of action, the time in which each stage's device is busy; of a whole backward nothing."""
        forward, inputs = list(self.forward), list(self.input_gradients)
        if self.is_fused:
            forward[-1], inputs[-1] = forward[-1] + inputs[-1], 0.0
        return tuple(forward), (), tuple(inputs), self.weight_gradients

    @cached_property
    def num_free_bytes(self) -> tuple[float, ...]:
        """The bytes that each device has for micro-batches; infinite without a limit."""
        limit = math.inf if self.num_bytes_per_ipu is None else self.num_bytes_per_ipu
        return tuple(limit - constant for constant in self.num_constant_bytes)

    @cached_property
    def num_least_bytes(self) -> tuple[int, ...]:
        """The bytes that each device needs to do one micro-batch after another."""
        found = []
        for ipu, stages in enumerate(self.stages_of):
            held = [self.num_held_bytes[stage] for stage in stages]
            most, now = sum(held), sum(held)
            for stage in reversed(stages):
                now += self.num_between_bytes[stage] - self.num_held_bytes[stage]
                most, now = max(most, now), now - self.num_between_bytes[stage]
            found.append(self.num_constant_bytes[ipu] + most)
        return tuple(found)

    def is_both(self, stage: int) -> bool:
        """Whether a stage's forward does its input gradients as well."""
        return self.is_fused and stage == self.num_stages - 1

    @cached_property
    def updates_of_ipus(self) -> tuple[float, ...]:
        """The time of each device's updates."""
        return tuple(sum(self.updates[stage] for stage in stages) for stages in self.stages_of)

    def find_end(self, free: Sequence[float]) -> float:
        """When all is done, updates too, if that is when each device has done its actions."""
        return max(map(operator.add, free, self.updates_of_ipus), default=0.0)


def find_step_time(problem: OrderProblem, order: Order) -> float:
    """Finds how long a step takes in an order; infinite where devices wait for each other for ever."""
    last = problem.num_stages - 1
    times, fused = problem.times, problem.is_fused
    ipus = problem.device_mapping
    # When the inputs of each stage's actions are there, by micro-batch; those of a row are ready in it.
    arrived: list[list[list[float]]] = [[[] for _stage in ipus] for _kind in times]
    arrived[FORWARD][0] = [0.0] * problem.num_micro_batches
    done = [[0] * len(ipus) for _kind in times]
    down, up = (*problem.forward_transfers, 0.0), (0.0, *problem.backward_transfers)
    free, places = [0.0] * len(order), [0] * len(order)
    waiting = list(range(len(order)))
    while waiting:
        ipu = waiting.pop()
        row, place, now = order[ipu], places[ipu], free[ipu]
        while place < len(row):
            kind, stage = row[place]
            number = done[kind][stage]
            if kind != WEIGHTS and not (kind == INPUTS and stage == last):
                arrivals = arrived[kind][stage]
                if number == len(arrivals):
                    break
                if arrivals[number] > now:
                    now = arrivals[number]
            if (kind == INPUTS and done[FORWARD][stage] <= number) or (
                kind == WEIGHTS and done[INPUTS][stage] <= number
            ):
                return math.inf
            now += times[kind][stage]
            done[kind][stage] = number + 1
            place += 1
            if kind == FORWARD and stage < last:
                target, time = arrived[FORWARD][stage + 1], down[stage]
                other = ipus[stage + 1]
            elif stage and (
                (kind == INPUTS and not (fused and stage == last)) or (kind == FORWARD and fused)
            ):
                target, time = arrived[INPUTS][stage - 1], up[stage]
                other = ipus[stage - 1]
            else:
                continue
            target.append(max(now, target[-1] if target else 0.0) + time if time else now)
            if other != ipu and other not in waiting:
                waiting.append(other)
        places[ipu], free[ipu] = place, now
    if any(place < len(row) for place, row in zip(places, order, strict=True)):
        return math.inf
    return problem.find_end(free)


def find_peaks(problem: OrderProblem, order: Order) -> tuple[int, ...]:
    """Finds the most bytes that each device holds in an order, with what it holds all the time."""
    peaks = []
    for constant, row in zip(problem.num_constant_bytes, order, strict=True):
        peak = now = constant
        for kind, stage in row:
            if kind == FORWARD:
                now += problem.num_held_bytes[stage]
            elif kind == INPUTS:
                now += problem.num_between_bytes[stage] - problem.num_held_bytes[stage]
            else:
                now -= problem.num_between_bytes[stage]
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


def fits(problem: OrderProblem, order: Order) -> bool:
    """Whether an order holds no more bytes than the limit on any device."""
    limit = problem.num_bytes_per_ipu
    return limit is None or max(find_peaks(problem, order)) <= limit


def as_rows(order: Order) -> Rows:
    """Writes down an order with its micro-batches."""
    return tuple(map(number_actions, order))


def as_order(rows: Iterable[Sequence[Action | None]]) -> Order:
    """Reads the order of rows, with whole backwards in halves."""
    order = []
    for row in rows:
        steps: list[Step] = []
        for action in row:
            if action is None:
                continue
            if action.kind is ActionKind.BACKWARD:
                steps += [(INPUTS, action.stage), (WEIGHTS, action.stage)]
            else:
                steps.append((action.kind, action.stage))
        order.append(tuple(steps))
    return tuple(order)
