"""Checks of a generator's arguments, and their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.ground.shapes import describe

__all__ = ["check_chunk_lengths", "check_logits", "check_positive", "check_slots", "for_each"]

CHUNK_LENGTHS = (1, 4, 16, 64, 256)


def check_positive(name: str, value: Any) -> None:
    """Raises a ValueError if a value is not an integer of at least 1."""
    if not is_integer(value, 1):
        raise ValueError(f"{name} must be an integer of at least 1; got {value!r}.")


def check_chunk_lengths(given: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    """The lengths of a prompt's chunks, the longest first; raises a ValueError if they are not usable."""
    lengths = list(CHUNK_LENGTHS if given is None else given)
    if not all(is_integer(length, 1) for length in lengths) or 1 not in lengths:
        raise ValueError(
            "chunk_lengths must be integers of at least 1, and 1 must be among them, so that every prompt "
            f"can be divided into such lengths; got {given!r}."
        )
    return tuple(sorted({int(length) for length in lengths if length <= max_length}, reverse=True))


def check_slots(num_slots: Any, num_groups: Any, num_devices: int) -> tuple[int, int]:
    """The numbers of slots and groups; raises a ValueError if they are not usable."""
    if num_slots is not None:
        check_positive("num_slots", num_slots)
    if num_groups is None:
        num_groups = num_devices if num_slots is None else min(num_devices, num_slots)
    check_positive("num_groups", num_groups)
    if num_slots is None:
        num_slots = 4 * num_groups
    if num_slots % num_groups:
        raise ValueError(
            f"num_slots must be a multiple of num_groups, {num_groups}, which have as many slots each; got "
            f"{num_slots}. Take {-(-num_slots // num_groups) * num_groups}, or give num_groups, too."
        )
    return int(num_slots), int(num_groups)


def check_logits(pipeline: Pipeline, length: int) -> Sequence[jax.ShapeDtypeStruct]:
    """Raises if the last stage does not return logits for a chunk. Returns their shape, in a list."""
    avals = pipeline.traced.returned_avals
    is_logits = len(avals) == 1 and (
        avals[0].ndim == 1 or (avals[0].ndim == 2 and avals[0].shape[0] in (1, length))
    )
    if not is_logits or not jnp.issubdtype(avals[0].dtype, jnp.floating) or 0 in avals[0].shape:
        given = ", ".join(map(describe, avals)) or "nothing"
        raise ValueError(
            f"The last stage must return logits, floating-point numbers [{length}, words] for {length} "
            f"tokens of one request, or [words] for the last of them; it returns {given}. Stages of a "
            "generator have no axis for a batch, and no loss."
        )
    return avals


def for_each(name: str, value: Any, number: int) -> Sequence[Any]:
    """A list with the value of each prompt."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{name} must have one entry for each of the {number} prompts; got {len(value)}.")
    return list(value)
