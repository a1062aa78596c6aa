"""Lower bounds of the step time: what no order of a problem can be faster than. No JAX.

Heads and tails: an action cannot begin before its head, and after its end at least its tail passes before
all is done. They are longest paths over what every order has to keep: results and their transfers,
micro-batches in order, and the limit of bytes. If a stage can have n micro-batches in flight, its forward
of micro-batch k+n begins after its input gradients of k; and where only c may be between the halves, the
weight gradients of micro-batch k-c come before the forward of k. Of all that must be done on a device
between two actions, the sum of the times is a path as well.

Then each device alone has to do its actions, no two at a time, within heads and tails. Jackson's preemptive
schedule, most urgent tail first, is the shortest one if actions could be interrupted (Carlier, "The
one-machine sequencing problem", 1982).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ipu_pipeline.engine.schedules.order_problems import FORWARD, INPUTS, WEIGHTS, OrderProblem

__all__ = ["find_bound", "find_caps", "find_heads", "find_tails"]

Times = list[list[list[float]]]  # by kind, stage and micro-batch


@dataclass(frozen=True)
class Caps:
    """How many micro-batches a stage can hold.

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
        before = sum(problem.num_held_bytes[other] for other in problem.stages_of[ipu] if other < stage)
        held, between = problem.num_held_bytes[stage], problem.num_between_bytes[stage]
        room = problem.num_free_bytes[ipu]
        flying = max(1, _divide(room - max(0, between - held), before + held, count))
        least = max(held, between) if problem.is_both(stage) else held
        rooms = [room - (number - 1) * (before + held) - before - least for number in range(1, flying + 1)]
        caps.append(Caps(flying, tuple(_divide(own, between, count) for own in rooms)))
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
            own, own_weights = ends[INPUTS][stage], ends[WEIGHTS][stage]
            if number >= cap.flying:
                # One of the ways to have room: that many flying, and the others back or even done.
                begin = max(
                    begin,
                    min(
                        max(own[number - flying], own_weights[number - flying - between])
                        if number >= flying + between
                        else own[number - flying]
                        for flying, between in enumerate(cap.between, start=1)
                    ),
                )
                # All that must have been done since the input gradients of an earlier micro-batch began.
                own, f = heads[INPUTS][stage], forward[stage]
                for ahead in range(cap.flying, number + 1):
                    work = (ahead - cap.flying) * f + works[stage][ahead]
                    begin = max(begin, own[number - ahead] + work)
            if number >= cap.begun:
                begin = max(begin, own_weights[number - cap.begun])
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
            f, i, w, rest = forward[stage], inputs[stage], weights[stage], count - number
            # Up to a later forward: what must be done between.
            own = tails[FORWARD][stage]
            for ahead in range(cap.flying, rest):
                work = (ahead - cap.flying + 1) * f + works[stage][ahead] - i
                tail = max(tail, own[number + ahead] + work)
            work = (rest - 1) * i + rest * w + max(0, rest - cap.flying) * f
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
    for ipu, own in enumerate(problem.stages_of):
        if not own:
            continue
        jobs = [
            (heads[kind][stage][n], times[kind][stage], tails[kind][stage][n])
            for kind in kinds
            for stage in own
            for n in numbers
            if times[kind][stage]
        ]
        if (found := find_preemptive(jobs)) > best:
            best, reason = found, f"the work of device {ipu}"
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
