"""`pipeline`: a model cut into stages, run over several IPUs."""

from __future__ import annotations

import enum
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from ipu_pipeline.calls import PipelineCall, current_builder
from ipu_pipeline.engine import names
from ipu_pipeline.engine.differentiation import GradientMap
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedQueue
from ipu_pipeline.operations import Operation
from ipu_pipeline.optimizers import unwrap
from ipu_pipeline.placeholders import Placeholder, as_traced_inputs

__all__ = ["OptimizerFunctionOutput", "PipelineSchedule", "pipeline"]

OptimizerFunction: TypeAlias = "Callable[..., OptimizerFunctionOutput]"

_MAX_INT32 = 2**31 - 1


class PipelineSchedule(enum.Enum):
    """The order in which IPUs take forwards and backwards.

    Grouped: all IPUs run forwards together, then all backwards; stages of one kind overlap best, and
    the early stages hold most micro-batches. Interleaved: neighbours alternate, and about half as many
    micro-batches are held. Sequential: one micro-batch at a time, nothing overlaps, the least is held.
    """

    Grouped = "grouped"
    Interleaved = "interleaved"
    Sequential = "sequential"


@dataclass
class OptimizerFunctionOutput:
    """What an `optimizer_function` returns.

    Attributes:
      opt: an `optax.GradientTransformation`, or `optimizers.MapGradientOptimizer` around one.
      loss: a scalar.
      compute_gradients_args: not built yet.
      compute_gradients_kwargs: {"var_list": names} trains only those variables (full names).
      apply_gradients_args: not built yet.
      apply_gradients_kwargs: extra arguments of the optimizer's `update`.
    """

    opt: Any
    loss: Any
    compute_gradients_args: Sequence[Any] | None = None
    compute_gradients_kwargs: dict[str, Any] | None = None
    apply_gradients_args: Sequence[Any] | None = None
    apply_gradients_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("compute_gradients_args", "apply_gradients_args"):
            if getattr(self, name):
                raise NotImplementedError(
                    f"OptimizerFunctionOutput: {name} is not supported; use the keyword arguments."
                )
        unknown = set(self.compute_gradients_kwargs or ()) - {"var_list"}
        if unknown:
            raise ValueError(
                "OptimizerFunctionOutput: compute_gradients_kwargs may only have `var_list`; got "
                f"{', '.join(sorted(unknown))}."
            )
        unwrapped = unwrap(self.opt)
        if not isinstance(unwrapped.transformation, optax.GradientTransformation):
            raise TypeError(
                "OptimizerFunctionOutput: opt must be an optax.GradientTransformation, for example "
                f"optax.sgd(0.01); got {type(self.opt).__name__}."
            )
        if unwrapped.accumulates:
            raise ValueError(
                "OptimizerFunctionOutput: opt is a GradientAccumulationOptimizerV2, but a pipeline "
                "accumulates by itself. Give its inner optimizer, and set gradient_accumulation_count and "
                "reduction_method."
            )


def pipeline(
    computational_stages: Sequence[Callable[..., Any]],
    gradient_accumulation_count: int | None = None,
    gradient_accumulation_dtype: Any = None,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: Any = None,
    infeed_queue: IPUInfeedQueue | None = None,
    outfeed_queue: IPUOutfeedQueue | None = None,
    optimizer_function: OptimizerFunction | None = None,
    device_mapping: Sequence[int] | None = None,
    pipeline_schedule: PipelineSchedule | None = None,
    recomputation_mode: Any = None,
    forward_propagation_stages_poplar_options: Any = None,
    backward_propagation_stages_poplar_options: Any = None,
    weight_update_poplar_options: Any = None,
    offload_weight_update_variables: Any = None,
    replicated_optimizer_state_sharding: bool = False,
    offload_activations: Any = None,
    offload_gradient_accumulation_buffers: Any = None,
    replicated_weight_sharding: Any = None,
    offload_weights: Any = None,
    continuous_weight_updates: bool = False,
    outfeed_loss: bool = False,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: Any = None,
    outfeed_mask: Any = None,
    reduction_method: Any = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
) -> Operation:
    """Runs a model cut into stages, each on its IPU, and trains it if there is an optimizer.

    Arguments that are not described below are not built yet: another value than the default raises
    NotImplementedError.

    Args:
      computational_stages: the stages, Python functions. Each takes what the one before returns (a
        tuple or list as positional arguments, a dict as keyword arguments).
      gradient_accumulation_count: micro-batches per weight update, 1..2**31-1; required.
      repeat_count: how often the pipeline, with its weight update, runs in one `Session.run`.
      inputs: the first arguments of the first stage, arrays that stay the same during a run.
      infeed_queue: gives the first stage its other arguments, micro-batch by micro-batch.
      outfeed_queue: takes what the last stage returns, or the loss.
      optimizer_function: takes what the last stage returns, returns an `OptimizerFunctionOutput`. It is
        traced twice, for the loss in the last stage, and for the optimizer in the weight update, there
        on what the last stage returned for the last micro-batch. None: the pipeline only runs forwards.
      device_mapping: the IPU of each stage; by default each has its own, in order.
      pipeline_schedule: by default Grouped.
      outfeed_loss: whether the loss is enqueued, instead of what the last stage returns.
      reduction_method: SUM, MEAN or RUNNING_MEAN of the gradients over the micro-batches, or its name.
      name: optimizer state is kept under it; by default "Pipeline".

    Returns:
      An operation, to be returned from the compiled function.

    Raises:
      TypeError, ValueError: an argument is not usable, or the stages do not fit together.
      NotImplementedError: an argument is not built yet.
      RuntimeError: not called in a function that `ipu_compiler.compile` traces.
    """
    _refuse_unbuilt(locals())
    count = _check_count(gradient_accumulation_count)
    if optimizer_function is not None or reduction_method is not _DEFAULTS["reduction_method"]:
        reduction_method = GradientAccumulationReductionMethod.parse(reduction_method)
    _check_integer("repeat_count", repeat_count)
    pipeline_schedule = PipelineSchedule.Grouped if pipeline_schedule is None else pipeline_schedule
    _check_arguments(
        computational_stages, infeed_queue, outfeed_queue, optimizer_function, pipeline_schedule
    )
    device_mapping = _check_mapping(device_mapping, len(computational_stages))
    if outfeed_loss and optimizer_function is None:
        raise ValueError("An optimizer_function must be provided when outfeed_loss is True.")
    if outfeed_loss and outfeed_queue is None:
        raise ValueError("An outfeed_queue must be provided when outfeed_loss is True.")
    if optimizer_function is None and reduction_method is not _DEFAULTS["reduction_method"]:
        warnings.warn(
            "reduction_method will have no effect since this pipeline is in inference.", stacklevel=2
        )
    builder = current_builder()
    if builder is None:
        raise RuntimeError(
            "pipelining_ops.pipeline must be called in a function that ipu_compiler.compile traces, "
            "within an ipu_scope; here it is not placed on an IPU device."
        )
    if names.is_in_stage():
        raise RuntimeError(
            "pipelining_ops.pipeline was called within a computational stage; pipelines do not nest. Call "
            "it in the compiled function, or make its stages stages of the outer pipeline."
        )
    input_leaves, input_tree = as_traced_inputs(inputs)

    optimizer = None if optimizer_function is None else _Optimizer(optimizer_function)
    engine_pipeline = Pipeline(
        computational_stages,
        num_micro_batches=count,
        loss=None if optimizer is None else optimizer.loss,
        optimizer=None if optimizer is None else optimizer.transformation,
        schedule=pipeline_schedule.value,
        device_mapping=device_mapping,
        reduction=reduction_method.name.lower(),
        donate=True,
        trained=None if optimizer is None else optimizer.trained,
        program_names=builder.names,
        describe_capture=builder.describe_input,
        gradient_map=None if optimizer is None else optimizer.gradient_map,
        collect_outputs=outfeed_queue is not None and not outfeed_loss,
    )
    element = None if infeed_queue is None else infeed_queue.element
    input_avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in input_leaves]
    engine_pipeline.trace(element, *jax.tree.unflatten(input_tree, input_avals))
    call = PipelineCall(
        name=name or "Pipeline",
        pipeline=engine_pipeline,
        repeat_count=repeat_count,
        infeed_queue=infeed_queue,
        outfeed_queue=outfeed_queue,
        outfeeds_loss=outfeed_loss,
    )
    _check_outfeed(call)
    builder.add(call, input_leaves)
    return Operation(call.name)


_DEFAULTS = {
    parameter.name: parameter.default for parameter in inspect.signature(pipeline).parameters.values()
}
_NOT_BUILT = (
    "gradient_accumulation_dtype",
    "batch_serialization_iterations",
    "recomputation_mode",
    "forward_propagation_stages_poplar_options",
    "backward_propagation_stages_poplar_options",
    "weight_update_poplar_options",
    "offload_weight_update_variables",
    "replicated_optimizer_state_sharding",
    "offload_activations",
    "offload_gradient_accumulation_buffers",
    "replicated_weight_sharding",
    "offload_weights",
    "accumulate_outfeed",
    "accumulate_outfeed_dtype",
    "outfeed_mask",
)


class _Optimizer:
    """An `optimizer_function` as the engine takes it: a loss and a transformation."""

    def __init__(self, function: OptimizerFunction) -> None:
        self._function = function
        self._var_list: Sequence[str] | None = None
        self._gradient_map: GradientMap | None = None

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        output = self._call(*args, **kwargs)
        self._var_list = (output.compute_gradients_kwargs or {}).get("var_list")
        self._gradient_map = unwrap(output.opt).gradient_map
        return output.loss

    def transformation(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        # The loss is traced again and dropped, so its variables may be asked for again.
        frame = names.Frame(names.ProgramNames(), True, "the optimizer_function", is_stage=True)
        with names.frame(frame):
            output = self._call(*args, **kwargs)
        return unwrap(output.opt).transformation, dict(output.apply_gradients_kwargs or {})

    def trained(self) -> Sequence[str] | None:
        return self._var_list

    def gradient_map(self) -> GradientMap | None:
        return self._gradient_map

    def _call(self, *args: Any, **kwargs: Any) -> OptimizerFunctionOutput:
        output = self._function(*args, **kwargs)
        if not isinstance(output, OptimizerFunctionOutput):
            raise TypeError(
                "optimizer_function must return a pipelining_ops.OptimizerFunctionOutput; it returned "
                f"{type(output).__name__}."
            )
        return output


def _refuse_unbuilt(arguments: dict[str, Any]) -> None:
    if arguments["continuous_weight_updates"]:
        raise NotImplementedError("Continuous weight updates are currently not supported.")
    for argument in _NOT_BUILT:
        value, default = arguments[argument], _DEFAULTS[argument]
        if value is not default and not (type(value) is type(default) and value == default):
            raise NotImplementedError(f"{argument} is not built yet; leave it at its default, {default!r}.")
    count = arguments["gradient_accumulation_count"]
    if isinstance(count, (Placeholder, jax.core.Tracer)):
        raise NotImplementedError(
            "gradient_accumulation_count as a placeholder or a traced value is not built yet; give a "
            "Python integer."
        )
    stages = arguments["computational_stages"]
    if isinstance(stages, (list, tuple)) and any(isinstance(s, (list, tuple)) for s in stages):
        raise NotImplementedError(
            "computational_stages: parallel stages (a list in place of a function) are not built yet."
        )


def _check_count(count: Any) -> int:
    if count is None:
        raise ValueError("gradient_accumulation_count must be specified.")
    return _check_integer("gradient_accumulation_count", count)


def _check_integer(argument: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{argument} must be an integer; got {value!r}.")
    if not 1 <= value <= _MAX_INT32:
        raise ValueError(f"{argument} must be from 1 to {_MAX_INT32}; got {value}.")
    return int(value)


def _check_arguments(
    computational_stages: Any,
    infeed_queue: Any,
    outfeed_queue: Any,
    optimizer_function: Any,
    pipeline_schedule: Any,
) -> None:
    if not isinstance(pipeline_schedule, PipelineSchedule):
        raise TypeError(
            "The given pipeline_schedule is not a member of the PipelineSchedule enumeration; got "
            f"{pipeline_schedule!r}."
        )
    if not isinstance(computational_stages, (list, tuple)):
        raise TypeError(
            "computational_stages argument needs to be a list or a tuple; got "
            f"{type(computational_stages).__name__}."
        )
    if not computational_stages:
        raise ValueError("computational_stages must have at least one stage; it is empty.")
    for index, stage in enumerate(computational_stages):
        if not callable(stage):
            raise TypeError(f"computational_stages[{index}] must be a function; got {stage!r}.")
    if infeed_queue is not None and not isinstance(infeed_queue, IPUInfeedQueue):
        raise TypeError(
            "infeed_queue is not an instance of ipu_infeed_queue.IPUInfeedQueue; got "
            f"{type(infeed_queue).__name__}."
        )
    if outfeed_queue is not None and not isinstance(outfeed_queue, IPUOutfeedQueue):
        raise TypeError(
            "outfeed_queue is not an instance of ipu_outfeed_queue.IPUOutfeedQueue; got "
            f"{type(outfeed_queue).__name__}."
        )
    if optimizer_function is not None and not callable(optimizer_function):
        raise TypeError(f"optimizer_function must be a function; got {optimizer_function!r}.")


def _check_mapping(device_mapping: Any, num_stages: int) -> list[int]:
    if device_mapping is None:
        return list(range(num_stages))
    if not isinstance(device_mapping, (list, tuple)):
        raise TypeError(
            f"device_mapping argument needs to be a list or a tuple; got {type(device_mapping).__name__}."
        )
    if len(device_mapping) != num_stages:
        raise ValueError(
            f"Each stage must be mapped to an IPU: {len(device_mapping)} mappings != {num_stages} stages."
        )
    for index, ipu in enumerate(device_mapping):
        if not isinstance(ipu, (int, np.integer)) or isinstance(ipu, bool) or ipu < 0:
            raise ValueError(
                "Each stage must be mapped to an IPU: device_mapping must have integers from 0; "
                f"device_mapping[{index}] is {ipu!r}."
            )
    return [int(ipu) for ipu in device_mapping]


def _check_outfeed(call: PipelineCall) -> None:
    _tree, avals = call.outfed
    if call.outfeed_queue is None and avals:
        described = ", ".join(f"{aval.dtype.name}{list(aval.shape)}" for aval in avals)
        raise ValueError(
            f"The last computational stage has tensor outputs: {described}, but no outfeed_queue has "
            "been provided."
        )
    if call.outfeed_queue is not None and not avals:
        warnings.warn(
            "outfeed_queue will stay empty since the last computational stage returns nothing.",
            stacklevel=3,
        )
