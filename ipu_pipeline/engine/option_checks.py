"""Checks of a pipeline's options: what each may be, and which of them have no effect."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine.devices.offloading import Offload
from ipu_pipeline.engine.devices.sharding import Shard
from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.ground.checks import is_integer

__all__ = ["check_fields", "find_unused"]

Fields: TypeAlias = "Mapping[str, Any]"


def check_fields(fields: Fields) -> None:
    """Checks what can be seen of each option alone."""
    for names, is_usable, wanted in _RULES:
        for name in names.split():
            if not is_usable(fields[name]):
                raise ValueError(f"{name} must be {wanted}; got {fields[name]!r}.")


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
    used = {Offload.WEIGHTS}
    if fields["execution_phases"] is not None:
        used.add(Offload.ACTIVATIONS)  # what goes from phase to phase
    for offload in map(Offload, fields["offload"]):
        if offload not in used:
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
    (
        "check_nans donate joins_assigned sum_collected",
        _is_boolean,
        "True or False",
    ),
    (
        "collect_outputs",
        lambda value: _is_boolean(value) or callable(value),
        "True, False, or a function of the outputs' shapes and dtypes",
    ),
    ("loss", _is_function, "a function of what the last stage returns, or None"),
    (
        "trained",
        _is_names,
        "a collection of full names, a function from the variables to one, or None",
    ),
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
