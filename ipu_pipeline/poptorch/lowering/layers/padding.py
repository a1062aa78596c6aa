"""Padding by a constant, a reflection, the edge, or the other end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []

_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _by_dimension(x: Array, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Sorts padding by dimension: torch's list begins with the last one."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs


@lowers("constant_pad_nd")
def _constant_pad(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """Pads by a constant. A negative number removes elements."""
    return jax.lax.pad(
        x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in _by_dimension(x, pad)]
    )


def _pad_by_mode(x: Array, pad: Sequence[int], mode: str) -> Array:
    pairs = _by_dimension(x, pad)
    made = jnp.pad(x, [(max(low, 0), max(high, 0)) for low, high in pairs], _MODES[mode])
    cut = [(min(low, 0), min(high, 0), 0) for low, high in pairs]
    return (
        jax.lax.pad(made, jnp.zeros((), x.dtype), cut)
        if any(low or high for low, high, inner in cut)
        else made
    )


@lowers("pad", keep=True)
def _pad(x: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    if mode == "constant":
        return _constant_pad(x, pad, 0 if value is None else value)
    return _pad_by_mode(x, pad, mode)


@lowers("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", keep=True)
def _reflection_pad(x: Array, padding: Sequence[int]) -> Array:
    return _pad_by_mode(x, padding, "reflect")


@lowers("replication_pad1d", "replication_pad2d", "replication_pad3d", keep=True)
def _replication_pad(x: Array, padding: Sequence[int]) -> Array:
    return _pad_by_mode(x, padding, "replicate")
