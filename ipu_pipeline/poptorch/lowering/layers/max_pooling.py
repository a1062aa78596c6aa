"""Maxima over windows, and their positions.

The gradient goes to the first of equal elements. Positions are counted in a plane, which is all pooled
dimensions together. They are computed only if something reads them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, is_float, per_dim
from ipu_pipeline.poptorch.lowering.layers.tiles import are_fast_tiles, largest_of_tiles
from ipu_pipeline.poptorch.lowering.layers.windows import Windows, make_windows
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


def _lowest(dtype: Any) -> np.ndarray[Any, Any]:
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def _max_pool(num_dims: int) -> Callable[..., Any]:
    def pool(
        x: Array,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> tuple[Any, Any]:
        windows = make_windows(x.shape, kernel_size, stride, padding, dilation, ceil_mode, num_dims)
        return _largest(x, windows), lambda: _positions(x, windows)

    return pool


lowers("max_pool2d_with_indices")(_max_pool(2))
lowers("max_pool3d_with_indices")(_max_pool(3))


def _largest(x: Array, windows: Windows) -> Array:
    if any(step != 1 for step in windows.dilation):  # JAX has no gradient of `reduce_window` for this
        return _take(x, _positions(x, windows), windows.num_dims)
    if are_fast_tiles(x, windows):
        return largest_of_tiles(x, windows)
    return jax.lax.reduce_window(
        x,
        _lowest(x.dtype),
        jax.lax.max,
        windows.spread(windows.kernel, x.ndim),
        windows.spread(windows.stride, x.ndim),
        windows.pads(x.ndim),
    )


def _positions(x: Array, windows: Windows) -> Array:
    """Returns each window's first position of the maximum. Windows are slices of padded planes."""
    num_dims, before = windows.num_dims, x.ndim - windows.num_dims
    pads = windows.pads(x.ndim)
    plane = math.prod(windows.lengths)
    values = jnp.pad(jax.lax.stop_gradient(x), pads, constant_values=_lowest(x.dtype))
    places = np.pad(np.arange(plane).reshape(windows.lengths), pads[before:], constant_values=plane)

    def cut(array: Any, offset: tuple[int, ...]) -> Any:
        at = [slice(None)] * (array.ndim - num_dims)
        for i, start in enumerate(offset):
            first = start * windows.dilation[i]
            at.append(
                slice(first, first + (windows.counts[i] - 1) * windows.stride[i] + 1, windows.stride[i])
            )
        return array[tuple(at)]

    offsets = list(itertools.product(*map(range, windows.kernel)))
    of_windows = jnp.stack([cut(values, offset) for offset in offsets], -1)
    their_places = np.stack([cut(places, offset) for offset in offsets], -1)
    return _first_largest(of_windows, jnp.asarray(their_places))


def _first_largest(values: Array, places: Array) -> Array:
    """Returns the smallest place of the maximum in each window, whose elements are the last dimension.

    Places beyond the plane do not count. NaN is larger than all numbers.
    """
    largest = jnp.max(values, -1, keepdims=True)
    is_largest = (values == largest) | jnp.isnan(values) if is_float(values) else values == largest
    return jnp.min(jnp.where(is_largest, places, jnp.iinfo(places.dtype).max), -1)


def _take(x: Array, positions: Array, num_dims: int) -> Array:
    """Takes the elements at positions in the planes."""
    flat = x.reshape(*x.shape[: x.ndim - num_dims], -1)
    at = positions.reshape(*flat.shape[:-1], -1)
    return jnp.take_along_axis(flat, at, -1, mode="clip").reshape(positions.shape)


def _adaptive_max_pool(num_dims: int) -> Callable[..., Any]:
    def pool(x: Array, output_size: int | Sequence[int]) -> tuple[Any, Any]:
        sizes = per_dim(output_size, num_dims)
        lengths = x.shape[x.ndim - num_dims :]
        if all(length % size == 0 for length, size in zip(lengths, sizes, strict=True)):
            kernel = [length // size for length, size in zip(lengths, sizes, strict=True)]
            windows = make_windows(x.shape, kernel, (), 0, 1, False, num_dims)
            return _largest(x, windows), lambda: _positions(x, windows)
        indices, valid = [], []
        for length, size in zip(lengths, sizes, strict=True):
            starts = np.arange(size) * length // size
            ends = -(-(np.arange(size) + 1) * length // size)
            index = starts[:, None] + np.arange((ends - starts).max())
            indices.append(index)
            valid.append(index < ends[:, None])
        positions = _gathered(x, indices, valid)
        return _take(x, positions, num_dims), positions

    return pool


lowers("adaptive_max_pool2d")(_adaptive_max_pool(2))
lowers("adaptive_max_pool3d")(_adaptive_max_pool(3))


def _gathered(x: Array, indices: list[Any], valid: list[Any] | None = None) -> Array:
    """Returns positions of maxima over windows with unequal steps."""
    num_dims = len(indices)
    lengths = x.shape[x.ndim - num_dims :]
    places: Any = 0
    is_valid: Any = True
    for i, index in enumerate(indices):
        windows, elements = [1] * num_dims, [1] * num_dims
        windows[i], elements[i] = index.shape[-2:]
        shape = (*index.shape[:-2], *windows, *elements)
        places = places * lengths[i] + jnp.minimum(index, lengths[i] - 1).reshape(shape)
        if valid is not None:
            is_valid = is_valid & valid[i].reshape(shape)
    outputs = places.shape[places.ndim - 2 * num_dims : places.ndim - num_dims]
    places = places.reshape(*places.shape[: places.ndim - 2 * num_dims], *outputs, -1)
    leading = x.shape[: x.ndim - num_dims]
    places = jnp.broadcast_to(places, (*leading, *places.shape[-num_dims - 1 :]))
    values = jnp.take_along_axis(
        jax.lax.stop_gradient(x).reshape(*leading, -1), places.reshape(*leading, -1), -1, mode="clip"
    ).reshape(places.shape)
    if valid is not None:
        values = jnp.where(jnp.asarray(is_valid).reshape(*outputs, -1), values, _lowest(x.dtype))
    return _first_largest(values, places)


def _starts(samples: Array, length: int, size: int, kernel: int) -> Array:
    """Returns where fractional pooling's windows begin: in steps of two lengths, in a sample's order."""
    if size == 1:
        return jnp.full((*samples.shape, 1), length - kernel)
    alpha = jnp.asarray((length - kernel) / (size - 1), samples.dtype)
    first = jnp.arange(size - 1, dtype=samples.dtype)
    starts = jnp.floor((first + samples[..., None]) * alpha) - jnp.floor(samples * alpha)[..., None]
    return jnp.concatenate([starts.astype(int), jnp.full((*samples.shape, 1), length - kernel)], -1)


def _fractional_max_pool(num_dims: int) -> Callable[..., Any]:
    def pool(
        x: Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Array
    ) -> tuple[Any, Any]:
        kernel, sizes = per_dim(kernel_size, num_dims), per_dim(output_size, num_dims)
        leading = x.shape[: x.ndim - num_dims]
        samples = random_samples.reshape(-1, num_dims)[: math.prod(leading)].reshape(*leading, num_dims)
        indices = []
        for i in range(num_dims):
            sample = samples[
                ..., num_dims - 1 - i if num_dims == 2 else i
            ]  # in two dimensions, width comes first
            starts = _starts(sample, x.shape[x.ndim - num_dims + i], sizes[i], kernel[i])
            indices.append(starts[..., None] + jnp.arange(kernel[i]))
        positions = _gathered(x, indices)
        return _take(x, positions, num_dims), positions

    return pool


lowers("fractional_max_pool2d", keep=True)(_fractional_max_pool(2))
lowers("fractional_max_pool3d", keep=True)(_fractional_max_pool(3))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _put(x: Array, at: Array, length: int) -> Array:
    """Puts elements (planes, elements) at places in planes of that length, with 0 elsewhere.

    Overlapping windows give the same element several times: in torch, each then has the gradient of one.
    """
    return jnp.zeros((x.shape[0], length), x.dtype).at[jnp.arange(x.shape[0])[:, None], at].set(x)


def _put_forward(x: Array, at: Array, length: int) -> tuple[Array, Array]:
    return _put(x, at, length), at


def _put_backward(length: int, at: Array, gradient: Array) -> tuple[Array, None]:
    del length
    return jnp.take_along_axis(gradient, at, 1, mode="clip"), None


_put.defvjp(_put_forward, _put_backward)


def _max_unpool(num_dims: int) -> Callable[..., Any]:
    def unpool(x: Array, indices: Array, output_size: Sequence[int], *rest: Any) -> Array:
        del rest  # stride and padding; the output's size was made from them
        leading = x.shape[: x.ndim - num_dims]
        flat = x.reshape(math.prod(leading), -1)
        made = _put(flat, indices.reshape(flat.shape), math.prod(output_size))
        return made.reshape(*leading, *output_size)

    return unpool


lowers("max_unpool2d", keep=True)(_max_unpool(2))
lowers("max_unpool3d", keep=True)(_max_unpool(3))
