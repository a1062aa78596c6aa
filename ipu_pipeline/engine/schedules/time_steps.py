"""Finds when each action runs and why IPUs are idle, in lock-step, as real IPUs are. No JAX.

A time-step lasts as long as its slowest action. What its actions send is sent between it and the next one,
which takes as long as the slowest of these transfers. A time-step begins when the one before is over and
the host, which runs ahead, has started all programs of it. Updates have their own time-step at the end.
Forwards, backwards and halves of these have their own time-steps, also on the last stage. Replicas keep
step, too. They send to each other before and after the updates. In execution phases, what the actions of a
time-step need from host memory and leave there is moved together with what they send or, where phases are
brought ahead, while they compute.

Source: the execution of an IPU in steps of compute, sync and exchange ("Bulk Synchronous Parallel") in
Graphcore's IPU Programmer's Guide. Every idle moment has one cause:

* host: all devices, from the end of a time-step to the begin of the next one.
* transfers: all devices, while what a time-step sent is in transit, and while replicas send to each other.
* imbalance: devices that act in a time-step, after they have finished; for updates, all devices.
* ramps: devices that do not act in a time-step. Before the first backward of a device it is ramp-up, after
  its last forward ramp-down; time that is both or neither is half of each. Without backwards, the first
  forward counts.
* shared cores: the time by which a time-step is longer than its slowest action alone.

With N stages on N devices, M micro-batches and forwards that take as long as backwards, Grouped and
Interleaved have 2(M+N-1) time-steps, in 2M of which a device acts: the ramps are (N-1)/(M+N-1) of the time
(Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, have it as (N-1)/M
of the rest).
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from ipu_pipeline.engine.schedules.actions import HALVES, UPDATE, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.tasks import ENDING, LOAD, SEND, STORE, Step, make_step
from ipu_pipeline.engine.schedules.timelines import Array, Bubble

__all__ = ["run_in_lock_step"]


def run_in_lock_step(scenario: Scenario, timetable: Timetable) -> tuple[Step, float, Bubble]:
    """Finds when each task of a scenario runs, in the time-steps of a timetable.

    Returns:
      The tasks, the time when all is done, and the idle time by cause.
    """
    costs = dataclasses.replace(scenario.costs, is_fused=False)
    run = _Run(dataclasses.replace(scenario, costs=costs, schedule=timetable))
    ramp_up, ramp_down = run.run_actions(timetable)
    for kind in ENDING:
        run.run_ending(kind)
    number = len(scenario.ipus_of_replicas)
    causes = run.imbalance, number * run.transfers, number * run.waited, number * run.shared
    return run.step, run.now, Bubble(ramp_up, ramp_down, *causes)


class _Run:
    """A run in lock-step.

    Attributes:
      step: the tasks.
      now: the time when all so far is done.
      waited: how long all devices have waited for the host.
      transfers: how long nothing but transfers went on.
      imbalance: how long devices have waited for the slowest one, summed over the devices.
      shared: how much longer time-steps have taken because devices share cores.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.step = make_step(scenario)
        self.now = self.waited = self.transfers = self.imbalance = self.shared = 0.0
        self._scenario = scenario
        # By block: its program's cost and cores in all replicas, what it sends, and what it moves from and
        # to host memory. Replicas wait for the one whose links take longest.
        blocks = list(itertools.chain.from_iterable(self.step.blocks))
        self._costs, self._cores, self._sent, self._moved = np.zeros((4, len(blocks)))
        starts = np.zeros((scenario.cluster.num_processes, len(blocks)))
        for number, block in enumerate(blocks):
            for task in block:
                if task.kind == SEND:
                    self._sent[number] = max(self._sent[number], task.cost)
                elif task.kind in (LOAD, STORE):
                    self._moved[number] += task.cost
                elif task.cost:
                    self._costs[number] = task.cost
                    self._cores[number] += task.cores
                    process = scenario.cluster.process_of(task.resource)
                    starts[process, number] += sum(start for _host, start in task.waits)
        self._starts = np.unique(starts, axis=0)  # processes that start the same count once
        self._started = np.zeros(len(self._starts))

    def run_actions(self, timetable: Timetable) -> tuple[float, float]:
        """Runs all actions. Returns the idle time in the ramps, up and down."""
        scenario, number = self._scenario, self._scenario.costs.num_stages
        flat = np.fromiter(
            itertools.chain.from_iterable(timetable.order), np.int32, 3 * len(timetable.order)
        )
        kinds, stages = flat[0::3], flat[1::3]
        blocks, places = kinds * number + stages, np.array(timetable.time_steps, np.int64) - 1

        def longest(lengths: Array) -> Array:
            """The longest of the times of each time-step's actions."""
            found = np.zeros(timetable.num_time_steps)
            np.maximum.at(found, places, lengths[blocks])
            return found

        slowest, transfers = longest(self._costs), longest(self._sent)
        transfers += list(map(self._beside, longest(self._moved).tolist(), slowest.tolist()))
        ends, lasts = self._costs[blocks], slowest
        if scenario.cores is not None:
            cores, bounds = self._cores[blocks], np.searchsorted(places, np.arange(len(slowest) + 1))
            parts = [
                share(ends[first:last].tolist(), cores[first:last].tolist(), scenario.cores)
                for first, last in itertools.pairwise(bounds)
            ]
            ends = np.array(list(itertools.chain.from_iterable(parts)))
            lasts = np.array([max(part, default=0.0) for part in parts])
        started = np.zeros(len(slowest))
        for process, starts in enumerate(self._starts):
            of_process = np.cumsum(np.bincount(places, starts[blocks], len(slowest)))
            started, self._started[process] = np.maximum(started, of_process), of_process[-1]
        lengths = lasts + transfers
        before = np.cumsum(lengths) - lengths
        waited = np.maximum.accumulate(np.maximum(started - before, 0.0))
        begins = before + waited
        self.now, self.waited = float(begins[-1] + lengths[-1]), float(waited[-1])
        self.transfers, self.shared = float(transfers.sum()), float((lasts - slowest).sum())
        idle = np.bincount(places, minlength=len(slowest)) @ slowest - self._costs[blocks].sum()
        self.imbalance = scenario.cluster.num_replicas * float(idle)

        order = np.argsort(blocks, kind="stable")
        numbers = np.split(order, np.cumsum(np.bincount(blocks, minlength=len(self._costs)))[:-1])
        for block, here in zip(itertools.chain.from_iterable(self.step.blocks), numbers, strict=True):
            times = begins[places[here]]
            for task in block:
                task.begins, task.ends = times, times + ends[here]
                if task.kind == SEND:
                    task.begins = times + lasts[places[here]]
                    task.ends = task.begins + task.cost
        return _find_ramps(scenario, slowest, places, kinds, stages)

    def run_ending(self, kind: int) -> None:
        """Runs what ends the step: replicas reduce gradients, update, or gather what each has updated."""
        scenario, number = self._scenario, self._scenario.costs.num_stages
        blocks = slice(kind * number, (kind + 1) * number)
        tasks = itertools.chain.from_iterable(self.step.blocks[kind])
        programs = [task for task in tasks if task.kind == kind and task.cost]
        if programs:
            self._started += self._starts[:, blocks].sum(axis=1)
            waited = max(0.0, float(self._started.max()) - self.now)
            self.waited, self.now = self.waited + waited, self.now + waited
        alone = dict.fromkeys(scenario.ipus_of_replicas, 0.0)
        for task in programs:
            alone[task.resource] += task.cost
        lasts, slowest = list(alone.values()), max(alone.values())
        if scenario.cores is not None and kind == UPDATE:
            lasts = share(lasts, [1.0] * len(lasts), scenario.cores)
        last, free = dict(zip(alone, lasts, strict=True)), dict.fromkeys(alone, self.now)
        for task in programs:  # those of a device follow each other
            begin = free[task.resource]
            free[task.resource] += task.cost * (last[task.resource] / alone[task.resource])
            task.begins, task.ends = [begin], [free[task.resource]]
        moved = np.bincount(scenario.device_mapping, self._moved[blocks])
        transfers = self._beside(float(moved.max()), slowest)
        self.now += max(lasts) + transfers
        if kind == UPDATE:
            self.imbalance += len(alone) * slowest - sum(alone.values())
            self.shared += max(lasts) - slowest
        else:
            transfers += slowest
        self.transfers += transfers

    def _beside(self, moving: float, computing: float) -> float:
        """The time that moving something from and to host memory adds to computing."""
        memory = self._scenario.host_memory
        return 0.0 if memory is None else memory.time_beside(moving, computing)


def share(costs: list[float], demands: list[float], cores: float) -> list[float]:
    """Finds when programs end that begin together at 0, as `task_times` does for any."""
    ends = [0.0] * len(costs)
    now = served = 0.0
    left = sum(demands)
    for number in sorted(range(len(costs)), key=costs.__getitem__):
        now += (costs[number] - served) * max(1.0, left / cores)
        served = costs[number]
        left -= demands[number]
        ends[number] = now
    return ends


def _find_ramps(
    scenario: Scenario, slowest: Array, places: Array, kinds: Array, stages: Array
) -> tuple[float, float]:
    """Finds the idle time in the ramps, up and down."""
    where = np.array(scenario.device_mapping)[stages]
    up = down = 0.0
    for ipu in scenario.ipus:
        here = where == ipu
        own_places, own_kinds = places[here], kinds[here]
        forwards = own_places[own_kinds == ActionKind.FORWARD]
        is_back = (own_kinds == ActionKind.BACKWARD) | (own_kinds == HALVES[0])
        filled = int(own_places[is_back][0] if scenario.training else forwards[0])
        last = int(forwards[-1]) + 1
        active = np.zeros(len(slowest))
        active[own_places] = slowest[own_places]
        idle = np.concatenate([[0.0], np.cumsum(slowest - active)])  # sums until a time-step
        inner = sorted((filled, last))
        between = idle[inner[1]] - idle[inner[0]]
        up += idle[inner[0]] + between / 2
        down += idle[-1] - idle[inner[1]] + between / 2
    number = scenario.cluster.num_replicas
    return number * float(up), number * float(down)
