"""Turns a schedule and the costs of its actions into timelines. No JAX."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ipu_pipeline.engine.schedules.actions import GATHER, HALVES, UPDATE, ActionKind
from ipu_pipeline.engine.schedules.bubbles import find_bubble
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.free_running import Link, Programs, wire
from ipu_pipeline.engine.schedules.in_phases import run_step
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.shared_cores import run_sharing
from ipu_pipeline.engine.schedules.time_steps import run_in_lock_step
from ipu_pipeline.engine.schedules.timelines import Array, Bubble, Sending, Timeline, concatenate, memory_of

__all__ = ["Simulation", "predict_step_time", "simulate"]

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
      free_running: the timeline if devices wait only for data, as in the engine. See the modules
        `free_running` and `bubbles`.
      lock_step: the timeline if devices start each time-step together, as Graphcore's IPUs do. See the
        module `time_steps`.
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
    return _run(scenario, scenario.timetable(), wire(scenario))


def _run(scenario: Scenario, timetable: Timetable, programs: Programs) -> float:
    if scenario.cores is None:
        return run_step(scenario, timetable, programs, scenario.costs.host)
    return run_sharing(programs, timetable, scenario.costs.host, scenario.cores)


def _simulate_freely(scenario: Scenario, timetable: Timetable) -> Timeline:
    programs = wire(scenario)
    step_time = _run(scenario, timetable, programs)
    bubble = find_bubble(scenario, timetable, programs, step_time)
    number = scenario.costs.num_stages
    runs = {
        (kind, *divmod(place, number)): (np.array(own.begins), np.array(own.ends))
        for kind, programs_of_kind in enumerate(programs[: GATHER + 1])
        for place, own in enumerate(programs_of_kind)
        if own.ends and (own.cost or kind < UPDATE)
    }
    sendings = []
    for programs_of_kind in programs[:UPDATE]:
        for place, own in enumerate(programs_of_kind):
            for link in own.links:
                if link.time:
                    arrivals = np.array(link.arrivals)
                    begins = np.maximum(own.ends, np.append(0.0, arrivals[:-1]))
                    sendings.append(_sending(scenario, place // number, link, begins, arrivals))
    return _timeline(scenario, runs, sendings, step_time, bubble, is_fused=scenario.is_fused)


def _simulate_in_lock_step(scenario: Scenario, timetable: Timetable) -> Timeline:
    number = scenario.costs.num_stages
    flat = np.fromiter(itertools.chain.from_iterable(timetable.order), np.int32, 3 * len(timetable.order))
    kinds, stages = flat[0::3], flat[1::3]
    run = run_in_lock_step(scenario, timetable, kinds, stages)
    programs = wire(scenario)
    works = kinds * number + stages
    places = np.split(
        np.argsort(works, kind="stable"), np.cumsum(np.bincount(works, minlength=UPDATE * number))
    )
    runs, sendings = {}, []
    for kind, programs_of_kind in enumerate(programs[:UPDATE]):
        for place, own in enumerate(programs_of_kind):
            replica, stage = divmod(place, number)
            here = places[kind * number + stage]
            if len(here):
                runs[kind, replica, stage] = run.begins[here], run.ends[here]
            for link in own.links:
                if link.time:
                    sent = run.sent[here]
                    sendings.append(_sending(scenario, replica, link, sent, sent + link.time))
    for (kind, stage), (begin, end) in run.closing.items():
        for replica in range(scenario.cluster.num_replicas):
            runs[kind, replica, stage] = np.array([begin]), np.array([end])
    return _timeline(scenario, runs, sendings, run.step_time, run.bubble, is_fused=False)


def _sending(scenario: Scenario, replica: int, link: Link, begins: Array, ends: Array) -> dict[str, Array]:
    """The columns of `Sending` of a link."""
    source, target = link.edge
    return {
        "source": np.full(len(ends), source),
        "target": np.full(len(ends), target),
        "micro_batch": _elements(scenario, replica, len(ends), scenario.chunk_size),
        "begin": begins,
        "end": ends,
    }


def _elements(scenario: Scenario, replica: int, number: int, size: int = 1) -> Array:
    """The infeed elements that a replica's micro-batches are; for larger chunks, the first of each."""
    return np.arange(number, dtype=np.int32) * size * scenario.cluster.num_replicas + replica


def _timeline(
    scenario: Scenario,
    runs: Mapping[tuple[int, int, int], tuple[Array, Array]],
    sendings: Sequence[Mapping[str, Array]],
    step_time: float,
    bubble: Bubble,
    *,
    is_fused: bool,
) -> Timeline:
    """Makes a timeline.

    Args:
      scenario: what was simulated.
      runs: (kind, replica, stage) -> begins and ends by chunk.
      sendings: the columns of `Sending`, by link.
      step_time: the time when all is done.
      bubble: idle time by cause.
      is_fused: whether the last stage's forwards are its backwards, too.
    """
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
        held = memory.num_held_bytes[stage] * size
        if not scenario.training:
            return [(begins, ends, held)]
        if stage not in halved:
            return [(begins, runs[ActionKind.BACKWARD, replica, stage][1], held)]
        between = runs[first, replica, stage][1]
        later = memory.num_between_bytes[stage] * size
        return [(begins, between, held), (between, runs[second, replica, stage][1], later)]

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
