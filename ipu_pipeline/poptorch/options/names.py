"""The names in config files and JSON: setters, PopTorch's enumerations and classes, torch's dtypes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from ipu_pipeline.poptorch import enums
from ipu_pipeline.poptorch.options.base import OptionGroup, is_configurable
from ipu_pipeline.poptorch.options.phased import ParallelPhasedExecution, SerialPhasedExecution
from ipu_pipeline.poptorch.options.stages import Phase, Stage
from ipu_pipeline.poptorch.options.strategies import PipelinedExecution, ShardedExecution
from ipu_pipeline.poptorch.options.tensor_locations import TensorLocationSettings

__all__ = ["find_class", "find_setter", "find_value"]

_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        ParallelPhasedExecution,
        Phase,
        PipelinedExecution,
        SerialPhasedExecution,
        ShardedExecution,
        Stage,
        TensorLocationSettings,
    )
}


def find_class(name: str) -> type | None:
    """Finds a class that a file may make objects of, such as "poptorch.Stage"."""
    return _CLASSES.get(name.removeprefix("poptorch.")) if name.startswith("poptorch.") else None


def find_value(name: str) -> Any:
    """Finds an enumeration's member, such as "poptorch.OutputMode.All", or a dtype; None if it is neither.

    "poptorch." and "poptorch.enums." may be left out.
    """
    module, _dot, member = name.rpartition(".")
    if module == "torch":
        dtype = getattr(torch, member, None)
        return dtype if isinstance(dtype, torch.dtype) else None
    kind = module.removeprefix("poptorch.").removeprefix("enums.")
    if kind not in enums.__all__:
        return None
    members: type[enum.Enum] = getattr(enums, kind)
    return members.__members__.get(member)


def find_setter(target: Any, name: str) -> Callable[..., Any]:
    """Finds a method of options, stages or strategies that a file may call."""
    method = getattr(type(target), name, None)
    if not is_configurable(method):
        known = [key for key in dir(type(target)) if is_configurable(getattr(type(target), key))]
        if isinstance(target, OptionGroup):
            known += [f"{group}..." for group in target.groups]
        kind = type(target).__name__
        raise AttributeError(f"{kind} has no setter {name!r}. It has: {', '.join(known)}.")
    found: Callable[..., Any] = getattr(target, name)
    return found
