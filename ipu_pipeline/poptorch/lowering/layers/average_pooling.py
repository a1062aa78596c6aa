"""Means over windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, per_dim, widen
from ipu_pipeline.poptorch.lowering.layers.windows import Windows, make_windows
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


def _counts(windows: Windows, include_padding: bool) -> np.ndarray[Any, Any]:
    """Returns the divisor of each window's sum: its number of elements, with or without padding."""
    counts = np.ones((1,) * windows.num_dims)
    for i in range(windows.num_dims):
        length, padding = windows.lengths[i], windows.padding[i]
        starts = np.arange(windows.counts[i]) * windows.stride[i] - padding
        ends = np.minimum(starts + windows.kernel[i], length + padding)
        if not include_padding:
            starts, ends = np.maximum(starts, 0), np.minimum(ends, length)
        shape = [1] * windows.num_dims
        shape[i] = windows.counts[i]
        counts = counts * (ends - starts).reshape(shape)
    return counts


def _average_pool(num_dims: int) -> Callable[..., Array]:
    def pool(
        x: Array,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        windows = make_windows(x.shape, kernel_size, stride, padding, 1, ceil_mode, num_dims)
        wide = widen(x)
        total = jax.lax.reduce_window(
            wide,
            np.zeros((), wide.dtype),
            jax.lax.add,
            windows.spread(windows.kernel, x.ndim),
            windows.spread(windows.stride, x.ndim),
            windows.pads(x.ndim),
        )
        if divisor_override is not None:
            return total / divisor_override
        counts = _counts(windows, count_include_pad)
        if (counts == counts.flat[0]).all():
            return total / float(counts.flat[0])
        return total / counts.astype(wide.dtype)

    return pool


lowers("avg_pool1d")(_average_pool(1))
lowers("avg_pool2d")(_average_pool(2))
lowers("avg_pool3d")(_average_pool(3))


def _average_axis(x: Array, axis: int, size: int) -> Array:
    """Takes means of `size` parts of an axis. They overlap if its length is not a multiple of `size`."""
    length = x.shape[axis]
    if length % size == 0:
        return jnp.mean(x.reshape(*x.shape[:axis], size, length // size, *x.shape[axis + 1 :]), axis + 1)
    starts = np.arange(size) * length // size
    ends = -(-(np.arange(size) + 1) * length // size)
    place = np.arange(length)
    inside = (place >= starts[:, None]) & (place < ends[:, None])
    weights = jnp.asarray(inside / (ends - starts)[:, None], x.dtype)
    return jnp.moveaxis(jnp.tensordot(x, weights, ((axis,), (1,))), -1, axis)


def _adaptive_average_pool(num_dims: int) -> Callable[..., Array]:
    def pool(x: Array, output_size: int | Sequence[int]) -> Array:
        wide = widen(x)
        for i, size in enumerate(per_dim(output_size, num_dims)):
            wide = _average_axis(wide, x.ndim - num_dims + i, size)
        return wide

    return pool


lowers("adaptive_avg_pool1d", keep=True)(_adaptive_average_pool(1))
lowers("_adaptive_avg_pool2d")(_adaptive_average_pool(2))
lowers("_adaptive_avg_pool3d")(_adaptive_average_pool(3))
