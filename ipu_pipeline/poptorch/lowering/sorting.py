"""Sorting, and operations that use it. Values are read at sorted places, where their gradients go.

NaN is larger than all numbers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, as_axis, is_float
from ipu_pipeline.poptorch.lowering.registry import lowers


def _sorted(x: Array, axis: int, descending: bool) -> tuple[Array, Array]:
    """Returns sorted values and their places. Equal elements keep their order."""
    places = jax.lax.broadcasted_iota(jnp.result_type(int), x.shape, axis)
    if descending:
        x, places = (jnp.flip(array, axis) for array in (x, places))
    values, places = jax.lax.sort((x, places), dimension=axis, is_stable=True, num_keys=1)
    return (jnp.flip(values, axis), jnp.flip(places, axis)) if descending else (values, places)


def _with_scalars(function: Any) -> Any:
    """Makes a function return a scalar as its own result."""

    def compute(x: Array, *args: Any, **kwargs: Any) -> tuple[Array, Array]:
        return function(x, *args, **kwargs) if x.ndim else (x, jnp.zeros((), int))

    return compute


@lowers("sort.default")
@_with_scalars
def _sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    return _sorted(x, as_axis(dim, x.ndim), descending)


@lowers("sort.stable")
@_with_scalars
def _sort_stable(
    x: Array, *, stable: bool | None = True, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    del stable
    return _sorted(x, as_axis(dim, x.ndim), descending)


@lowers("topk")
@_with_scalars
def _topk(
    x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    del sorted  # they always are
    axis = as_axis(dim, x.ndim)
    if largest:
        values, places = jax.lax.top_k(jnp.moveaxis(x, axis, -1), k)
        return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis)
    values, places = _sorted(x, axis, descending=False)
    return jax.lax.slice_in_dim(values, 0, k, axis=axis), jax.lax.slice_in_dim(places, 0, k, axis=axis)


def _at_rank(x: Array, axis: int, rank: Array, keepdim: bool) -> tuple[Array, Array]:
    """Returns the element of a rank from 0, with length 1 along the axis, and its place."""
    values, places = _sorted(x, axis, descending=False)
    element = [jnp.take_along_axis(array, rank, axis, mode="clip") for array in (values, places)]
    value, place = element if keepdim else [array.squeeze(axis) for array in element]
    return value, place


@lowers("kthvalue", keep=True)
@_with_scalars
def _kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    axis = as_axis(dim, x.ndim)
    return _at_rank(x, axis, jnp.full((1,) * x.ndim, k - 1), keepdim)


def _median_rank(x: Array, axis: int, ignores_nan: bool) -> Array:
    """Returns the rank of the lower median, or of a NaN if there is one and it is not ignored."""
    count = x.shape[axis]
    if not is_float(x):
        return jnp.full((1,) * x.ndim, (count - 1) // 2)
    num_nan = jnp.sum(jnp.isnan(x), axis, keepdims=True)
    if ignores_nan:
        return jnp.maximum(count - num_nan - 1, 0) // 2
    return jnp.where(num_nan > 0, count - 1, (count - 1) // 2)


@lowers("median.dim", keep=True)
@_with_scalars
def _median(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    axis = as_axis(dim, x.ndim)
    return _at_rank(x, axis, _median_rank(x, axis, ignores_nan=False), keepdim)


@lowers("nanmedian.dim", keep=True)
@_with_scalars
def _nanmedian(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    axis = as_axis(dim, x.ndim)
    return _at_rank(x, axis, _median_rank(x, axis, ignores_nan=True), keepdim)


def _total_median(x: Array, ignores_nan: bool) -> Array:
    """Takes the median of all elements. Its gradient is divided among equal elements."""
    flat = x.reshape(-1)
    value = _at_rank(jax.lax.stop_gradient(flat), 0, _median_rank(flat, 0, ignores_nan), False)[0]
    if not is_float(x):
        return value
    is_median = (flat == value) | (jnp.isnan(flat) & jnp.isnan(value))
    changes = jnp.where(is_median & jnp.isfinite(flat), flat - jax.lax.stop_gradient(flat), 0)
    return value + jnp.sum(changes) / jnp.sum(is_median).astype(x.dtype)


@lowers("median.default", keep=True)
def _median_of_all(x: Array) -> Array:
    return _total_median(x, ignores_nan=False)


@lowers("nanmedian.default", keep=True)
def _nanmedian_of_all(x: Array) -> Array:
    return _total_median(x, ignores_nan=True)


@lowers("searchsorted.Tensor", "searchsorted.Scalar", keep=True)
def _searchsorted(
    boundaries: Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    del out_int32
    if sorter is not None:
        boundaries = jnp.take_along_axis(boundaries, sorter, -1)
    side = side or ("right" if right else "left")
    values = jnp.asarray(x)
    if boundaries.ndim == 1:
        return jnp.searchsorted(boundaries, values, side=side)
    rows = boundaries.reshape(-1, boundaries.shape[-1])
    below = jnp.less if side == "left" else jnp.less_equal
    value_rows = values.reshape(rows.shape[0], -1)
    return jnp.sum(below(rows[:, None], value_rows[..., None]), -1).reshape(values.shape)


@lowers("bucketize.Tensor", keep=True)
def _bucketize(x: Array, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _running_extremum(x: Array, dim: int, is_better: Any) -> tuple[Array, Array]:
    """Returns the extremum so far, and its last place."""
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    axis = as_axis(dim, x.ndim)

    def combine(before: Any, after: Any) -> Any:
        takes = is_better(after[0], before[0]) | (jnp.isnan(after[0]) if is_float(x) else False)
        return tuple(jnp.where(takes, new, old) for new, old in zip(after, before, strict=True))

    places = jax.lax.broadcasted_iota(jnp.result_type(int), x.shape, axis)
    best_places = jax.lax.associative_scan(combine, (jax.lax.stop_gradient(x), places), axis=axis)[1]
    return jnp.take_along_axis(x, best_places, axis, mode="clip"), best_places


@lowers("cummax", keep=True)
def _cummax(x: Array, dim: int) -> tuple[Array, Array]:
    return _running_extremum(x, dim, jnp.greater_equal)


@lowers("cummin", keep=True)
def _cummin(x: Array, dim: int) -> tuple[Array, Array]:
    return _running_extremum(x, dim, jnp.less_equal)


@lowers("mode")
@_with_scalars
def _mode(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """Returns the most frequent element (of several, the smallest) and its last place."""
    axis = as_axis(dim, x.ndim)
    values, _places = _sorted(jax.lax.stop_gradient(x), axis, descending=False)
    number = jax.lax.broadcasted_iota(jnp.result_type(int), x.shape, axis)
    differs = values != jnp.roll(values, 1, axis)
    begins = jax.lax.cummax(jnp.where(differs, number, 0), axis)
    best = jnp.argmax(number - begins, axis, keepdims=True)  # the end of the first of the longest runs
    most_frequent = jnp.take_along_axis(values, best, axis)
    place = jnp.max(jnp.where(x == most_frequent, number, 0), axis, keepdims=True)
    value = jnp.take_along_axis(x, place, axis)
    return (value, place) if keepdim else (value.squeeze(axis), place.squeeze(axis))


@lowers("histc")
def _histc(x: Array, bins: int = 100, min: float = 0, max: float = 0) -> Array:
    """Counts in bins of equal widths, the last including its upper end. By default they hold everything."""
    flat = jax.lax.stop_gradient(x).reshape(-1)
    low, high = jnp.asarray(min, x.dtype), jnp.asarray(max, x.dtype)
    if min == max and x.size:
        low, high = jnp.min(flat), jnp.max(flat)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    place = jnp.floor((flat - low) * bins / (high - low)).astype(int)
    place = jnp.where((flat >= low) & (flat <= high), jnp.minimum(place, bins - 1), bins)
    return jnp.zeros((bins,), x.dtype).at[place].add(1, mode="drop")


@lowers("nonzero_static")
def _nonzero_static(x: Array, *, size: int, fill_value: int = -1) -> Array:
    if x.ndim == 0:
        return jnp.zeros((size, 0), int)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), -1)


@lowers("histogram.bin_ct", "histogram.bins_tensor")
def _histogram(
    x: Array, bins: Any = 100, *, range: Any = None, weight: Array | None = None, density: bool = False
) -> tuple[Array, Array]:
    if weight is not None:
        weight = weight.reshape(-1)
    limits = None if range is None else tuple(range)
    return jnp.histogram(x.reshape(-1), bins, limits, weight, density)
