"""IPUs in lock-step, as real ones are: when each action of a step runs, and why IPUs are idle. No JAX.

A time-step lasts as long as its slowest action. What its actions send is sent between it and the next one,
which takes as long as the slowest of these transfers. A time-step begins when the one before is over and
the host, which runs ahead, has started all its programs. Updates have a time-step of their own at the end.
Forwards and backwards have their own time-steps, on the last stage too.

Source: the execution of an IPU in steps of compute, sync and exchange ("Bulk Synchronous Parallel") in
Graphcore's IPU Programmer's Guide. Every idle moment has one cause:

* host: all IPUs, from the end of a time-step to the begin of the next one.
* transfers: all IPUs, while what a time-step sent is on its way.
* imbalance: IPUs that act in a time-step, when they have finished; in the time-step of updates all IPUs.
* ramps: IPUs that do not act in a time-step. Before the first backward of an IPU it is ramp-up, after its
  last forward ramp-down; what is both or neither is half of each. Without backwards, the first forward.
* shared cores: what a time-step takes longer than its slowest action alone.

With N stages on N IPUs, M micro-batches and forwards that take as long as backwards, Grouped and
Interleaved have 2(M+N-1) time-steps, in 2M of which an IPU acts: the ramps are (N-1)/(M+N-1) of the time
(Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, have it as (N-1)/M
of the rest).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.shared_cores import share
from ipu_pipeline.engine.schedules.timelines import Array, Bubble

__all__ = ["LockStep", "run_in_lock_step"]


@dataclass(frozen=True, eq=False)
class LockStep:
    """When actions run.

    Attributes:
      begins: of the actions in the order of the timetable, and then of the updates of all stages, if any
        takes time.
      ends: likewise.
      sent: likewise, when what an action sends begins to be sent.
      step_time: when all is done.
      bubble: idle time by cause.
    """

    begins: Array
    ends: Array
    sent: Array
    step_time: float
    bubble: Bubble


@dataclass(frozen=True, eq=False)
class _Steps:
    """Time-steps of actions: an entry per action, and an entry per time-step.

    Attributes:
      places: of an action, the time-step, from 0.
      costs: of an action, alone.
      ends: of an action, counted from the begin of its time-step.
      slowest: of a time-step, the longest of its actions' costs.
      lasts: of a time-step, until its last action ends.
      transfers: of a time-step, how long sending takes.
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
      kinds: of the actions in the order of the timetable.
      stages: likewise.
    """
    costs = scenario.costs
    steps = _make_steps(scenario, timetable, kinds, stages)
    number_started = np.cumsum(np.bincount(steps.places, steps.costs > 0, len(steps.lasts)))
    begins = _begin(steps.lasts + steps.transfers, costs.host * number_started)
    ends = begins + steps.lasts + steps.transfers
    action_begins = begins[steps.places]
    action_ends = action_begins + steps.ends
    sent = action_begins + steps.lasts[steps.places]
    step_time, imbalance, shared = float(ends[-1]), 0.0, 0.0
    waited = float(begins[0] + (begins[1:] - ends[:-1]).sum())
    if scenario.training and any(costs.update):
        started = costs.host * (number_started[-1] + sum(update > 0 for update in costs.update))
        begin = max(step_time, started)
        own_begins, own_ends, slowest = _update(scenario, begin)
        waited += begin - step_time
        step_time = max(own_ends)
        imbalance = len(scenario.ipus) * slowest - sum(costs.update)
        shared = len(scenario.ipus) * (step_time - begin - slowest)
        action_begins, action_ends = np.append(action_begins, own_begins), np.append(action_ends, own_ends)
    num_ipus = len(scenario.ipus)
    ramp_up, ramp_down = _find_ramps(scenario, steps, kinds, stages)
    num_active = np.bincount(steps.places, minlength=len(steps.lasts))
    imbalance += float(num_active @ steps.slowest - steps.costs.sum())
    transfers = num_ipus * float(steps.transfers.sum())
    shared += num_ipus * float((steps.lasts - steps.slowest).sum())
    bubble = Bubble(ramp_up, ramp_down, imbalance, transfers, num_ipus * waited, shared)
    return LockStep(action_begins, action_ends, sent, step_time, bubble)


def _make_steps(scenario: Scenario, timetable: Timetable, kinds: Array, stages: Array) -> _Steps:
    costs, size = scenario.costs, scenario.chunk_size
    places = np.array(timetable.time_steps, np.int64) - 1
    own = np.array([costs.forward, costs.backward])[kinds, stages] * size
    sending = np.zeros((2, costs.num_stages))
    for (source, target), time in costs.transfers.items():
        kind = int(scenario.levels[source] > scenario.levels[target])
        sending[kind, source] = max(sending[kind, source], time * size)
    slowest, transfers = np.zeros(timetable.num_time_steps), np.zeros(timetable.num_time_steps)
    np.maximum.at(slowest, places, own)
    np.maximum.at(transfers, places, sending[kinds, stages])
    ends, lasts = own, slowest
    if scenario.cores is not None:
        cores = np.array([costs.forward_cores, costs.backward_cores])[kinds, stages]
        bounds = np.searchsorted(places, np.arange(len(slowest) + 1))
        parts = [
            share(own[first:last].tolist(), cores[first:last].tolist(), scenario.cores)
            for first, last in itertools.pairwise(bounds)
        ]
        ends = np.array([end for part in parts for end in part])
        lasts = np.array([max(part, default=0.0) for part in parts])
    return _Steps(places, own, ends, slowest, lasts, transfers)


def _begin(lengths: Array, started: Array) -> Array:
    """When each time-step begins: after the one before, and not before the host has started it."""
    before = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    return before + np.maximum.accumulate(np.maximum(started - before, 0.0))


def _update(scenario: Scenario, begin: float) -> tuple[list[float], list[float], float]:
    """The time-step of updates: begins and ends by stage, and how long it takes an IPU at most, alone.

    Those of one IPU follow each other.
    """
    own = scenario.costs.update
    alone = dict.fromkeys(scenario.ipus, 0.0)
    for ipu, cost in zip(scenario.device_mapping, own, strict=True):
        alone[ipu] += cost
    lasts = list(alone.values())
    if scenario.cores is not None:
        lasts = share(lasts, [1.0] * len(lasts), scenario.cores)
    slowdown = {
        ipu: last / alone[ipu] if alone[ipu] else 1.0 for ipu, last in zip(alone, lasts, strict=True)
    }
    times = dict.fromkeys(scenario.ipus, begin)
    begins, ends = [], []
    for ipu, cost in zip(scenario.device_mapping, own, strict=True):
        begins.append(times[ipu])
        times[ipu] += cost * slowdown[ipu]
        ends.append(times[ipu])
    return begins, ends, max(alone.values())


def _find_ramps(scenario: Scenario, steps: _Steps, kinds: Array, stages: Array) -> tuple[float, float]:
    """Idle time in the ramps, up and down."""
    where = np.array(scenario.device_mapping)[stages]
    up = down = 0.0
    for ipu in scenario.ipus:
        here = where == ipu
        places, own_kinds = steps.places[here], kinds[here]
        forwards = places[own_kinds == ActionKind.FORWARD]
        filled = int(places[own_kinds == ActionKind.BACKWARD][0] if scenario.training else forwards[0])
        last = int(forwards[-1]) + 1
        active = np.zeros(len(steps.slowest))
        active[places] = steps.slowest[places]
        idle = np.concatenate([[0.0], np.cumsum(steps.slowest - active)])  # until a time-step
        inner = sorted((filled, last))
        between = idle[inner[1]] - idle[inner[0]]
        up += idle[inner[0]] + between / 2
        down += idle[-1] - idle[inner[1]] + between / 2
    return float(up), float(down)
