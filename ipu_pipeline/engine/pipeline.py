"""The engine's public class: a pipeline of stage functions, whose steps take a state and return the next.

It builds and runs pipelines; `inspect` and `planning` have functions that answer questions about them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import building, peers, schedules, watching
from ipu_pipeline.engine.building import Built, Recipe, build
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, check_processes, make_groups
from ipu_pipeline.engine.devices.feeds import (
    Element,
    PlacedMicroBatches,
    Supply,
    Take,
    copy_leaves,
    gather,
    take_nothing,
)
from ipu_pipeline.engine.devices.links import naming_peers
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.devices.xla_settings import CompilerOptions, check_compiles, plan_options
from ipu_pipeline.engine.execution import compilation, op_by_op
from ipu_pipeline.engine.execution.agreement import agree_on, identify_operations
from ipu_pipeline.engine.execution.block_runner import BlockRunner
from ipu_pipeline.engine.execution.contract import Iterated, Pending, Request, Runner
from ipu_pipeline.engine.execution.measured_costs import why_not_timed
from ipu_pipeline.engine.execution.observation import StepOnItsWay, copy_state, rehearse, watch_step
from ipu_pipeline.engine.execution.op_by_op import StageCaller
from ipu_pipeline.engine.execution.runner import PlanRunner
from ipu_pipeline.engine.measured_choices import (
    SearchedTimetables,
    Timetables,
    check_one_process,
    choose_by_steps,
    measure_scenario,
)
from ipu_pipeline.engine.mesh_isolation import apart
from ipu_pipeline.engine.option_types import ONE_BY_ONE, Chunking, Offload, Recomputation, Reduction, Shard
from ipu_pipeline.engine.pipeline_options import PipelineOptions, find_unused, make_options
from ipu_pipeline.engine.pipeline_states import (
    Adoption,
    BetweenSteps,
    adopt_optimizer_state,
    compare,
    make_optimizer_state,
    make_state,
    make_variables,
)
from ipu_pipeline.engine.plan.memory import find_moments, plan_stages
from ipu_pipeline.engine.plan.op_by_op import OpByOp, Visit, find_nans
from ipu_pipeline.engine.planning.dispatch_plans import (
    ChunkedStep,
    check_dispatch_plan,
    choose_dispatch_plan,
)
from ipu_pipeline.engine.planning.memory_records import Moments, StageMemory
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.progress import tracing
from ipu_pipeline.engine.state import (
    MOVES,
    PipelineState,
    Progress,
    StepOutputs,
    as_plain_state,
    check_exists,
    check_not_traced,
    check_state,
    without_aliases,
)
from ipu_pipeline.engine.step_micro_batches import (
    MicroBatchShapes,
    StepFeed,
    check_alike,
    check_number,
    describe_number,
    describe_shapes,
    find_key,
    trace_again,
)
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.frames import Surroundings
from ipu_pipeline.engine.tracing.side_outputs import Metric, UserChecks, find_failed, hands_out_checks
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stage_lists import StageEntry, flatten_stages
from ipu_pipeline.engine.tracing.stage_meshes import uses_replicas
from ipu_pipeline.engine.tracing.stages import TracedPipeline
from ipu_pipeline.engine.updates.optimizer_wrappers import is_loss_weight, without_weights
from ipu_pipeline.engine.updates.update_programs import AccumulatorPlan, Updates, plan_accumulators
from ipu_pipeline.ground.checks import check_positive, parse_member, parse_members
from ipu_pipeline.ground.lazy_initialization import begin_first_run
from ipu_pipeline.ground.pytrees import as_shapes, check_like, describe_structures

P = ParamSpec("P")
# The functions and attributes that replace former methods.
_MOVED = {
    "facts": "engine.inspect.find_facts(pipeline)",
    "measure_costs": "engine.planning.measure_costs(pipeline)",
    "num_micro_batches": "pipeline.options.num_micro_batches",
    "plan_host_memory": "engine.planning.plan_host_memory(pipeline, link)",
    "plan_ipu_memory": "engine.planning.plan_ipu_memory(pipeline)",
    "plan_memory": "engine.planning.plan_memory(pipeline)",
    "scenario": "engine.planning.measure_scenario(pipeline)",
    "searched": "engine.inspect.find_searched(pipeline)",
    "summary": "engine.inspect.summarize(pipeline)",
    "with_dispatch_plan": "engine.planning.with_dispatch_plan(pipeline, plan)",
    "with_recomputation": "engine.planning.with_recomputation(pipeline, recompute)",
}


def _with_options(
    make: Callable[P, PipelineOptions],
) -> Callable[
    [Callable[[Pipeline, Any, PipelineOptions], None]], Callable[Concatenate[Pipeline, Any, P], None]
]:
    """Lets `__init__` take an options object's fields as arguments, which type checkers understand, too."""

    def decorate(
        init: Callable[[Pipeline, Any, PipelineOptions], None],
    ) -> Callable[Concatenate[Pipeline, Any, P], None]:
        def wrapped(self: Pipeline, stages: Any, *args: P.args, **options: P.kwargs) -> None:
            init(self, stages, make_options("Pipeline", *args, **options))

        signature = inspect.signature(init)
        options = inspect.signature(make).parameters
        parameters = list(signature.parameters.values())[:2]
        parameters += [parameter for name, parameter in options.items() if name != "hooks"]
        functools.update_wrapper(wrapped, init)
        vars(wrapped)["__signature__"] = signature.replace(parameters=parameters)
        return wrapped  # type: ignore[return-value]  # it may be called with `stages=`, too

    return decorate


class Pipeline:
    """A model in stages, each on its own device, trained with gradient accumulation.

    Example:
      >>> def first(w, x, targets):
      ...     return jnp.tanh(x @ w), targets
      >>> def second(w, x, targets):
      ...     return jnp.mean((x @ w - targets) ** 2)
      >>> pipeline = engine.Pipeline(
      ...     [first, second],
      ...     parameters=[np.ones([8, 16], np.float32), np.ones([16, 2], np.float32)],
      ...     num_micro_batches=4,
      ...     optimizer=optax.sgd(0.1),
      ... )
      >>> micro_batches = [(np.ones([4, 8], np.float32), np.zeros([4, 2], np.float32))] * 4
      >>> state = pipeline.init(jax.random.key(0), micro_batches[0])
      >>> state, outputs = pipeline.step(state, micro_batches)
      >>> len(outputs.losses), state.update_count
      (4, 1)

    Attributes:
      timetable: a function that returns the checked timetable of a step, from its number of micro-batches,
        or of groups of `num_serialized`. For a searched schedule, see `engine.inspect.find_searched`.
    """

    split_table: Any = None  # where its stages begin, and why, if the engine cut it
    measured_costs: tuple[Any, schedules.Costs] | None = None  # a runner, and what its stages take
    iterated: Iterated | None = None  # the loop whose body the pipeline is

    @_with_options(PipelineOptions)
    def __init__(
        self, stages: Sequence[StageEntry | Sequence[StageEntry]], options: PipelineOptions
    ) -> None:
        """Checks the arguments; nothing is traced or compiled yet.

        Args:
          stages: functions, or `Stage`s. Each takes the previous stage's result (a tuple or list as
            positional arguments, a dict as keyword arguments); the first one takes the inputs of `step` and
            then the micro-batch. Variables come from `get_variable`, or from a pytree of `parameters` as
            the first argument. A list in place of a stage: parallel stages, which run at the same time on
            the same values; their results are concatenated.
          options: keyword arguments: the fields of `PipelineOptions`, which describes them.

        Raises:
          TypeError: a compiler option has a wrong type, or an argument is unknown.
          ValueError: an argument has a wrong value.
        """
        functions, mapping, self._parameters = flatten_stages(
            stages, options.device_mapping, options.parameters
        )
        self.split_table = getattr(stages, "table", None)
        levels = tuple(level for level, parallel in enumerate(functions) for _stage in parallel)
        schedule, count = options.schedule, options.num_micro_batches
        if options.num_serialized > 1 and (schedule != "sequential" or len(set(mapping)) > 1):
            raise ValueError(
                'num_serialized above 1 needs the schedule "sequential" and all stages on one device; got '
                f"{options.num_serialized} with the schedule {schedule!r} and device_mapping "
                f"{list(mapping)}."
            )
        if options.execution_phases is not None:
            options.execution_phases.check(levels[-1] + 1, schedule, options.num_serialized)
        self._begin(Recipe(functions, mapping, options), levels, options.loss is not None)
        if isinstance(schedule, schedules.SearchedSchedule) and len(functions) < len(mapping):
            raise ValueError(
                "PipelineSchedule.searched goes with stages one after another; these have parallel ones. "
                "Take a schedule with a name."
            )
        # One program needs no timetable, but a user's schedule is checked all the same.
        number = 1 if count is None else count
        is_file = isinstance(schedule, schedules.FileSchedule)  # for one number of micro-batches only
        self.timetable(min(number, 64) if self.is_one_program and not is_file else number)
        for sentence in find_unused(vars(options)):
            warnings.warn(sentence, stacklevel=3)

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Says what takes the place of a method that is gone."""
            if name in _MOVED:
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} object has no attribute {name!r}; use {_MOVED[name]}")
            return object.__getattribute__(self, name)  # raises the first error again, a property's too

    def _begin(self, recipe: Recipe, levels: Sequence[int], trains: bool) -> None:
        """Checks a recipe, and takes it."""
        self._recipe, options = recipe, recipe.options
        self._num_replicas, self._has_identical_keys = options.num_replicas, False
        if options.dispatch_plan is not None:
            check_dispatch_plan(options.dispatch_plan, options.num_micro_batches, self.is_one_program)
        self._compiler_options = _plan_compiler_options(self)
        parse_member(Reduction, options.reduction, "reduction")  # it may raise
        self._offload = parse_members(Offload, options.offload, "offload")
        self._shard = parse_members(Shard, options.shard, "shard")
        self.recompute = (
            None
            if options.recompute is None
            else parse_member(Recomputation, options.recompute, "recompute, unless it is None,")
        )
        self._devices = options.devices
        self._chosen_plan: Chunking | None = None
        self._built: Built | None = None
        self.programs: tuple[StagePrograms, ...] = ()  # of each stage, before XLA
        self.runner: Runner[Any] | None = None
        self._shapes = MicroBatchShapes()
        self._surroundings: Surroundings | None = None  # of the first trace
        self._program_cache = compilation.current_programs()
        self._between = BetweenSteps()
        # A timetable does not hold the pipeline: an infeed holds the runner, which has the timetable, and
        # the pipeline's program holds the infeed.
        self.timetable = Timetables(options.schedule, recipe.mapping, trains, tuple(levels))
        self._building = threading.RLock()  # held while it is traced, and while its runner is made

    @property
    def num_devices(self) -> int:
        """The number of devices that each replica needs."""
        return (max(self.device_mapping) + 1) * self.options.num_devices_per_ipu

    @property
    def num_replicas(self) -> int:
        """The number of copies of the pipeline."""
        return self._num_replicas

    @property
    def options(self) -> PipelineOptions:
        """The given options; `schedule` as a name of this library, or a function."""
        return self._recipe.options

    @property
    def device_mapping(self) -> tuple[int, ...]:
        """The device of each stage."""
        return self._recipe.mapping

    @property
    def is_one_program(self) -> bool:
        """Whether all stages are on one device, without phases, which are separate programs."""
        if self.options.execution_phases is not None:
            return False
        is_one_device = self._num_replicas == self.options.num_devices_per_ipu == 1
        return is_one_device and len(set(self.device_mapping)) == 1

    @property
    def built(self) -> Built:
        """The traced pipeline and its programs."""
        if self._built is None:
            raise RuntimeError("The pipeline has not been traced; call trace, init or step first.")
        return self._built

    @property
    def traced(self) -> TracedPipeline:
        """The stages as jaxprs."""
        return self.built.traced

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables by full name."""
        return without_weights(self.traced.variables)

    @property
    def dispatch_plan(self) -> Chunking | None:
        """The number of micro-batches per program, and the reason; None on one device.

        If no plan was given, it is estimated from the programs and the kind of device (CPU until devices
        are known). If chunks may pay, steps on zeros are timed when the pipeline is prepared, except in
        several processes. Each micro-batch is a program if the schedule is not "grouped", with
        recomputation or offloading, with fewer than eight micro-batches, and if their number is only known
        at run time.
        """
        if self.is_one_program:
            return None
        if self.options.dispatch_plan is not None:
            return self.options.dispatch_plan
        if self._chosen_plan is None:
            platform = "cpu" if self._devices is None else self._devices[0].platform
            self._chosen_plan = choose_dispatch_plan(chunked_step(self), platform)
        return self._chosen_plan

    def copied(self, **changes: Any) -> Pipeline:
        """A copy without runner, with some options changed. Nothing is traced again."""
        options = dataclasses.replace(self.options, **changes)
        new: Pipeline = copy.copy(self)
        new._recipe = dataclasses.replace(self._recipe, options=options)
        new.runner, new.measured_costs = None, None
        new._shapes, new._between = MicroBatchShapes(), BetweenSteps()
        new.timetable = dataclasses.replace(self.timetable, searches=None)
        return new

    # Building.

    @apart
    def trace(self, micro_batch: Any, *inputs: Any) -> None:
        """Traces the stages and the optimizer and checks them. Does not start a JAX backend.

        Args:
          micro_batch: a micro-batch, or the same pytree of `jax.ShapeDtypeStruct`s; None for no feed.
          *inputs: the inputs that are constant during a step, or their shapes and dtypes.

        Raises:
          ValueError: the pipeline was traced before, with inputs of other shapes, with micro-batches of
            another structure or other dtypes, or with too many shapes; or these shapes and the first ones
            cannot share one state.
          ValueError: an accumulator's dtype is wrong, or a value cannot be summed.
          ValueError: there is a gradient map, and parallel stages on several devices share a trained
            variable.
          Others: those of `stages.trace`, together with errors of `trained`;
            `optimizer_tracing.trace_optimizer` and `update_programs.cut_updates`.
        """
        element = as_shapes(micro_batch, "The micro-batch")
        input_shapes: tuple[Any, ...] = as_shapes(inputs, "The inputs")
        with self._building:
            if self._built is None:
                surroundings = Surroundings.now(self.options.hooks.program_names)
                # Else JAX writes loops out while it traces.
                with jax.disable_jit(False), tracing():
                    halved: Collection[int] = ()
                    if not self.is_one_program:  # from now on with any number of micro-batches
                        number = self.options.num_micro_batches or 2 * len(self.device_mapping)
                        halved = self.timetable(number).halved
                        self.timetable = dataclasses.replace(self.timetable, halved=halved)
                    built = build(self._recipe, element, input_shapes, self.recompute, halved)
                self._built, self.programs, self._surroundings = built, built.programs, surroundings
                for number, shapes in enumerate(self.options.shapes):
                    check_like(shapes, element, f"shapes[{number}]", may_vary=True)
                    self.for_shapes(shapes)
                return
        traced = self._built.traced
        if traced.inputs != input_shapes:
            raise ValueError(
                f"The pipeline was traced for the inputs {traced.inputs}, and now got {input_shapes}."
            )
        _check_element(self, element, 0)
        self.for_shapes(element)

    def for_shapes(self, micro_batch: Any) -> Pipeline:
        """Returns the pipeline for micro-batches of these shapes, for its facts and summary.

        For the shapes of the first micro-batch it is this pipeline; for others it is a pipeline with its
        own programs and the same variables. Steps are still run by this pipeline.

        Args:
          micro_batch: a micro-batch, or its shapes and dtypes, of the structure of the first one.

        Raises:
          RuntimeError: the pipeline has not been traced.
          ValueError: it has another structure or other dtypes than the first one; there are more than
            `max_shapes` shapes; or something must not depend on the shapes, see `trace`.
        """
        element, built = as_shapes(micro_batch, "The micro-batch"), self.built
        traced, surroundings, pipelines = built.traced, self._surroundings, self._shapes.others
        check_like(element, traced.element, "The micro-batch", may_vary=True)
        key = find_key(element)

        def trace(captures: Captures) -> Pipeline:
            assert surroundings is not None
            hooks = dataclasses.replace(
                self.options.hooks, program_names=surroundings.names.copy(), captures=captures
            )
            new: Pipeline = self.copied(hooks=hooks, shapes=())
            new._built, new.programs = None, ()
            new.trace(element, *traced.given)
            return new

        with self._building:
            if key == find_key(traced.element):
                return self
            if key not in pipelines:
                check_number(
                    [traced.element, *(pipeline.traced.element for pipeline in pipelines.values())],
                    element,
                    self.options.max_shapes,
                )
                assert surroundings is not None
                new = trace_again(traced, element, surroundings, self.options.hooks.captures, trace)
                check_alike(built, new.built, (accumulator_plan(self), accumulator_plan(new)))
                pipelines[key] = new
            pipeline: Pipeline = pipelines[key]
            return pipeline

    def set_recomputation(self, recompute: Recomputation | None) -> None:
        """Sets what stages keep for their backward. A change compiles everything again."""
        if recompute is self.recompute:
            return
        self.recompute, self._chosen_plan = recompute, None
        self.runner, self._shapes = None, MicroBatchShapes()
        self.timetable = dataclasses.replace(self.timetable, searches=None)
        if self._built is not None:
            self.programs = self._built.make_programs(recompute)

    def set_replicas(self, num_replicas: int, identical_keys: bool = False) -> None:
        """Sets the number of replicas. A change compiles everything again.

        Args:
          num_replicas: see `PipelineOptions`.
          identical_keys: whether all replicas draw the same random numbers as a single one would.

        Raises:
          ValueError: the number is not usable.
        """
        self._has_identical_keys = identical_keys
        if isinstance(self.runner, PlanRunner):
            for runner in self.runner.of_shapes:
                runner.has_identical_keys = identical_keys
                runner.make_single().has_identical_keys = identical_keys
        if num_replicas == self._num_replicas:
            return
        self.options.check_replicas(num_replicas)
        self._num_replicas, self._chosen_plan = num_replicas, None
        self.runner, self._shapes = None, MicroBatchShapes()
        self.timetable = dataclasses.replace(self.timetable, searches=None)
        self._compiler_options = _plan_compiler_options(self)

    def prepare(self, devices: Sequence[Any] | None = None) -> Runner[Any]:
        """Returns the runner of the pipeline, made at the first call, which starts JAX's backend.

        Args:
          devices: the JAX devices to use, see `PipelineOptions`; by default those of the previous call, or
            of the options. For other devices than before, everything is compiled again.

        Raises:
          ValueError: there are too few devices, or XLA refuses a compiler option.
        """
        runner = self.runner
        if runner is not None and (devices is None or _has_devices(self, self._devices, devices)):
            return runner
        begin_first_run()
        with self._building:
            if self.runner is None or not (devices is None or _has_devices(self, self._devices, devices)):
                runner = self._make_runner(devices)
                for shapes in self.options.shapes:  # unless that has been done
                    self.for_shapes(shapes)
                self._shapes.set_runner(
                    self.traced.element, runner, self._make_other_runner, self._building
                )
                self.runner = runner
            return self.runner

    @apart
    def _make_runner(self, devices: Sequence[Any] | None) -> Runner[Any]:
        # The devices, checked before anything is dropped.
        if devices is None:
            devices = jax.devices() if self._devices is None else self._devices
            if self._shard and self._num_replicas == 1:  # who gives devices may give replicas, and warns
                warnings.warn("shard has no effect: there is one replica, which has all.", stacklevel=4)
        number, per_ipu = self._num_replicas, self.options.num_devices_per_ipu
        num_needed = self.num_devices * number
        if len(devices) < num_needed:
            of_replicas = f" of {number} replicas" if number > 1 else ""
            raise ValueError(
                f"The pipeline needs {num_needed} devices, {per_ipu if per_ipu > 1 else 'one'} per number "
                f"in device_mapping{of_replicas}, but there are {len(devices)}. On a CPU, before the first "
                f"use of JAX, ipu_pipeline.set_num_devices({num_needed}) makes more."
            )
        groups, schedule = make_groups(devices, self.device_mapping, number, per_ipu), self.options.schedule
        check_processes(groups)
        if self.options.check_nans and groups[0].processes[1:]:
            raise ValueError(
                "check_nans needs all devices in one process; those given are of the processes "
                f"{list(groups[0].processes)}."
            )
        if isinstance(schedule, schedules.SearchedSchedule):
            check_one_process(groups)
        if self.options.execution_phases is not None and groups[0].processes[1:]:
            raise ValueError(
                "execution_phases need all devices in one process; those given are of the processes "
                f"{list(groups[0].processes)}."
            )
        check_compiles(self._compiler_options, groups)
        # Whatever depended on the former devices.
        if self._devices is None or [d.platform for d in self._devices] != [d.platform for d in devices]:
            self._chosen_plan = None
        self.runner, self._devices = None, list(devices)
        self._between = BetweenSteps()
        self.timetable = dataclasses.replace(self.timetable, searches=None)
        self._agree(devices[:num_needed])
        # The runner, and for a searched schedule its timetables.
        placement = self._place_state(groups)
        if self.is_one_program:
            if isinstance(schedule, schedules.SearchedSchedule):
                warnings.warn(
                    "A searched schedule has no effect: all stages are on one device.", stacklevel=3
                )
            return self._make_block_runner(placement)
        runner = self._make_column_runner(devices, placement)
        if isinstance(schedule, schedules.SearchedSchedule) and self.built.updates is not None:
            searched = SearchedTimetables(
                measure_scenario(
                    runner,
                    functools.partial(make_state, runner, jax.random.key(0)),
                    self.built,
                    schedule,
                    functools.partial(plan_in_flight, self, runner.chunk_size, runner.chunk_size),
                )
            )
            number = self.options.num_micro_batches or runner.chunk_size
            searched(number // runner.chunk_size)  # it may raise
            runner.follow(searched)
            self.timetable = dataclasses.replace(self.timetable, searches=searched)
        return runner

    def _make_other_runner(self, lead: Runner[Any], element: Any, number: int) -> Runner[Any]:
        """Makes the runner for other shapes of micro-batches, which the runner for the first ones leads."""
        if lead.placement.has_peers:
            raise ValueError(
                f"A micro-batch has the shapes {describe_shapes(element)}, in place of "
                f"{describe_shapes(self.traced.element)}. In several processes all micro-batches must have "
                "the same shapes, as not all processes read them: pad them."
            )
        pipeline: Pipeline = self.for_shapes(element)
        placement = pipeline._place_state(lead.placement.groups)
        if isinstance(lead, BlockRunner):
            return pipeline._make_block_runner(placement, lead, number)
        assert isinstance(lead, PlanRunner)
        assert self._devices is not None
        pipeline._devices, pipeline._chosen_plan = self._devices, self.dispatch_plan
        runner = pipeline._make_column_runner(self._devices, placement, lead, number)
        lead.check_other(runner)
        if self.timetable.searches is not None:
            runner.follow(self.timetable.searches)
        return runner

    def _make_block_runner(
        self, placement: StatePlacement, lead: BlockRunner | None = None, number: int = 0
    ) -> BlockRunner:
        """Makes the runner for one device."""
        runner = BlockRunner(
            placement,
            self.programs,
            self.built.collecting,
            self.built.accumulator_dtypes,
            donate=self.options.donate,
            block_bytes=self.options.block_bytes,
            num_serialized=self.options.num_serialized,
            has_fixed_room=self.options.num_micro_batches is None,
            iterated=self.iterated,
            options=self._compiler_options.whole,
            lead=lead,
            shapes=number,
        )
        runner.kept = self._program_cache
        runner.note = "" if lead is None else _describe_number(self, number)
        make = _runner_maker(
            self, placement, [placement], number, self._compiler_options, self._has_identical_keys
        )

        @functools.cache
        def make_single() -> PlanRunner:
            first = None if lead is None else lead.make_single()
            return make(lead=first, other=first)

        runner.make_single = make_single
        return runner

    def _make_column_runner(
        self,
        devices: Sequence[Any],
        placement: StatePlacement,
        lead: PlanRunner | None = None,
        number_of_shapes: int = 0,
    ) -> PlanRunner:
        """Makes the runner for several devices, once the dispatch plan is known."""
        size, number, per_ipu = self.num_devices, self._num_replicas, self.options.num_devices_per_ipu
        homes = [placement]
        if number > 1:
            starts = range(0, size * number, size)
            new_groups = [make_groups(devices[start:], self.device_mapping, 1, per_ipu) for start in starts]
            # Groups tell where values are, so all runners of a pipeline have the same ones.
            groups = new_groups if lead is None else [home.groups for home in lead.homes]
            homes = list(map(self._place_state, groups))

        make_runner = _runner_maker(
            self, placement, homes, number_of_shapes, self._compiler_options, self._has_identical_keys
        )
        first: list[PlanRunner] = []

        @functools.cache
        def make(chunk_size: int) -> PlanRunner:
            other_runner = first[0] if first else lead
            runner = make_runner(dispatch_plan=Chunking(chunk_size), lead=lead, other=other_runner)
            first.append(runner)
            runner.kept = self._program_cache
            runner.note = "" if lead is None else _describe_number(self, number_of_shapes)
            if number > 1 and not self.options.hooks.gathers_outputs:
                runner.keep_outputs()
            return runner

        may_measure = not (self.iterated is not None or placement.has_peers or why_not_timed(self.programs))
        if lead is None and self.options.dispatch_plan is None and may_measure:
            self._chosen_plan = choose_by_steps(
                chunked_step(self),
                make,
                devices[0],
                self.built,
                (self.options.num_micro_batches or 0) * self._num_replicas,
                functools.partial(_describe_for_choice, self),
            )
        plan = self.dispatch_plan
        assert plan is not None

        runner = make(plan.chunk_size)
        if lead is None:
            runner.forget_trials()
        if plan.chunk_size > 1:
            leading = runner if lead is None else lead
            runner.make_single = functools.cache(
                lambda: make_runner(dispatch_plan=ONE_BY_ONE, lead=leading, other=leading).like(runner)
            )
        return runner

    def _agree(self, devices: Sequence[Any]) -> None:
        """Checks that all processes of the run have the same pipeline."""
        plan = None if self.is_one_program else self.dispatch_plan
        timetable = self.timetable(self.options.num_micro_batches or 1)
        about = self.built, self.options, self.device_mapping, timetable, plan
        agree_on("pipeline", lambda: building.describe(*about), devices)

    def _place_state(self, groups: Sequence[DeviceGroup]) -> StatePlacement:
        return StatePlacement(
            self.traced,
            self.built.updates,
            groups,
            accumulator_plan(self),
            self._offload,
            self._shard,
            self.built.partitions,
        )

    @apart
    @peers.one_thread("the initial state of a pipeline")
    def init(self, key: Any, micro_batch: Any, *inputs: Any) -> PipelineState:
        """Makes the initial state of training.

        Args:
          key: a scalar random key, from `jax.random.key`.
          micro_batch: an example, or its shapes and dtypes.
          *inputs: the inputs that are constant during a step, or their shapes and dtypes.

        Returns:
          The state, its leaves on the devices of their stages.

        Raises:
          TypeError: it is called within `jax.jit` or another transformation.
          ValueError: the key is not from `jax.random.key`; or see `trace` and `prepare`.
        """
        check_not_traced("Pipeline.init", key)
        if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
            raise ValueError(
                f"init: key must be a random key from jax.random.key; got {type(key).__name__}. "
                "jax.random.wrap_key_data makes one of a raw key."
            )
        self.trace(micro_batch, *inputs)
        state = make_state(self.prepare(), key)
        return dataclasses.replace(state, variables=without_weights(state.variables))

    @apart
    def init_optimizer_state(
        self, variables: Mapping[str, Any], outputs: Sequence[Any] | None = None
    ) -> Any:
        """Makes the initial state of the optimizer.

        Args:
          variables: the variables, by full name.
          outputs: the leaves of the last stage's result for the first micro-batch.

        Returns:
          The state; None without training, or if it depends on outputs that are not given.
        """
        return make_optimizer_state(self.prepare(), variables, outputs)

    @apart
    def parameters(self, state: PipelineState) -> Any:
        """Returns the parameters as pytrees: one per stage in a list, or the pytree of a split model.

        Args:
          state: from `init` or a step; its arrays are not copied.

        Returns:
          The pytrees that the pipeline was given as `parameters`, with the state's values; a `Shared` is
          replaced by its value. None for stages without a pytree of parameters. For the stages of a split,
          the pytree that the split was given: stacked parameters of layers are stacked again, on the first
          layer's device.

        Raises:
          TypeError: the argument is not a state.
          ValueError: the state lacks some of them, a step with `donate` has destroyed it, or the
            pipeline has other stages besides those of a split.
        """
        check_state("Pipeline.parameters", state, may_be_traced=True)
        return self._parameters.read(state.variables)

    @apart
    def with_parameters(self, state: PipelineState, parameters: Any) -> PipelineState:
        """Replaces the values of parameters in a state. The rest stays, including the optimizer's state.

        Args:
          state: from `init` or a step.
          parameters: as returned by `parameters`; JAX or NumPy arrays, on any device. They are not copied,
            so with `donate` a step destroys them.

        Raises:
          TypeError: the argument is not a state.
          ValueError: number, structure, shape or dtype differs, a shared parameter has two values, or a
            step with `donate` has destroyed the state or the parameters.
        """
        check_state("Pipeline.with_parameters", state, may_be_traced=True)
        check_exists("Pipeline.with_parameters: parameters", parameters)
        variables = {**state.variables, **self._parameters.write(parameters)}
        return dataclasses.replace(state, variables=variables)

    @peers.one_thread("taking the state of another pipeline")
    @apart
    def adopt(self, state: PipelineState) -> tuple[PipelineState, Adoption]:
        """Makes a state for this pipeline from another pipeline's state, which may have other variables.

        Variables of the same name keep their values; others get initial values, from the state's key.
        Counts and key continue. The optimizer's state is kept if all parts that belong to known variables
        are present, as with the same optimizer. Otherwise, or if all of its variables are new, it starts
        again. (Counts for all variables together, such as Adam's number of updates, continue for new
        variables, too. `init_optimizer_state` makes a wholly new state.)

        If the stages differ and variables are named after them (`stage1/w`), use `engine.resplit`, which
        needs all variables.

        Args:
          state: of any pipeline, on any devices, with any replicas. Arrays that are already in place are
            not copied: with `donate` a step destroys them in the old state, too.

        Returns:
          The state for this pipeline, and an `Adoption`: the names kept, new and left out.

        Raises:
          RuntimeError: the pipeline has not been traced.
          TypeError: the argument is not a state, or this is called within `jax.jit` or another
            transformation.
          ValueError: a variable has another shape or dtype, no variable is common to both, a new variable
            was given as a shape, or a step with `donate` has destroyed the state.
        """
        check_state("Pipeline.adopt", state)
        adoption = compare(state.variables, self.variables)
        runner = self.prepare()
        placement = runner.placement
        old_variables = {name: state.variables[name] for name in adoption.taken}
        variables = {
            **placement.place_variables(old_variables),
            **make_variables(placement, adoption.new, state.key),
        }
        optimizer_state = None
        if self.built.updates is not None:
            optimizer_state, is_taken = adopt_optimizer_state(
                state.optimizer_state,
                self.built.updates,
                adoption.new,
                lambda: make_optimizer_state(runner, variables),
            )
            adoption = dataclasses.replace(adoption, takes_optimizer_state=is_taken)
        new = dataclasses.replace(state, variables=variables, optimizer_state=optimizer_state)
        placed = self.place(new)
        return dataclasses.replace(placed, variables=without_weights(placed.variables)), adoption

    # Running.

    @peers.one_thread("a step of a pipeline")
    @apart
    def step(
        self,
        state: PipelineState,
        micro_batches: Iterable[Any] | PlacedMicroBatches,
        *inputs: Any,
        num_micro_batches: int | None = None,
    ) -> tuple[PipelineState, StepOutputs]:
        """Runs all micro-batches and, in training, one weight update.

        Args:
          state: from `init` or the step before; with `donate` it must not be used afterwards.
          micro_batches: an iterable of pytrees of arrays, one for each micro-batch of the step in all
            replicas. An iterator is only consumed as far as the step needs; a list or tuple must have no
            more. Or the result of `place_micro_batches`. With several processes, only those with a stage
            that reads micro-batches take any. If an iterator raises an error there, the step's remaining
            micro-batches are taken all the same, so that the next step starts at the same place in all
            processes.
          *inputs: pytrees of arrays that are constant during the step.
          num_micro_batches: the number of micro-batches, if the pipeline was given None.

        Returns:
          The new state and the outputs, still being computed, on the pipeline's devices. A mesh of
          `jax.set_mesh` around the call has no effect; use the results outside of that mesh, or copy them
          (`np.asarray`, `engine.gathered`).

        Raises:
          OutOfRangeError: there are too few micro-batches, here or in another process.
          ProcessError: the micro-batches of another process raised an error, or that process has ended.
          TypeError: it is called within `jax.jit` or another transformation, or `state` is not a state.
          ValueError: a micro-batch or an input has another dtype or structure than the first; an input has
            another shape, or micro-batches have more than `max_shapes` shapes; the state has been destroyed
            by a step with `donate`; `num_micro_batches` is given twice, or not at all; or there are
            more micro-batches in a list than a step takes.
        """
        check_not_traced("Pipeline.step", inputs)
        count = self.updated_every(num_micro_batches) * self._num_replicas
        check_state("Pipeline.step", state, is_known=self._between.is_placed(state))
        leaves = None
        if isinstance(micro_batches, PlacedMicroBatches):
            take, leaves = micro_batches.taker(self.prepare(), count), micro_batches.leaves
            if leaves is None and (_looks_for_nans(self.options) or _is_op_by_op()):
                raise ValueError(
                    "micro_batches: they were placed before jax_debug_nans or jax_disable_jit was set. "
                    "Call place_micro_batches again."
                )
        else:

            def has_peers() -> bool:
                return self._built is not None and self.prepare().placement.has_peers

            feed = StepFeed(micro_batches, count, has_peers)
            if self._built is None:
                self.trace(feed.peek(), *inputs)
            has_feed, place = bool(jax.tree.leaves(self.traced.element)), self.place_element
            take = take_nothing
            if has_feed:
                take = feed.placing(lambda element, number: place(_check_element(self, element, number)))
        _check_targets(self.built)
        state = self.place(state)
        input_leaves = check_like(tuple(inputs), self.traced.inputs, "The inputs")
        supply = Supply(take, self._shapes.resolve)
        step = StepOnItsWay(self.prepare().describe_start, self.traced, supply)
        watch_step(step)
        try:
            progress = self._progress(state, supply, inputs, input_leaves, num_micro_batches, leaves)
        except BaseException:
            step.failed()
            raise
        collects = self.options.collect_outputs
        unflatten = list if callable(collects) else self.traced.output_tree.unflatten if collects else None
        reported = self.built.metrics.select(progress)
        outputs = StepOutputs(progress.collected, unflatten, lambda: reported.read(1))
        new_state = self._between.hide_weights(progress.state)
        step.started(new_state, outputs)
        return new_state, outputs

    @apart
    def place_micro_batches(self, micro_batches: Sequence[Any]) -> PlacedMicroBatches:
        """Puts a step's micro-batches on the devices that read them, for one or more calls of `step`.

        Args:
          micro_batches: pytrees of arrays, all micro-batches of a step. Their memory is not shared.

        Raises:
          RuntimeError: the pipeline has not been traced.
          ValueError: a micro-batch has another dtype or structure than the pipeline was traced for; there
            are more than `max_shapes` shapes; or a program handles several micro-batches, and they do not
            fill whole groups.
        """
        check_not_traced("Pipeline.place_micro_batches", micro_batches)
        runner, place = self.prepare(), self.place_element
        leaves = [_check_element(self, element, number) for number, element in enumerate(micro_batches)]
        elements: list[Any] = [self._shapes.resolve(place(element_leaves)) for element_leaves in leaves]
        keeps = _looks_for_nans(self.options) or _is_op_by_op()
        copies = list(map(copy_leaves, leaves)) if keeps else None
        return PlacedMicroBatches(runner, len(elements), runner.place_ahead(elements), copies)

    def _progress(
        self,
        state: PipelineState,
        supply: Supply,
        inputs: Sequence[Any],
        input_leaves: Sequence[Any],
        num_micro_batches: int | None,
        leaves: Sequence[Sequence[Any]] | None,
    ) -> Progress:
        """Runs a step, or computes it op by op where that is asked for, and looks for nans."""
        has_nan_checks, is_op_by_op = _looks_for_nans(self.options), _is_op_by_op()
        runner = self.prepare()
        may_raise = has_nan_checks or hands_out_checks(self.traced.enqueued)

        def run(state: PipelineState) -> Progress:
            results: list[Progress] = []
            self.run(
                state,
                supply,
                input_leaves,
                lambda progress, _count: results.append(progress),
                num_micro_batches=num_micro_batches,
            )
            return results[0]

        if not (may_raise or is_op_by_op) or runner.placement.has_peers:
            return run(state)
        count = self.updated_every(num_micro_batches)

        def replay(elements: Sequence[Any], visit: Callable[[Visit], None] | None = None) -> Progress:
            """Computes the step op by op."""
            if leaves is not None:
                elements = [self.place_element(element_leaves) for element_leaves in leaves]
            single: PlanRunner = runner.make_single()
            accumulators = single.make_accumulators(self.built.accumulator_dtypes)
            return op_by_op.compute(
                runner,
                dataclasses.replace(state, accumulators=accumulators),
                Request(input_leaves, count, limit=count, total=count),
                list(map(self._shapes.resolve, elements)),
                OpByOp(single.maker.layout, self.built.collecting.sources, has_nan_checks),
                visit,
            )

        with jax.debug_nans(False), jax.disable_jit(False):
            # jax_disable_jit: op by op, with no compiled step.
            if is_op_by_op:
                if self.uses_replicas:
                    raise RuntimeError(
                        "jax.disable_jit: stages compute with other replicas, which only run together. "
                        "Leave it out, or debug with num_replicas=1."
                    )
                number = count * self._num_replicas
                micro_batches = gather(supply, number, number) if leaves is None else []
                assert self._surroundings is not None
                call = StageCaller(
                    self._recipe.functions,
                    self.options.loss,
                    self._surroundings,
                    jax.tree.structure(self.traced.element),
                    inputs,
                    int(state.update_count),
                    runner.homes[0].groups[0],
                )
                progress = replay(micro_batches, call)
                self._between = BetweenSteps()
                error = find_failed(self.traced.enqueued, progress.enqueued, self._num_replicas)
                if error is not None:
                    raise error
                return dataclasses.replace(
                    progress, state=dataclasses.replace(progress.state, accumulators={})
                )
            # check_nans: compiled, and op by op only if there is a nan.
            micro_batches = supply.taken = []
            input_state = copy_state(state) if self.options.donate else state
            progress = run(input_state)
            supply.taken = None  # `StepOnItsWay` holds the supply, which is not to hold the micro-batches
            place = find_nans(progress) if has_nan_checks else ""
            if not place:
                return progress
            self._between = BetweenSteps()
            why = "stages compute with other replicas, so the operation is not looked for"
            if not self.uses_replicas:
                replay(micro_batches)
                why = "computed op by op it has none, so this is due to how XLA joins operations"
            raise FloatingPointError(f"invalid value (nan) in {place} of the step: {why}.")

    @property
    def uses_replicas(self) -> bool:
        """Whether a stage or its derivative computes with other replicas, or asks which one it is in."""
        programs = [program for each in self.programs for program in (each.forward, *each.backwards)]
        return self.traced.uses_replicas or any(uses_replicas(each.equations) for each in programs)

    @property
    def place_element(self) -> Callable[[Sequence[Any]], Element]:
        """A function that puts a micro-batch's leaves on the devices that read them, for `accumulate`.

        It changes with the devices. It may be called from another thread.
        """
        runner = self.prepare()
        if self.iterated is not None or self.options.max_shapes == 1:
            return runner.place_element
        assert self._shapes.runners is not None
        return self._shapes.runners.place_element

    def updated_every(self, num_micro_batches: int | None) -> int:
        """The number of a step's micro-batches in each replica; those of a group count one by one."""
        fixed_number = self.options.num_micro_batches
        if (fixed_number is None) == (num_micro_batches is None):
            raise ValueError(
                "num_micro_batches must be given once, to the pipeline or, if that got None, to each step; "
                f"the pipeline got {fixed_number}, the step {num_micro_batches}."
            )
        count = num_micro_batches if fixed_number is None else fixed_number
        assert count is not None
        check_positive("num_micro_batches", count)
        return int(count) * self.options.num_serialized

    @apart
    def compile(self, state: PipelineState, num_updates: int = 1) -> None:
        """Compiles the programs of a step before the first one. Runs nothing, and keeps the state as it is.

        Args:
          state: from `init` or a step.
          num_updates: the number of steps that may be done together, see `accumulate`.

        Raises:
          ValueError: a variable is missing. Or each step is given its number of micro-batches, or the
            optimizer's state depends on the last stage's outputs: then the first step compiles.
        """
        check_state("Pipeline.compile", state)
        count = self.updated_every(None)
        if self.built.updates is not None and state.optimizer_state is None:
            raise ValueError(
                "compile() is not available here: the optimizer state is made from the first step's "
                "outputs, so that step compiles."
            )
        runner = self.prepare()
        state = self.place(state)
        accumulators = self._between.accumulators
        if accumulators is None:
            accumulators = runner.make_accumulators(self.built.accumulator_dtypes)
        inputs = [np.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self.traced.inputs)]
        total = num_updates * count
        request = Request(inputs, count, limit=total, total=total)
        state = dataclasses.replace(state, accumulators=accumulators)
        runner.compile(state, request)
        self._shapes.compile(state, request)

    @apart
    def run(
        self,
        state: PipelineState,
        take: Take | None,
        input_leaves: Sequence[Any],
        on_update: Callable[[Progress, int], Any],
        num_updates: int = 1,
        num_total: int | None = None,
        *,
        num_micro_batches: int | None = None,
        one_by_one: bool = False,
        replacing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        should_stop: Callable[[], bool] | None = None,
    ) -> PipelineState:
        """Runs weight updates, or executions without training, one after another or several together.

        After an error before an update has begun, the state is the one last passed to `on_update`.

        Args:
          state: placed, see `place`.
          take: takes a number, and returns that many micro-batches or fewer, at least one, as returned by
            `place_element`. Or a `Supply` of them. None: there is no feed.
          input_leaves: the leaves of the inputs.
          on_update: called after some updates, with the progress and the number of these updates.
          num_updates: the number of updates to do.
          num_total: the number of updates of the whole run; None: `num_updates`.
          num_micro_batches: as for `step`.
          one_by_one: whether `on_update` is called for each update before the next one begins.
          replacing: returns a context for the time when the old state may be gone (its memory is given to
            the new one) and `on_update` does not have the new one yet.
          should_stop: called after each call of `on_update`; True ends the run.

        Returns:
          The state after the last update, still being computed.
        """
        count, total = 0, num_updates if num_total is None else num_total
        supply = take if isinstance(take, Supply) else Supply(take or take_nothing, self._shapes.resolve)
        while count < num_updates:
            limits = (1, 1) if one_by_one else (num_updates - count, total)
            pending = self.accumulate(state, supply, input_leaves, *limits, num_micro_batches)
            with replacing():
                before = int(state.execution_count)
                progress = self.update(state, pending)
                state = progress.state
                num_done = int(state.execution_count) - before
                count += num_done
                if hands_out_checks(self.traced.enqueued):  # else nothing is waited for
                    error = find_failed(self.traced.enqueued, progress.enqueued, self._num_replicas)
                    if error is not None:
                        self._between = BetweenSteps()
                        raise error
                on_update(dataclasses.replace(progress, num_ahead=supply.num_left), num_done)
            if should_stop is not None and should_stop():
                break
        return state

    @apart
    def accumulate(
        self,
        state: PipelineState,
        take: Take,
        input_leaves: Sequence[Any],
        num_updates: int = 1,
        num_total: int = 1,
        num_micro_batches: int | None = None,
    ) -> Pending:
        """Does the first part of `step`: everything that does not change the state.

        Args:
          state: placed, see `place`.
          take: takes a number, and returns that many micro-batches or fewer, at least one, as returned by
            `place_element`. Or a `Supply` of them, which keeps the remaining ones for the next update.
          input_leaves: the leaves of the inputs.
          num_updates: the number of weight updates that may be done together.
          num_total: the number of updates of the run, which the sizes of blocks depend on.
          num_micro_batches: as for `step`.

        Returns:
          The argument of `update`.
        """
        count = self.updated_every(num_micro_batches)
        runner = self.prepare()
        accumulators = self._between.take_accumulators(runner, self.built.accumulator_dtypes)
        state = dataclasses.replace(state, accumulators=accumulators)
        request = Request(input_leaves, count, limit=num_updates * count, total=num_total * count)
        if self.options.shapes and not runner.has_run:
            self._shapes.compile(state, request)
        if (watcher := watching.current()) is not None:
            watcher.introduce(runner, self)
            rehearse(watcher, runner, state, request)
        with naming_peers():
            pending: Pending = runner.fetch(state, request, take)
        return pending

    @apart
    def update(self, state: PipelineState, pending: Pending) -> Progress:
        """Does the second part of `step`. With `donate` it destroys the old state.

        Args:
          state: as for `accumulate`.
          pending: the result of `accumulate`.

        Returns:
          The new state, and the results to read.
        """
        _check_optimizer_state(self.built.updates, state)
        # The accumulators are part of what is pending.
        with naming_peers():
            progress: Progress = self.prepare().run(state, pending)
        return dataclasses.replace(progress, state=self._between.keep(progress.state))

    @apart
    def place(self, state: PipelineState) -> PipelineState:
        """Puts the leaves of a state on the devices of their stages.

        Raises:
          ValueError: a variable is missing, is no array, or has another shape or dtype; or elements of it
            are masked.
        """
        if (placed := self._between.find_placed(state)) is not None:
            return placed
        state = as_plain_state(state)
        for name, spec in self.variables.items():
            value = state.variables.get(name)
            if value is None:
                raise ValueError(f"The state has no variable {name}; the pipeline needs {spec}. {MOVES}")
            if value.shape != spec.shape or value.dtype != spec.dtype:
                raise ValueError(
                    f"Variable {name} must be {spec.dtype.name}{list(spec.shape)}; the state has "
                    f"{value.dtype.name}{list(value.shape)}."
                )
        _check_optimizer_state(self.built.updates, state)
        weights = {
            name: np.zeros(spec.shape, spec.dtype)
            for name, spec in self.traced.variables.items()
            if is_loss_weight(name)
        }
        if not weights.keys() <= state.variables.keys():
            state = dataclasses.replace(state, variables={**state.variables, **weights})
        state = self.prepare().place_state(state)
        return without_aliases(state) if self.options.donate else state

    def take_accumulators(self, other: Pipeline) -> None:
        """Takes over another pipeline's accumulators, which are zeros between two steps.

        Pipelines that use the same state in turn, each for its shape of micro-batches, then share one set.
        If the accumulators do not fit, both pipelines make new ones in their next steps.

        Args:
          other: traced, and with the same options.
        """
        accumulators, other._between.accumulators = other._between.accumulators, None
        own_places = _find_accumulators(self), self._devices, self._num_replicas, self._offload
        other_places = _find_accumulators(other), other._devices, other._num_replicas, other._offload
        if accumulators is not None and own_places == other_places:
            self._between.accumulators = accumulators


def plan_in_flight(pipeline: Pipeline, count: int, chunk_size: int) -> tuple[StageMemory, ...]:
    """Plans what stages hold, from a step's micro-batches and those of a program."""
    if pipeline.is_one_program:  # it ends a micro-batch before the next one starts
        number = pipeline.options.num_serialized
        fullest: Sequence[Moments] = [((number, 0),)] * len(pipeline.device_mapping)
    else:
        fullest = [
            tuple((chunk_size * before, chunk_size * between) for before, between in moments)
            for moments in find_moments(pipeline.programs, pipeline.timetable(count // chunk_size))
        ]
    residual_bytes = {} if pipeline.runner is None else pipeline.runner.residual_bytes
    return plan_stages(pipeline.traced, pipeline.programs, pipeline.device_mapping, fullest, residual_bytes)


def chunked_step(pipeline: Pipeline) -> ChunkedStep:
    """Describes the step that a dispatch plan is chosen for."""
    options = pipeline.options
    count = options.num_micro_batches
    return ChunkedStep(
        pipeline.programs,
        pipeline.traced.levels,
        pipeline.timetable,
        count,
        lambda chunk_size: max(m.num_live_bytes for m in plan_in_flight(pipeline, count or 1, chunk_size)),
        options.max_chunked_bytes,
        is_grouped=options.schedule == "grouped",
        saves_memory=pipeline.recompute is not None or bool(options.offload),
        num_replicas=pipeline.num_replicas,
    )


def accumulator_plan(pipeline: Pipeline) -> AccumulatorPlan:
    """Plans which program accumulates where."""
    reduction = Reduction(pipeline.options.reduction)
    return plan_accumulators(pipeline.traced, pipeline.programs, pipeline.device_mapping, reduction)


def _describe_for_choice(pipeline: Pipeline) -> Mapping[str, str]:
    """Describes everything that the choice of a dispatch plan depends on."""
    options, mapping = pipeline.options, pipeline.device_mapping
    timetable = pipeline.timetable(options.num_micro_batches or 1)
    texts = building.describe(pipeline.built, options, mapping, timetable, None)
    programs = [program for stage in pipeline.programs for program in (stage.forward, *stage.backwards)]
    texts |= {program.name: identify_operations(program.equations) for program in programs}
    updates = () if pipeline.built.updates is None else pipeline.built.updates.updates
    return texts | {program.name: str(program.num_operations) for program in updates}


def _describe_number(pipeline: Pipeline, number: int) -> str:
    return describe_number(pipeline.traced.element, number, pipeline.options.max_shapes)


def _find_accumulators(pipeline: Pipeline) -> Any:
    """A value that identifies the accumulators and their places."""
    ipus, owners = pipeline.device_mapping, pipeline.traced.owners
    dtypes = pipeline.built.accumulator_dtypes
    homes = {name: ipus[owners[name]] for name in dtypes}
    extra = accumulator_plan(pipeline).extra
    return dtypes, homes | {key: ipus[accumulator.stage] for key, accumulator in extra.items()}


def _plan_compiler_options(pipeline: Pipeline) -> CompilerOptions:
    options = pipeline.options
    return plan_options(
        len(pipeline.device_mapping),
        pipeline.is_one_program,
        options.optimizer is not None,
        options.forward_options,
        options.backward_options,
        options.update_options,
        options.hooks.option_names,
    )


def _has_devices(pipeline: Pipeline, known_devices: Sequence[Any] | None, devices: Sequence[Any]) -> bool:
    """Whether the pipeline would have the same devices of `devices` as of `known_devices`."""
    assert known_devices is not None
    size, per_ipu = max(pipeline.device_mapping) + 1, pipeline.options.num_devices_per_ipu
    numbers = [
        (ipu + size * replica) * per_ipu + part
        for ipu in pipeline.device_mapping
        for replica in range(pipeline.num_replicas)
        for part in range(per_ipu)
    ]
    return all(number < len(devices) and devices[number] == known_devices[number] for number in numbers)


def _check_element(pipeline: Pipeline, element: Any, number: int) -> list[Any]:
    """Checks a micro-batch against the first one. Returns its leaves."""
    may_vary = pipeline.options.max_shapes > 1
    return check_like(element, pipeline.traced.element, f"Micro-batch {number}", may_vary=may_vary)


def _check_optimizer_state(updates: Updates | None, state: PipelineState) -> None:
    if updates is None or state.optimizer_state is None:
        return
    tree = jax.tree.structure(state.optimizer_state)
    if tree != updates.state_tree:
        state_text, expected_text = describe_structures(tree, updates.state_tree)
        raise ValueError(
            "The state's optimizer_state is of another optimizer or of other variables: it is "
            f"{state_text}, and the pipeline's optimizer makes {expected_text}."
        )


def _looks_for_nans(options: PipelineOptions) -> bool:
    config: Any = jax.config
    return bool(options.check_nans or config.jax_debug_nans)


def _is_op_by_op() -> bool:
    config: Any = jax.config
    return bool(config.jax_disable_jit)


def _runner_maker(
    pipeline: Pipeline,
    placement: StatePlacement,
    homes: Sequence[StatePlacement],
    number_of_shapes: int,
    options: CompilerOptions,
    has_identical_keys: bool,
) -> Callable[..., PlanRunner]:
    """A function that makes a runner by plans. It does not hold the pipeline, see `timetable`."""
    return functools.partial(
        PlanRunner,
        placement,
        homes,
        pipeline.programs,
        pipeline.timetable.by_schedule,
        pipeline.options.donate,
        pipeline.built.collecting,
        options,
        pipeline.built.accumulator_dtypes,
        iterated=pipeline.iterated,
        phases=pipeline.options.execution_phases,
        shapes=number_of_shapes,
        joins_assigned=pipeline.options.joins_assigned,
        has_identical_keys=has_identical_keys,
    )


def _check_targets(built: Built) -> None:
    """Raises if something is enqueued for another target than those that a step serves."""
    entries = (*built.traced.enqueued, *(() if built.updates is None else built.updates.enqueued))
    for entry in entries:
        if not isinstance(entry.target, Metric | UserChecks):
            raise ValueError(
                f"Pipeline.step: something is enqueued to {entry.target!r}, which is for sessions. Return "
                "the value from the last stage, or report it with engine.metric."
            )
