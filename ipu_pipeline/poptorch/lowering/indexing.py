"""Reads and writes elements at places given by arrays of integers.

An index out of range is an error in torch, but cannot be one in a compiled program: reading there gives NaN
(the smallest number for integers), and writing there does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, as_axis, is_float, is_inexact
from ipu_pipeline.poptorch.lowering.registry import lowers


def pick(x: Array, index: Array, axis: int) -> Array:
    """Picks elements along an axis. `index` has the result's shape; only that axis may exceed x's."""
    lengths = (*index.shape[:axis], x.shape[axis], *index.shape[axis + 1 :])
    x = x if lengths == x.shape else jax.lax.slice(x, (0,) * x.ndim, lengths)
    return jnp.take_along_axis(x, index, axis, mode="fill", wrap_negative_indices=False)


def _along(index: Array, axis: int) -> tuple[Array, ...]:
    """Returns the full index for each element of `index`: itself on the axis, its place on the others."""
    places = jnp.indices(index.shape, index.dtype, sparse=True)
    return (*places[:axis], index, *places[axis + 1 :])


def _lift(x: Array, index: Array) -> tuple[Array, Array]:
    """Turns scalars into vectors of one element."""
    return x.reshape(x.shape or (1,)), index.reshape(index.shape or (1,))


@lowers("gather")
def _gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    del sparse_grad
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    wide, indices = _lift(x, index)
    return pick(wide, indices, as_axis(dim, wide.ndim)).reshape(index.shape)


@lowers("index_select")
def _index_select(x: Array, dim: int, index: Array) -> Array:
    wide, indices = _lift(x, index)
    axis = as_axis(dim, wide.ndim)
    at = (*(slice(None),) * axis, indices)
    elements = wide.at[at].get(mode="fill", wrap_negative_indices=False)
    return elements if x.ndim else elements.reshape(())


def _places(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    for index in indices:
        if index is not None and index.dtype == jnp.bool_:
            raise NotImplementedError(
                "A tensor indexed by a boolean mask has a shape that depends on values, which a compiled "
                "program cannot have. Use torch.where, or multiply by the mask."
            )
    return tuple(slice(None) if index is None else index for index in indices)


@lowers("index.Tensor")
def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x.at[_places(indices)].get(mode="fill")


@lowers("index_put", "_unsafe_index_put")
def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    masks = [index for index in indices if index is not None and index.dtype == jnp.bool_]
    if masks:
        return _put_by_mask(x, indices, values, accumulate)
    at = x.at[_places(indices)]
    return at.add(values.astype(x.dtype)) if accumulate else at.set(values.astype(x.dtype))


def _put_by_mask(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool) -> Array:
    """Puts the same values wherever a single mask, of one or more dimensions, is true."""
    axis = next(number for number, index in enumerate(indices) if index is not None)
    mask = indices[axis]
    assert mask is not None
    after = x.ndim - axis - mask.ndim
    while values.ndim > after and values.shape[0] == 1:
        values = values[0]
    if sum(index is not None for index in indices) != 1 or values.ndim > after:
        raise NotImplementedError(
            "index_put with a boolean mask takes one mask, and the same values wherever it is true: "
            "otherwise their number depends on values. Use torch.where."
        )
    mask = mask.reshape(mask.shape + (1,) * after)
    values = values.astype(x.dtype)
    return jnp.where(mask, x + values if accumulate else values, x)


@lowers("masked_scatter", keep=True)
def _masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    """Puts the source's n-th element at the mask's n-th true element."""
    x, mask = jnp.broadcast_arrays(x, mask)
    order = jnp.cumsum(mask.reshape(-1)) - 1
    elements = source.reshape(-1).at[order].get(mode="fill", wrap_negative_indices=False)
    return jnp.where(mask, elements.reshape(mask.shape), x)


def _source(source: Array, index: Array, x: Array) -> Array:
    """Returns the part of the source that has the index's shape."""
    source = source.reshape(source.shape or (1,))
    return source[tuple(slice(length) for length in index.shape)].astype(x.dtype)


@lowers("scatter.src", "scatter.value")
def _scatter(x: Array, dim: int, index: Array, source: Any) -> Array:
    if index.size == 0:
        return x
    wide, indices = _lift(x, index)
    values = _source(source, indices, x) if isinstance(source, jax.Array) else jnp.asarray(source, x.dtype)
    return (
        wide.at[_along(indices, as_axis(dim, wide.ndim))]
        .set(values, wrap_negative_indices=False)
        .reshape(x.shape)
    )


@lowers("scatter_add")
def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    return _scatter_reduce(x, dim, index, source, "sum")


@lowers("scatter_reduce.two")
def _scatter_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    if index.size == 0:
        return x
    wide, indices = _lift(x, index)
    at = _along(indices, as_axis(dim, wide.ndim))
    source = _source(source, indices, x)
    if not include_self:
        written = jnp.zeros(wide.shape, bool).at[at].set(True)
        original, wide = wide, jnp.where(written, _neutral(reduce, x.dtype), wide)
    if reduce == "sum":
        reduced = wide.at[at].add(source)
    elif reduce == "mean":
        ones = jnp.ones(source.shape, int)
        counts = jnp.full(wide.shape, 1 if include_self else 0).at[at].add(ones)
        total = wide.at[at].add(source)
        counts = jnp.maximum(counts, 1)
        reduced = total / counts if is_inexact(total) else jnp.floor_divide(total, counts)
    elif reduce == "prod":
        reduced = _scatter_product(wide, at, source)
    else:
        reduced = _scatter_extremum(wide, at, source, reduce, wide if include_self else original)
    if not include_self:
        reduced = jnp.where(written, reduced, original)
    return reduced.reshape(x.shape)


@lowers("index_reduce", keep=True)
def _index_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """Reduces slices of the source into places along one dimension."""
    wide, values = (array.reshape(array.shape or (1,)) for array in (x, source))
    shape = [1] * wide.ndim
    shape[as_axis(dim, wide.ndim)] = -1
    places = jnp.broadcast_to(index.reshape(shape), values.shape)
    return _scatter_reduce(wide, dim, places, values, reduce, include_self=include_self).reshape(x.shape)


def _neutral(reduce: str, dtype: Any) -> Array:
    if reduce in ("sum", "mean"):
        return jnp.zeros((), dtype)
    if reduce == "prod":
        return jnp.ones((), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(reduce == "amin")
    low, high = (-jnp.inf, jnp.inf) if jnp.issubdtype(dtype, jnp.floating) else _limits(dtype)
    return jnp.asarray(low if reduce == "amax" else high, dtype)


def _limits(dtype: Any) -> tuple[int, int]:
    return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)


def _scatter_product(x: Array, at: tuple[Array, ...], source: Array) -> Array:
    """Multiplies, with the right gradient even where factors are 0: the product of the others."""
    return _product(x, at, source) if is_inexact(x) else x.at[at].multiply(source)


@jax.custom_jvp
def _product(x: Array, at: tuple[Array, ...], source: Array) -> Array:
    return x.at[at].multiply(source)


@_product.defjvp
def _product_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, at, source = primals
    x_zero, zero = x == 0, source == 0
    zeros = x_zero.astype(int).at[at].add(zero.astype(int))
    nonzero = jnp.where(x_zero, 1, x).at[at].multiply(jnp.where(zero, 1, source))
    x_share = jnp.where(zeros - x_zero == 0, nonzero / jnp.where(x_zero, 1, x), 0)
    share = jnp.where(zeros[at] - zero == 0, nonzero[at] / jnp.where(zero, 1, source), 0)
    return _product(x, at, source), (tangents[0] * x_share).at[at].add(tangents[2] * share)


def _scatter_extremum(x: Array, at: tuple[Array, ...], source: Array, reduce: str, counted: Array) -> Array:
    """Takes an extremum, whose gradient is divided among equal elements.

    As in torch, an element of `counted` counts as one of them even where it was replaced in x.
    """
    extremum = jax.lax.stop_gradient(x.at[at].max(source) if reduce == "amax" else x.at[at].min(source))
    if not is_float(x):
        return extremum
    x_equal, equal = x == extremum, source == extremum[at]
    counts = (counted == extremum).astype(x.dtype).at[at].add(equal.astype(x.dtype))
    return _share(extremum, x, source, at, x_equal, equal, counts)


@jax.custom_jvp
def _share(
    result: Array, x: Array, source: Array, at: Any, x_equal: Array, equal: Array, counts: Array
) -> Array:
    """Returns the result unchanged, with a share of its gradient for each equal element."""
    del x, source, at, x_equal, equal, counts
    return result


@_share.defjvp
def _share_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    result, _x, _source, at, x_equal, equal, counts = primals
    total = jnp.where(x_equal, tangents[1], 0).at[at].add(jnp.where(equal, tangents[2], 0))
    return result, total / jnp.maximum(counts, jnp.ones_like(counts))


@lowers("scatter.reduce", "scatter.value_reduce")
def _scatter_by(x: Array, dim: int, index: Array, source: Any, *, reduce: str) -> Array:
    """Computes the older form of `scatter_reduce`, in which the source may be a number."""
    if not isinstance(source, jax.Array):
        source = jnp.full(index.shape, source, x.dtype)
    return _scatter_reduce(x, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


@lowers("put", keep=True)
def _put(x: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    """Puts elements at places in the flattened array. Negative places count from its end."""
    at, values = x.reshape(-1).at[index.reshape(-1)], source.reshape(-1).astype(x.dtype)
    return (at.add(values) if accumulate else at.set(values)).reshape(x.shape)
