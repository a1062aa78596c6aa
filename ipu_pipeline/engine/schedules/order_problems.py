"""Problems of ordering a step's actions: times, bytes and a limit; costs of an order, and lower bounds."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ipu_pipeline.engine.schedules.timetables import Action, ActionKind, Rows, number_actions

# A device follows its row, and waits at an action until its inputs are there; a link sends one result
# after another while devices compute. Unlike in the simulator, actions that take no time wait in their
# row, too, so that memory is free when the row says so. Every stage is halved: a whole backward is input
# gradients and, directly after them, weight gradients.

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
        """The time of each stage by kind of action; whole backwards have none."""
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
        sizes = []
        for ipu, stages in enumerate(self.stages_of):
            held_bytes = [self.num_held_bytes[stage] for stage in stages]
            most, now = sum(held_bytes), sum(held_bytes)
            for stage in reversed(stages):
                now += self.num_between_bytes[stage] - self.num_held_bytes[stage]
                most, now = max(most, now), now - self.num_between_bytes[stage]
            sizes.append(self.num_constant_bytes[ipu] + most)
        return tuple(sizes)

    def is_both(self, stage: int) -> bool:
        """Whether a stage's forward does its input gradients as well."""
        return self.is_fused and stage == self.num_stages - 1

    @cached_property
    def updates_of_ipus(self) -> tuple[float, ...]:
        """The time of each device's updates."""
        return tuple(sum(self.updates[stage] for stage in stages) for stages in self.stages_of)

    def find_end(self, free: Sequence[float]) -> float:
        """The time when all is done, with updates, from the times when devices have done their actions."""
        return max(map(operator.add, free, self.updates_of_ipus), default=0.0)


def find_step_time(problem: OrderProblem, order: Order) -> float:
    """Finds how long a step takes in an order; infinite where devices wait for each other for ever."""
    last = problem.num_stages - 1
    times, fused = problem.times, problem.is_fused
    ipus = problem.device_mapping
    # When the inputs of each stage's actions are there, by micro-batch; those of a row are ready in it.
    arrived: list[list[list[float]]] = [[[] for _stage in ipus] for _kind in times]
    arrived[FORWARD][0] = [0.0] * problem.num_micro_batches
    num_done = [[0] * len(ipus) for _kind in times]
    down, up = (*problem.forward_transfers, 0.0), (0.0, *problem.backward_transfers)
    free, places = [0.0] * len(order), [0] * len(order)
    waiting = list(range(len(order)))
    while waiting:
        ipu = waiting.pop()
        row, place, now = order[ipu], places[ipu], free[ipu]
        while place < len(row):
            kind, stage = row[place]
            number = num_done[kind][stage]
            if kind != WEIGHTS and not (kind == INPUTS and stage == last):
                arrivals = arrived[kind][stage]
                if number == len(arrivals):
                    break
                if arrivals[number] > now:
                    now = arrivals[number]
            if (kind == INPUTS and num_done[FORWARD][stage] <= number) or (
                kind == WEIGHTS and num_done[INPUTS][stage] <= number
            ):
                return math.inf
            now += times[kind][stage]
            num_done[kind][stage] = number + 1
            place += 1
            if kind == FORWARD and stage < last:
                target, time = arrived[FORWARD][stage + 1], down[stage]
                receiver = ipus[stage + 1]
            elif stage and (
                (kind == INPUTS and not (fused and stage == last)) or (kind == FORWARD and fused)
            ):
                target, time = arrived[INPUTS][stage - 1], up[stage]
                receiver = ipus[stage - 1]
            else:
                continue
            target.append(max(now, target[-1] if target else 0.0) + time if time else now)
            if receiver != ipu and receiver not in waiting:
                waiting.append(receiver)
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


# Lower bounds of the step time.
#
# An action cannot begin before its head, and after its end at least its tail passes: longest paths over
# what every order keeps (results and transfers, micro-batches in order, the limit of bytes). If a stage
# can have n micro-batches in flight, its forward of k+n begins after its input gradients of k; where only
# c may be between the halves, the weight gradients of k-c come before the forward of k. Within heads and
# tails each device does its actions one at a time; Jackson's preemptive schedule, most urgent tail first,
# is the shortest (Carlier, "The one-machine sequencing problem", 1982).

Times = list[list[list[float]]]  # by kind, stage and micro-batch


@dataclass(frozen=True)
class Caps:
    """The number of micro-batches that a stage can hold.

    Attributes:
      flying: the most that have gone forward, with their input gradients not done.
      between: by the number of those, the most that can be between the halves then; from one on.
    """

    flying: int
    between: tuple[int, ...]

    @cached_property
    def begun(self) -> int:
        """The most that have gone forward, with their weight gradients not done."""
        return max(flying + between for flying, between in enumerate(self.between, start=1))

    def find_work(self, count: int, inputs: float, weights: float) -> list[float]:
        """The least work of halves until a forward, since all of them up to an earlier micro-batch."""
        pairs = list(enumerate(self.between, start=1))
        return [
            min(
                max(0, ahead + 1 - flying) * inputs + max(0, ahead + 1 - flying - between) * weights
                for flying, between in pairs
            )
            for ahead in range(count)
        ]


def find_caps(problem: OrderProblem) -> list[Caps]:
    """Finds how many micro-batches each stage can hold if its device holds as few as possible otherwise."""
    count, caps = problem.num_micro_batches, []
    for stage, ipu in enumerate(problem.device_mapping):
        # A micro-batch that a stage holds is also held by the stages before on the same device.
        before = sum(problem.num_held_bytes[s] for s in problem.stages_of[ipu] if s < stage)
        held_bytes, between = problem.num_held_bytes[stage], problem.num_between_bytes[stage]
        room = problem.num_free_bytes[ipu]
        flying = max(1, _divide(room - max(0, between - held_bytes), before + held_bytes, count))
        least = max(held_bytes, between) if problem.is_both(stage) else held_bytes
        rooms = [room - number * (before + held_bytes) - before - least for number in range(flying)]
        caps.append(Caps(flying, tuple(_divide(space, between, count) for space in rooms)))
    return caps


def _divide(room: float, size: int, most: int) -> int:
    return most if not size or room >= most * size else max(0, int(room // size))


def find_heads(problem: OrderProblem) -> Times:
    """Finds a time for each action before which it cannot begin."""
    stages, count = range(problem.num_stages), problem.num_micro_batches
    forward, inputs, weights = (problem.times[kind] for kind in (FORWARD, INPUTS, WEIGHTS))
    caps, last = find_caps(problem), problem.num_stages - 1
    heads: Times = [[[0.0] * count for _stage in stages] for _kind in range(4)]
    ends: Times = [[[0.0] * count for _stage in stages] for _kind in range(4)]
    down, up = (*problem.forward_transfers, 0.0), (0.0, *problem.backward_transfers)
    arrived = [0.0] * problem.num_stages
    returned = [0.0] * problem.num_stages
    works = [caps[stage].find_work(count, inputs[stage], weights[stage]) for stage in stages]
    for number in range(count):
        for stage in stages:
            begin = arrived[stage]
            if number:
                begin = max(begin, ends[FORWARD][stage][number - 1])
                if problem.is_both(stage):
                    begin = max(begin, ends[INPUTS][stage][number - 1])
            cap = caps[stage]
            input_ends, weight_ends = ends[INPUTS][stage], ends[WEIGHTS][stage]
            if number >= cap.flying:
                # One of the ways to have room: that many flying, and the others back or even done.
                begin = max(
                    begin,
                    min(
                        max(input_ends[number - flying], weight_ends[number - flying - between])
                        if number >= flying + between
                        else input_ends[number - flying]
                        for flying, between in enumerate(cap.between, start=1)
                    ),
                )
                # All that must have been done since the input gradients of an earlier micro-batch began.
                input_heads, f = heads[INPUTS][stage], forward[stage]
                for ahead in range(cap.flying, number + 1):
                    work = (ahead - cap.flying) * f + works[stage][ahead]
                    begin = max(begin, input_heads[number - ahead] + work)
            if number >= cap.begun:
                begin = max(begin, weight_ends[number - cap.begun])
            heads[FORWARD][stage][number] = begin
            end = ends[FORWARD][stage][number] = begin + forward[stage]
            if stage < last:
                arrived[stage + 1] = max(arrived[stage + 1], end) + down[stage]
        for stage in reversed(stages):
            begin = max(ends[FORWARD][stage][number], returned[stage] if stage < last else 0.0)
            if number:
                begin = max(begin, ends[INPUTS][stage][number - 1])
            heads[INPUTS][stage][number] = begin
            end = ends[INPUTS][stage][number] = begin + inputs[stage]
            if stage:
                returned[stage - 1] = max(returned[stage - 1], end) + up[stage]
            begin = max(end, ends[WEIGHTS][stage][number - 1]) if number else end
            heads[WEIGHTS][stage][number] = begin
            ends[WEIGHTS][stage][number] = begin + weights[stage]
    return heads


def find_tails(problem: OrderProblem) -> Times:
    """Finds a time for each action that passes at least from its end to the end of all."""
    stages, count = range(problem.num_stages), problem.num_micro_batches
    forward, inputs, weights = (problem.times[kind] for kind in (FORWARD, INPUTS, WEIGHTS))
    caps, last = find_caps(problem), problem.num_stages - 1
    tails: Times = [[[0.0] * count for _stage in stages] for _kind in range(4)]
    wholes: Times = [[[0.0] * count for _stage in stages] for _kind in range(4)]  # with the action
    down, up = (*problem.forward_transfers, 0.0), (0.0, *problem.backward_transfers)
    links_down, links_up = [0.0] * problem.num_stages, [0.0] * problem.num_stages
    works = [caps[stage].find_work(count, inputs[stage], weights[stage]) for stage in stages]
    for number in reversed(range(count)):
        for stage in stages:
            cap = caps[stage]
            update = problem.updates_of_ipus[problem.device_mapping[stage]]
            tail = wholes[WEIGHTS][stage][number + 1] if number + 1 < count else update
            if number + cap.begun < count:
                tail = max(tail, wholes[FORWARD][stage][number + cap.begun])
            tails[WEIGHTS][stage][number] = tail
            wholes[WEIGHTS][stage][number] = tail + weights[stage]
            tail = wholes[WEIGHTS][stage][number]
            if number + 1 < count:
                tail = max(tail, wholes[INPUTS][stage][number + 1])
                if problem.is_both(stage):
                    tail = max(tail, wholes[FORWARD][stage][number + 1])
            f, i, w, remaining = forward[stage], inputs[stage], weights[stage], count - number
            # Up to a later forward: what must be done between.
            forward_tails = tails[FORWARD][stage]
            for ahead in range(cap.flying, remaining):
                work = (ahead - cap.flying + 1) * f + works[stage][ahead] - i
                tail = max(tail, forward_tails[number + ahead] + work)
            work = (remaining - 1) * i + remaining * w + max(0, remaining - cap.flying) * f
            tail = max(tail, work + update)
            if stage:
                links_up[stage] = max(links_up[stage], wholes[INPUTS][stage - 1][number]) + up[stage]
                tail = max(tail, links_up[stage])
            tails[INPUTS][stage][number] = tail
            wholes[INPUTS][stage][number] = tail + i
        for stage in reversed(stages):
            tail = wholes[INPUTS][stage][number]
            if number + 1 < count:
                tail = max(tail, wholes[FORWARD][stage][number + 1])
            if stage < last:
                links_down[stage] = max(links_down[stage], wholes[FORWARD][stage + 1][number]) + down[stage]
                tail = max(tail, links_down[stage])
            tails[FORWARD][stage][number] = tail
            wholes[FORWARD][stage][number] = tail + forward[stage]
    return tails


def find_bound(problem: OrderProblem) -> tuple[float, str]:
    """Finds the largest of the bounds: the time, and what takes so long, in words."""
    heads, tails = find_heads(problem), find_tails(problem)
    times = problem.times
    stages, numbers = range(problem.num_stages), range(problem.num_micro_batches)
    kinds = (FORWARD, INPUTS, WEIGHTS)
    best, reason = (
        max(
            heads[kind][stage][n] + times[kind][stage] + tails[kind][stage][n]
            for kind in kinds
            for stage in stages
            for n in numbers
        ),
        "the longest path",
    )
    for ipu, ipu_stages in enumerate(problem.stages_of):
        if not ipu_stages:
            continue
        jobs = [
            (heads[kind][stage][n], times[kind][stage], tails[kind][stage][n])
            for kind in kinds
            for stage in ipu_stages
            for n in numbers
            if times[kind][stage]
        ]
        if (ipu_bound := find_preemptive(jobs)) > best:
            best, reason = ipu_bound, f"the work of device {ipu}"
    return best, reason


def find_preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Finds when all is done if one machine does the jobs (head, time, tail) and may interrupt them."""
    waiting: list[list[float]] = []  # tail (negative), time left
    now = latest = 0.0
    jobs = sorted(jobs)
    place, number = 0, len(jobs)
    while place < number or waiting:
        if not waiting and jobs[place][0] > now:
            now = jobs[place][0]
        while place < number and jobs[place][0] <= now:
            heapq.heappush(waiting, [-jobs[place][2], jobs[place][1]])
            place += 1
        top = waiting[0]
        end = now + top[1]
        if place < number and jobs[place][0] < end:
            top[1] -= jobs[place][0] - now
            now = jobs[place][0]
        else:
            heapq.heappop(waiting)
            now = end
            latest = max(latest, end - top[0])
    return latest
