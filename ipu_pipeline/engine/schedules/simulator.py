"""Turns a schedule and the costs of its actions into timelines. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ipu_pipeline.engine.schedules.actions import GATHER, HALVES, UPDATE, ActionKind
from ipu_pipeline.engine.schedules.bubbles import find_bubble
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.task_times import run_step
from ipu_pipeline.engine.schedules.tasks import SEND, Step
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
        `task_times` and `bubbles`.
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
