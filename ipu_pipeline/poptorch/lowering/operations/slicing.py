"""Slices that begin at a place given by a tensor. A slice that does not fit begins earlier."""

from __future__ import annotations

import jax

from ipu_pipeline.poptorch.lowering.arrays import Array
from ipu_pipeline.poptorch.lowering.registry import lowers
from ipu_pipeline.poptorch.operations.slicing import SLICE, UPDATE

__all__: list[str] = []


@lowers(SLICE, keep=True)
def _dynamic_slice(tensor: Array, dim: int, start: Array, size: int, step: int) -> Array:
    part = jax.lax.dynamic_slice_in_dim(tensor, start.reshape(()), size, dim)
    return jax.lax.slice_in_dim(part, 0, size, step, dim)


@lowers(UPDATE, keep=True)
def _dynamic_update(input: Array, src: Array, dim: int, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(input, src, start.reshape(()), dim)
