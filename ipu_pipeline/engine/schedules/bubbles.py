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

from ipu_pipeline.engine.schedules.actions import GATHER, HALVES, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.task_times import run_step
from ipu_pipeline.engine.schedules.tasks import Step, Task
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


def find_bubble(scenario: Scenario, timetable: Timetable, step: Step) -> Bubble:
    """Finds the idle time by cause."""
    scenario = dataclasses.replace(scenario, schedule=timetable)  # without another search
    num_ipus = len(scenario.ipus_of_replicas)
    work = sum(scenario.work_of_ipus().values())
    shared_cores = host = transfers = imbalance = 0.0

    def take_away(changed: Scenario) -> float:
        nonlocal step
        before, step = step.end, run_step(changed, timetable)
        return max(0.0, num_ipus * (before - step.end))

    if scenario.cores is not None:
        scenario = dataclasses.replace(scenario, cores=None)
        shared_cores = take_away(scenario)
    if scenario.costs.host:
        scenario = dataclasses.replace(scenario, costs=dataclasses.replace(scenario.costs, host=0.0))
        host = take_away(scenario)
    cluster = dataclasses.replace(scenario.cluster, within=LinkSpeed(), between=LinkSpeed())
    if scenario.costs.transfers or cluster != scenario.cluster or scenario.host_memory is not None:
        costs = dataclasses.replace(scenario.costs, transfers={})
        scenario = dataclasses.replace(scenario, costs=costs, cluster=cluster, host_memory=None)
        transfers = take_away(scenario)
    idle = num_ipus * step.end - work
    even = balanced(scenario)
    if even.costs != scenario.costs:
        other = run_step(even, timetable)
        shorter = num_ipus * (step.end - other.end)
        if shorter > 0:
            imbalance, step = shorter, other
    up, down = _find_ramps(even, step)
    ramps = max(0.0, idle - imbalance)
    ramp_up = ramps * (up / (up + down) if up + down else 0.5)
    return Bubble(ramp_up, ramps - ramp_up, imbalance, transfers, host, shared_cores)


def _find_ramps(scenario: Scenario, step: Step) -> tuple[float, float]:
    """Finds the idle time before the first backwards and after the last forwards of the devices."""
    up, down, step_time = 0.0, 0.0, step.end
    by_ipu: dict[int, list[Task]] = {ipu: [] for ipu in scenario.ipus_of_replicas}
    for task in step:
        if task.cost and task.kind <= GATHER:
            by_ipu[task.resource].append(task)
    for ipu, tasks in by_ipu.items():
        if not tasks:
            up, down = up + step_time / 2, down + step_time / 2
            continue
        begins = np.sort(np.concatenate([np.array(task.begins) for task in tasks]))
        ends = np.sort(np.concatenate([np.array(task.ends) for task in tasks]))
        forwards = [task for task in tasks if task.kind == ActionKind.FORWARD]
        backwards = [task for task in tasks if task.kind in (ActionKind.BACKWARD, HALVES[0])]
        backwards = backwards or [task for task in tasks if task.kind == HALVES[1]]
        last = max((task.ends[-1] for task in forwards), default=0.0)
        is_last = scenario.is_fused and ipu % scenario.num_ipus == scenario.device_mapping[-1]
        filling = [task.begins[0] for task in (forwards[-1:] if is_last or not backwards else backwards)]
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
