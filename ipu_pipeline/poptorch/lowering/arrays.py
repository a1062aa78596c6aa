"""Helpers of several families of lowerings: precision, dimensions, casts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # a JAX array; JAX's own annotations do not tell arrays from numbers
Dims = int | Sequence[int] | None


def is_float(x: Array) -> bool:
    """Whether an array has floating-point numbers."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def is_inexact(x: Array) -> bool:
    """Whether an array has floating-point or complex numbers."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def is_complex(x: Array) -> bool:
    """Whether an array has complex numbers."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.complexfloating))


def is_half(x: Array) -> bool:
    """Whether an array has floating-point numbers of 16 bits."""
    return is_float(x) and jnp.result_type(x).itemsize == 2


def widen(x: Array) -> Array:
    """Converts float16 and bfloat16 to float32, as torch computes with them. Others are unchanged."""
    return x.astype(jnp.float32) if isinstance(x, jax.Array) and is_half(x) else x


def to_float(x: Array) -> Array:
    """Widens floats, and converts integers and booleans to float32. Complex numbers are unchanged."""
    return widen(x) if is_inexact(x) else x.astype(jnp.float32)


def in_float32(function: Callable[..., Array]) -> Callable[..., Array]:
    """Makes a function compute in at least 32 bits. The result is cast to the graph's dtype later."""

    @functools.wraps(function)
    def compute(*args: Array, **kwargs: Any) -> Array:
        return function(*map(widen, args), **kwargs)

    return compute


def operands(a: Array, b: Array) -> tuple[Array, Array]:
    """Prepares two operands, one of which may be a Python number.

    A number stays exact with arrays of 16-bit floats, which are widened: 1e5 is not infinite with float16.
    With short integers it wraps around, as in torch.
    """
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        return a, b
    if not isinstance(b, jax.Array):
        return widen(a), wrap_number(a, b)
    return wrap_number(b, a), widen(b)


def wrap_number(array: Array, number: Any) -> Any:
    """Prepares a number to compute with an array: wraps it around if the array has short integers."""
    dtype = array.dtype
    if isinstance(number, int) and dtype.kind in "iu" and dtype.itemsize < 4:
        return np.asarray(number).astype(dtype)
    return number


def cast(x: Array, dtype: Any) -> Array:
    """Converts an array to another dtype as torch does.

    Floating-point numbers become integers of 8 and 16 bits by way of 32 bits, so that they wrap around
    (XLA's conversion saturates). Complex numbers become real by dropping the imaginary part.
    """
    dtype = np.dtype(dtype)
    if is_complex(x) and dtype.kind != "c":
        x = x != 0 if dtype.kind == "b" else x.real
    if is_float(x) and dtype.kind in "iu" and dtype.itemsize < 4:
        x = x.astype(jnp.int32)
    return x.astype(dtype)


def as_axis(dim: int, ndim: int) -> int:
    """Counts a dimension from the front. A scalar has one dimension of one element, as in torch."""
    return dim % max(ndim, 1)


def as_axes(dims: Dims, ndim: int) -> tuple[int, ...]:
    """Counts dimensions from the front. None and an empty sequence stand for all dimensions."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0) or ndim == 0:
        return tuple(range(ndim))
    return tuple(as_axis(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims))


def per_dim(values: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Returns one number for each of `count` dimensions; a single one stands for all."""
    values = [values] if isinstance(values, int) else list(values)
    return tuple(values * count if len(values) == 1 else values)


def absolute(x: Array) -> Array:
    """Computes the absolute value, with the gradient 0 at 0 (JAX's is 1)."""
    return jnp.where(x == 0, 0, jnp.abs(x)) if is_float(x) else jnp.abs(x)


def safe_sqrt(x: Array) -> Array:
    """Computes the square root with the gradient 0 at 0, as torch does for norms and deviations."""
    is_zero = x == 0
    return jnp.where(is_zero, 0, jax.lax.sqrt(jnp.where(is_zero, 1, x)))
