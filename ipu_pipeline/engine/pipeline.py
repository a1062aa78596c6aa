"""The engine's public class: a pipeline of stage functions, whose steps take a state and return the next.

It builds, runs and describes pipelines, and delegates all of this.
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
from typing import Any, Concatenate, ParamSpec

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
from ipu_pipeline.engine.execution import kept, op_by_op
from ipu_pipeline.engine.execution.comparing import identify_operations
from ipu_pipeline.engine.execution.contract import Iterated, Pending, Request, Runner
from ipu_pipeline.engine.execution.measured_costs import Measured, divide_last, why_not_timed
from ipu_pipeline.engine.execution.runner import PlanRunner
from ipu_pipeline.engine.execution.single_device.runner import BlockRunner
from ipu_pipeline.engine.execution.watched import copy_state, rehearse
from ipu_pipeline.engine.hanging import StepOnItsWay, watch
from ipu_pipeline.engine.inspect.describing import describe, find_shared_sends, find_update_sends
from ipu_pipeline.engine.inspect.facts import PipelineDetails, Sent, select_fields
from ipu_pipeline.engine.inspect.summary import PipelineSummary
from ipu_pipeline.engine.inspect.waiting import estimate_bubble
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
from ipu_pipeline.engine.plan.readers.op_by_op import OpByOp, Visit, find_nans
from ipu_pipeline.engine.planning.choosing import (
    HOST_SECONDS,
    ChunkedStep,
    choose_dispatch_plan,
)
from ipu_pipeline.engine.planning.chunking import ONE_BY_ONE, Chunking, check_dispatch_plan
from ipu_pipeline.engine.planning.memory import find_moments, plan_stages
from ipu_pipeline.engine.planning.memory_plans import IpuMemory, Moments, StageMemory
from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.collecting import Collecting
from ipu_pipeline.engine.programs.recomputation import Recomputation
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.progress import initializing, tracing
from ipu_pipeline.engine.rehearsing import choose_by_steps
from ipu_pipeline.engine.searched_timetables import (
    SearchedTimetables,
    check_one_process,
    make_scenario,
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
from ipu_pipeline.engine.tracing.recomputation_marks import has_marks
from ipu_pipeline.engine.tracing.replicas import uses_replicas
from ipu_pipeline.engine.tracing.specs import VariableSpec, initial_value
from ipu_pipeline.engine.tracing.stage_lists import StageEntry, flatten_stages
from ipu_pipeline.engine.tracing.surroundings import Surroundings
from ipu_pipeline.engine.tracing.traced import TracedPipeline
from ipu_pipeline.engine.tracing.user_checks import UserChecks, find_failed, hands_out_checks
from ipu_pipeline.engine.updates.accumulators import AccumulatorPlan, plan_accumulators
from ipu_pipeline.engine.updates.cutting import Updates
from ipu_pipeline.engine.updates.loss_weights import is_loss_weight, without_weights
from ipu_pipeline.ground.cores import count_cores
from ipu_pipeline.ground.enumerations import parse_member
from ipu_pipeline.ground.errors import OutOfRangeError
from ipu_pipeline.ground.first_run import begin_first_run
from ipu_pipeline.ground.shapes import as_shapes, check_like, describe_structures

__all__ = ["Pipeline"]

P = ParamSpec("P")


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
        parameters = [*list(known.parameters.values())[:2], *inspect.signature(make).parameters.values()]
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

    _split_costs: schedules.Costs | None = None  # what its stages take, if the engine cut it by that
    _measured_costs: tuple[Any, schedules.Costs] | None = None  # a runner, and what its stages take
    _cuts = ""  # where its stages begin, and why, if the engine cut it

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
        table = getattr(stages, "table", None)
        self._cuts = "" if table is None else table.cuts
        self._split_costs = None if table is None else table.costs
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
        self._searched: SearchedTimetables | None = None  # made with the runner, and dropped with it
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
            options.option_names,
        )

    def timetable(self, num_micro_batches: int) -> schedules.Timetable:
        """Returns the checked timetable of a step.

        For a schedule that is searched, see `searched`.

        Args:
          num_micro_batches: micro-batches of a step, or groups of `num_serialized`.
        """
        return (self._searched or self._make_timetable)(num_micro_batches)

    def _find_halved(self) -> Collection[int]:
        """The stages whose backward is done in halves, from now on with any number of micro-batches."""
        if self.is_one_program:
            return ()
        halved = self._follow(None, self.num_micro_batches or 2 * len(self.device_mapping)).halved
        self._make_timetable = functools.partial(self._follow, halved)
        return halved

    def searched(self, num_micro_batches: int | None = None) -> schedules.Searched | None:
        """Returns the result of the schedule's search, with its bound.

        Args:
          num_micro_batches: as for `step`.

        Returns:
          The rows, the step time by the measured costs, without updates, a lower bound for any order, and
          the gap between them. None if nothing is searched: the schedule is another one, there is no
          training, or all stages are on one device. Then, and until `prepare` is called, the timetable is
          "interleaved" with a split backward.
        """
        if self._searched is None:
            return None
        return self._searched.find(self.updated_every(num_micro_batches) // self.num_serialized)

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

    @property
    def separate_variables(self) -> frozenset[str]:
        """The full names of the variables that have a separate value in each replica."""
        if self.options.joins_assigned or self._num_replicas == 1:
            return frozenset()
        return frozenset(spec.name for stage in self.traced.stages for spec in stage.assigned)

    def plan_memory(self, num_micro_batches: int | None = None) -> tuple[StageMemory, ...]:
        """Plans the memory that each stage holds between forwards and backwards.

        Args:
          num_micro_batches: micro-batches of a step, if the pipeline has no fixed number.

        Raises:
          ValueError: the number of micro-batches is given neither here nor to the pipeline.
        """
        plan = self.dispatch_plan
        return self._plan_memory(self._count(num_micro_batches), 1 if plan is None else plan.chunk_size)

    def _plan_memory(self, count: int, chunk_size: int) -> tuple[StageMemory, ...]:
        if self.is_one_program:  # it ends a micro-batch before the next one starts
            fullest: Sequence[Moments] = [((self.num_serialized, 0),)] * len(self.device_mapping)
        else:
            fullest = [
                tuple((chunk_size * before, chunk_size * between) for before, between in moments)
                for moments in find_moments(self._programs, self.timetable(count // chunk_size))
            ]
        known = {} if self._runner is None else self._runner.residual_bytes
        return plan_stages(self.traced, self._programs, self.device_mapping, fullest, known)

    def plan_ipu_memory(self, num_micro_batches: int | None = None) -> tuple[IpuMemory, ...]:
        """Plans the memory of each device while steps run: state, accumulators, micro-batches and programs.

        The programs' memory is known once they are compiled, in the first step. With all stages on one
        device it includes the micro-batches.

        Args:
          num_micro_batches: micro-batches of a step, if the pipeline has no fixed number.

        Returns:
          One entry per device, in order.

        Raises:
          ValueError: the number of micro-batches is given neither here nor to the pipeline; or see
            `prepare`.
        """
        count = self._count(num_micro_batches)
        runner, stages = self.prepare(), self.plan_memory(count)
        return runner.plan_memory(self.built.accumulator_dtypes, stages, count * self.num_serialized)

    def plan_host_memory(self, link: schedules.LinkSpeed) -> schedules.HostMemory | None:
        """Returns the transfers of execution phases from and to host memory, for `Scenario.host_memory`.

        Args:
          link: the link between each device and host memory, with the same speed in either direction.

        Returns:
          The bytes of each program; None if there are no phases, or nothing leaves the devices.

        Raises:
          ValueError: there are several replicas, whose steps in phases are not simulated; or see `prepare`.
        """
        runner = self.prepare()
        if self.options.execution_phases is None:
            return None
        assert isinstance(runner, PlanRunner)
        if self._num_replicas > 1:
            raise ValueError(
                "plan_host_memory goes with one replica, as steps of replicas in phases are not simulated; "
                f"num_replicas is {self._num_replicas}."
            )
        return runner.find_host_memory(self.built.accumulator_dtypes, link)

    def scenario(self, num_micro_batches: int | None = None) -> schedules.Scenario:
        """Measures a step, for `simulate`, `what_if`, `advise` and `ipu-pipeline simulate --costs-from`.

        Programs, transfers and updates are measured one at a time, unless they were measured before. CPU
        devices share the CPU's cores. With several replicas the scenario is the first replica's, with its
        share of the cores.

        Args:
          num_micro_batches: micro-batches of a step, if the pipeline has no fixed number.

        Raises:
          ValueError: all stages are on one device; or they cannot be run on zeros: they print, call back
            into Python or loop by data; or there are several processes, or execution phases.
        """
        count = self._count(num_micro_batches) * self.num_serialized
        runner, measured = self._measure_stages("Pipeline.scenario")
        is_shared = runner.placement.groups[0].devices[0].platform == "cpu"
        return make_scenario(
            runner,
            self.built,
            measured.costs,
            self._plan_memory(count, runner.chunk_size),
            self.options.schedule,
            count,
            measured.num_temporary_bytes,
            count_cores() / self._num_replicas if is_shared else None,
            [stage.whole_layers for stage in self.facts().stages],
        )

    @apart
    def measure_costs(self) -> schedules.Costs:
        """Measures programs, transfers and updates, in seconds; `scenario` includes them.

        The time of the last stage's program is divided into forward and backward by their operations. The
        host is assumed to start a program in 20 microseconds.

        Raises:
          ValueError: see `scenario`.
        """
        return self._measure_stages("Pipeline.measure_costs")[1].costs

    def _measure_stages(self, caller: str) -> tuple[PlanRunner, Measured]:
        runner = self.prepare()
        reasons = {
            "all stages are on one device, in one program": not isinstance(runner, PlanRunner),
            "there are execution phases": self.options.execution_phases is not None,
            "there are several processes": runner.placement.has_peers,
            why_not_timed(self._programs): bool(why_not_timed(self._programs)),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            raise ValueError(f"{caller} runs the stages on zeros, one at a time; here {reason}.")
        assert isinstance(runner, PlanRunner)
        is_searched = isinstance(self.options.schedule, schedules.SearchedSchedule)
        measured = runner.measure(HOST_SECONDS, with_updates=True, with_skips=not is_searched)
        last = self.facts().stages[-1]
        costs = dataclasses.replace(measured.costs, is_fused=last.is_fused)
        if last.is_fused:
            first = last.backward_operations - last.weight_operations
            costs = divide_last(costs, last.forward_operations, first, is_halved=last.is_halved)
        self._measured_costs = runner, costs
        return runner, measured._replace(costs=costs)

    def _count(self, num_micro_batches: int | None) -> int:
        count = self.num_micro_batches if num_micro_batches is None else num_micro_batches
        if count is None:
            raise ValueError("plan_memory: num_micro_batches must be given, as for `step`; it is None.")
        return count

    def facts(
        self, num_micro_batches: int | None = None, *, left_out: Collection[str] = ()
    ) -> PipelineDetails:
        """Returns the facts that are known before anything is compiled. Does not start JAX's backend.

        Args:
          num_micro_batches: micro-batches of a step, if the pipeline has no fixed number. Without it, a
            step of one micro-batch is assumed.
          left_out: full names of variables to leave out.

        Raises:
          RuntimeError: the pipeline has not been traced; see `trace`.
        """
        built, options, plan = self.built, self.options, self.dispatch_plan
        count = self.num_micro_batches if num_micro_batches is None else num_micro_batches
        chunk_size, schedule = 1 if plan is None else plan.chunk_size, options.schedule
        trains = built.updates is not None
        costs = self._split_costs
        if self._measured_costs is not None and self._measured_costs[0] is self._runner:
            costs = self._measured_costs[1]
        return describe(
            built.traced,
            self._programs,
            self._plan_memory(count or 1, chunk_size),
            built.accumulator_dtypes if trains else None,
            self.num_carried,
            {*left_out, *filter(is_loss_weight, built.traced.variables)},
            name="Pipeline",
            kind="training" if trains else "inference",
            schedule=schedules.schedule_name(schedule),
            num_micro_batches=count,
            num_serialized=self.num_serialized,
            chunk_size=chunk_size,
            is_one_program=self.is_one_program,
            num_replicas=self._num_replicas,
            sent=self._find_sends(),
            dispatch="" if plan is None else str(plan),
            cuts=self._cuts,
            costs=costs,
            num_devices_per_ipu=options.num_devices_per_ipu,
            divided=tuple(built.partitions),
        )

    def _find_sends(self) -> tuple[Sent, ...]:
        """What crosses from device to device per weight update."""
        traced, ipus = self.traced, self.device_mapping
        extra = self.plan_accumulators().extra
        shared = find_shared_sends(traced, ipus, extra, self.built.accumulator_dtypes)
        return (*shared, *find_update_sends(self.updates, ipus))

    def summary(
        self, num_micro_batches: int | None = None, *, left_out: Collection[str] = ()
    ) -> PipelineSummary:
        """Summarizes the memory and work of each stage, and the bubble, before anything is compiled.

        Does not start JAX's backend. `print` shows it as a table.

        Args:
          num_micro_batches: micro-batches of a step, if the pipeline has no fixed number. Without it, a
            long step is assumed.
          left_out: full names of variables to leave out.

        Raises:
          RuntimeError: the pipeline has not been traced; see `trace`.
        """
        count = self.num_micro_batches if num_micro_batches is None else num_micro_batches
        facts = self.facts(count or 2 * len(self.device_mapping), left_out=left_out)
        schedule, num_chunks = self.options.schedule, (count or 0) // facts.chunk_size
        has_name = isinstance(schedule, str)
        told = facts.schedule if has_name else "of your own"
        if isinstance(schedule, schedules.SearchedSchedule):
            found = None if count is None else self.searched(num_micro_batches)
            told = "searched, when the pipeline is prepared" if found is None else str(found)
        return select_fields(
            PipelineSummary,
            facts,
            schedule=told,
            num_micro_batches=count,
            bubble=estimate_bubble(facts.stages, self.timetable, num_chunks, has_name) if count else None,
        )

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
            lambda chunk_size: max(m.num_live_bytes for m in self._plan_memory(count or 1, chunk_size)),
            self.options.max_chunked_bytes,
            is_grouped=self.options.schedule == "grouped",
            saves_memory=self._recompute is not None or bool(self._offload),
            num_replicas=self._num_replicas,
        )

    def with_dispatch_plan(self, plan: Chunking | None) -> Pipeline:
        """Returns the pipeline with another plan (None: it is chosen). Nothing is traced again."""
        if plan is not None:
            check_dispatch_plan(plan, self.num_micro_batches, self.is_one_program)
        options = dataclasses.replace(self.options, dispatch_plan=plan)
        return self._copy(_recipe=dataclasses.replace(self._recipe, options=options), _others={})

    def _copy(self, **changes: Any) -> Pipeline:
        """A copy without runner, with some attributes changed."""
        other = copy.copy(self)
        vars(other).update(_runner=None, _searched=None, _shapes=None, _accumulators=None, _placed=None)
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
                around = Surroundings.now(self.options.program_names)
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
            options = dataclasses.replace(
                self.options, program_names=around.names.copy(), captures=captures, shapes=()
            )
            recipe = dataclasses.replace(self._recipe, options=options)
            other = self._copy(_recipe=recipe, _built=None, _programs=(), _others={})
            other.trace(element, *built.traced.given)
            return other

        try:
            other: Pipeline = around.run(self.options.captures.trace_again, built.traced.captured, trace)
        except Exception as error:
            error.add_note(
                f"The micro-batch, {describe_shapes(element)}, has other shapes than the first one, "
                f"{describe_shapes(built.traced.element)}. With max_shapes=1 that is an error by itself."
            )
            raise
        check_alike(built, other.built, (self.plan_accumulators(), other.plan_accumulators()))
        return other

    def with_recomputation(self, recompute: Recomputation | None) -> Pipeline:
        """Returns the pipeline with another recomputation; see `set_recomputation`."""
        other = copy.copy(self)
        other.set_recomputation(recompute)
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
        if isinstance(self._runner, PlanRunner):
            for runner in self._runner.of_shapes:
                runner.has_identical_keys = identical_keys
                runner.make_single().has_identical_keys = identical_keys
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
        self._runner = self._searched = self._shapes = None

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
            self._searched = searched
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
        assert isinstance(lead, PlanRunner)
        assert self._devices is not None
        other._devices, other._chosen_plan = self._devices, self.dispatch_plan
        runner = other._make_column_runner(self._devices, placement, lead, number)
        lead.check_other(runner)
        if self._searched is not None:
            runner.follow(self._searched)
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
        make = self._runner_maker(placement, [placement], number)

        @functools.cache
        def make_single() -> PlanRunner:
            first = None if lead is None else lead.make_single()
            return make(lead=first, other=first)

        runner.make_single = make_single
        return runner

    def _tell_shapes(self, number: int) -> str:
        """What is told while programs compile for other shapes than the first micro-batch's."""
        element, most = describe_shapes(self.traced.element), self.options.max_shapes
        return f"for micro-batches of {element} ({number + 1} of at most {most} shapes)"

    def _make_column_runner(
        self,
        devices: Sequence[Any],
        placement: StatePlacement,
        lead: PlanRunner | None = None,
        number_of_shapes: int = 0,
    ) -> PlanRunner:
        """Makes the runner for several devices, once the dispatch plan is known."""
        size, number, each = self.num_devices, self._num_replicas, self.options.num_devices_per_ipu
        homes = [placement]
        if number > 1:
            starts = range(0, size * number, size)
            own = [make_groups(devices[start:], self.device_mapping, 1, each) for start in starts]
            # Groups tell where values are, so all runners of a pipeline have the same ones.
            groups = own if lead is None else [home.groups for home in lead.homes]
            homes = list(map(self._place_state, groups))

        make_runner = self._runner_maker(placement, homes, number_of_shapes)
        first: list[PlanRunner] = []

        @functools.cache
        def make(chunk_size: int) -> PlanRunner:
            other = first[0] if first else lead
            made = make_runner(dispatch_plan=Chunking(chunk_size), lead=lead, other=other)
            first.append(made)
            made.kept = self._kept
            made.note = "" if lead is None else self._tell_shapes(number_of_shapes)
            if number > 1 and not self.options.gathers_outputs:
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
            leading = runner if lead is None else lead
            runner.make_single = functools.cache(
                lambda: make_runner(dispatch_plan=ONE_BY_ONE, lead=leading, other=leading).like(runner)
            )
        return runner

    def _runner_maker(
        self, placement: StatePlacement, homes: Sequence[StatePlacement], number_of_shapes: int
    ) -> Callable[..., PlanRunner]:
        """What makes a runner by plans. It does not hold the pipeline, see `_follow`."""
        return functools.partial(
            PlanRunner,
            placement,
            homes,
            self._programs,
            self._make_timetable,
            self.options.donate,
            self.collecting,
            self._compiler_options,
            self.built.accumulator_dtypes,
            iterated=self._iterated,
            phases=self.options.execution_phases,
            shapes=number_of_shapes,
            joins_assigned=self.options.joins_assigned,
            has_identical_keys=self._has_identical_keys,
        )

    def _measure(self, runner: PlanRunner, schedule: schedules.SearchedSchedule) -> schedules.Scenario:
        """Measures the stages, and what they hold, for a search."""
        return measure_scenario(
            runner,
            functools.partial(self._make_state, runner, jax.random.key(0)),
            self.built,
            schedule,
            functools.partial(self._plan_memory, runner.chunk_size, runner.chunk_size),
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
            optimizer_state=self._init_optimizer_state(runner, variables, None),
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
        return self._init_optimizer_state(self.prepare(), variables, outputs)

    def _init_optimizer_state(
        self, runner: Runner[Any], variables: Mapping[str, Any], outputs: Sequence[Any] | None
    ) -> Any:
        updates = self.updates
        if updates is None or (updates.init_needs_outputs and outputs is None):
            return None
        placed = runner.placement.place_variables(variables)
        return runner.init_optimizer_state(placed, dict(enumerate(outputs or ())))

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
                lambda: self._init_optimizer_state(runner, variables, None),
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
        step = StepOnItsWay(self.prepare().describe_start, self.traced, take)
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

        def replay(elements: Sequence[Any], visit: Callable[[Visit], None] | None = None) -> Progress:
            """Computes the step op by op."""
            if leaves is not None:
                elements = [self.place_element(own) for own in leaves]
            single: PlanRunner = runner.make_single()
            accumulators = single.make_accumulators(self.built.accumulator_dtypes)
            return op_by_op.compute(
                runner,
                RunState(state, accumulators),
                Request(input_leaves, every, limit=every, total=every),
                list(map(self._resolve, elements)),
                OpByOp(single.maker.layout, self.collecting.sources, has_nan_checks),
                visit,
            )

        every = self.updated_every(num_micro_batches)
        with jax.debug_nans(False), jax.disable_jit(False):
            if is_op_by_op:
                if self.uses_replicas:
                    raise RuntimeError(
                        "jax.disable_jit: stages compute with other replicas, which only run together. "
                        "Leave it out, or debug with num_replicas=1."
                    )
                number = every * self._num_replicas
                taken = gather(take, number, number) if leaves is None else []
                progress = replay(taken, self._make_caller(inputs, int(state.update_count)))
                self._look_at_checks(progress)
                self._accumulators = self._placed = None
                return dataclasses.replace(progress, state=RunState(progress.state.pipeline, {}))
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
            if not self.uses_replicas:
                replay(kept)
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
    def places_with_marks(self) -> list[str]:
        """The names, in errors, of the stages that mark values to keep in recomputation."""
        return [stage.place for stage in self.traced.stages if has_marks(stage.flat)]

    @property
    def uses_replicas(self) -> bool:
        """Whether a stage computes with other replicas, or asks which one it is in."""
        return any(uses_replicas(stage.flat) for stage in self.traced.stages)

    @property
    def takes_elements(self) -> bool:
        """Whether this process supplies micro-batches; with several processes, some do not."""
        return self.prepare().takes_elements

    @property
    def waits_for_python(self) -> bool:
        """Whether the programs call Python functions on the host."""
        return self.prepare().waits_for_python

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

    def introduce(self, name: str) -> None:
        """Tells the watcher, if there is one, that this pipeline is about to run.

        Args:
          name: the name that people know it by.
        """
        if (watcher := watching.current()) is not None:
            watcher.introduce(self.prepare(), self, name)

    def num_fetched(self, num_updates: int, num_micro_batches: int | None = None) -> int:
        """The least number of micro-batches to fetch ahead; `accumulate` takes no more at once.

        Args:
          num_updates: the number of weight updates to do.
          num_micro_batches: as for `step`.
        """
        every = self.updated_every(num_micro_batches)
        return self.prepare().num_fetched(num_updates * every, every)

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


def _check_targets(traced: TracedPipeline, updates: Updates | None) -> None:
    """Raises if something is enqueued for another target than those that a step serves."""
    entries = (*traced.enqueued, *(() if updates is None else updates.enqueued))
    for entry in entries:
        if not isinstance(entry.target, Metric | UserChecks):
            raise ValueError(
                f"Pipeline.step: something is enqueued to {entry.target!r}, which is for sessions. Return "
                "the value from the last stage, or report it with engine.metric."
            )
