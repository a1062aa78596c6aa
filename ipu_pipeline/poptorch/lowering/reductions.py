"""Sums, means, extrema and norms over dimensions, and distances between rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import (
    Array,
    Dims,
    absolute,
    as_axes,
    as_axis,
    is_complex,
    is_inexact,
    safe_sqrt,
    to_float,
    widen,
)
from ipu_pipeline.poptorch.lowering.registry import lowers


def _accumulating(x: Array, dtype: Any) -> Array:
    """Widens an array, after converting it if a dtype is asked for."""
    return widen(x if dtype is None else x.astype(dtype))


@lowers("sum")
def _sum(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    return jnp.sum(_accumulating(x, dtype), as_axes(dim, x.ndim), keepdims=keepdim)


@lowers("mean")
def _mean(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    return jnp.mean(_accumulating(x, dtype), as_axes(dim, x.ndim), keepdims=keepdim)


@lowers("prod")
def _prod(x: Array, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    return jnp.prod(_accumulating(x, dtype), as_axes(dim, x.ndim), keepdims=keepdim)


@lowers("any")
def _any(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.any(x, as_axes(dim, x.ndim), keepdims=keepdim)


@lowers("all", "_is_all_true")
def _all(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.all(x, as_axes(dim, x.ndim), keepdims=keepdim)


@lowers("amax", "max.default")
def _amax(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """Takes the maximum. Its gradient is divided among equal elements, as in torch."""
    return jnp.max(x, as_axes(dim, x.ndim), keepdims=keepdim)


@lowers("amin", "min.default")
def _amin(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.min(x, as_axes(dim, x.ndim), keepdims=keepdim)


def _position(function: Callable[..., Array], x: Array, dim: int | None, keepdim: bool) -> Array:
    """Returns the first position of an extremum. NaN counts as the largest, and as the smallest."""
    if dim is None:
        position = function(x.reshape(-1), 0)
        return position.reshape((1,) * x.ndim) if keepdim else position
    if x.ndim == 0:
        return jnp.zeros((), int)
    return function(x, as_axis(dim, x.ndim), keepdims=keepdim)


@lowers("argmax")
def _argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return _position(jnp.argmax, x, dim, keepdim)


@lowers("argmin")
def _argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return _position(jnp.argmin, x, dim, keepdim)


def _with_position(
    function: Callable[..., Array], x: Array, dim: int, keepdim: bool
) -> tuple[Array, Array]:
    """Returns an extremum and its position, which alone gets the gradient."""
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    axis = as_axis(dim, x.ndim)
    position = function(x, axis, keepdims=True)
    value = jnp.take_along_axis(x, position, axis, mode="promise_in_bounds")
    return (value, position) if keepdim else (value.squeeze(axis), position.squeeze(axis))


@lowers("max.dim")
def _max(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _with_position(jnp.argmax, x, dim, keepdim)


@lowers("min.dim")
def _min(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _with_position(jnp.argmin, x, dim, keepdim)


def _squared(x: Array) -> Array:
    """Squares each element, or its absolute value if it is complex."""
    return jnp.square(x.real) + jnp.square(x.imag) if is_complex(x) else jnp.square(x)


def variance(x: Array, axes: tuple[int, ...], correction: float, keepdim: bool) -> tuple[Array, Array]:
    """Returns variance and mean, with torch's infinity or NaN if there are too few elements to correct."""
    x = to_float(x)
    mean = jnp.mean(x, axes, keepdims=True)
    squares = jnp.sum(_squared(x - mean), axes, keepdims=keepdim)
    count = math.prod(x.shape[axis] for axis in axes)
    return squares / max(count - correction, 0), mean if keepdim else mean.squeeze(axes)


def _variance(x: Array, dim: Any, unbiased: Any, keepdim: bool, correction: Any) -> tuple[Array, Array]:
    """Handles overloads: (x, unbiased), (x, dim, unbiased, keepdim), (x, dim, correction=, keepdim=)."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    by = (1 if unbiased else 0) if unbiased is not None else 1 if correction is None else correction
    return variance(x, as_axes(dim, x.ndim), by, keepdim)


@lowers("var")
def _var(
    x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Array:
    return _variance(x, dim, unbiased, keepdim, correction)[0]


@lowers("var_mean", keep=True)
def _var_mean(
    x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> tuple[Array, Array]:
    return _variance(x, dim, unbiased, keepdim, correction)


@lowers("std", keep=True)
def _std(
    x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Array:
    return safe_sqrt(_variance(x, dim, unbiased, keepdim, correction)[0])


@lowers("std_mean", keep=True)
def _std_mean(
    x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> tuple[Array, Array]:
    squares, mean = _variance(x, dim, unbiased, keepdim, correction)
    return safe_sqrt(squares), mean


@lowers("logsumexp", keep=True)
def _logsumexp(x: Array, dim: Dims, keepdim: bool = False) -> Array:
    return jax.nn.logsumexp(to_float(x), as_axes(dim, x.ndim), keepdims=keepdim)


@lowers("linalg_vector_norm", keep=True)
def vector_norm(
    x: Array, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    """Computes a vector norm. Where it is 0, its gradient is 0."""
    axes = as_axes(dim, x.ndim)
    x = _accumulating(x, dtype)
    if ord == 0:
        return jnp.sum(x != 0, axes, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(absolute(x), axes, keepdims=keepdim)
    if ord == 2:
        return safe_sqrt(jnp.sum(_squared(x), axes, keepdims=keepdim))
    if math.isinf(ord):
        return (jnp.max if ord > 0 else jnp.min)(absolute(x), axes, keepdims=keepdim)
    sizes = absolute(x)
    is_zero = sizes == 0
    powers = jnp.where(is_zero, 0.0 if ord > 0 else jnp.inf, jnp.where(is_zero, 1, sizes) ** ord)
    total = jnp.sum(powers, axes, keepdims=keepdim)
    is_nothing = total == 0
    return jnp.where(is_nothing, 0, jnp.where(is_nothing, 1, total) ** (1 / ord))


def _scan_sum(x: Array, dtype: Any) -> Array:
    x = _accumulating(x, dtype)
    return x if is_inexact(x) or dtype is not None else x.astype(int)


@lowers("cumsum")
def _cumsum(x: Array, dim: int, *, dtype: Any = None) -> Array:
    return jnp.cumsum(_scan_sum(x, dtype), as_axis(dim, x.ndim)) if x.ndim else _scan_sum(x, dtype)


@lowers("cumprod")
def _cumprod(x: Array, dim: int, *, dtype: Any = None) -> Array:
    return jnp.cumprod(_scan_sum(x, dtype), as_axis(dim, x.ndim)) if x.ndim else _scan_sum(x, dtype)


@lowers("logcumsumexp", "_logcumsumexp")
def _logcumsumexp(x: Array, dim: int) -> Array:
    return jax.lax.cumlogsumexp(to_float(x), as_axis(dim, x.ndim)) if x.ndim else x


# Distances between rows.


def _norm_of_rows(difference: Array, p: float) -> Array:
    """Takes the norm over the last dimension. As in torch, a maximum's gradient is not divided here."""
    if not math.isinf(p):
        return vector_norm(difference, p, -1)
    sizes = absolute(difference)
    largest = jax.lax.stop_gradient(jnp.max(sizes, -1, keepdims=True))
    changes = jnp.where(sizes == largest, sizes - jax.lax.stop_gradient(sizes), 0)
    return largest[..., 0] + jnp.sum(changes, -1)


@lowers("_cdist_forward")
def _cdist(a: Array, b: Array, p: float, compute_mode: int | None = None) -> Array:
    """Takes distances between all rows of a and of b. torch multiplies large matrices, and rounds more."""
    del compute_mode
    return _norm_of_rows(a[..., :, None, :] - b[..., None, :, :], p)


@lowers("_pdist_forward")
def _pdist(x: Array, p: float = 2) -> Array:
    """Takes distances between each row and the later ones."""
    first, second = np.triu_indices(x.shape[0], 1)
    return _norm_of_rows(x[first] - x[second], p)


@lowers("dist", keep=True)
def _dist(a: Array, b: Array, p: float = 2) -> Array:
    """Takes the distance between two arrays as a whole."""
    return vector_norm(a - b, p)
