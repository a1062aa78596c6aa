"""The arguments of a pipeline besides its stages."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax

from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.offloading import Offload, OffloadName
from ipu_pipeline.engine.devices.sharding import Shard, ShardName
from ipu_pipeline.engine.option_checks import check_fields
from ipu_pipeline.engine.planning.chunking import Chunking
from ipu_pipeline.engine.programs.accumulation import Reduction, ReductionName
from ipu_pipeline.engine.programs.gradient_maps import GradientMap, GradientTarget
from ipu_pipeline.engine.programs.recomputation import Recomputation, RecomputationName
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.tracing import frames, stage_lists
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.tensor_parallel import TensorParallel
from ipu_pipeline.engine.updates import optimizer_tracing
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.ground.names import find_near
from ipu_pipeline.ground.shapes import describe_structure

__all__ = ["PipelineOptions", "check_positive", "make_options"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineOptions:
    """The keyword arguments of `Pipeline`, checked as far as possible without the stages.

    Example:
      >>> engine.PipelineOptions(num_micro_batches=4, schedule="no_such_schedule")
      Traceback (most recent call last):
          ...
      ValueError: schedule must be ...

    Attributes:
      num_micro_batches: micro-batches per step, at least 1. None: each step is given the number, and a
        new number does not compile again.
      parameters: a pytree of arrays for each stage, which its function takes before its inputs,
        `stage(parameters, *inputs)`; as for `Stage`. None: the stages are as they are given.
      loss: takes what the last stage returns, returns a scalar; goes with `optimizer`. None: the last stage
        returns the loss. Without an optimizer the pipeline only runs forwards.
      max_shapes: how many different shapes micro-batches may have; the pipeline has programs for each of
        them, made when the first one comes. Structure and dtypes are those of the first micro-batch. All
        share one state, so variables must not depend on shapes. With several processes it is 1.
      shapes: micro-batches, or their shapes and dtypes, for which the programs are compiled with those of
        the first one, in `compile` or the first step, and not when they come.
      loss_weight: None, or a function that takes what the last stage returns, as `loss` does, and returns
        the number of items that this loss is a sum over, such as tokens that are not padding: a scalar, an
        integer or floating-point number. The gradients of a weight update are then those of the losses'
        sum divided by the sum of all its micro-batches' weights, in all replicas, whatever the reduction:
        those of the mean over all items, as of one large batch. If that sum is 0, they are 0, and the
        optimizer updates with these. `StepOutputs.losses` are the losses as they are, not divided. Not with
        `gradient_map`.
      optimizer: an Optax transformation; or a function of what the last stage returned for the last
        micro-batch (for the state at the start: the first). The function returns a transformation, or a
        pair of a transformation and a dict of extra arguments for its `update`.
      schedule: a name of `schedules.named_schedules`, or that of another library ("1f1b"), in any case.
        "interleaved" is 1F1B; Megatron's interleaved schedule is "looped" or "interleaved_1f1b". Or a
        function like `schedules.grouped`; or the path of a CSV file, see `schedules.read_csv`, which is
        read at once. It becomes a name of `named_schedules` or a function.
      device_mapping: the IPU of each stage, a number from 0; a list of numbers for parallel stages. By
        default each stage has its own.
      devices: the JAX device of each IPU; by default the first of `jax.devices()`.
      reduction: "mean", "running_mean" or "sum" of the gradients over the micro-batches.
      donate: whether `step` may destroy the state that it is given. False makes it a pure function.
      check_nans: whether each step is waited for, and a nan in its results is a FloatingPointError that
        names the operation, its line, the stage and the micro-batch; the state stays as it was. JAX's
        `jax_debug_nans` does the same.
      trained: full names of the variables to train, or a function that returns them: it is given the
        `variables`, once the stages have been traced. None: all trainable ones.
      program_names: the names of the program that the pipeline is part of; by default its own.
      captures: collects traced values from outside that the stages and the optimizer may use. They are
        further inputs of the pipeline, after those that are given. By default none may be used.
      gradient_map: returns, once the stages have been traced, None or a function of a gradient and its
        variable; it is applied to each micro-batch's gradients, before accumulation.
      gradient_targets: returns, once the stages have been traced, the targets that get each micro-batch's
        gradients (see `GradientTarget`).
      execution_phases: which stages run as one phase, and what leaves the devices from phase to phase; with
        the schedule "sequential" and in one process only. None: there are no phases.
      recompute: "auto", "recompute_then_backpropagate" or "recompute_and_backpropagate_interleaved"
        (see `Recomputation`). None: stages keep what their backward needs.
      offload: any of "weight_update_variables", "activations", "gradient_accumulation_buffers" and
        "weights" (see `Offload`), which then lie in host memory while no program uses them.
      accumulator_dtype: of the gradients' sums or means: None for the variable's dtype, a dtype, or a
        function from a variable (`VariableSpec`, with `name`, `shape`, `dtype`) to one of these.
      num_serialized: the number of micro-batches that a stage handles, one after another, before the next
        stage starts. With k, a step has `num_micro_batches` times k of them. Above 1 only with the schedule
        "sequential" and all stages on one device.
      collect_outputs: False leaves what the last stage returns out of `StepOutputs`, which saves
        memory. A function, from these outputs as a pytree of `jax.ShapeDtypeStruct`s to one boolean per
        leaf, leaves out leaves with False; `StepOutputs.outputs` then has lists of the other leaves.
      collect_losses: False leaves losses out of `StepOutputs`.
      sum_collected: whether what is collected is summed over the micro-batches of a step, as they
        finish. `StepOutputs` then has one entry, the sums.
      sum_dtype: of sums: None for the value's dtype, a dtype, or a function from the value's
        `jax.ShapeDtypeStruct` (of one micro-batch) to one of these. Booleans need a dtype, and
        floating-point numbers are not summed as integers.
      block_bytes: with all stages on one device, how much of it the micro-batches of one call, and their
        outputs, may take.
      forward_options: per stage, XLA's options for its forward program, by name, as for the
        `compiler_options` of `jax.jit`. The last stage's forward and backward are one program, which
        gets the options of both; with all stages on one device everything is one, which gets all.
      backward_options: per stage, XLA's options for its backward program; only with an optimizer.
      update_options: XLA's options for the programs of the weight update; only with an optimizer.
      option_names: what errors call these three arguments and `gradient_map`, by their names here.
      dispatch_plan: over several devices, how many micro-batches a program handles. None: chosen so that
        a step is short, for the schedule "grouped" (see `Pipeline.dispatch_plan`). With all stages on one
        device everything is one program, and a plan is an error.
      num_replicas: the number of copies of the pipeline that run at the same time, each with its own
        micro-batches and devices: micro-batch k of replica r is number k * num_replicas + r of what `step`
        is given, and IPU i of replica r is device r * (IPUs of a replica) + i. Gradients, accumulated in
        each, are averaged over the replicas once per weight update. So are floating-point variables that
        stages assign (see `joins_assigned`). Of other variables, and of outputs that the optimizer reads,
        the first replica's values count. Values that are collected have a leading axis of size num_replicas
        if that is above 1. Random keys differ between replicas. Not with `num_serialized` above 1.
      num_turns: into how many turns the replicas are divided, a divisor of their number. With k there are
        devices for `num_replicas` / k of them. These run at the same time, and then the next ones on the
        same devices; a weight update follows the last turn. Up to rounding the numbers are those of one
        turn, and a step takes k times as long. It is for a job that has lost some of its devices. Not with
        stages that compute with other replicas, with micro-batches of several shapes, or with values of
        variables that are each replica's own (`joins_assigned`).
      joins_assigned: False leaves each replica its own values of variables that stages assign, from update
        to update. Reading the state's arrays then gives the first replica's values; writing them gives the
        new values to all replicas.
      gathers_outputs: with replicas in several processes, whether what all of them collect comes to the
        process of the first one. False leaves each process its own replicas' part, with an axis of their
        number if that is above 1; each replica must then be in one process.
      shard: any of "optimizer_state" and "weights" (see `Shard`), of which each replica then has a part, as
        far as sizes can be divided by the number of replicas.
      tensor_parallel: how many devices compute each stage together, and what they divide. IPU i of replica
        r then has `size` devices, from number (r * (IPUs of a replica) + i) * size on. What goes from stage
        to stage is whole on each of them. Not with `num_serialized` above 1. None: one device.
      max_chunked_bytes: the chosen dispatch plan may not make a stage hold more than this between forwards
        and backwards by handling several micro-batches at once.
      post_validation: whether IPUs update with a guess of what joins them, such as whether gradients are
        clipped by their global norm, and go on; an update that turns out wrong is done again, so that the
        results are the same. Between the updates of one `run` only; `step` warns. Variables, optimizer
        state, gradients and a step's micro-batches are then kept for one step longer. See
        `updates.guessing`.
    """

    num_micro_batches: int | None
    parameters: Sequence[Any] | None = None
    max_shapes: int = 8
    shapes: Sequence[Any] = ()
    loss: Callable[..., Any] | None = None
    loss_weight: Callable[..., Any] | None = None
    optimizer: optimizer_tracing.Optimizer | None = None
    schedule: schedules.Schedule = "grouped"
    device_mapping: stage_lists.Mapping | None = None
    devices: Sequence[Any] | None = None
    reduction: ReductionName | Reduction = "mean"
    donate: bool = False
    trained: Collection[str] | Callable[[Mapping[str, VariableSpec]], Collection[str] | None] | None = None
    program_names: frames.ProgramNames = field(default_factory=frames.ProgramNames)
    captures: Captures = field(default_factory=Captures)
    gradient_map: Callable[[], GradientMap | None] | None = None
    gradient_targets: Callable[[], Sequence[GradientTarget]] | None = None
    execution_phases: ExecutionPhases | None = None
    recompute: RecomputationName | Recomputation | None = None
    offload: Collection[OffloadName | Offload] = ()
    accumulator_dtype: Any = None
    num_serialized: int = 1
    num_replicas: int = 1
    num_turns: int = 1
    joins_assigned: bool = True
    gathers_outputs: bool = True
    shard: Collection[ShardName | Shard] = ()
    tensor_parallel: TensorParallel | None = None
    collect_outputs: bool | Callable[[Any], Sequence[bool]] = True
    collect_losses: bool = True
    check_nans: bool = False
    sum_collected: bool = False
    sum_dtype: Any = None
    block_bytes: int = 64 * 2**20
    forward_options: Sequence[Options] | None = None
    backward_options: Sequence[Options] | None = None
    update_options: Options | None = None
    option_names: Mapping[str, str] = field(default_factory=dict)
    dispatch_plan: Chunking | None = None
    max_chunked_bytes: int = 32 * 2**20
    post_validation: bool = False

    def __post_init__(self) -> None:
        """Checks the fields that can be checked alone.

        Raises:
          TypeError: the schedule is of another type, or a function that does not take its arguments.
          ValueError: a field is not usable.
        """
        object.__setattr__(self, "schedule", schedules.find_schedule(self.schedule))
        check_fields(vars(self))
        if self.num_micro_batches is not None:
            check_positive("num_micro_batches", self.num_micro_batches)
        check_positive("max_shapes", self.max_shapes)
        if isinstance(self.shapes, dict) or len(self.shapes) > self.max_shapes:
            raise ValueError(
                "shapes must be a list of micro-batches, or of their shapes and dtypes "
                f"(jax.ShapeDtypeStruct), of at most max_shapes, {self.max_shapes}; got "
                f"{f'{len(self.shapes)} of them' if not isinstance(self.shapes, dict) else 'a dict'}."
            )
        check_positive("num_serialized", self.num_serialized)
        self.check_replicas(self.num_replicas, self.num_turns)
        if self.tensor_parallel is not None and not isinstance(self.tensor_parallel, TensorParallel):
            raise ValueError(
                f"tensor_parallel must be a TensorParallel or None; got {self.tensor_parallel!r}."
            )
        if self.num_devices_per_ipu > 1 and self.num_serialized > 1:
            raise ValueError(
                "num_serialized must be 1 with several devices for each IPU; got "
                f"{self.num_serialized} and tensor_parallel.size {self.num_devices_per_ipu}."
            )
        _check_optimizer(self.optimizer)
        if self.loss is not None and self.optimizer is None:
            raise ValueError("Pass an optimizer with loss to train, or neither for inference only.")
        if self.loss is None and self.optimizer is not None:
            object.__setattr__(self, "loss", _last_stage_loss)
        if self.loss_weight is not None and self.loss is None:
            raise ValueError("loss_weight says what loss is divided by, so it needs loss and optimizer.")
        if self.loss_weight is not None and not callable(self.loss_weight):
            raise TypeError(
                "loss_weight must be a function of what the last stage returns, or None; got "
                f"{self.loss_weight!r}."
            )

    def check_replicas(self, num_replicas: Any, num_turns: Any) -> None:
        """Raises a ValueError if a pipeline cannot have these numbers of replicas, and of their turns."""
        check_positive("num_replicas", num_replicas)
        check_positive("num_turns", num_turns)
        if num_replicas > 1 and self.num_serialized > 1:
            raise ValueError(
                f"num_replicas must be 1 with num_serialized above 1; got {num_replicas} and "
                f"{self.num_serialized}. A replica takes its micro-batches one by one."
            )
        if num_replicas % num_turns:
            raise ValueError(
                f"num_turns must be a divisor of num_replicas, {num_replicas}, as each turn has equally "
                f"many; got {num_turns}."
            )
        if num_turns > 1 and not self.joins_assigned:
            raise ValueError(
                "joins_assigned must be True where replicas take turns, which have one value of each "
                f"variable; num_turns is {num_turns}."
            )

    @property
    def num_devices_per_ipu(self) -> int:
        """The number of devices that compute each stage together."""
        return 1 if self.tensor_parallel is None else self.tensor_parallel.size


def make_options(caller: str, *arguments: Any, **options: Any) -> PipelineOptions:
    """Makes the options of a pipeline from what a function, `caller`, was given.

    Raises:
      TypeError: some are given by position, there is no such option, or `num_micro_batches` is missing.
    """
    names = [known.name for known in fields(PipelineOptions)]
    if arguments:
        raise TypeError(f"{caller}: options are given by their names; got {arguments[0]!r} without one.")
    for name in options:
        if name not in names:
            raise TypeError(f"{caller}: there is no option {name!r}.{find_near(name, names)}")
    if "num_micro_batches" not in options:
        raise TypeError(f"{caller}: num_micro_batches must be given.")
    return PipelineOptions(**options)


def _last_stage_loss(*values: Any, **others: Any) -> Any:
    if len(values) != 1 or others:
        raise TypeError(
            "loss is not given, so the last stage must return the loss alone, a scalar. It returns "
            f"{describe_structure(jax.tree.structure(others or values))}. Give loss, a function of these."
        )
    return values[0]


def _check_optimizer(optimizer: Any) -> None:
    """Raises a TypeError for what makes an optimizer or a part of one: a function of Optax, or a class.

    As a function of the user's, it would get what the last stage returns: a loss as its learning rate.
    """
    is_function = isinstance(optimizer, types.FunctionType) and optimizer.__module__.startswith("optax.")
    if is_function or isinstance(optimizer, type):
        kind = "function" if is_function else "class"
        raise TypeError(
            f"optimizer must be an optax.GradientTransformation; got the {kind} {optimizer.__qualname__}. "
            f"Call it, for example {optimizer.__name__}(1e-3)."
        )


def check_positive(argument: str, value: Any) -> None:
    """Raises a ValueError if an argument is not an integer of at least 1."""
    if not is_integer(value, 1):
        raise ValueError(f"{argument} must be an integer of at least 1; got {value!r}.")
