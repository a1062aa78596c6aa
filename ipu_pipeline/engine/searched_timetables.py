"""Measures pipelines; makes the timetables of one whose schedule is searched by what the searches find."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from ipu_pipeline.engine.building import Built
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.execution.contract import Request
from ipu_pipeline.engine.execution.measured_costs import CALLBACKS, why_not_timed
from ipu_pipeline.engine.execution.runner import PlanRunner
from ipu_pipeline.engine.inspect.facts import LayerFacts
from ipu_pipeline.engine.inspect.layer_costs import find_layer_costs
from ipu_pipeline.engine.planning.memory_plans import StageMemory
from ipu_pipeline.engine.schedules import (
    Costs,
    Memory,
    Scenario,
    Schedule,
    Searched,
    SearchedSchedule,
    Timetable,
    timetable,
)
from ipu_pipeline.engine.state import PipelineState, RunState

__all__ = [
    "SearchedTimetables",
    "Timetables",
    "check_one_process",
    "make_scenario",
    "measure_scenario",
]

_MOST_TIMETABLES = 64  # that are kept, of numbers of micro-batches


@dataclass(frozen=True)
class Timetables:
    """Returns the checked timetable of a step, by the number of its micro-batches or groups of them."""

    schedule: Schedule
    mapping: tuple[int, ...]  # the device of each stage
    trains: bool
    levels: tuple[int, ...]  # of the stages
    halved: frozenset[int] | None = None  # the stages whose backward is halved; None: the schedule says it
    of_any_number: Timetable | None = None  # a loop's, whose iterations run one after the other
    searches: SearchedTimetables | None = None  # a searched schedule's, made with the runner

    def __call__(self, num_micro_batches: int) -> Timetable:
        """Returns the timetable."""
        return (self.searches or self.by_schedule)(num_micro_batches)

    def by_schedule(self, num_micro_batches: int) -> Timetable:
        """Returns the timetable of the schedule, before any search."""
        if self.of_any_number is not None:
            return self.of_any_number
        number, levels = len(self.levels), self.levels
        return timetable(
            self.schedule, number, num_micro_batches, self.mapping, self.trains, levels, self.halved
        )


class SearchedTimetables:
    """Makes the timetable for each number of micro-batches, or chunks of them, by a search of its own."""

    def __init__(self, scenario: Scenario) -> None:
        """Takes the pipeline as it was measured."""
        self._scenario = scenario
        self._kept = functools.lru_cache(_MOST_TIMETABLES)(self._make)

    def _make(self, num_chunks: int) -> tuple[Searched, Timetable]:
        number = num_chunks * self._scenario.chunk_size
        scenario = dataclasses.replace(self._scenario, num_micro_batches=number)
        found = scenario.searched
        assert found is not None
        return found, scenario.timetable()

    def find(self, num_micro_batches: int) -> Searched:
        """Returns what the search found."""
        return self._kept(num_micro_batches // self._scenario.chunk_size)[0]

    def __call__(self, num_chunks: int) -> Timetable:
        """Returns the timetable."""
        return self._kept(num_chunks)[1]


def check_one_process(groups: Sequence[DeviceGroup]) -> None:
    """Checks that all devices are in this process."""
    processes = sorted({process for group in groups for process in group.processes})
    if len(processes) > 1:
        raise ValueError(
            "PipelineSchedule.searched needs all devices in one process, since each would measure "
            f"something else; those given are of the processes {processes}. Search in one process, write "
            "the rows with write_csv, and give all of them the file."
        )


def measure_scenario(
    runner: PlanRunner,
    make_state: Callable[[], PipelineState],
    built: Built,
    schedule: SearchedSchedule,
    plan_memory: Callable[[], Sequence[StageMemory]],
) -> Scenario:
    """Measures a pipeline's stages, each alone, and plans what they hold. Runs no update."""
    if reason := CALLBACKS if runner.has_callbacks else why_not_timed(runner.programs):
        raise ValueError(
            f"PipelineSchedule.searched runs the stages on zeros to measure them: {reason}. Take a "
            "schedule with a name, or one that was searched without these and written to a file."
        )
    dtypes, size = built.accumulator_dtypes, runner.chunk_size
    zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(built.traced.inputs)]
    state = RunState(make_state(), runner.make_accumulators(dtypes))
    runner.compile(state, Request(zeros, size, limit=size, total=size))
    costs = runner.measure().costs
    return make_scenario(runner, built, costs, plan_memory(), schedule, size)


def make_scenario(
    runner: PlanRunner,
    built: Built,
    costs: Costs,
    stages: Sequence[StageMemory],
    schedule: Schedule,
    num_micro_batches: int,
    temporaries: Sequence[int] = (),
    cores: float | None = None,
    layers: Sequence[Sequence[LayerFacts]] = (),
) -> Scenario:
    """Makes the scenario of a pipeline whose costs are known."""
    placement = runner.placement
    mapping = tuple(group.ipu for group in placement.groups)
    constant = [0] * (1 + max(mapping))
    plans = runner.plan_memory(built.accumulator_dtypes, stages, num_micro_batches)
    held = [stage.num_held_bytes for stage in stages]
    for ipu in plans:
        constant[ipu.ipu] = ipu.num_device_bytes - ipu.num_activation_bytes
        if ipu.num_temporary_bytes is None and temporaries:
            constant[ipu.ipu] += max(
                own for own, there in zip(temporaries, mapping, strict=True) if there == ipu.ipu
            )
    return Scenario(
        costs,
        schedule,
        num_micro_batches,
        device_mapping=mapping,
        levels=tuple(built.traced.levels),
        training=built.updates is not None,
        chunk_size=runner.chunk_size,
        cores=cores,
        memory=Memory(
            tuple(constant),
            tuple(held),
            tuple(stage.num_between_bytes for stage in stages),
        ),
        layers=find_layer_costs(layers, costs, held, mapping, plans),
    )
