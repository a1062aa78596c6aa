"""Simulator of a schedule with costs: timelines, free-running or in lock-step, and why devices are idle."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.tasks import ENDING, LOAD, SEND, STORE, Step, Task, make_step, run_step
from ipu_pipeline.engine.schedules.timelines import Array, Bubble, Sending, Timeline, concatenate, memory_of
from ipu_pipeline.engine.schedules.timetables import GATHER, HALVES, UPDATE, ActionKind, Timetable

# Idle time of devices that wait only for data.
#
# An idle moment seldom has a single cause: a device waits for another one, which waited for a transfer.
# So a cause counts as the time by which a step would be shorter without it, times the number of devices.
# Causes are taken away one after the other: shared cores first (sharing is not monotonic), the
# host's time, transfers (also all-reduces and those to host memory), and imbalance (work is spread evenly
# over the devices; 0 where that makes the step longer, as with few micro-batches). The ramps are left:
# before the first backward of a device it is ramp-up, after its last forward ramp-down; time that is both
# or neither is half of each.
#
# None can be negative: an end of a program is the latest of sums of costs (a "max-plus" system: Baccelli
# et al., "Synchronization and Linearity", 1992), so it does not come later when a cost gets less. Sharing
# cores has no such property. With N equal stages on N devices and M micro-batches, only the ramps are
# left with Grouped and Interleaved, (N-1)/(M+N-1) of the step (Narayanan et al., "Efficient Large-Scale
# Language Model Training on GPU Clusters", 2021, have it as (N-1)/M of the rest); with Sequential they
# are (N-1)/N.


def balanced(scenario: Scenario) -> Scenario:
    """Spreads all work of a scenario evenly over the devices, and there over the stages."""
    ipus = scenario.device_mapping
    num_there = [ipus.count(ipu) for ipu in ipus]

    def even(times: tuple[float, ...]) -> tuple[float, ...]:
        share = sum(times) / len(scenario.ipus)
        spread = tuple(share / number for number in num_there)
        return times if np.allclose(times, spread, rtol=1e-12, atol=0) else spread

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
        even_step = run_step(even, timetable)
        shorter = num_ipus * (step.end - even_step.end)
        if shorter > 0:
            imbalance, step = shorter, even_step
    up, down = _find_free_ramps(even, step)
    ramps = max(0.0, idle - imbalance)
    ramp_up = ramps * (up / (up + down) if up + down else 0.5)
    return Bubble(ramp_up, ramps - ramp_up, imbalance, transfers, host, shared_cores)


def _find_free_ramps(scenario: Scenario, step: Step) -> tuple[float, float]:
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


# Lock-step, in which real IPUs run: compute, sync and exchange ("Bulk Synchronous Parallel" in
# Graphcore's IPU Programmer's Guide).
#
# A time-step lasts as long as its slowest action, and then as long as the slowest transfer of what was
# sent. It begins when the one before is over and the host, which runs ahead, has started all programs of
# it. Updates have a time-step at the end; no programs are fused; replicas keep step, and send to each
# other before and after the updates. What execution phases move goes together with what actions send or,
# where phases are brought ahead, while they compute. Every idle moment has one cause, see `Bubble`.


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
            maxima = np.zeros(timetable.num_time_steps)
            np.maximum.at(maxima, places, lengths[blocks])
            return maxima

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
        for block, positions in zip(itertools.chain.from_iterable(self.step.blocks), numbers, strict=True):
            times = begins[places[positions]]
            for task in block:
                task.begins, task.ends = times, times + ends[positions]
                if task.kind == SEND:
                    task.begins = times + lasts[places[positions]]
                    task.ends = task.begins + task.cost
        return _find_step_ramps(scenario, slowest, places, kinds, stages)

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
    """Finds when programs end that begin together at 0 on shared cores."""
    ends = [0.0] * len(costs)
    now = served = 0.0
    demand = sum(demands)
    for number in sorted(range(len(costs)), key=costs.__getitem__):
        now += (costs[number] - served) * max(1.0, demand / cores)
        served = costs[number]
        demand -= demands[number]
        ends[number] = now
    return ends


def _find_step_ramps(
    scenario: Scenario, slowest: Array, places: Array, kinds: Array, stages: Array
) -> tuple[float, float]:
    """Finds the idle time in the ramps, up and down."""
    where = np.array(scenario.device_mapping)[stages]
    up = down = 0.0
    for ipu in scenario.ipus:
        is_here = where == ipu
        own_places, own_kinds = places[is_here], kinds[is_here]
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


# Timelines.

_COLUMNS = ("kinds", "stages", "micro_batches", "ipus", "begins", "ends")


@dataclass(frozen=True, eq=False)
class Simulation:
    """The result of a simulation.

    Example:
      >>> costs = engine.Costs.of(3, forward=[1.0, 1.0, 2.0], backward=2.0)
      >>> simulation = engine.simulate(engine.Scenario(costs, num_micro_batches=8))
      >>> simulation.limiting_ipu
      2

    Attributes:
      scenario: the simulated scenario.
      timetable: the checked schedule. If programs handle several micro-batches, its actions are for chunks.
      free_running: the timeline if devices wait only for data, as in the engine.
      lock_step: the timeline if devices start each time-step together, as Graphcore's IPUs do.
    """

    scenario: Scenario
    timetable: Timetable
    free_running: Timeline
    lock_step: Timeline

    @property
    def limiting_ipu(self) -> int:
        """The busiest device."""
        work = self.free_running.work
        return max(work, key=work.__getitem__)


def simulate(scenario: Scenario) -> Simulation:
    """Simulates a step of a pipeline that starts empty.

    Example:
      >>> costs = engine.Costs.of(4, forward=1.0, backward=2.0)
      >>> simulation = engine.simulate(engine.Scenario(costs, "grouped", num_micro_batches=8))
      >>> simulation.free_running.step_time
      33.0
      >>> round(simulation.free_running.utilisation, 3)
      0.727

    Args:
      scenario: the schedule and its costs.

    Returns:
      The result, with both timelines.

    Raises:
      ScheduleError: the schedule is incomplete, out of order or deadlocked.
      ValueError: there are too many actions.
    """
    timetable = scenario.timetable()
    return Simulation(
        scenario,
        timetable,
        _simulate_freely(scenario, timetable),
        _simulate_in_lock_step(scenario, timetable),
    )


def predict_step_time(scenario: Scenario) -> float:
    """Returns `simulate(scenario).free_running.step_time`: the step time if devices wait only for data.

    Example:
      >>> costs = engine.Costs.of(4, forward=1.0, backward=2.0)
      >>> scenario = engine.Scenario(costs, "grouped", num_micro_batches=8)
      >>> schedules.predict_step_time(scenario)
      33.0
    """
    return run_step(scenario, scenario.timetable()).end


def _simulate_freely(scenario: Scenario, timetable: Timetable) -> Timeline:
    step = run_step(scenario, timetable)
    return _timeline(
        scenario, step, step.end, find_bubble(scenario, timetable, step), is_fused=scenario.is_fused
    )


def _simulate_in_lock_step(scenario: Scenario, timetable: Timetable) -> Timeline:
    return _timeline(scenario, *run_in_lock_step(scenario, timetable), is_fused=False)


def _elements(scenario: Scenario, replica: int, number: int, size: int = 1) -> Array:
    """The infeed elements that a replica's micro-batches are; for larger chunks, the first of each."""
    return np.arange(number, dtype=np.int32) * size * scenario.cluster.num_replicas + replica


def _timeline(
    scenario: Scenario, step: Step, step_time: float, bubble: Bubble, *, is_fused: bool
) -> Timeline:
    """Makes a timeline."""
    runs, sendings = {}, []
    for task in step:
        begins, ends = np.array(task.begins), np.array(task.ends)
        if task.kind == SEND and len(begins):
            sendings.append(
                {
                    "source": np.full(len(ends), task.stage),
                    "target": np.full(len(ends), task.target),
                    "micro_batch": _elements(scenario, task.replica, len(ends), scenario.chunk_size),
                    "begin": begins,
                    "end": ends,
                }
            )
        elif task.kind <= GATHER and len(begins) and (task.cost or task.kind < UPDATE):
            runs[task.kind, task.replica, task.stage] = begins, ends
    costs, ipus, last = scenario.costs, scenario.device_mapping, scenario.costs.num_stages - 1
    halved = scenario.halved
    back = [HALVES[0] if stage in halved else ActionKind.BACKWARD for stage in range(last + 1)]
    tables: list[dict[str, Array]] = []
    for (kind, replica, stage), (begins, ends) in runs.items():
        first, behind, is_action = 0.0, 1.0, kind < UPDATE
        if is_fused and stage == last and kind in (ActionKind.FORWARD, back[last]):
            begins, ends = runs[ActionKind.FORWARD, replica, last]
            together = costs.forward[last] + costs.of_actions[back[last]][last]
            share = costs.forward[last] / together if together else 1.0
            first, behind = (0.0, share) if kind == ActionKind.FORWARD else (share, 1.0)
        size = scenario.chunk_size if is_action else 1
        begins, ends = _parts(begins, ends, size, first, behind)
        number = len(begins)
        tables.append(
            {
                "kinds": np.full(number, kind, np.int8),
                "stages": np.full(number, stage, np.int32),
                "micro_batches": _elements(scenario, replica, number) if is_action else np.full(1, -1),
                "ipus": np.full(number, scenario.ipu_of(replica, ipus[stage]), np.int32),
                "begins": begins,
                "ends": ends,
            }
        )
    return Timeline(
        **concatenate(tables, _COLUMNS, "begins", "ipus", "kinds"),
        sendings=concatenate(sendings, Sending._fields, "begin", "source"),
        step_time=step_time,
        work=scenario.work_of_ipus(),
        bubble=bubble,
        memory=_find_memory(scenario, runs),
        num_samples=scenario.num_samples,
    )


def _parts(begins: Array, ends: Array, size: int, first: float, behind: float) -> tuple[Array, Array]:
    """The part of each micro-batch of a chunk between two shares of its time: begins and ends."""
    numbers = np.arange(size)
    lengths = (ends - begins)[:, None] / size
    part_begins = begins[:, None] + lengths * (numbers + first)
    part_ends = begins[:, None] + lengths * (numbers + behind)
    if behind == 1.0:
        part_ends[:, -1] = ends  # without rounding
    return part_begins.reshape(-1), part_ends.reshape(-1)


def _find_memory(
    scenario: Scenario, runs: Mapping[tuple[int, int, int], tuple[Array, Array]]
) -> dict[int, tuple[Array, Array]]:
    """Finds what each device holds over time; empty if that is not known."""
    memory = scenario.memory
    if memory is None:
        return {}
    first, second = HALVES
    halved, size = scenario.halved, scenario.chunk_size

    def held_by(replica: int, stage: int) -> list[tuple[Array, Array, int]]:
        begins, ends = runs[ActionKind.FORWARD, replica, stage]
        held_bytes = memory.num_held_bytes[stage] * size
        if not scenario.training:
            return [(begins, ends, held_bytes)]
        if stage not in halved:
            return [(begins, runs[ActionKind.BACKWARD, replica, stage][1], held_bytes)]
        between = runs[first, replica, stage][1]
        later = memory.num_between_bytes[stage] * size
        return [(begins, between, held_bytes), (between, runs[second, replica, stage][1], later)]

    return {
        scenario.ipu_of(replica, ipu): memory_of(
            memory.num_constant_bytes[ipu],
            [
                entry
                for stage in range(scenario.costs.num_stages)
                if scenario.device_mapping[stage] == ipu
                for entry in held_by(replica, stage)
            ],
        )
        for replica in range(scenario.cluster.num_replicas)
        for ipu in scenario.ipus
    }
