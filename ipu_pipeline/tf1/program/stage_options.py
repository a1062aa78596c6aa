"""`PipelineStageOptions`: compiler options for the programs of a pipeline's stages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.engine.fronts import as_level

__all__ = ["OPTION_NAMES", "PipelineStageOptions", "compiler_options"]

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
    given = {"forward_options": forward, "backward_options": backward, "update_options": weight_update}
    found: dict[str, Any] = {}
    has_poplar_options = []
    for parameter, value in given.items():
        name = OPTION_NAMES[parameter]
        if value is None:
            continue
        if parameter == "update_options":
            if not isinstance(value, PipelineStageOptions):
                raise TypeError(
                    f"{name} to be of type PipelineStageOptions was expected; got {type(value).__name__}."
                )
            entries = [value]
            found[parameter] = value.compiler_options or {}
        else:
            entries = _check_list(name, value, stages)
            found[parameter] = [entry.compiler_options or {} for entry in entries]
        if any(getattr(entry, poplar) for entry in entries for poplar in _POPLAR):
            has_poplar_options.append(name)
        if parameter != "forward_options" and not trains:
            del found[parameter]
            warnings.warn(f"{name} will have no effect since this pipeline is in inference.", stacklevel=3)
    if has_poplar_options:
        warnings.warn(
            f"{', '.join(_POPLAR)} of {', '.join(has_poplar_options)} will have no effect: they are "
            "Poplar's, and mean nothing to XLA. compiler_options has XLA's.",
            stacklevel=3,
        )
    return found


def _check_list(name: str, value: Any, stages: Sequence[Any]) -> list[PipelineStageOptions]:
    rule = f"{name} must be a list or a tuple of PipelineStageOptions objects"
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{rule}; got {type(value).__name__}.")
    for entry in (one for level in value for one in as_level(level)):
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
            wanted = f"a list of {len(stage)} PipelineStageOptions" if is_parallel else "one"
            raise ValueError(f"{name}[{index}] must be {wanted}, as computational_stages[{index}] is.")
    return [one for level in value for one in as_level(level)]
