"""Choices by measurements: dispatch plans by steps on zeros, searched timetables by costs."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import watching
from ipu_pipeline.engine.building import Built
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.feeds import take_from
from ipu_pipeline.engine.execution.contract import Request
from ipu_pipeline.engine.execution.measured_costs import (
    CALLBACKS,
    describe_device,
    digest,
    find_directory,
    keep_measurement,
    read_measurement,
    why_not_timed,
)
from ipu_pipeline.engine.execution.runner import PlanRunner
from ipu_pipeline.engine.inspect.estimates import find_layer_costs
from ipu_pipeline.engine.inspect.facts import LayerFacts
from ipu_pipeline.engine.option_types import Chunking
from ipu_pipeline.engine.planning.dispatch_plans import ChunkedStep, choose_dispatch_plan
from ipu_pipeline.engine.planning.memory_records import StageMemory
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
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.ground.pytrees import num_bytes

# Dispatch plans, by steps on zeros. The choice is kept for later processes.

_IN_A_ROW = 2  # steps, the second of which begins while the first one ends
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 50, 0.25  # of plans that take turns
_MOST_SECONDS = 1.0  # after which there is no further round: the times of long steps vary less
_ROUNDS_ALONE = 2  # of a plan by itself, which only corrects an estimate
_MOST_BYTES = 1 << 28  # of a state of zeros; the steps of larger models do not depend on dispatches

_plans: dict[str, Chunking] = {}  # by key


def time_in_turns(
    steps: Mapping[int, Callable[[], Any]], num_rounds: int | None = None, most: int = _MOST_ROUNDS
) -> dict[int, float]:
    """Runs steps in turns, each first and last as often. Returns the medians of the seconds of each."""
    times: dict[int, list[float]] = {size: [] for size in steps}
    begin = time.perf_counter()

    def goes_on(number: int) -> bool:
        if num_rounds is not None or number == 0:
            return number < (num_rounds or 1)
        seconds = _MOST_SECONDS if number < _LEAST_ROUNDS else _SECONDS
        return number < most and time.perf_counter() - begin < seconds

    number = 0
    while goes_on(number):
        for size in list(steps) if number % 2 else reversed(list(steps)):
            before = time.perf_counter()
            for _step in range(_IN_A_ROW):
                arrays = steps[size]()
            jax.block_until_ready(arrays)
            times[size].append((time.perf_counter() - before) / _IN_A_ROW)
        number += 1
    return {size: statistics.median(seconds) for size, seconds in times.items()}


class StepTimes:
    """Times steps of a pipeline on zeros with several plans. What they return is dropped."""

    def __init__(self, make: Callable[[int], PlanRunner], built: Built, count: int, number: int) -> None:
        """Compiles nothing yet."""
        self.compile_seconds = 0.0
        self._make, self._built, self._number = make, built, number
        zeros = list(map(_zeros, jax.tree.leaves(built.traced.inputs)))
        self._request = Request(zeros, count, limit=count, total=count)
        self._state: PipelineState | None = None
        self._steps: dict[int, Callable[[], Any]] = {}

    def time(self, chunk_sizes: Sequence[int]) -> dict[int, float]:
        """The medians of the seconds that a step takes with plans that take turns, by size."""
        for size in chunk_sizes:
            if size not in self._steps:
                runner = self._make(size)
                self._steps[size] = self._prepare(runner)
                jax.block_until_ready(self._steps[size]())  # the first one takes longer
        most = _ROUNDS_ALONE if len(chunk_sizes) == 1 else _MOST_ROUNDS
        return time_in_turns({size: self._steps[size] for size in chunk_sizes}, most=most)

    def _prepare(self, runner: PlanRunner) -> Callable[[], Any]:
        """Compiles the programs of a plan. Returns its step, which takes the state of the last one."""
        if self._state is None:
            self._state = self._make_state(runner)
        begin = time.perf_counter()
        runner.compile(self._state, self._request)
        self.compile_seconds = time.perf_counter() - begin
        fed = list(map(_zeros, jax.tree.leaves(self._built.traced.element)))
        elements = [runner.place_element(fed) if fed else () for _number in range(self._number)]
        placed = runner.place_ahead(elements)

        def step() -> Any:
            state, watcher = self._state, watching.current()
            assert state is not None
            with nullcontext() if watcher is None else watcher.rehearsing(runner):
                progress = runner.run(state, runner.fetch(state, self._request, take_from(placed)))
            runner.has_run = False  # nothing of the user's has
            self._state = state = progress.state
            return state.variables, state.optimizer_state, state.accumulators, progress.collected

        return step

    def _make_state(self, runner: PlanRunner) -> PipelineState:
        updates = self._built.updates
        variables = {name: _zeros(spec) for name, spec in self._built.traced.variables.items()}
        optimizer_state = None
        if updates is not None and not updates.init_needs_outputs:
            leaves = [leaf.aval for leaf in updates.state_leaves]
            optimizer_state = updates.state_tree.unflatten(map(_zeros, leaves))
        state = PipelineState(
            variables=variables,
            optimizer_state=optimizer_state,
            update_count=0,
            execution_count=0,
            key=jax.random.key(0),
        )
        return runner.place(state, self._built.accumulator_dtypes)


def _zeros(aval: Any) -> Any:
    """Zeros on the host; of random keys, which NumPy does not have, on a device."""
    make = np.zeros if isinstance(aval.dtype, np.dtype) else jnp.zeros
    return make(aval.shape, aval.dtype)


def choose_by_steps(
    step: ChunkedStep,
    make: Callable[[int], PlanRunner],
    device: Any,
    built: Built,
    number: int,
    describe: Callable[[], Mapping[str, str]],
) -> Chunking:
    """Chooses a dispatch plan by steps on zeros where they may be run, else by estimates."""
    num_micro_batches = step.num_micro_batches
    if num_micro_batches is None or not _may_run(built):
        return choose_dispatch_plan(step, device.platform)
    key = digest("dispatch plan", str(describe()), str(step.max_live_bytes), describe_device(device))
    directory, parse = find_directory(), functools.partial(_parse, num_micro_batches)
    plan = _plans.get(key) or read_measurement(directory, key, parse)
    if plan is None:
        times = StepTimes(make, built, num_micro_batches, number)
        try:
            plan = choose_dispatch_plan(step, device.platform, times)
        except jax.errors.JaxRuntimeError:  # there may be no room beside a state
            return choose_dispatch_plan(step, device.platform)
        if times.compile_seconds:  # it was not clear by the estimate
            plan = keep_measurement(directory, key, dataclasses.asdict(plan), parse) or plan
    _plans[key] = plan
    return plan


def _parse(num_micro_batches: int, fields: Any) -> Chunking | None:
    """A plan from the fields of a file; None if it does not fit a step of so many micro-batches."""
    plan = Chunking(**fields)
    return plan if isinstance(plan.reason, str) and num_micro_batches % plan.chunk_size == 0 else None


def _may_run(built: Built) -> bool:
    """Whether steps can run on zeros: they terminate, have no visible effects, and fit in memory.

    The caller has checked the stages.
    """
    updates = built.updates
    avals: list[Any] = list(built.traced.variables.values())
    if updates is not None:
        if updates.has_callbacks or updates.init_needs_outputs:
            return False
        if any(program.loops_by_data for program in updates.updates):
            return False
        avals += [leaf.aval for leaf in updates.state_leaves]
    if jax.config.jax_debug_nans or jax.config.jax_debug_infs:  # type: ignore[attr-defined]
        return False
    return num_bytes(avals) <= _MOST_BYTES


# Timetables, and the measured scenarios that they are searched for.

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
        self._searches = functools.lru_cache(_MOST_TIMETABLES)(self._make)

    def _make(self, num_chunks: int) -> tuple[Searched, Timetable]:
        number = num_chunks * self._scenario.chunk_size
        scenario = dataclasses.replace(self._scenario, num_micro_batches=number)
        searched = scenario.searched
        assert searched is not None
        return searched, scenario.timetable()

    def find(self, num_micro_batches: int) -> Searched:
        """Returns what the search found."""
        return self._searches(num_micro_batches // self._scenario.chunk_size)[0]

    def __call__(self, num_chunks: int) -> Timetable:
        """Returns the timetable."""
        return self._searches(num_chunks)[1]


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
    state = dataclasses.replace(make_state(), accumulators=runner.make_accumulators(dtypes))
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
    held_bytes = [stage.num_held_bytes for stage in stages]
    for ipu in plans:
        constant[ipu.ipu] = ipu.num_device_bytes - ipu.num_activation_bytes
        if ipu.num_temporary_bytes is None and temporaries:
            constant[ipu.ipu] += max(
                size for size, home in zip(temporaries, mapping, strict=True) if home == ipu.ipu
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
            tuple(constant), tuple(held_bytes), tuple(stage.num_between_bytes for stage in stages)
        ),
        layers=find_layer_costs(layers, costs, held_bytes, mapping, plans),
    )
