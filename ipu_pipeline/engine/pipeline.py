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
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import fingerprints, peers, schedules, watching
from ipu_pipeline.engine.adopting import Adoption, adopt_optimizer_state, compare
from ipu_pipeline.engine.apart import apart
from ipu_pipeline.engine.building import Built, Recipe, build
from ipu_pipeline.engine.calling import StageCaller
from ipu_pipeline.engine.devices.compiler_options import CompilerOptions, check_compiles, plan_options
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, check_processes, make_groups
from ipu_pipeline.engine.devices.feeds import (
    NEW_SHAPES,
    Element,
    PlacedMicroBatches,
    Supply,
    Take,
    copy_leaves,
    gather,
    shapes_of,
    take_nothing,
)
from ipu_pipeline.engine.devices.links import naming_peers
from ipu_pipeline.engine.devices.offloading import parse_offload
from ipu_pipeline.engine.devices.sharding import parse_shard
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution import kept
from ipu_pipeline.engine.execution.comparing import identify_operations
from ipu_pipeline.engine.execution.contract import Iterated, Pending, Request, Runner
from ipu_pipeline.engine.execution.measured_costs import why_not_timed
from ipu_pipeline.engine.execution.runner import ColumnRunner
from ipu_pipeline.engine.execution.single_device.runner import BlockRunner
from ipu_pipeline.engine.execution.watched import copy_state, rehearse
from ipu_pipeline.engine.hanging import StepOnItsWay, watch
from ipu_pipeline.engine.micro_batch_shapes import (
    MicroBatchShapes,
    ShapesKey,
    check_alike,
    check_number,
    describe_shapes,
    find_key,
)
from ipu_pipeline.engine.option_checks import find_unused
from ipu_pipeline.engine.pipeline_options import PipelineOptions, check_positive, make_options
from ipu_pipeline.engine.planning.choosing import (
    ChunkedStep,
    choose_dispatch_plan,
)
from ipu_pipeline.engine.planning.chunking import ONE_BY_ONE, Chunking, check_dispatch_plan
from ipu_pipeline.engine.planning.memory import find_moments, plan_stages
from ipu_pipeline.engine.planning.memory_plans import Moments, StageMemory
from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.collecting import Collecting
from ipu_pipeline.engine.programs.recomputation import Recomputation
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.progress import initializing, tracing
from ipu_pipeline.engine.rehearsing import choose_by_steps
from ipu_pipeline.engine.replaying import Replay, find_nans
from ipu_pipeline.engine.searched_timetables import (
    SearchedTimetables,
    check_one_process,
    measure_scenario,
)
from ipu_pipeline.engine.state import PipelineState, Progress, RunState, StepOutputs
from ipu_pipeline.engine.state_checks import (
    MOVES,
    as_plain_state,
    check_elements,
    check_exists,
    check_not_traced,
    check_state,
    without_aliases,
)
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.metrics import Metric, MetricReader
from ipu_pipeline.engine.tracing.specs import VariableSpec, initial_value
from ipu_pipeline.engine.tracing.stage_lists import StageEntry, flatten_stages
from ipu_pipeline.engine.tracing.surroundings import Surroundings
from ipu_pipeline.engine.tracing.traced import TracedPipeline
from ipu_pipeline.engine.tracing.user_checks import UserChecks, find_failed, hands_out_checks
from ipu_pipeline.engine.updates.accumulators import AccumulatorPlan, plan_accumulators
from ipu_pipeline.engine.updates.cutting import Updates
from ipu_pipeline.engine.updates.loss_weights import is_loss_weight, without_weights
from ipu_pipeline.ground.enumerations import parse_member
from ipu_pipeline.ground.errors import OutOfRangeError
from ipu_pipeline.ground.first_run import begin_first_run
from ipu_pipeline.ground.shapes import as_shapes, check_like, describe_structures

__all__ = ["Pipeline"]

P = ParamSpec("P")
# Methods that have become functions of a pipeline.
_MOVED = {
    "facts": "inspect.find_facts",
    "measure_costs": "planning.measure_costs",
    "plan_host_memory": "planning.plan_host_memory",
    "plan_ipu_memory": "planning.plan_ipu_memory",
    "plan_memory": "planning.plan_memory",
    "scenario": "planning.measure_scenario",
    "searched": "inspect.find_searched",
    "summary": "inspect.summarize",
    "with_dispatch_plan": "planning.with_dispatch_plan",
    "with_recomputation": "planning.with_recomputation",
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

        known = inspect.signature(init)
        options = [one for name, one in inspect.signature(make).parameters.items() if name != "hooks"]
        parameters = [*list(known.parameters.values())[:2], *options]
        functools.update_wrapper(wrapped, init)
        vars(wrapped)["__signature__"] = known.replace(parameters=parameters)
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
    """

    split_table: Any = None  # where its stages begin, and why, if the engine cut it
    measured_costs: schedules.Costs | None = None  # what its stages take, measured with its runner

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
        known = 1 if count is None else count
        is_file = isinstance(schedule, schedules.FileSchedule)  # for one number of micro-batches only
        self.timetable(min(known, 64) if self.is_one_program and not is_file else known)
        for sentence in find_unused(vars(options)):
            warnings.warn(sentence, stacklevel=3)

    if not TYPE_CHECKING:  # for which there would be any attribute

        def __getattr__(self, name: str) -> Any:
            """Says what takes the place of a method that is gone."""
            instead = f"; use engine.{_MOVED[name]}(pipeline)" if name in _MOVED else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    def _begin(self, recipe: Recipe, levels: Sequence[int], trains: bool) -> None:
        """Checks a recipe, and takes it.

        Args:
          recipe: what the pipeline is made of.
          levels: the levels of its stages.
          trains: whether it goes backward.
        """
        self._recipe, options, mapping = recipe, recipe.options, recipe.mapping
        schedule, count = options.schedule, options.num_micro_batches
        self._num_replicas, self._has_identical_keys = options.num_replicas, False
        if options.dispatch_plan is not None:
            check_dispatch_plan(options.dispatch_plan, count, self.is_one_program)
        self._compiler_options = self._plan_compiler_options()
        self._reduction = parse_member(Reduction, options.reduction, "reduction")
        self._offload = parse_offload(options.offload)
        self._shard = parse_shard(options.shard)
        self._recompute = (
            None
            if options.recompute is None
            else parse_member(Recomputation, options.recompute, "recompute, unless it is None,")
        )
        self._devices = options.devices
        self._chosen_plan: Chunking | None = None
        self._built: Built | None = None
        self._programs: tuple[StagePrograms, ...] = ()
        self._runner: Runner[Any] | None = None
        self._shapes: MicroBatchShapes | None = None  # made with the runner, and dropped with it
        # the same pipeline for micro-batches of other shapes than the first one
        self._others: dict[ShapesKey, Pipeline] = {}
        self._surroundings: Surroundings | None = None  # of the first trace
        self._kept = kept.current()
        self._accumulators: dict[str, Any] | None = None  # the zeros that the last update left
        self._placed: _Placed | None = None
        # A function by itself, so that its callers do not hold the pipeline: an infeed holds the runner,
        # and the pipeline's program the infeed.
        self._follow: Callable[[frozenset[int] | None, int], schedules.Timetable] = functools.partial(
            _make_timetable, schedule, mapping, trains, tuple(levels)
        )
        self._make_timetable: Callable[[int], schedules.Timetable] = functools.partial(self._follow, None)
        self.searches: SearchedTimetables | None = None  # made with the runner, and dropped with it
        self._building = threading.RLock()  # held while it is traced, and while its runner is made

    def _plan_compiler_options(self) -> CompilerOptions:
        options = self.options
        return plan_options(
            len(self.device_mapping),
            self.is_one_program,
            options.optimizer is not None,
            options.forward_options,
            options.backward_options,
            options.update_options,
            options.hooks.option_names,
        )

    def timetable(self, num_micro_batches: int) -> schedules.Timetable:
        """Returns the checked timetable of a step.

        For a schedule that is searched, see `engine.inspect.find_searched`.

        Args:
          num_micro_batches: micro-batches of a step, or groups of `num_serialized`.
        """
        return (self.searches or self._make_timetable)(num_micro_batches)

    def _find_halved(self) -> Collection[int]:
        """The stages whose backward is done in halves, from now on with any number of micro-batches."""
        if self.is_one_program:
            return ()
        halved = self._follow(None, self.num_micro_batches or 2 * len(self.device_mapping)).halved
        self._make_timetable = functools.partial(self._follow, halved)
        return halved

    # What is known about the pipeline.

    @property
    def num_ipus(self) -> int:
        """The number of devices that each replica needs."""
        return max(self.device_mapping) + 1

    @property
    def num_devices(self) -> int:
        """The number of devices that each replica needs."""
        return self.num_ipus * self.options.num_devices_per_ipu

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
    def _iterated(self) -> Iterated | None:
        """The loop whose body the pipeline is; None if there is none."""
        return None

    @property
    def is_loop(self) -> bool:
        """Whether the micro-batches are iterations of a loop."""
        return self._iterated is not None

    @property
    def num_carried(self) -> int:
        """The number of a micro-batch's first leaves that come from the one before; 0 except in a loop."""
        return 0 if self._iterated is None else len(self._iterated.carried)

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
    def programs(self) -> tuple[StagePrograms, ...]:
        """The programs of each stage, before XLA."""
        return self._programs or self.built.programs

    @property
    def updates(self) -> Updates | None:
        """The optimizer's programs; None without training."""
        return self.built.updates

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches per step, or groups of `num_serialized`; None if each step is given the number."""
        return self.options.num_micro_batches

    @property
    def num_serialized(self) -> int:
        """The number of micro-batches that a stage handles before the next stage starts."""
        return self.options.num_serialized

    @property
    def collecting(self) -> Collecting:
        """The results that are collected from the last stage."""
        return self.built.collecting

    @property
    def metrics(self) -> MetricReader:
        """A reader of the metrics of stages and the optimizer."""
        return self.built.metrics

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables by full name."""
        return without_weights(self.traced.variables)

    def plan_stages(self, count: int, chunk_size: int) -> tuple[StageMemory, ...]:
        """Plans what stages hold, from a step's micro-batches and those of a program."""
        if self.is_one_program:  # it ends a micro-batch before the next one starts
            fullest: Sequence[Moments] = [((self.num_serialized, 0),)] * len(self.device_mapping)
        else:
            fullest = [
                tuple((chunk_size * before, chunk_size * between) for before, between in moments)
                for moments in find_moments(self._programs, self.timetable(count // chunk_size))
            ]
        known = {} if self._runner is None else self._runner.residual_bytes
        return plan_stages(self.traced, self._programs, self.device_mapping, fullest, known)

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
            self._chosen_plan = choose_dispatch_plan(self._chunked_step, platform)
        return self._chosen_plan

    @property
    def _chunked_step(self) -> ChunkedStep:
        """What a dispatch plan is chosen for."""
        count = self.num_micro_batches
        return ChunkedStep(
            self._programs,
            self.traced.levels,
            self.timetable,
            count,
            lambda chunk_size: max(m.num_live_bytes for m in self.plan_stages(count or 1, chunk_size)),
            self.options.max_chunked_bytes,
            is_grouped=self.options.schedule == "grouped",
            saves_memory=self._recompute is not None or bool(self._offload),
            num_replicas=self._num_replicas,
        )

    def copied(self, **changes: Any) -> Pipeline:
        """A copy without runner, with some options changed. Nothing is traced again."""
        options = dataclasses.replace(self.options, **changes)
        return self._copy(_recipe=dataclasses.replace(self._recipe, options=options), _others={})

    def _copy(self, **changes: Any) -> Pipeline:
        """A copy without runner, with some attributes changed."""
        other = copy.copy(self)
        vars(other).update(
            _runner=None, searches=None, measured_costs=None, _shapes=None, _accumulators=None, _placed=None
        )
        vars(other).update(changes)
        return other

    def plan_accumulators(self) -> AccumulatorPlan:
        """Plans which program accumulates where."""
        return plan_accumulators(self.traced, self._programs, self.device_mapping, self._reduction)

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
            `optimizer_tracing.trace_optimizer` and `updates.cut_updates`.
        """
        element = as_shapes(micro_batch, "The micro-batch")
        input_shapes: tuple[Any, ...] = as_shapes(inputs, "The inputs")
        with self._building:
            if self._built is None:
                around = Surroundings.now(self.options.hooks.program_names)
                # Else JAX writes loops out while it traces.
                with jax.disable_jit(False), tracing():
                    built = build(self._recipe, element, input_shapes, self._recompute, self._find_halved())
                self._built, self._programs, self._surroundings = built, built.programs, around
                self._trace_named()
                return
        known = self._built.traced
        if known.inputs != input_shapes:
            raise ValueError(
                f"The pipeline was traced for the inputs {known.inputs}, and now got {input_shapes}."
            )
        self.check_element(element, 0)
        self.for_shapes(element)

    def _trace_named(self) -> None:
        """Traces the stages for the shapes that were named, unless that has been done; see `trace`."""
        for number, named in enumerate(self.options.shapes):
            check_like(named, self.traced.element, f"shapes[{number}]", may_vary=True)
            self.for_shapes(named)

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
        check_like(element, built.traced.element, "The micro-batch", may_vary=True)
        key = find_key(element)
        with self._building:
            if key == find_key(built.traced.element):
                return self
            if key not in self._others:
                known = [built.traced.element, *(one.traced.element for one in self._others.values())]
                check_number(known, element, self.options.max_shapes)
                self._others[key] = self._trace_other(element)
            return self._others[key]

    def _trace_other(self, element: Any) -> Pipeline:
        """Traces the stages for other shapes of micro-batches, in the surroundings of the first trace."""
        built, around = self.built, self._surroundings
        assert around is not None

        def trace(captures: Captures) -> Pipeline:
            hooks = dataclasses.replace(
                self.options.hooks, program_names=around.names.copy(), captures=captures
            )
            options = dataclasses.replace(self.options, hooks=hooks, shapes=())
            recipe = dataclasses.replace(self._recipe, options=options)
            other = self._copy(_recipe=recipe, _built=None, _programs=(), _others={})
            other.trace(element, *built.traced.given)
            return other

        try:
            other: Pipeline = around.run(
                self.options.hooks.captures.trace_again, built.traced.captured, trace
            )
        except Exception as error:
            error.add_note(
                f"The micro-batch, {describe_shapes(element)}, has other shapes than the first one, "
                f"{describe_shapes(built.traced.element)}. With max_shapes=1 that is an error by itself."
            )
            raise
        check_alike(built, other.built, (self.plan_accumulators(), other.plan_accumulators()))
        return other

    def set_recomputation(self, recompute: Recomputation | None) -> None:
        """Sets what stages keep for their backward. A change compiles everything again."""
        if recompute is self._recompute:
            return
        self._recompute, self._chosen_plan = recompute, None
        self._forget_runner()
        self._others = {}
        if self._built is not None:
            self._programs = self._built.make_programs(recompute)

    def set_replicas(self, num_replicas: int, identical_keys: bool = False) -> None:
        """Sets the number of replicas. A change compiles everything again.

        Args:
          num_replicas: see `PipelineOptions`.
          identical_keys: whether all replicas draw the same random numbers as a single one would.

        Raises:
          ValueError: the number is not usable.
        """
        self._has_identical_keys = identical_keys
        if isinstance(self._runner, ColumnRunner):
            for runner in self._runner.of_shapes:
                runner.replicas.has_identical_keys = identical_keys
                runner.make_single().replicas.has_identical_keys = identical_keys
        if num_replicas == self._num_replicas:
            return
        self.options.check_replicas(num_replicas)
        self._num_replicas, self._chosen_plan = num_replicas, None
        self._forget_runner()
        self._others = {}
        self._compiler_options = self._plan_compiler_options()

    def prepare(self, devices: Sequence[Any] | None = None) -> Runner[Any]:
        """Returns the runner of the pipeline, made at the first call, which starts JAX's backend.

        Args:
          devices: the JAX devices to use, see `PipelineOptions`; by default those of the previous call, or
            of the options. For other devices than before, everything is compiled again.

        Raises:
          ValueError: there are too few devices, or XLA refuses a compiler option.
        """
        runner = self._runner
        if runner is not None and (devices is None or self._has_devices(devices)):
            return runner
        begin_first_run()
        with self._building:
            if self._runner is None or not (devices is None or self._has_devices(devices)):
                runner = self._make_runner(devices)
                shapes = MicroBatchShapes(self.traced.element, runner)
                self._trace_named()
                for other in self._others.values():
                    shapes.add(other.traced.element, functools.partial(self._make_other_runner, runner))
                self._runner, self._shapes = runner, shapes
            return self._runner

    def _forget_runner(self) -> None:
        """Has the next `prepare` make another runner."""
        self._runner = self.searches = self._shapes = self.measured_costs = None

    @apart
    def _make_runner(self, devices: Sequence[Any] | None) -> Runner[Any]:
        if devices is None:
            devices = jax.devices() if self._devices is None else self._devices
            if self._shard and self._num_replicas == 1:  # who gives devices may give replicas, and warns
                warnings.warn("shard has no effect: there is one replica, which has all.", stacklevel=4)
        number, each = self._num_replicas, self.options.num_devices_per_ipu
        needed = self.num_devices * number
        if len(devices) < needed:
            of_replicas = f" of {number} replicas" if number > 1 else ""
            raise ValueError(
                f"The pipeline needs {needed} devices, {each if each > 1 else 'one'} per number in "
                f"device_mapping{of_replicas}, but "
                f"there are {len(devices)}. On a CPU, before the first use of JAX, "
                f"ipu_pipeline.set_num_devices({needed}) makes more."
            )
        groups, schedule = make_groups(devices, self.device_mapping, number, each), self.options.schedule
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
        if self._devices is None or [d.platform for d in self._devices] != [d.platform for d in devices]:
            self._chosen_plan = None
        self._forget_runner()
        self._devices = list(devices)
        self._placed = self._accumulators = None
        self._agree(devices[:needed])
        placement = self._place_state(groups)
        if self.is_one_program:
            if isinstance(schedule, schedules.SearchedSchedule):
                warnings.warn(
                    "A searched schedule has no effect: all stages are on one device.", stacklevel=3
                )
            return self._make_block_runner(placement)
        runner = self._make_column_runner(devices, placement)
        if isinstance(schedule, schedules.SearchedSchedule) and self.updates is not None:
            searched = SearchedTimetables(self._measure(runner, schedule))
            searched((self.num_micro_batches or runner.chunk_size) // runner.chunk_size)  # it may raise
            runner.follow(searched)
            self.searches = searched
        return runner

    def _make_other_runner(self, lead: Runner[Any], element: Any, number: int) -> Runner[Any]:
        """Makes the runner for other shapes of micro-batches, which the runner for the first ones leads."""
        if lead.placement.has_peers:
            raise ValueError(
                f"A micro-batch has the shapes {describe_shapes(element)}, in place of "
                f"{describe_shapes(self.traced.element)}. In several processes all micro-batches must have "
                "the same shapes, as not all processes read them: pad them."
            )
        other: Pipeline = self.for_shapes(element)
        placement = other._place_state(lead.placement.groups)
        if isinstance(lead, BlockRunner):
            return other._make_block_runner(placement, lead, number)
        assert isinstance(lead, ColumnRunner)
        assert self._devices is not None
        other._devices, other._chosen_plan = self._devices, self.dispatch_plan
        runner = other._make_column_runner(self._devices, placement, lead, number)
        lead.check_other(runner)
        if self.searches is not None:
            runner.follow(self.searches)
        return runner

    def _make_block_runner(
        self, placement: StatePlacement, lead: BlockRunner | None = None, number: int = 0
    ) -> BlockRunner:
        """Makes the runner for one device."""
        runner = BlockRunner(
            placement,
            self._programs,
            self.collecting,
            donate=self.options.donate,
            block_bytes=self.options.block_bytes,
            num_serialized=self.num_serialized,
            has_fixed_room=self.num_micro_batches is None,
            iterated=self._iterated,
            options=self._compiler_options.whole,
            lead=lead,
            shapes=number,
        )
        runner.kept = self._kept
        runner.note = "" if lead is None else self._tell_shapes(number)
        return runner

    def _tell_shapes(self, number: int) -> str:
        """What is told while programs compile for other shapes than the first micro-batch's."""
        element, most = describe_shapes(self.traced.element), self.options.max_shapes
        return f"for micro-batches of {element} ({number + 1} of at most {most} shapes)"

    def _make_column_runner(
        self,
        devices: Sequence[Any],
        placement: StatePlacement,
        lead: ColumnRunner | None = None,
        number_of_shapes: int = 0,
    ) -> ColumnRunner:
        """Makes the runner for several devices, once the dispatch plan is known."""
        size, number, each = self.num_devices, self._num_replicas, self.options.num_devices_per_ipu
        homes = [placement]
        if number > 1:
            starts = range(0, size * number, size)
            own = [make_groups(devices[start:], self.device_mapping, 1, each) for start in starts]
            homes = list(map(self._place_state, own))

        # Without the pipeline itself, which the runner is not to hold; see `_follow`.
        make_runner = functools.partial(
            ColumnRunner,
            placement,
            homes,
            self._programs,
            self._make_timetable,
            self.options.donate,
            self.collecting,
            self._compiler_options,
            iterated=self._iterated,
            phases=self.options.execution_phases,
            shapes=number_of_shapes,
        )

        @functools.cache
        def make(chunk_size: int) -> ColumnRunner:
            made = make_runner(dispatch_plan=Chunking(chunk_size), lead=lead)
            made.replicas.joins_assigned = self.options.joins_assigned
            made.replicas.has_identical_keys = self._has_identical_keys
            made.kept = self._kept
            made.note = "" if lead is None else self._tell_shapes(number_of_shapes)
            if number > 1 and not self.options.hooks.gathers_outputs:
                made.keep_outputs()
            return made

        may_measure = not (self.is_loop or placement.has_peers or why_not_timed(self._programs))
        if lead is None and self.options.dispatch_plan is None and may_measure:
            self._chosen_plan = choose_by_steps(
                self._chunked_step,
                make,
                devices[0],
                self.built,
                (self.num_micro_batches or 0) * self._num_replicas,
                self._describe_for_choice,
            )
        plan = self.dispatch_plan
        assert plan is not None

        runner = make(plan.chunk_size)
        if plan.chunk_size > 1:
            first = runner if lead is None else lead
            runner.make_single = functools.cache(
                lambda: make_runner(dispatch_plan=ONE_BY_ONE, lead=first).like(runner)
            )
        return runner

    def _measure(self, runner: ColumnRunner, schedule: schedules.SearchedSchedule) -> schedules.Scenario:
        """Measures the stages, and what they hold, for a search."""
        return measure_scenario(
            runner,
            functools.partial(self._make_state, runner, jax.random.key(0)),
            self.built,
            schedule,
            functools.partial(self.plan_stages, runner.chunk_size, runner.chunk_size),
        )

    def _describe_for_choice(self) -> Mapping[str, str]:
        """What tells the pipeline from others that another dispatch plan may be chosen for."""
        timetable = self.timetable(self.num_micro_batches or 1)
        told = fingerprints.describe(self.built, self.options, self.device_mapping, timetable, None)
        programs = [program for own in self._programs for program in (own.forward, *own.backwards)]
        told |= {program.name: identify_operations(program.equations) for program in programs}
        updates = () if self.updates is None else self.updates.updates
        return told | {program.name: str(program.num_operations) for program in updates}

    def _agree(self, devices: Sequence[Any]) -> None:
        """Sees that all processes of the run have the same pipeline."""
        plan = None if self.is_one_program else self.dispatch_plan
        timetable = self.timetable(self.num_micro_batches or 1)
        fingerprints.agree(self.built, self.options, self.device_mapping, timetable, plan, devices)

    def _place_state(self, groups: Sequence[DeviceGroup]) -> StatePlacement:
        return StatePlacement(
            self.traced,
            self.updates,
            groups,
            self.plan_accumulators(),
            self._offload,
            self._shard,
            self.built.partitions,
            None if self.options.execution_phases is None else self.options.execution_phases.num_ahead,
        )

    def _has_devices(self, devices: Sequence[Any]) -> bool:
        known = self._devices
        assert known is not None
        size, each = self.num_ipus, self.options.num_devices_per_ipu
        needed = [
            (ipu + size * replica) * each + part
            for ipu in self.device_mapping
            for replica in range(self._num_replicas)
            for part in range(each)
        ]
        return all(number < len(devices) and devices[number] == known[number] for number in needed)

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
        state = self._make_state(self.prepare(), key)
        return dataclasses.replace(state, variables=without_weights(state.variables))

    def _make_state(self, runner: Runner[Any], key: Any) -> PipelineState:
        variables = self._make_variables(runner.placement, self.traced.variables, key)
        return PipelineState(
            variables=variables,
            optimizer_state=self._init_optimizer_state(runner.placement, variables, None),
            update_count=0,
            execution_count=0,
            key=key,
        )

    def _make_variables(self, placement: StatePlacement, names: Iterable[str], key: Any) -> dict[str, Any]:
        """The initial values of variables, placed."""
        variables: dict[str, Any] = {}
        names = list(names)
        with initializing(len(names)) as progress:
            for name in names:  # one at a time: all of them may not fit one device
                spec = self.traced.variables[name]
                made = initial_value(spec, key) if placement.has_variable(name) else spec
                variables |= placement.place_variables({name: made})
                progress.num_done += 1
        return variables

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
        return self._init_optimizer_state(self.prepare().placement, variables, outputs)

    def _init_optimizer_state(
        self, placement: StatePlacement, variables: Mapping[str, Any], outputs: Sequence[Any] | None
    ) -> Any:
        updates = self.updates
        if updates is None or (updates.init_needs_outputs and outputs is None):
            return None
        placed = placement.place_variables(variables)
        return updates.state_tree.unflatten(placement.init_optimizer_state(placed, outputs))

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
        placement = self.prepare().placement
        taken = {name: state.variables[name] for name in adoption.taken}
        variables = {
            **placement.place_variables(taken),
            **self._make_variables(placement, adoption.new, state.key),
        }
        optimizer_state = None
        if self.updates is not None:
            optimizer_state, is_taken = adopt_optimizer_state(
                state.optimizer_state,
                self.updates,
                adoption.new,
                lambda: self._init_optimizer_state(placement, variables, None),
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
        every = self.updated_every(num_micro_batches) * self._num_replicas
        known = None if self._placed is None else self._placed()
        check_state("Pipeline.step", state, is_known=state is known)
        if isinstance(micro_batches, PlacedMicroBatches):
            take_placed = micro_batches.taker(self.prepare(), every)
            keeps = micro_batches.leaves is not None
            if not keeps and (self._looks_for_nans or self._is_op_by_op):
                raise ValueError(
                    "micro_batches: they were placed before jax_debug_nans or jax_disable_jit was set. "
                    "Call place_micro_batches again."
                )
            return self._step(state, take_placed, inputs, num_micro_batches, micro_batches.leaves)
        try:
            iterator = _iterate(micro_batches, every)
        except Exception as error:
            if self._built is None or not self.prepare().placement.has_peers:
                raise
            iterator = _raise(error)  # when it is asked, so that the other processes hear of it
        if self._built is None:
            try:
                first = next(iterator)
            except StopIteration:
                raise OutOfRangeError(_describe_shortage(0, every)) from None
            self.trace(first, *inputs)
            iterator = _chain(first, iterator)
        place, numbers = self.place_element, iter(range(every))

        def take(wanted: int) -> list[Any]:
            del wanted
            number = next(numbers)
            try:
                try:
                    element = next(iterator)
                except StopIteration:
                    raise OutOfRangeError(_describe_shortage(number, every)) from None
                return [place(self.check_element(element, number))]
            except Exception:
                if self.prepare().placement.has_peers:  # whose iterators are where the next step begins
                    for _number in numbers:
                        with contextlib.suppress(Exception):
                            next(iterator, None)
                raise

        has_feed = bool(jax.tree.leaves(self.traced.element))
        return self._step(state, take if has_feed else take_nothing, inputs, num_micro_batches)

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
        leaves = [self.check_element(element, number) for number, element in enumerate(micro_batches)]
        elements: list[Any] = [self._resolve(place(own)) for own in leaves]
        keeps = self._looks_for_nans or self._is_op_by_op
        kept = list(map(copy_leaves, leaves)) if keeps else None
        return PlacedMicroBatches(runner, len(elements), runner.place_ahead(elements), kept)

    def _step(
        self,
        state: PipelineState,
        take: Take,
        inputs: Sequence[Any],
        num_micro_batches: int | None,
        leaves: Sequence[Sequence[Any]] | None = None,
    ) -> tuple[PipelineState, StepOutputs]:
        _check_targets(self.traced, self.updates)
        state = self.place(state)
        input_leaves = self.check_inputs(inputs)
        step = StepOnItsWay(self.prepare().starting, self.traced, take)
        watch(step)
        try:
            progress = self._progress(state, step.take, inputs, input_leaves, num_micro_batches, leaves)
        except BaseException:
            step.failed()
            raise
        collects = self.options.collect_outputs
        unflatten = list if callable(collects) else self.traced.output_tree.unflatten if collects else None
        reader, reported = self.metrics, self.metrics.select(progress)
        outputs = StepOutputs(progress.collected, unflatten, lambda: reader.read(reported, 1))
        given = self._give(progress.state.pipeline)
        step.started(given, outputs)
        return given, outputs

    def _progress(
        self,
        state: PipelineState,
        take: Take,
        inputs: Sequence[Any],
        input_leaves: Sequence[Any],
        num_micro_batches: int | None,
        leaves: Sequence[Sequence[Any]] | None,
    ) -> Progress:
        """Runs a step, or computes it op by op where that is asked for, and looks for nans."""
        has_nan_checks, is_op_by_op, runner = self._looks_for_nans, self._is_op_by_op, self.prepare()
        may_raise = has_nan_checks or self._has_checks
        if not (may_raise or is_op_by_op) or runner.placement.has_peers:
            return self._run_once(state, take, input_leaves, num_micro_batches)
        replay = Replay(
            runner,
            self._find_alike,
            state,
            [],
            input_leaves,
            self.built.accumulator_dtypes,
            self._has_identical_keys,
            has_nan_checks,
        )
        with jax.debug_nans(False), jax.disable_jit(False):
            if is_op_by_op:
                if self.traced.uses_replicas:
                    raise RuntimeError(
                        "jax.disable_jit: stages compute with other replicas, which only run together. "
                        "Leave it out, or debug with num_replicas=1."
                    )
                number = self.updated_every(num_micro_batches) * self._num_replicas
                taken = gather(take, number, number) if leaves is None else []
                call = self._make_caller(inputs, int(state.update_count))
                progress = replay.on(leaves or _leaves_of(taken), call).run()
                self._look_at_checks(progress)
                self._accumulators = self._placed = None
                placed = runner.place_state(progress.state.pipeline)
                return dataclasses.replace(progress, state=RunState(placed, {}))
            kept: list[Element] = []

            def recording(wanted: int) -> Sequence[Any]:
                found = take(wanted)
                kept.extend(found)
                return found

            own = copy_state(RunState(state, {})).pipeline if self.options.donate else state
            progress = self._run_once(own, recording, input_leaves, num_micro_batches)
            found = find_nans(progress) if has_nan_checks else ""
            if not found:
                return progress
            self._accumulators = self._placed = None
            why = "stages compute with other replicas, so the operation is not looked for"
            if not self.traced.uses_replicas:
                replay.on(leaves or _leaves_of(kept)).run()
                why = "computed op by op it has none, so this is due to how XLA joins operations"
            raise FloatingPointError(f"invalid value (nan) in {found} of the step: {why}.")

    def _run_once(
        self, state: PipelineState, take: Take, input_leaves: Sequence[Any], num_micro_batches: int | None
    ) -> Progress:
        found: list[Progress] = []
        self.run(
            state,
            take,
            input_leaves,
            lambda progress, _count: found.append(progress),
            num_micro_batches=num_micro_batches,
        )
        (progress,) = found
        return progress

    def _look_at_checks(self, progress: Progress) -> None:
        """Raises if a `checkify.check` of a stage has failed. Waits for them only if there are any."""
        if self._has_checks:
            error = find_failed(self.traced.enqueued, progress.enqueued, self._num_replicas)
            if error is not None:
                self._accumulators = self._placed = None
                raise error

    @property
    def _has_checks(self) -> bool:
        return hands_out_checks(self.traced.enqueued)

    def _find_alike(self, leaves: Sequence[Any]) -> Pipeline:
        """The pipeline for a micro-batch's shapes, from its leaves."""
        if self.options.max_shapes == 1:
            return self
        return self.for_shapes(self._element_tree.unflatten(leaves))

    @property
    def _looks_for_nans(self) -> bool:
        config: Any = jax.config
        return bool(self.options.check_nans or config.jax_debug_nans)

    @property
    def _is_op_by_op(self) -> bool:
        config: Any = jax.config
        return bool(config.jax_disable_jit)

    @property
    def _element_tree(self) -> Any:
        return jax.tree.structure(self.traced.element)

    def _make_caller(self, inputs: Sequence[Any], update_count: int) -> StageCaller:
        assert self._surroundings is not None
        return StageCaller(
            self._recipe.functions,
            self.options.loss,
            self._surroundings,
            self._element_tree,
            inputs,
            update_count,
            self.prepare().homes[0].groups[0],
        )

    def _give(self, state: PipelineState) -> PipelineState:
        """The state after a step without what users need not see, the variables that count weights."""
        hidden = {name: value for name, value in state.variables.items() if is_loss_weight(name)}
        if not hidden:
            return state
        given = dataclasses.replace(state, variables=without_weights(state.variables))
        self._placed = _Placed(given)
        self._placed.hidden = hidden
        return given

    @property
    def place_element(self) -> Callable[[Sequence[Any]], Element]:
        """A function that puts a micro-batch's leaves on the devices that read them, for `accumulate`.

        It changes with the devices. It may be called from another thread.
        """
        runner = self.prepare()
        if self.is_loop or self._shapes is None or self.options.max_shapes == 1:
            return runner.place_element
        return self._shapes.place_element

    def _resolve(self, element: Any) -> Any:
        """A micro-batch from `place_element`, once there are programs for its shapes."""
        if shapes_of(element) != NEW_SHAPES:
            return element
        with self._building:
            runner = self.prepare()
            assert self._shapes is not None
            return self._shapes.resolve(element, functools.partial(self._make_other_runner, runner))

    def place_ahead(self, elements: Sequence[Element]) -> list[Element]:
        """Groups an update's micro-batches, from `place_element`, as programs take them."""
        return list(self.prepare().place_ahead(elements))

    def updated_every(self, num_micro_batches: int | None) -> int:
        """The number of a step's micro-batches in each replica; those of a group count one by one."""
        known = self.num_micro_batches
        if (known is None) == (num_micro_batches is None):
            raise ValueError(
                "num_micro_batches must be given once, to the pipeline or, if that got None, to each step; "
                f"the pipeline got {known}, the step {num_micro_batches}."
            )
        count = num_micro_batches if known is None else known
        assert count is not None
        check_positive("num_micro_batches", count)
        return int(count) * self.num_serialized

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
        every = self.updated_every(None)
        if self.updates is not None and state.optimizer_state is None:
            raise ValueError(
                "compile() is not available here: the optimizer state is made from the first step's "
                "outputs, so that step compiles."
            )
        runner = self.prepare()
        state = self.place(state)
        accumulators = self._accumulators
        if accumulators is None:
            accumulators = runner.make_accumulators(self.built.accumulator_dtypes)
        inputs = [np.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self.traced.inputs)]
        total = num_updates * every
        run_state = RunState(state, accumulators)
        request = Request(inputs, every, limit=total, total=total)
        runner.compile(run_state, request)
        self._compile_others(run_state, request)

    def _compile_others(self, state: RunState, request: Request) -> None:
        """Compiles what is run for other shapes of micro-batches than the first one's, as far as known."""
        assert self._shapes is not None
        for runner in self._shapes.runners[1:]:
            runner.compile(state, request)

    @apart
    def run(
        self,
        state: PipelineState,
        take: Take,
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
            `place_element`.
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
        done, total = 0, num_updates if num_total is None else num_total
        supply = Supply(take, self._resolve)
        while done < num_updates:
            wanted = (1, 1) if one_by_one else (num_updates - done, total)
            pending = self.accumulate(state, supply, input_leaves, *wanted, num_micro_batches)
            with replacing():
                before = int(state.execution_count)
                progress = self.update(state, pending)
                state = progress.state.pipeline
                num_done = int(state.execution_count) - before
                done += num_done
                self._look_at_checks(progress)
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
        every = self.updated_every(num_micro_batches)
        runner = self.prepare()
        accumulators, self._accumulators = self._accumulators, None
        if accumulators is None:
            accumulators = runner.make_accumulators(self.built.accumulator_dtypes)
        request = Request(input_leaves, every, limit=num_updates * every, total=num_total * every)
        if self.options.shapes and not runner.has_run:
            self._compile_others(RunState(state, accumulators), request)
        if (watcher := watching.current()) is not None:
            watcher.introduce(runner, self)
            rehearse(watcher, runner, RunState(state, accumulators), request)
        with naming_peers():
            pending: Pending = runner.fetch(RunState(state, accumulators), request, take)
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
        self._check_optimizer_state(state)
        # The accumulators are part of what is pending.
        with naming_peers():
            progress: Progress = self.prepare().run(RunState(state, {}), pending)
        self._accumulators = progress.state.accumulators
        self._placed = _Placed(progress.state.pipeline)
        return progress

    @apart
    def place(self, state: PipelineState) -> PipelineState:
        """Puts the leaves of a state on the devices of their stages.

        Raises:
          ValueError: a variable is missing, is no array, or has another shape or dtype; or elements of it
            are masked.
        """
        placed = self._placed
        if placed is not None and state is placed():
            if placed.hidden:
                return dataclasses.replace(state, variables={**state.variables, **placed.hidden})
            return state
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
        self._check_optimizer_state(state)
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
        found, other._accumulators = other._accumulators, None
        if found is not None and self._find_accumulators() == other._find_accumulators():
            self._accumulators = found

    def _find_accumulators(self) -> Any:
        """A value that identifies the accumulators and their places."""
        extra, ipus, owners = self.plan_accumulators().extra, self.device_mapping, self.traced.owners
        dtypes = self.built.accumulator_dtypes
        homes = {name: ipus[owners[name]] for name in dtypes}
        homes |= {key: ipus[accumulator.stage] for key, accumulator in extra.items()}
        return dtypes, homes, self._devices, self._num_replicas, self._offload

    def check_element(self, element: Any, number: int) -> list[Any]:
        """Checks a micro-batch against the first one. Returns its leaves.

        Raises:
          ValueError: structure or dtype differ; or, if `max_shapes` is 1, shapes do.
        """
        may_vary = self.options.max_shapes > 1
        return check_like(element, self.traced.element, f"Micro-batch {number}", may_vary=may_vary)

    def check_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Checks the inputs in the same way. Returns their leaves."""
        return check_like(tuple(inputs), self.traced.inputs, "The inputs")

    def _check_optimizer_state(self, state: PipelineState) -> None:
        if self.updates is None or state.optimizer_state is None:
            return
        tree = jax.tree.structure(state.optimizer_state)
        if tree != self.updates.state_tree:
            given, made = describe_structures(tree, self.updates.state_tree)
            raise ValueError(
                "The state's optimizer_state is of another optimizer or of other variables: it is "
                f"{given}, and the pipeline's optimizer makes {made}."
            )


class _Placed(weakref.ref[PipelineState]):
    """The last state that is known to be placed, and the variables that it does not show."""

    hidden: Mapping[str, Any] = MappingProxyType({})


def _make_timetable(
    schedule: schedules.Schedule,
    mapping: tuple[int, ...],
    trains: bool,
    levels: tuple[int, ...],
    halved: frozenset[int] | None,
    num_micro_batches: int,
) -> schedules.Timetable:
    return schedules.timetable(schedule, len(levels), num_micro_batches, mapping, trains, levels, halved)


def _describe_shortage(number: int, every: int) -> str:
    return f"The data ended after {number} of the {every} micro-batches of a step."


def _iterate(micro_batches: Iterable[Any], every: int) -> Iterator[Any]:
    """Begins to iterate over the micro-batches of a step.

    Raises:
      TypeError: they are not what can be iterated over.
      ValueError: there are too many in a list.
    """
    if isinstance(micro_batches, (list, tuple)) and len(micro_batches) > every:
        raise ValueError(
            f"micro_batches: a step takes {every}; the {type(micro_batches).__name__} has "
            f"{len(micro_batches)}. Give each step its own, or all steps one iterator."
        )
    return iter(check_elements("Pipeline.step", micro_batches))


def _raise(error: Exception) -> Iterator[Any]:
    """An iterator that raises an error."""
    yield from ()
    raise error


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _leaves_of(elements: Sequence[Any]) -> list[Sequence[Any]]:
    """The leaves of micro-batches from a feed, or of those that stand for them without one."""
    return [element.leaves if element else () for element in elements]


def _check_targets(traced: TracedPipeline, updates: Updates | None) -> None:
    """Raises if something is enqueued for another target than those that a step serves."""
    entries = (*traced.enqueued, *(() if updates is None else updates.enqueued))
    for entry in entries:
        if not isinstance(entry.target, Metric | UserChecks):
            raise ValueError(
                f"Pipeline.step: something is enqueued to {entry.target!r}, which is for sessions. Return "
                "the value from the last stage, or report it with engine.metric."
            )
