"""Finds when the tasks of a step run, if devices wait only for data. No JAX.

The host of each process starts the programs one after another, in the order of the timetable, and runs
ahead of the devices, as the engine's runner does. A task begins as soon as it has been started, its
resource has finished the previous one, and all that it reads has arrived. So it begins at the latest of
these times, and one pass in the order of the timetable finds them all.

In execution phases the host waits, where another phase begins, until all but `num_ahead` of the phases
before have ended and what they leave has arrived in host memory. Weight updates follow the last phase, and
the host waits for each in the same way. What a stage leaves in host memory must have arrived there before
anything of the stage is brought again. Where all of a micro-batch goes through host memory, this holds for
what any stage leaves.

Devices that share cores, as a CPU's virtual devices do, slow each other down, so no task's end is known
before others have begun. A second pass, which takes several times as long, goes forward in time. A program
that runs alone keeps some cores busy (`Costs.forward_cores`), and a transfer, which is a copy in the host's
memory there, keeps one. While they would keep more busy than there are, all are slowed down by the same
factor: the cores that they would keep busy over those there are.
That is egalitarian processor sharing (Kleinrock, "Time-shared Systems: A theoretical treatment", 1967),
with programs that may be wider than a core. As all running programs are served at the same rate, the
service since the beginning of a program that never ends is a clock for all of them: each ends when that
clock shows what it showed at the program's begin, plus its cost.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from ipu_pipeline.engine.schedules.actions import UPDATE, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.tasks import ENDING, SEND, STORE, Step, Task, make_step

__all__ = ["run_step"]

_LAST = -1  # the chunk that what ends a step reads

Order: TypeAlias = "Iterable[tuple[int, int, int]]"  # kind, stage and chunk of blocks


def run_step(scenario: Scenario, timetable: Timetable) -> Step:
    """Makes the tasks of a scenario and finds when each runs, in the order of a timetable."""
    step = make_step(scenario)
    stages = range(scenario.costs.num_stages)
    order = itertools.chain(timetable.order, itertools.product(ENDING, stages, [_LAST]))
    if scenario.cores is None:
        _run_in_order(step, scenario, order)
    else:
        _SharedCores(step, order).run(scenario.cores)
    return step


def _run_in_order(step: Step, scenario: Scenario, order: Order) -> None:
    free = [0.0] * step.num_resources
    if scenario.host_memory is not None:
        order = _in_phases(step, scenario, order, free)
    blocks = [
        [
            [
                (
                    task.resource,
                    task.cost,
                    [other.ends for other in task.reads],
                    task.waits,
                    task.begins.append,
                    task.ends.append,
                )
                for task in block
            ]
            for block in of_kind
        ]
        for of_kind in step.blocks
    ]
    for kind, stage, chunk in order:
        for resource, cost, reads, waits, add_begin, add_end in blocks[kind][stage]:
            begin = free[resource]
            for other, start in waits:
                started = free[other] = free[other] + start
                if started > begin:
                    begin = started
            for ends in reads:
                arrival = ends[chunk]
                if arrival > begin:
                    begin = arrival
            end = free[resource] = begin + cost
            add_begin(begin)
            add_end(end)


def _in_phases(
    step: Step, scenario: Scenario, order: Order, free: list[float]
) -> Iterator[tuple[int, int, int]]:
    """Makes the host wait where another phase or update begins: changes `free` while blocks run."""
    assert scenario.host_memory is not None
    phases = scenario.host_memory.phases
    before = collections.deque[float]()  # ends of phases that may not be over
    current: object = None
    end = 0.0  # of the phase, with what it leaves
    for kind, stage, chunk in order:
        block = step.blocks[kind][stage]
        if not block or not block[0].waits:  # not a program
            yield kind, stage, chunk
            continue
        phase = stage if kind == UPDATE else (chunk, *phases.find(ActionKind(kind), scenario.levels[stage]))
        if phase != current:
            if current is not None:
                before.append(end)
            while phases.num_ahead is not None and len(before) > phases.num_ahead:
                host, _start = block[0].waits[0]
                free[host] = max(free[host], before.popleft())
            if kind == UPDATE and isinstance(current, tuple):
                before.clear()  # updates are counted separately
            current, end = phase, 0.0
        yield kind, stage, chunk
        for task in block:
            if task.kind != SEND:
                end = max(end, task.ends[-1])
            if task.kind == STORE:
                free[step.left[stage]] = max(free[step.left[stage]], task.ends[-1])


class _SharedCores:
    def __init__(self, step: Step, order: Order) -> None:
        resources = range(step.num_resources)
        # What is still to run on each resource: tasks, chunks, and when the host has started them.
        self._queues = [collections.deque[tuple[Task, int, float]]() for _resource in resources]
        self._is_busy = [False for _resource in resources]
        self._readers: dict[Task, list[int]] = {task: [] for task in step}  # the resources of these
        self._now = 0.0
        self._served = 0.0
        self._demand = 0.0
        self._running: list[tuple[float, int]] = []  # the service clock at a task's end, and its resource
        self._timers: list[tuple[float, int]] = []  # when to look at a resource again
        for task in step:
            for other in task.reads:
                self._readers[other].append(task.resource)
        hosts = [0.0 for _resource in resources]
        for kind, stage, chunk in order:
            for task in step.blocks[kind][stage]:
                started = 0.0
                for host, start in task.waits:
                    started = hosts[host] = hosts[host] + start
                self._queues[task.resource].append((task, chunk, started))

    def run(self, cores: float) -> None:
        for resource in range(len(self._queues)):
            self._begin(resource)
        running, timers = self._running, self._timers
        while running or timers:
            rate = cores / self._demand if self._demand > cores else 1.0
            done = self._now + (running[0][0] - self._served) / rate if running else float("inf")
            if timers and timers[0][0] <= done:
                time, resource = heapq.heappop(timers)
                self._served += (time - self._now) * rate
                self._now = time
                self._begin(resource)
                continue
            self._served, resource = heapq.heappop(running)
            self._now = done
            task, _chunk, _started = self._queues[resource].popleft()
            self._demand = self._demand - task.cores if running else 0.0
            self._is_busy[resource] = False
            task.ends.append(done)
            for reader in self._readers[task]:
                self._begin(reader)
            self._begin(resource)

    def _begin(self, resource: int) -> None:
        """Begins the next task of a resource if all is there; if only time is missing, sets a timer."""
        if self._is_busy[resource] or not self._queues[resource]:
            return
        task, chunk, started = self._queues[resource][0]
        for other in task.reads:
            if len(other.ends) < (other.num_runs if chunk == _LAST else chunk + 1):
                return  # the task that makes it looks here again
        if started > self._now:
            heapq.heappush(self._timers, (started, resource))
            return
        self._is_busy[resource] = True
        self._demand += task.cores
        task.begins.append(self._now)
        heapq.heappush(self._running, (self._served + task.cost, resource))
