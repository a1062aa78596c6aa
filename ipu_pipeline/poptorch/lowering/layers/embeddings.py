"""Rows of a table, and sums, means and maxima of bags of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


def _rows(weight: Array, indices: Array, padding_idx: int, scale_grad_by_freq: bool) -> Array:
    """Takes rows. The padding row's gradient is 0; others may be divided by how often they are taken."""
    rows = weight.at[indices].get(mode="fill", wrap_negative_indices=False)
    if padding_idx >= 0:
        rows = jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)
    if scale_grad_by_freq:
        counts = jnp.zeros(weight.shape[0], int).at[indices].add(1)
        rows = _divide_gradient(rows, counts[indices][..., None].astype(rows.dtype))
    return rows


@jax.custom_vjp
def _divide_gradient(x: Array, by: Array) -> Array:
    del by
    return x


_divide_gradient.defvjp(lambda x, by: (x, by), lambda by, gradient: (gradient / by, None))


@lowers("embedding")
def _embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    del sparse  # how torch keeps the gradient
    return _rows(weight, indices, padding_idx, scale_grad_by_freq)


@lowers("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    """Reduces bags: runs of `indices` that begin at `offsets`. Mode 0 takes sums, 1 means, 2 maxima."""
    del sparse
    num_bags = offsets.shape[0] - (1 if include_last_offset else 0)
    places = jnp.arange(indices.shape[0], dtype=offsets.dtype)
    bags = jnp.searchsorted(offsets[:num_bags], places, side="right") - 1
    if include_last_offset:
        bags = jnp.where(places < offsets[-1], bags, num_bags)
    counted = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)
    sizes = jnp.zeros(num_bags, indices.dtype).at[bags].add(counted.astype(indices.dtype), mode="drop")
    rows = widen(_rows(weight, indices, padding_idx, scale_grad_by_freq))
    if per_sample_weights is not None:
        rows = rows * widen(per_sample_weights)[:, None]
    empty = jnp.zeros((num_bags, weight.shape[1]), rows.dtype)
    if mode == 2:
        result, positions = _maxima(rows, bags, counted, empty)
        return result, bags, sizes, jnp.where(positions < 0, positions, indices[positions])
    total = empty.at[bags].add(jnp.where(counted[:, None], rows, 0), mode="drop")
    if mode == 1:
        total = total / jnp.maximum(sizes, 1)[:, None].astype(total.dtype)
    return total, bags, sizes, jnp.zeros(num_bags, indices.dtype)


def _maxima(rows: Array, bags: Array, counted: Array, empty: Array) -> tuple[Array, Array]:
    """Returns each bag's and column's maximum and the first row that has it; 0 and -1 for empty bags."""
    lowest = jnp.full_like(empty, -jnp.inf)
    values = jax.lax.stop_gradient(jnp.where(counted[:, None], rows, -jnp.inf))
    largest = lowest.at[bags].max(values, mode="drop")
    count = rows.shape[0]
    is_largest = counted[:, None] & (values == largest.at[bags].get(mode="fill"))
    places = jnp.where(is_largest, jnp.arange(count)[:, None], count)
    first = jnp.full(empty.shape, count).at[bags].min(places, mode="drop")
    result = jnp.take_along_axis(rows, jnp.minimum(first, count - 1), 0)
    return jnp.where(first < count, result, 0), jnp.where(first < count, first, -1)
