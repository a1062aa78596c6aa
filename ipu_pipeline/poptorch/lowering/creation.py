"""Makes arrays. The graph's results decide their dtypes. Memory that torch leaves unset is 0 here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


@lowers("full")
def _full(size: Sequence[int], value: Any, *, dtype: Any = None) -> Array:
    return jnp.full(tuple(size), value, dtype)


@lowers("full_like")
def _full_like(x: Array, value: Any, *, dtype: Any = None) -> Array:
    return jnp.full(x.shape, value, x.dtype if dtype is None else dtype)


@lowers("fill")
def _fill(x: Array, value: Any) -> Array:
    return jnp.full(x.shape, value, x.dtype)


@lowers("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: Any = None) -> Array:
    return jnp.asarray(value, dtype)


@lowers("empty", "zeros", "empty_permuted", "empty_strided")
def _zeros(size: Sequence[int], layout: Any = None, *, dtype: Any = None) -> Array:
    del layout
    return jnp.zeros(tuple(size), dtype)


@lowers("ones")
def _ones(size: Sequence[int], *, dtype: Any = None) -> Array:
    return jnp.ones(tuple(size), dtype)


@lowers("empty_like", "zeros_like")
def _zeros_like(x: Array, *, dtype: Any = None) -> Array:
    return jnp.zeros(x.shape, dtype or x.dtype)


@lowers("ones_like")
def _ones_like(x: Array, *, dtype: Any = None) -> Array:
    return jnp.ones(x.shape, dtype or x.dtype)


@lowers("arange.start_step")
def _arange(start: float, end: float, step: float = 1, *, dtype: Any = None) -> Array:
    """Computes `start + number * step`, which rounds as in torch."""
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        count = len(range(start, end, step))
    else:
        count = max(0, math.ceil((end - start) / step))
    wide = jnp.result_type(float) if dtype is None or jnp.issubdtype(dtype, jnp.floating) else dtype
    return jax.lax.iota(wide, count) * step + start


@lowers("eye", keep=True)
def _eye(n: int, m: int | None = None, *, dtype: Any = None) -> Array:
    return jnp.eye(n, n if m is None else m, dtype=dtype)


@lowers("tril", keep=True)
def _tril(x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


@lowers("triu", keep=True)
def _triu(x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)
