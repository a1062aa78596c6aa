"""Fourier transforms. torch's other ones are made of these three.

Each goes over its dimensions one by one, because XLA's own transforms take at most three. `normalization`
is 0 for none, 1 to divide by the root of the number of elements, 2 to divide by that number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []

_FORWARD, _INVERSE = "backward", "forward"  # NumPy's names of the scalings that give each no factor


def _scaled(x: Array, shape: Sequence[int], dim: Sequence[int], normalization: int) -> Array:
    count = math.prod(shape[axis] for axis in dim)
    return x / (1, math.sqrt(count), count)[normalization]


@lowers("_fft_c2c")
def _c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    made = x
    for axis in dim:
        made = jnp.fft.fft(made, axis=axis) if forward else jnp.fft.ifft(made, axis=axis, norm=_INVERSE)
    return _scaled(made, x.shape, dim, normalization)


@lowers("_fft_r2c")
def _r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    *others, last = dim
    made = (jnp.fft.rfft if onesided else jnp.fft.fft)(x, axis=last)
    return _scaled(_c2c(made, others, 0, True), x.shape, dim, normalization)


@lowers("_fft_c2r")
def _c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    *others, last = dim
    made = jnp.fft.irfft(_c2c(x, others, 0, False), last_dim_size, axis=last, norm=_INVERSE)
    return _scaled(made, made.shape, dim, normalization)
