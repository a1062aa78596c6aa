"""The options of a pipeline: its arguments besides the stages, checked each and against each other."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.devices.xla_settings import Options
from ipu_pipeline.engine.option_types import (
    Chunking,
    Offload,
    OffloadName,
    Recomputation,
    RecomputationName,
    Reduction,
    ReductionName,
    Shard,
    ShardName,
)
from ipu_pipeline.engine.programs.accumulation import GradientMap, GradientTarget
from ipu_pipeline.engine.schedules.clusters import ExecutionPhases
from ipu_pipeline.engine.tracing import frames, stage_lists
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stage_meshes import TensorParallel
from ipu_pipeline.engine.updates import optimizer_tracing
from ipu_pipeline.ground.checks import check_positive, find_near, is_integer, require
from ipu_pipeline.ground.pytrees import describe_structure

# Checks.

Fields: TypeAlias = "Mapping[str, Any]"


def check_fields(fields: Fields) -> None:
    """Checks what can be seen of each option alone."""
    for names, is_usable, expected in _RULES:
        for name in names.split():
            require(is_usable(fields[name]), f"{name} must be {expected}", fields[name])


def find_unused(fields: Fields) -> Iterator[str]:
    """Finds the options that were given, and have no effect beside the others.

    Limits are not among them, nor what is for several replicas, as a pipeline may get these later.

    Yields:
      A sentence for each.
    """
    if fields["optimizer"] is None:
        for name in _find_only_for_training(fields):
            yield f"{name} has no effect: the pipeline only runs forwards."
    if fields["sum_collected"] and fields["loss"] is None and fields["collect_outputs"] is False:
        yield "sum_collected has no effect: neither outputs nor losses are collected."
    elif fields["sum_dtype"] is not None and not fields["sum_collected"]:
        yield "sum_dtype has no effect without sum_collected."


def _find_only_for_training(fields: Fields) -> Iterator[str]:
    """The options that were given, and that only training has a use for."""
    for name in ("trained", "gradient_map", "accumulator_dtype", "recompute"):
        if fields[name] is not None:
            yield name
    if Reduction(fields["reduction"]) is not Reduction.MEAN:
        yield "reduction"
    for_inference = {Offload.WEIGHTS}
    if fields["execution_phases"] is not None:
        for_inference.add(Offload.ACTIVATIONS)  # what goes from phase to phase
    for offload in map(Offload, fields["offload"]):
        if offload not in for_inference:
            yield f'"{offload.value}" in offload'
    if Shard.OPTIMIZER_STATE in map(Shard, fields["shard"]):
        yield f'"{Shard.OPTIMIZER_STATE.value}" in shard'


def _is_boolean(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


def _is_late(value: Any, *arguments: None) -> bool:
    """Whether a value is None, or a function that can be called without arguments, or with so many."""
    if value is None or not callable(value):
        return value is None
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        return True
    return True


def _is_names(value: Any) -> bool:
    return _is_late(value, None) or (isinstance(value, Collection) and not isinstance(value, str))


def _is_devices(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, Collection) and all(isinstance(device, jax.Device) for device in value)


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("check_nans donate joins_assigned sum_collected", _is_boolean, "True or False"),
    (
        "collect_outputs",
        lambda value: _is_boolean(value) or callable(value),
        "True, False, or a function of the outputs' shapes and dtypes",
    ),
    ("loss", _is_function, "a function of what the last stage returns, or None"),
    ("trained", _is_names, "a collection of full names, a function from the variables to one, or None"),
    (
        "gradient_map",
        _is_late,
        "a function without arguments that returns the map, as in gradient_map=lambda: halve, or None",
    ),
    ("devices", _is_devices, "a list of devices, as jax.devices() returns it, or None"),
    (
        "execution_phases",
        lambda value: value is None or isinstance(value, ExecutionPhases),
        "an engine.ExecutionPhases, or None",
    ),
    ("block_bytes max_chunked_bytes", lambda value: is_integer(value, 0), "an integer of at least 0"),
)


# The options.


@dataclass(frozen=True, kw_only=True, eq=False)
class Hooks:
    """What interfaces that are built on the engine set of a pipeline, besides its options."""

    # the names of options in errors, of accumulator_dtype, sum_dtype, gradient_map and XLA's options
    option_names: Mapping[str, str] = field(default_factory=dict)
    # what a program's variables, layers and keys are named so far; pipelines with the same one give
    # automatically named layers different names
    program_names: frames.ProgramNames = field(default_factory=frames.ProgramNames)
    # collects outer traced values, which become further inputs of the pipeline; else they are an error
    captures: Captures = field(default_factory=Captures)
    # called once the stages are traced; returns the targets of each micro-batch's gradients
    gradient_targets: Callable[[], Sequence[GradientTarget]] | None = None
    collect_losses: bool = True  # False: `StepOutputs.losses` are empty
    # with replicas in several processes: whether the first replica's process gets all results; else each
    # keeps those of its own replicas, and each replica must be in one process
    gathers_outputs: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineOptions:
    """The keyword arguments of `Pipeline`, of which only `num_micro_batches` is required.

    They stand in five groups: training (`num_micro_batches` to `shapes`), placement and order (`schedule`
    to `num_serialized`), memory (`donate` to `execution_phases`), several devices per stage (`num_replicas`
    to `tensor_parallel`), and results and compiling (`collect_outputs` to `update_options`). They are
    checked before anything is traced or compiled, as far as that is possible without the stages. Options of
    training warn if the pipeline only runs forwards.

    Example:
      >>> engine.PipelineOptions(num_micro_batches=4, schedule="no_such_schedule")
      Traceback (most recent call last):
          ...
      ValueError: schedule must be ...

    Attributes:
      num_micro_batches: micro-batches per step, at least 1. A training step does one weight update from all
        their gradients (gradient accumulation). With more of them devices wait less, because the pipeline
        fills and drains once per step; but the effective batch grows, or each micro-batch shrinks. None:
        each step is given its number, `step(state, micro_batches, num_micro_batches=n)`, and a new number
        does not compile again. Then no dispatch plan is chosen, and `Pipeline.compile` is not available.
      parameters: a pytree of arrays for each stage, which its function takes before its inputs,
        `stage(parameters, *inputs)`; or a function from a random key to such a pytree; or its shapes, for a
        pipeline that runs on another one's state. None: stages are `Stage`s, or use `get_variable`.
      loss: a function from the last stage's result to a scalar. It runs in the last stage's program. None:
        the last stage returns the loss. Only with an optimizer.
      loss_weight: a function from the last stage's result, like `loss`, to the number of items that this
        loss is a sum over, such as tokens that are not padding: a scalar, an integer or floating-point
        number. A weight update then has the gradients of the mean over all items, as with one large batch:
        of the sum of the losses divided by the sum of the weights, over all micro-batches and replicas,
        whatever the reduction. If the sum of the weights is 0, the gradients are 0, and the optimizer
        updates with these. `StepOutputs.losses` are not divided. None: each micro-batch counts the same.
        Not with `gradient_map`.
      optimizer: an Optax transformation. It is traced once, over the trained variables of all stages as a
        dict by full name. Each device updates its own variables; a global norm spans all of them. Or a
        function of the last stage's result for the last micro-batch of the step (in the first replica; for
        the initial state, for the first micro-batch), which returns a transformation, or a pair of one and
        a dict of extra arguments for its `update`: for `optax.contrib.reduce_on_plateau`, which needs the
        loss. If the initial optimizer state depends on these outputs, it is None until the first step.
        None: the pipeline only runs forwards.
      reduction: how the gradients of the micro-batches are combined. "mean": as in one large batch whose
        loss is a mean. "running_mean": the same up to rounding, without large sums, for accumulators of 16
        bits. "sum": the more micro-batches, the lower the learning rate has to be.
      accumulator_dtype: the dtype in which gradients are accumulated: None for the variable's dtype, a
        dtype, or a function from a variable (`VariableSpec`, with `name`, `shape`, `dtype`) to one of
        these. float32 keeps small gradients of bfloat16 variables from being rounded away; bfloat16 halves
        the accumulators of float32 variables, and loses small gradients. The optimizer, with its state,
        uses the wider of the two dtypes.
      trained: full names of the variables to train, or a function that returns them: it is given the
        `variables`, once the stages have been traced. The others have no gradient, accumulator or optimizer
        state, and stages before the first trained variable have no backward. None: all trainable ones.
      gradient_map: a function without arguments, called once the stages have been traced, that returns a
        function of a gradient and its variable, or None. That function is applied to each micro-batch's
        gradient of each variable before accumulation, and keeps its shape and dtype; it may use no other
        traced values. Use it for changes that must be made per micro-batch, such as clipping: changes once
        per update are cheaper in the optimizer. Parallel stages on several devices then cannot share a
        variable.
      max_shapes: the most different shapes of micro-batches, such as lengths of texts. The pipeline has
        programs for each shape, compiled when its first micro-batch comes. Structure and dtypes are those
        of the first micro-batch. All share one state, so variables must not depend on shapes. 1 with
        several processes.
      shapes: micro-batches, or their shapes and dtypes (`jax.ShapeDtypeStruct`), whose programs are
        compiled together with the first micro-batch's, in `compile` or the first step, instead of when the
        first such micro-batch comes.
      schedule: the order of forwards and backwards on each device: a name of `schedules.named_schedules`,
        or the name in another library ("1f1b"), in any case; a function like `schedules.grouped`; the path
        of a CSV file, see `schedules.read_csv`, which is read at once; or a `SearchedSchedule`. Note that
        "interleaved" is 1F1B, and Megatron's interleaved schedule is "looped" or "interleaved_1f1b".
        Results do not depend on it. `Pipeline.options` has it as a name of `named_schedules` or a function.
      device_mapping: the number of each stage's device, from 0; a list of numbers for parallel stages.
        Stages on one device take turns. Numbers that no stage has leave a device idle. With all stages on
        one device, without replicas, tensor parallelism and phases, a step is one compiled program, and the
        schedule has no effect. None: each stage has its own device.
      devices: the JAX devices to use. With n device numbers in the mapping, device i of replica r is entry
        `r * n + i`; with `tensor_parallel` of size T, the T entries from `(r * n + i) * T` on. A device may
        occur several times. None: the first of `jax.devices()`.
      dispatch_plan: on several devices, the number of micro-batches that a program handles, one after
        another. `Chunking(k)`, where k divides `num_micro_batches`, starts k times fewer programs, which
        pays where these are short; but stages hold k times as many micro-batches, and the pipeline takes
        longer to fill. `Chunking()` starts a program per micro-batch, and compiles fastest. None: chosen
        for the schedule "grouped" by simulated and timed steps, else 1 (see `Pipeline.dispatch_plan`). With
        all stages on one device a plan is an error.
      max_chunked_bytes: a chosen dispatch plan does not make any stage hold more bytes than this
        between forwards and backwards by handling several micro-batches at once. Default: 32 MiB. 0 chooses
        one micro-batch per program. It has no effect where no plan is chosen: with a plan of your own,
        another schedule than "grouped", `recompute`, `offload`, or `num_micro_batches=None`.
      block_bytes: with all stages on one device, the most bytes that the micro-batches of one call of the
        program, and their outputs, may take (default: 64 MiB). Lower it if
        large micro-batches leave too little memory: more calls follow. 0 gives each micro-batch a call.
      num_serialized: the number of micro-batches that a stage handles, one after another, before the next
        stage starts. With k, a step has `num_micro_batches` times k of them. It is for one device with
        `offload=["weights"]`, which brings weights there once for k micro-batches; stages keep k times as
        much. Above 1 only with the schedule "sequential" and all stages on one device, without replicas and
        tensor parallelism.
      donate: whether `step` reuses the memory of the state that it is given, so that old and new weights
        never exist at the same time. The old state must not be used afterwards, and arrays given to
        `with_parameters` may be destroyed with it. Recommended in a training loop that only uses the newest
        state. Without training, only variables that stages assign are destroyed, and only with all stages
        on one device. False: `step` is a pure function, and any state can be used again.
      recompute: the values that a stage keeps of a micro-batch between forward and backward (activation
        checkpointing). None: all values that the backward needs. "recompute_then_backpropagate": the
        stage's inputs; the backward starts by repeating the forward.
        "recompute_and_backpropagate_interleaved", or "auto": also the values marked by
        `recomputation_checkpoint`; the backward goes from mark to mark. Both cost a second
        forward of all stages but the last. `jax.checkpoint` within a stage works in addition. See
        `Recomputation`.
      offload: the arrays that are in host memory while no program uses them: any of
        "weight_update_variables" (the optimizer's state), "activations" (what stages keep for their
        backward), "gradient_accumulation_buffers" and "weights" (see `Offload`). Programs that use these
        arrays wait for transfers: the optimizer's state, which one program per step uses, costs least.
        Devices need JAX's memory kind `pinned_host`. Without training only "weights" has an effect, and
        "activations" in phases.
      execution_phases: which entries of `stages` run as one phase, for a model that does not fit its
        devices: a micro-batch goes through all phases before the next one begins, one phase computes at a
        time, and what is offloaded leaves the devices between phases. Only with the schedule "sequential",
        `num_serialized` 1, and all devices in one process. None: there are no phases.
      num_replicas: the number of copies of the pipeline, each with its own devices and micro-batches (data
        parallelism): micro-batch k of replica r is number `k * num_replicas + r` of what `step` is given.
        Gradients, accumulated in each, are averaged over the replicas once per weight update. So are
        floating-point variables that stages assign; of others, and of outputs that the optimizer reads, the
        first replica's values count. Values that are collected have a leading axis of size `num_replicas`
        if that is above 1. Random keys differ between replicas. Not with `num_serialized` above 1.
      shard: the arrays that are divided over the replicas, each keeping a part: any of "optimizer_state"
        (ZeRO-1) and "weights", the trainable variables that only one stage has (see `Shard`). An array is
        divided along the first axis whose size is a multiple of the number of replicas; others stay whole.
        Weights are gathered for each program that reads them. Gradients are accumulated whole in each
        replica. With one replica it warns.
      joins_assigned: whether variables that stages assign are made equal in all replicas at the end of each
        step: floating-point ones are averaged, others get the first replica's value. True is for
        statistics. False keeps a value per replica, as caches need; reading the state's array then gives
        the first replica's values, and writing it sets all.
      tensor_parallel: a `TensorParallel`: the number of devices that compute each stage together, and the
        axes along which they divide its variables, for stages too large or too slow for one device. Values
        between stages are whole on each device. Not with `num_serialized` above 1, nor, with replicas, in
        stages that compute with other replicas. None: one device.
      collect_outputs: whether `StepOutputs.outputs` has the last stage's results, which stay on the device
        until they are read or dropped. A function from these results, as a pytree of
        `jax.ShapeDtypeStruct`s, to one boolean per leaf leaves out leaves with False; `outputs` then has
        lists of the other leaves.
      sum_collected: whether collected results are summed over a step's micro-batches as these finish, so
        that memory does not grow with their number. `StepOutputs` then has one entry, the sums (not
        means). For evaluation, let the last stage return counts.
      sum_dtype: the dtype of these sums: None for the value's dtype, a dtype, or a function from the
        value's `jax.ShapeDtypeStruct` (of one micro-batch) to one of these. Use float32 for bfloat16
        values. Booleans need a dtype, and floating-point numbers cannot be summed as integers.
      check_nans: whether a nan in a step's results is a FloatingPointError that names the operation, its
        line, the stage and the micro-batch; the state stays as it was. JAX's `jax_debug_nans` does the
        same. Each step is then waited for, and with `donate` works on a copy of the state. All devices must
        be in one process.
      forward_options: for each stage a dict of XLA's options for its forward program, as for the
        `compiler_options` of `jax.jit`; stages after the last entry have none. The last stage's forward and
        backward are one program, which gets the options of both; with all stages on one device everything
        is one program, which gets all. Options that contradict each other are an error.
      backward_options: the same for the backward programs, both of them where the schedule splits
        backwards. Only with an optimizer.
      update_options: a dict of XLA's options for the programs of the weight update. Only with an optimizer.
      hooks: for interfaces built on the engine, none of them for users; see `engine.fronts`.
    """

    num_micro_batches: int | None
    parameters: Sequence[Any] | None = None
    loss: Callable[..., Any] | None = None
    loss_weight: Callable[..., Any] | None = None
    optimizer: optimizer_tracing.Optimizer | None = None
    reduction: ReductionName | Reduction = "mean"
    accumulator_dtype: Any = None
    trained: Collection[str] | Callable[[Mapping[str, VariableSpec]], Collection[str] | None] | None = None
    gradient_map: Callable[[], GradientMap | None] | None = None
    max_shapes: int = 8
    shapes: Sequence[Any] = ()
    schedule: schedules.Schedule = "grouped"
    device_mapping: stage_lists.Mapping | None = None
    devices: Sequence[Any] | None = None
    dispatch_plan: Chunking | None = None
    max_chunked_bytes: int = 32 * 2**20
    block_bytes: int = 64 * 2**20
    num_serialized: int = 1
    donate: bool = False
    recompute: RecomputationName | Recomputation | None = None
    offload: Collection[OffloadName | Offload] = ()
    execution_phases: ExecutionPhases | None = None
    num_replicas: int = 1
    shard: Collection[ShardName | Shard] = ()
    joins_assigned: bool = True
    tensor_parallel: TensorParallel | None = None
    collect_outputs: bool | Callable[[Any], Sequence[bool]] = True
    sum_collected: bool = False
    sum_dtype: Any = None
    check_nans: bool = False
    forward_options: Sequence[Options] | None = None
    backward_options: Sequence[Options] | None = None
    update_options: Options | None = None
    hooks: Hooks = field(default_factory=Hooks)

    def __post_init__(self) -> None:
        """Checks the fields that can be checked alone."""
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
        self.check_replicas(self.num_replicas)
        if self.tensor_parallel is not None and not isinstance(self.tensor_parallel, TensorParallel):
            raise ValueError(
                f"tensor_parallel must be a TensorParallel or None; got {self.tensor_parallel!r}."
            )
        if self.num_devices_per_ipu > 1 and self.num_serialized > 1:
            raise ValueError(
                "num_serialized must be 1 with several devices for each stage; got "
                f"{self.num_serialized} and tensor_parallel.size {self.num_devices_per_ipu}."
            )
        _check_optimizer(self.optimizer)
        if self.loss is not None and self.optimizer is None:
            raise ValueError("Pass an optimizer with loss to train, or neither for inference only.")
        if self.loss is None and self.optimizer is not None:
            object.__setattr__(self, "loss", _last_stage_loss)
        if self.loss_weight is not None and self.loss is None:
            raise ValueError("loss_weight says what loss is divided by, so it needs loss and optimizer.")
        rule = "loss_weight must be a function of what the last stage returns, or None"
        require(self.loss_weight is None or callable(self.loss_weight), rule, self.loss_weight, TypeError)

    def check_replicas(self, num_replicas: Any) -> None:
        """Raises a ValueError if a pipeline cannot have this number of replicas."""
        check_positive("num_replicas", num_replicas)
        if num_replicas > 1 and self.num_serialized > 1:
            raise ValueError(
                f"num_replicas must be 1 with num_serialized above 1; got {num_replicas} and "
                f"{self.num_serialized}. A replica takes its micro-batches one by one."
            )

    @property
    def num_devices_per_ipu(self) -> int:
        """The number of devices that compute each stage together."""
        return 1 if self.tensor_parallel is None else self.tensor_parallel.size


def make_options(caller: str, *arguments: Any, **options: Any) -> PipelineOptions:
    """Makes the options of a pipeline from what a function, `caller`, was given."""
    names = [option.name for option in fields(PipelineOptions)]
    if arguments:
        raise TypeError(f"{caller}: options are given by their names; got {arguments[0]!r} without one.")
    for name in options:
        if name not in names:
            raise TypeError(f"{caller}: there is no option {name!r}.{find_near(name, names)}")
    if "num_micro_batches" not in options:
        raise TypeError(f"{caller}: num_micro_batches must be given.")
    return PipelineOptions(**options)


def _last_stage_loss(*values: Any, **named: Any) -> Any:
    if len(values) != 1 or named:
        raise TypeError(
            "loss is not given, so the last stage must return the loss alone, a scalar. It returns "
            f"{describe_structure(jax.tree.structure(named or values))}. Give loss, a function of these."
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
