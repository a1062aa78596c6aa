"""The arguments of `pipeline`: their types, and checks before anything is traced."""

from __future__ import annotations

import enum
import itertools
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import Offload, Recomputation
from ipu_pipeline.engine.fronts import as_level
from ipu_pipeline.engine.schedules import ScheduleFunction, ScheduleName, SearchedSchedule, find_schedule
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.checks import MAX_INT32, check_function, check_integer, is_integer, list_members
from ipu_pipeline.ground.pytrees import check_dtype, check_float_dtype
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import IPUOutfeedMode, IPUOutfeedQueue
from ipu_pipeline.queues.queue_arguments import check_queue
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.graph import Placeholder
from ipu_pipeline.tf1.program.calls import PipelineCall

_POPLAR = ("convolution_options", "matmul_options", "slice_options")
OPTION_NAMES = {  # of the engine, in errors
    "accumulator_dtype": "gradient_accumulation_dtype",
    "sum_dtype": "accumulate_outfeed_dtype",
    "gradient_map": "gradient_mapping_function",
    "forward_options": "forward_propagation_stages_poplar_options",
    "backward_options": "backward_propagation_stages_poplar_options",
    "update_options": "weight_update_poplar_options",
}


@dataclass(frozen=True, eq=False)
class PipelineStageOptions:
    """Options for compiling programs of one stage.

    Graphcore's arguments have Graphcore's positions; `compiler_options` is given by name.

    Example:
      >>> options = ipu.pipelining_ops.PipelineStageOptions(
      ...     compiler_options={"xla_backend_optimization_level": 3}
      ... )

    Attributes:
      convolution_options: Poplar's options; XLA has no use for them, and a pipeline that gets them warns.
      matmul_options: same as `convolution_options`.
      slice_options: same as `convolution_options`.
      compiler_options: XLA's options, as for the `compiler_options` of `jax.jit`: names, such as
        "xla_backend_optimization_level", with booleans, integers, floats or strings.

    Raises:
      TypeError: one of them is not a dict.
      ValueError: one of Poplar's has an option of XLA's.
    """

    convolution_options: Mapping[str, Any] | None = None
    matmul_options: Mapping[str, Any] | None = None
    slice_options: Mapping[str, Any] | None = None
    compiler_options: Mapping[str, bool | int | float | str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("compiler_options", *_POPLAR):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(f"PipelineStageOptions: {name} must be a dict; got {value!r}.")
            if name in _POPLAR and any(str(option).startswith("xla_") for option in value or ()):
                raise ValueError(
                    f"PipelineStageOptions: {name} is for Poplar's options; got {value!r}. Pass XLA's as "
                    "compiler_options=."
                )


def compiler_options(
    stages: Sequence[Any], trains: bool, forward: Any, backward: Any, weight_update: Any
) -> dict[str, Any]:
    """Checks the three arguments of `pipeline`."""
    arguments = {"forward_options": forward, "backward_options": backward, "update_options": weight_update}
    options: dict[str, Any] = {}
    has_poplar_options = []
    for parameter, value in arguments.items():
        name = OPTION_NAMES[parameter]
        if value is None:
            continue
        if parameter == "update_options":
            if not isinstance(value, PipelineStageOptions):
                raise TypeError(
                    f"{name} to be of type PipelineStageOptions was expected; got {type(value).__name__}."
                )
            entries = [value]
            options[parameter] = value.compiler_options or {}
        else:
            entries = _check_list(name, value, stages)
            options[parameter] = [entry.compiler_options or {} for entry in entries]
        if any(getattr(entry, poplar) for entry in entries for poplar in _POPLAR):
            has_poplar_options.append(name)
        if parameter != "forward_options" and not trains:
            del options[parameter]
            warnings.warn(f"{name} will have no effect since this pipeline is in inference.", stacklevel=3)
    if has_poplar_options:
        warnings.warn(
            f"{', '.join(_POPLAR)} of {', '.join(has_poplar_options)} will have no effect: they are "
            "Poplar's, and mean nothing to XLA. compiler_options has XLA's.",
            stacklevel=3,
        )
    return options


def _check_list(name: str, value: Any, stages: Sequence[Any]) -> list[PipelineStageOptions]:
    rule = f"{name} must be a list or a tuple of PipelineStageOptions objects"
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{rule}; got {type(value).__name__}.")
    for entry in (entry for level in value for entry in as_level(level)):
        if not isinstance(entry, PipelineStageOptions):
            raise TypeError(f"{rule}; got one with {entry!r}.")
    if len(value) != len(stages):
        raise ValueError(
            f"{name} must have one PipelineStageOptions for each of the {len(stages)} stages; it has "
            f"{len(value)}."
        )
    for index, (level, stage) in enumerate(zip(value, stages, strict=True)):
        is_list, is_parallel = isinstance(level, (list, tuple)), isinstance(stage, (list, tuple))
        if is_list != is_parallel or len(as_level(level)) != len(as_level(stage)):
            expected = f"a list of {len(stage)} PipelineStageOptions" if is_parallel else "one"
            raise ValueError(f"{name}[{index}] must be {expected}, as computational_stages[{index}] is.")
    return [entry for level in value for entry in as_level(level)]


class PipelineSchedule(enum.Enum):
    """The order in which IPUs take forwards and backwards.

    Grouped: all IPUs run forwards together, then all run backwards; equal actions overlap best, and early
    stages hold the most micro-batches. Interleaved: neighbouring IPUs alternate, and hold about half as
    many micro-batches. Sequential: one micro-batch at a time; nothing overlaps, and memory is lowest.

    Interleaved is 1F1B (also named OneForwardOneBackward), not Megatron's "interleaved".

    In addition to Graphcore's, see docs/schedules.md:

    * AllForwards: all forwards, then all backwards (GPipe).
    * Looped: several stages on each IPU, whose `device_mapping` goes around the IPUs (`[0, 1, 0, 1]`), as
      in Megatron's interleaved: a smaller bubble, and more micro-batches in memory.
    * ZeroBubble: split backward (input and weight gradients); weight gradients fill the bubble. Same memory
      as Interleaved.
    * ZeroBubbleH2: ZeroBubble with almost no bubble, for twice the memory.
    * LoopedZeroBubble: Looped with a split backward, and almost no bubble.
    * ZeroBubbleV: two stages on each IPU, down and up (`[0, 1, 1, 0]`): almost no bubble, in the memory of
      Interleaved.
    * VHalf: ZeroBubbleV with half of the memory, and a small bubble.
    * VMin: ZeroBubbleV with a third of the memory, and a larger bubble.
    * DualPipeV: two stages on each IPU, down and up; forwards of one beside backwards of the other.

    `searched()` is not a fixed schedule: it makes an order for the costs of the stages.

    Example:
      >>> list(ipu.pipelining_ops.PipelineSchedule)[:3]
      [<PipelineSchedule.Grouped: 'grouped'>, <PipelineSchedule.Interleaved: 'interleaved'>,
       <PipelineSchedule.Sequential: 'sequential'>]
    """

    Grouped = "grouped"
    Interleaved = "interleaved"
    OneForwardOneBackward = "interleaved"  # noqa: PIE796  # an alias
    Sequential = "sequential"
    AllForwards = "all_forwards"
    Looped = "looped"
    ZeroBubble = "zero_bubble"
    ZeroBubbleH2 = "zero_bubble_h2"
    LoopedZeroBubble = "looped_zero_bubble"
    ZeroBubbleV = "zero_bubble_v"
    VHalf = "v_half"
    VMin = "v_min"
    DualPipeV = "dual_pipe_v"

    @staticmethod
    def searched(bytes_per_ipu: int | None = None) -> SearchedSchedule:
        """Searches for an order with a short step, by the measured costs of the stages.

        Args:
          bytes_per_ipu: the most bytes that an IPU may hold, see `engine.SearchedSchedule`; None: no limit.

        Raises:
          ValueError: it is not a number of bytes.
        """
        return SearchedSchedule(bytes_per_ipu)


class RecomputationMode(enum.Enum):
    """The values that a stage keeps between forward and backward, with `IPUConfig.allow_recompute`.

    RecomputeThenBackpropagate: the stage's inputs; the backward starts by repeating the whole forward.
    RecomputeAndBackpropagateInterleaved: the inputs and the values that `recomputation_checkpoint` marks;
    the backward goes from each mark to the previous one. Auto: the same as Interleaved. Without marks there
    is no difference.

    Example:
      >>> mode = ipu.pipelining_ops.RecomputationMode.RecomputeThenBackpropagate
      >>> def model(infeed_queue, stages, optimizer_function):
      ...     return ipu.pipelining_ops.pipeline(
      ...         stages,
      ...         gradient_accumulation_count=4,
      ...         infeed_queue=infeed_queue,
      ...         optimizer_function=optimizer_function,
      ...         recomputation_mode=mode,  # it needs IPUConfig.allow_recompute
      ...     )
    """

    Auto = "auto"
    RecomputeThenBackpropagate = "recompute_then_backpropagate"
    RecomputeAndBackpropagateInterleaved = "recompute_and_backpropagate_interleaved"


def check_count(count: Any) -> Any:
    """Checks the gradient_accumulation_count: an integer, or a traced scalar or placeholder."""
    if count is None:
        raise ValueError("gradient_accumulation_count must be specified.")
    if not isinstance(count, (jax.Array, Placeholder)):
        return check_integer("gradient_accumulation_count", count)
    if count.shape != () or not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            "gradient_accumulation_count must be an integer scalar; got "
            f"{count.dtype.name}{list(count.shape)}."
        )
    if jax_compat.is_traced(count) or isinstance(count, Placeholder):
        return count
    return check_integer("gradient_accumulation_count", int(count))  # an array with a value


def check_batch_serialization(
    iterations: int, count: Any, schedule: Any, mapping: Sequence[Any], reduction_method: Any
) -> None:
    """Raises if batch_serialization_iterations cannot be combined with the other arguments."""
    check_integer("batch_serialization_iterations", iterations)
    if iterations == 1:
        return
    if reduction_method is not GradientAccumulationReductionMethod.SUM:
        raise ValueError(
            "batch_serialization_iterations != 1 is only supported when reduction_method is "
            f"GradientAccumulationReductionMethod.SUM; got {reduction_method}."
        )
    if schedule != PipelineSchedule.Sequential.value:
        name = PipelineSchedule(schedule).name if isinstance(schedule, str) else schedule
        raise NotImplementedError(
            "Batch serialization is only supported with the `Sequential` schedule; got "
            f"{name}. Leave pipeline_schedule at None."
        )
    if len({ipu for entry in mapping for ipu in as_level(entry)}) != 1:
        raise NotImplementedError(
            "When using batch serialization, all the pipeline stages need to be mapped to a single IPU; "
            f"device_mapping is {list(mapping)}."
        )
    if isinstance(count, int) and count * iterations > MAX_INT32:
        raise ValueError(
            "gradient_accumulation_count times batch_serialization_iterations must be at most "
            f"{MAX_INT32}; got {count} times {iterations}."
        )


def check_arguments(
    computational_stages: Any,
    infeed_queue: Any,
    outfeed_queue: Any,
    optimizer_function: Any,
) -> None:
    """Raises if one of these arguments is not usable."""
    if not isinstance(computational_stages, (list, tuple)):
        raise TypeError(
            "computational_stages argument needs to be a list or a tuple; got "
            f"{type(computational_stages).__name__}."
        )
    if not computational_stages:
        raise ValueError("computational_stages must have at least one stage; it is empty.")
    for index, entry in enumerate(computational_stages):
        for stage in as_level(entry):
            check_function(f"computational_stages[{index}]", stage)
        if not as_level(entry):
            raise ValueError(f"computational_stages[{index}] must have functions; the list is empty.")
    check_queue("infeed_queue", infeed_queue, IPUInfeedQueue)
    check_queue("outfeed_queue", outfeed_queue, IPUOutfeedQueue)
    if optimizer_function is not None:
        check_function("optimizer_function", optimizer_function)


def find_pipeline_schedule(pipeline_schedule: Any) -> ScheduleName | ScheduleFunction | SearchedSchedule:
    """Finds the engine's schedule: a name, a function or a search. A file is read."""
    if isinstance(pipeline_schedule, PipelineSchedule):
        return pipeline_schedule.value
    is_known = isinstance(pipeline_schedule, (str, os.PathLike, SearchedSchedule))
    if not is_known and not callable(pipeline_schedule):
        raise TypeError(
            "The given pipeline_schedule is not a member of the PipelineSchedule enumeration "
            f"({list_members(PipelineSchedule)}), nor PipelineSchedule.searched(), a name, a function or a "
            f"path; got {pipeline_schedule!r}."
        )
    return find_schedule(pipeline_schedule, "pipeline_schedule")


def check_accumulator_dtype(dtype: Any) -> Any:
    """Converts the gradient_accumulation_dtype for the engine, checked as far as possible."""
    argument = "gradient_accumulation_dtype"
    if dtype is None:
        return None
    if callable(dtype) and not isinstance(dtype, type):
        return dtype
    return check_float_dtype(dtype, argument)


def check_replication(is_inference: bool, **arguments: Any) -> list[str]:
    """Returns the names of the arguments that are True; warns of those without effect in inference."""
    names = ("replicated_weight_sharding",) if is_inference else arguments
    return _find_true(arguments, names, "True or False", ": nothing is sharded")


def check_sharding(call: PipelineCall) -> None:
    """Warns of arguments that spread something over replicas, if there can be only one replica."""
    if call.replication.may_be_several:
        return  # a run finds the number of replicas: `PipelineCall.find_num_replicas`
    for argument in call.replication.sharded:
        warnings.warn(
            f"{argument} will have no effect since there is one replica: nothing is sharded.", stacklevel=3
        )


def check_recomputation(mode: Any, is_inference: bool) -> Recomputation:
    """Converts the recomputation_mode for the engine; warns if it has no effect."""
    if mode is None:
        return Recomputation.AUTO
    if not isinstance(mode, RecomputationMode):
        raise TypeError(
            "The given recomputation_mode is not a member of the RecomputationMode enumeration "
            f"({list_members(RecomputationMode)}); got {mode!r}."
        )
    if is_inference:
        warnings.warn(
            "recomputation_mode will have no effect since this pipeline is in inference.", stacklevel=3
        )
    return Recomputation(mode.value)


def check_offloading(is_inference: bool, **arguments: Any) -> list[Offload]:
    """Converts the offload arguments that are True for the engine; warns if they have no effect."""
    names = ("offload_weights",) if is_inference else arguments
    chosen = _find_true(arguments, names, "True, False or None", "")
    return [Offload(argument.removeprefix("offload_")) for argument in chosen]


def _find_true(
    arguments: Mapping[str, Any], in_effect: Collection[str], kinds: str, consequence: str
) -> list[str]:
    """Returns the names of the arguments that are True; warns of those that are not in effect."""
    for argument, value in arguments.items():
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{argument} must be {kinds}; got {value!r}.")
        if value and argument not in in_effect:
            text = f"{argument} will have no effect since this pipeline is in inference{consequence}."
            warnings.warn(text, stacklevel=4)
    return [argument for argument, value in arguments.items() if value and argument in in_effect]


def check_mapping(device_mapping: Any, stages: Sequence[Any]) -> list[int | list[int]]:
    """Checks the device_mapping; by default each stage has its own IPU."""
    num_stages = len(stages)
    if device_mapping is None:
        numbers = itertools.count()
        return [
            [next(numbers) for _stage in entry] if isinstance(entry, (list, tuple)) else next(numbers)
            for entry in stages
        ]
    if not isinstance(device_mapping, (list, tuple)):
        raise TypeError(
            f"device_mapping argument needs to be a list or a tuple; got {type(device_mapping).__name__}."
        )
    if len(device_mapping) != num_stages:
        raise ValueError(
            f"Each stage must be mapped to an IPU: {len(device_mapping)} mappings != {num_stages} stages."
        )
    for index, (entry, stage) in enumerate(zip(device_mapping, stages, strict=True)):
        is_parallel = isinstance(stage, (list, tuple))
        if isinstance(entry, (list, tuple)) != is_parallel or len(as_level(entry)) != len(as_level(stage)):
            expected = f"a list of {len(stage)} IPUs" if is_parallel else "one IPU"
            raise ValueError(
                f"Each stage must be mapped to an IPU: device_mapping[{index}] must be {expected}, as "
                f"computational_stages[{index}] is; got {entry!r}."
            )
        for ipu in as_level(entry):
            if not is_integer(ipu, 0):
                raise ValueError(
                    "Each stage must be mapped to an IPU: device_mapping must have integers from 0; "
                    f"device_mapping[{index}] is {entry!r}."
                )
    return [
        [int(ipu) for ipu in entry] if isinstance(entry, (list, tuple)) else int(entry)
        for entry in device_mapping
    ]


def check_outfeed_arguments(
    outfeed_queue: IPUOutfeedQueue | None,
    has_optimizer: bool,
    outfeed_loss: Any,
    outfeed_mask: Any,
    accumulate_outfeed: Any,
    accumulate_outfeed_dtype: Any,
) -> None:
    """Raises if the arguments about the outfeed cannot be combined."""
    _check_mask(outfeed_mask)
    for argument, value in (("outfeed_loss", outfeed_loss), ("accumulate_outfeed", accumulate_outfeed)):
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{argument} must be True or False; got {value!r}.")
    is_masked = outfeed_mask is not None
    if is_masked and not has_optimizer:
        raise ValueError("An optimizer_function must be provided when outfeed_mask is set.")
    if outfeed_loss and not has_optimizer:
        raise ValueError("An optimizer_function must be provided when outfeed_loss is True.")
    if outfeed_loss and is_masked:
        raise ValueError("Only one of `outfeed_loss` and `outfeed_mask` can be set.")
    settings = (
        ("outfeed_loss is True", outfeed_loss),
        ("outfeed_mask is set", is_masked),
        ("accumulate_outfeed is True", accumulate_outfeed),
    )
    for setting, is_set in settings:
        if is_set and outfeed_queue is None:
            raise ValueError(f"An outfeed_queue must be provided when {setting}.")
    if accumulate_outfeed:
        assert outfeed_queue is not None
        if outfeed_queue.outfeed_mode is not IPUOutfeedMode.ALL:
            raise ValueError(
                "To accumulate the outfeed, it must be in IPUOutfeedMode ALL. outfeed_queue is in mode "
                f"{outfeed_queue.outfeed_mode.name}."
            )
    if accumulate_outfeed_dtype is not None:
        if not accumulate_outfeed:
            raise ValueError(
                "accumulate_outfeed_dtype is only used when accumulate_outfeed is True; got "
                f"{accumulate_outfeed_dtype!r} with accumulate_outfeed=False."
            )
        if not callable(accumulate_outfeed_dtype) or isinstance(accumulate_outfeed_dtype, type):
            check_dtype(accumulate_outfeed_dtype, "accumulate_outfeed_dtype")


def _check_mask(mask: Any) -> None:
    if mask is None:
        return
    if not isinstance(mask, (list, tuple, dict)):
        raise TypeError(
            "outfeed_mask must be a list or tuple of booleans, or a dict of them for outputs in a dict; "
            f"got {mask!r}."
        )
    for place, value in mask.items() if isinstance(mask, dict) else enumerate(mask):
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"outfeed_mask must have booleans; outfeed_mask[{place!r}] is {value!r}.")


def apply_mask(mask: Any, outputs: Any) -> tuple[Any, list[bool]]:
    """Leaves out the outputs that an `outfeed_mask` selects."""
    if mask is None:
        return outputs, [True] * len(jax.tree.leaves(outputs))
    if isinstance(outputs, dict) != isinstance(mask, dict):
        kind = "a dict of booleans by name" if isinstance(outputs, dict) else "a list of booleans"
        raise ValueError(f"outfeed_mask must be {kind}, as the last stage's outputs are; got {mask!r}.")
    if isinstance(outputs, dict):
        if mask.keys() != outputs.keys():
            raise ValueError(
                "outfeed_mask must have the names of the last stage's outputs, "
                f"{', '.join(map(repr, outputs))}; got {', '.join(map(repr, mask)) or 'none'}."
            )
        unmasked: Any = {name: value for name, value in outputs.items() if not mask[name]}
        chosen: Any = {
            name: jax.tree.map(lambda _leaf, n=name: not mask[n], v) for name, v in outputs.items()
        }
    else:
        values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        if len(mask) != len(values):
            raise ValueError(
                f"outfeed_mask must have one boolean for each of the last stage's {len(values)} outputs; "
                f"it has {len(mask)}."
            )
        unmasked = [value for value, is_masked in zip(values, mask, strict=True) if not is_masked]
        unmasked = tuple(unmasked) if isinstance(outputs, tuple) else unmasked
        chosen = [
            jax.tree.map(lambda _leaf, m=is_masked: not m, value)
            for value, is_masked in zip(values, mask, strict=True)
        ]
        if not isinstance(outputs, (list, tuple)) and unmasked:
            (unmasked,) = unmasked
    if not jax.tree.leaves(unmasked):
        raise ValueError(f"outfeed_mask leaves nothing to enqueue; got {mask!r}.")
    return unmasked, jax.tree.leaves(chosen)


def check_outfeed(call: PipelineCall) -> None:
    """Raises if there are outputs and no outfeed; warns if there is an outfeed and no outputs."""
    avals = call.pipeline.traced.returned_avals
    if call.outfeed_queue is None and avals:
        described = ", ".join(f"{aval.dtype.name}{list(aval.shape)}" for aval in avals)
        raise ValueError(
            f"The last computational stage has tensor outputs: {described}, but no outfeed_queue has "
            "been provided."
        )
    if call.outfeed_queue is not None and not call.pipeline.built.collecting.avals:
        warnings.warn(
            "outfeed_queue will stay empty since the last computational stage returns nothing.",
            stacklevel=3,
        )


def check_recomputation_checkpoints(call: PipelineCall) -> None:
    """Warns if stages mark values to keep, in a mode that keeps none."""
    if call.recompute is Recomputation.RECOMPUTE_THEN_BACKPROPAGATE:
        marked = call.pipeline.traced.places_with_marks
        if marked:
            warnings.warn(
                f"recomputation_checkpoint in {', '.join(marked)} has no effect with the "
                "recomputation_mode RecomputeThenBackpropagate.",
                stacklevel=3,
            )
