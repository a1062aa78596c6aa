"""Finds why devices that wait only for data are idle in a step. No JAX.

An idle moment seldom has a single cause: a device waits for another one, which waited for a transfer. So a
cause counts as the time by which a step would be shorter without it, times the number of devices. One cause
after the other is taken away, and in the end only the ramps are left:

* shared cores: each program has the cores that it needs.
* host: the host takes no time.
* transfers: they take no time, nor do all-reduces: links are infinitely fast, also those to host memory.
* imbalance: the work of forwards, of backwards (and their halves) and of updates is each spread evenly over
  the devices, and there over the stages. 0 where that makes the step longer, which happens with few
  micro-batches.
* ramps: the idle time that is left. Before the first backward of a device it is ramp-up, after its last
  forward ramp-down; time that is both or neither is half of each. Without backwards, the first forward
  counts.

None can be negative: an end of a program is the latest of sums of costs (a "max-plus" system: Baccelli et
al., "Synchronization and Linearity", 1992), so it does not come later when a cost gets less.

With N stages on N devices that take equally long, and M micro-batches, only the ramps are left with Grouped
and Interleaved, (N-1)/(M+N-1) of the step (Narayanan et al., "Efficient Large-Scale Language Model Training
on GPU Clusters", 2021, have it as (N-1)/M of the rest); with Sequential they are (N-1)/N.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ipu_pipeline.engine.schedules.actions import HALVES, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.free_running import Programs, ProgramTiming, wire
from ipu_pipeline.engine.schedules.in_phases import run_step
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.timelines import Array, Bubble

__all__ = ["balanced", "find_bubble"]


def balanced(scenario: Scenario) -> Scenario:
    """Spreads all work of a scenario evenly over the devices, and there over the stages."""
    ipus = scenario.device_mapping
    num_there = [ipus.count(ipu) for ipu in ipus]

    def even(own: tuple[float, ...]) -> tuple[float, ...]:
        share = sum(own) / len(scenario.ipus)
        spread = tuple(share / number for number in num_there)
        return own if np.allclose(own, spread, rtol=1e-12, atol=0) else spread

    costs = scenario.costs
    return dataclasses.replace(
        scenario,
        costs=dataclasses.replace(
            costs,
            forward=even(costs.forward),
            backward=even(costs.backward),
            update=even(costs.update),
            weight_gradients=even(costs.weight_gradients),
        ),
    )


def find_bubble(scenario: Scenario, timetable: Timetable, programs: Programs, step_time: float) -> Bubble:
    """Finds the idle time by cause.

    Args:
      scenario: what was simulated.
      timetable: its timetable.
      programs: the programs, with the times when they ran.
      step_time: when the last program ended.
    """
    num_ipus = len(scenario.ipus_of_replicas)
    work = sum(scenario.work_of_ipus().values())

    def take_away(changed: Scenario, host: float) -> float:
        nonlocal step_time, programs
        programs = wire(changed)
        before, step_time = step_time, run_step(changed, timetable, programs, host)
        return max(0.0, num_ipus * (before - step_time))

    costs = scenario.costs
    shared_cores = host = transfers = 0.0
    if scenario.cores is not None:
        shared_cores = take_away(scenario, costs.host)
    if costs.host:
        host = take_away(scenario, 0.0)
    still = dataclasses.replace(
        scenario,
        costs=dataclasses.replace(costs, host=0.0, transfers={}),
        cluster=dataclasses.replace(scenario.cluster, within=LinkSpeed(), between=LinkSpeed()),
        host_memory=None,
    )
    if costs.transfers or still.cluster != scenario.cluster or scenario.host_memory is not None:
        transfers = take_away(still, 0.0)
    idle = num_ipus * step_time - work
    imbalance = 0.0
    even = balanced(still)
    if even.costs != still.costs:
        own = wire(even)
        shorter = num_ipus * (step_time - run_step(even, timetable, own, 0.0))
        if shorter > 0:
            imbalance, programs, step_time = shorter, own, step_time - shorter / num_ipus
    up, down = _find_ramps(even, programs, step_time)
    ramps = max(0.0, idle - imbalance)
    ramp_up = ramps * (up / (up + down) if up + down else 0.5)
    return Bubble(ramp_up, ramps - ramp_up, imbalance, transfers, host, shared_cores)


def _find_ramps(scenario: Scenario, programs: Programs, step_time: float) -> tuple[float, float]:
    """Finds the idle time before the first backwards and after the last forwards of the devices."""
    up = down = 0.0
    by_ipu: dict[int, list[list[ProgramTiming]]] = {
        ipu: [[] for _kind in programs] for ipu in scenario.ipus_of_replicas
    }
    for kind, programs_of_kind in enumerate(programs):
        for one in programs_of_kind:
            if one.cost:
                by_ipu[one.ipu][kind].append(one)
    for ipu, own in by_ipu.items():
        if not any(own):
            up, down = up + step_time / 2, down + step_time / 2
            continue
        begins = np.sort(np.concatenate([np.array(one.begins) for kind in own for one in kind]))
        ends = np.sort(np.concatenate([np.array(one.ends) for kind in own for one in kind]))
        forwards = own[ActionKind.FORWARD]
        backwards = [*own[ActionKind.BACKWARD], *own[HALVES[0]]] or own[HALVES[1]]
        last = max((one.ends[-1] for one in forwards), default=0.0)
        is_last = scenario.is_fused and ipu % scenario.num_ipus == scenario.device_mapping[-1]
        filling = [one.begins[0] for one in (forwards[-1:] if is_last or not backwards else backwards)]
        filled = min(filling, default=0.0)
        own_up, own_down = _split_gaps(np.append(0.0, ends), np.append(begins, step_time), filled, last)
        up, down = up + own_up, down + own_down
    return up, down


def _split_gaps(begins: Array, ends: Array, filled: float, last: float) -> tuple[float, float]:
    """Splits the time of gaps before `filled` from that after `last`; both or neither is half of each."""
    lengths = np.maximum(ends - begins, 0.0)
    is_up = np.where(ends <= filled, 1.0, 0.0)
    is_down = np.where(begins >= last, 1.0, 0.0)
    share = 0.5 + (is_up - is_down) / 2
    return float(lengths @ share), float(lengths @ (1 - share))
