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

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ipu_pipeline.engine.schedules.actions import GATHER, HALVES, REDUCE, UPDATE, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.shared_cores import share
from ipu_pipeline.engine.schedules.timelines import Array, Bubble

__all__ = ["LockStep", "run_in_lock_step"]


@dataclass(frozen=True, eq=False)
class LockStep:
    """When actions run.

    Attributes:
      begins: the begin of each action, in the order of the timetable; the same in each replica.
      ends: the end of each action, in the same order.
      sent: when the results of each action begin to be sent, in the same order.
      closing: (kind, stage) -> begin and end of what ends the step and takes time; kinds are numbered as in
        `free_running`.
      step_time: the time when all is done.
      bubble: idle time by cause, of all replicas.
    """

    begins: Array
    ends: Array
    sent: Array
    closing: Mapping[tuple[int, int], tuple[float, float]]
    step_time: float
    bubble: Bubble


@dataclass(frozen=True, eq=False)
class _Steps:
    """Time-steps of actions: an entry per action, and an entry per time-step.

    Attributes:
      places: the time-step of each action, from 0.
      costs: the time of each action alone.
      ends: the end of each action, counted from the begin of its time-step.
      slowest: the longest of the costs of each time-step's actions.
      lasts: the time of each time-step until its last action ends.
      transfers: how long sending takes after each time-step.
    """

    places: Array
    costs: Array
    ends: Array
    slowest: Array
    lasts: Array
    transfers: Array


def run_in_lock_step(scenario: Scenario, timetable: Timetable, kinds: Array, stages: Array) -> LockStep:
    """Finds when each action runs.

    Args:
      scenario: what is simulated.
      timetable: its timetable.
      kinds: the kinds of the actions, in the order of the timetable.
      stages: the stages of the actions, in the same order.
    """
    steps = _make_steps(scenario, timetable, kinds, stages)
    hosts = _Hosts(scenario)
    begins = _begin(steps.lasts + steps.transfers, hosts.start_actions(steps, stages))
    ends = begins + steps.lasts + steps.transfers
    action_begins = begins[steps.places]
    closing = _Closing(scenario, hosts, float(ends[-1]))
    ramp_up, ramp_down = _find_ramps(scenario, steps, kinds, stages)
    num_active = np.bincount(steps.places, minlength=len(steps.lasts))
    num_ipus, num_replicas = len(scenario.ipus), scenario.cluster.num_replicas
    waited = float(begins[0] + (begins[1:] - ends[:-1]).sum()) + closing.waited
    transfers = float(steps.transfers.sum()) + closing.transfers
    imbalance = float(num_active @ steps.slowest - steps.costs.sum()) + closing.imbalance
    shared = num_ipus * float((steps.lasts - steps.slowest).sum()) + closing.shared
    causes = (ramp_up, ramp_down, imbalance, num_ipus * transfers, num_ipus * waited, shared)
    return LockStep(
        action_begins,
        action_begins + steps.ends,
        action_begins + steps.lasts[steps.places],
        closing.intervals,
        closing.now,
        Bubble(*(num_replicas * cause for cause in causes)),
    )


class _Hosts:
    """The hosts of all processes, which start the programs of each time-step."""

    def __init__(self, scenario: Scenario) -> None:
        cluster, number = scenario.cluster, scenario.num_ipus
        counts = np.zeros((cluster.num_processes, number), np.int64)
        for device in range(cluster.num_replicas * number):
            counts[cluster.process_of(device), device % number] += 1
        self._cost = scenario.costs.host
        self._mapping = np.array(scenario.device_mapping)
        self._counts = np.unique(counts, axis=0)  # processes that start the same count once
        self._started = np.zeros(len(self._counts))

    def start_actions(self, steps: _Steps, stages: Array) -> Array:
        """The times when the programs of each time-step have been started, by the slowest host."""
        found = np.zeros(len(steps.lasts))
        for place, of_ipus in enumerate(self._counts):
            weights = (steps.costs > 0) * of_ipus[self._mapping[stages]]
            number_started = np.cumsum(np.bincount(steps.places, weights, len(steps.lasts)))
            found = np.maximum(found, number_started)
            self._started[place] = number_started[-1]
        return self._cost * found

    def start(self, costs: Mapping[int, float]) -> float:
        """Starts one more program per process for each stage that takes time. Returns the time of that."""
        stages = [stage for stage, cost in costs.items() if cost]
        if not stages:
            return 0.0
        self._started += (self._counts[:, self._mapping[stages]] > 0).sum(axis=1)
        return self._cost * float(self._started.max())


class _Closing:
    """The end of a step: replicas reduce gradients, update, and gather what each has updated.

    Attributes:
      intervals: see `LockStep.closing`.
      now: the time when all is done.
      waited: how long devices wait for the host.
      transfers: how long replicas send to each other.
      imbalance: how long the devices of a replica wait for the one that updates longest, summed over the
        devices.
      shared: how much longer the updates take because devices share cores, summed over the devices.
    """

    def __init__(self, scenario: Scenario, hosts: _Hosts, now: float) -> None:
        self.intervals: dict[tuple[int, int], tuple[float, float]] = {}
        self.now, self.waited, self.transfers = now, 0.0, 0.0
        self.imbalance = self.shared = 0.0
        mapping, cluster = scenario.device_mapping, scenario.cluster
        updates = {stage: scenario.update(stage) for stage in range(len(mapping))}
        halves = {mapping.index(ipu): scenario.half_ring(ipu) for ipu in scenario.ipus}
        rings = {
            stage: half * (1 if cluster.shards_optimizer_state else 2) for stage, half in halves.items()
        }
        self._send_together(REDUCE, hosts, rings)
        if any(updates.values()):
            self._wait(hosts.start(updates))
            begins, ends, slowest = _update(scenario, updates, self.now)
            self.intervals |= {
                (UPDATE, stage): (begins[stage], ends[stage]) for stage, cost in updates.items() if cost
            }
            self.imbalance = len(scenario.ipus) * slowest - sum(updates.values())
            self.shared = len(scenario.ipus) * (max(ends) - self.now - slowest)
            self.now = max(ends)
        if scenario.host_memory is not None and scenario.training:
            alone, moving = dict.fromkeys(scenario.ipus, 0.0), dict.fromkeys(scenario.ipus, 0.0)
            for stage, cost in updates.items():
                alone[mapping[stage]] += cost
                moving[mapping[stage]] += scenario.host_memory.time_of(UPDATE, stage)
            longer = scenario.host_memory.time_beside(max(moving.values()), max(alone.values()))
            self.transfers += longer
            self.now += longer
        if cluster.shards_optimizer_state:
            self._send_together(GATHER, hosts, halves)

    def _send_together(self, kind: int, hosts: _Hosts, times: Mapping[int, float]) -> None:
        self._wait(hosts.start(times))
        self.intervals |= {
            (kind, stage): (self.now, self.now + time) for stage, time in times.items() if time
        }
        self.transfers += max(times.values())
        self.now += max(times.values())

    def _wait(self, time: float) -> None:
        self.waited += max(0.0, time - self.now)
        self.now = max(self.now, time)


def _make_steps(scenario: Scenario, timetable: Timetable, kinds: Array, stages: Array) -> _Steps:
    costs, size = scenario.costs, scenario.chunk_size
    places = np.array(timetable.time_steps, np.int64) - 1
    own = np.array(costs.of_actions)[kinds, stages] * size
    sending = np.zeros((len(ActionKind), costs.num_stages))
    # The replica whose links take longest counts: the others wait.
    for source, target in dict.fromkeys([*costs.transfers, *costs.num_sent_bytes]):
        time = max(scenario.transfer(r, (source, target)) for r in range(scenario.cluster.num_replicas))
        is_back = scenario.levels[source] > scenario.levels[target]
        for kind in (ActionKind.BACKWARD, HALVES[0]) if is_back else (ActionKind.FORWARD,):
            sending[kind, source] = max(sending[kind, source], time)
    slowest, transfers = np.zeros(timetable.num_time_steps), np.zeros(timetable.num_time_steps)
    np.maximum.at(slowest, places, own)
    np.maximum.at(transfers, places, sending[kinds, stages])
    if scenario.host_memory is not None:
        all_stages = range(costs.num_stages)
        times = np.array([[scenario.host_memory.time_of(k, i) for i in all_stages] for k in ActionKind])
        moving = np.zeros(timetable.num_time_steps)
        np.maximum.at(moving, places, times[kinds, stages])
        longer = map(scenario.host_memory.time_beside, moving.tolist(), slowest.tolist())
        transfers = transfers + np.array(list(longer))
    ends, lasts = own, slowest
    if scenario.cores is not None:
        # Replicas do the same at the same time, and each takes the same share of the cores.
        cores = np.array([costs.forward_cores, *[costs.backward_cores] * 3])[kinds, stages]
        cores = cores * scenario.cluster.num_replicas
        bounds = np.searchsorted(places, np.arange(len(slowest) + 1))
        parts = [
            share(own[first:last].tolist(), cores[first:last].tolist(), scenario.cores)
            for first, last in itertools.pairwise(bounds)
        ]
        ends = np.array([end for part in parts for end in part])
        lasts = np.array([max(part, default=0.0) for part in parts])
    return _Steps(places, own, ends, slowest, lasts, transfers)


def _begin(lengths: Array, started: Array) -> Array:
    """The begin of each time-step: after the one before, and not before the host has started it."""
    before = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    return before + np.maximum.accumulate(np.maximum(started - before, 0.0))


def _update(
    scenario: Scenario, updates: Mapping[int, float], begin: float
) -> tuple[list[float], list[float], float]:
    """The time-step of updates: begins and ends by stage, and the longest time of a device alone.

    The updates of one device follow each other.
    """
    alone = dict.fromkeys(scenario.ipus, 0.0)
    for stage, cost in updates.items():
        alone[scenario.device_mapping[stage]] += cost
    lasts = list(alone.values())
    if scenario.cores is not None:
        lasts = share(lasts, [float(scenario.cluster.num_replicas)] * len(lasts), scenario.cores)
    slowdown = {
        ipu: last / alone[ipu] if alone[ipu] else 1.0 for ipu, last in zip(alone, lasts, strict=True)
    }
    times = dict.fromkeys(scenario.ipus, begin)
    begins, ends = [], []
    for stage, cost in updates.items():
        ipu = scenario.device_mapping[stage]
        begins.append(times[ipu])
        times[ipu] += cost * slowdown[ipu]
        ends.append(times[ipu])
    return begins, ends, max(alone.values())


def _find_ramps(scenario: Scenario, steps: _Steps, kinds: Array, stages: Array) -> tuple[float, float]:
    """Finds the idle time in the ramps, up and down."""
    where = np.array(scenario.device_mapping)[stages]
    up = down = 0.0
    for ipu in scenario.ipus:
        here = where == ipu
        places, own_kinds = steps.places[here], kinds[here]
        forwards = places[own_kinds == ActionKind.FORWARD]
        is_back = (own_kinds == ActionKind.BACKWARD) | (own_kinds == HALVES[0])
        filled = int(places[is_back][0] if scenario.training else forwards[0])
        last = int(forwards[-1]) + 1
        active = np.zeros(len(steps.slowest))
        active[places] = steps.slowest[places]
        idle = np.concatenate([[0.0], np.cumsum(steps.slowest - active)])  # sums until a time-step
        inner = sorted((filled, last))
        between = idle[inner[1]] - idle[inner[0]]
        up += idle[inner[0]] + between / 2
        down += idle[-1] - idle[inner[1]] + between / 2
    return float(up), float(down)
