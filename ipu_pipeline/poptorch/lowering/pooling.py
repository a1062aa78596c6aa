"""Pooling: windows, and means and maxima over them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, is_float, per_dim, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

# Windows. Dimensions that come before the pooled ones (batch, channels) have windows of one element.


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows along the pooled dimensions, which are an array's last ones, with one number for each."""

    lengths: tuple[int, ...]  # the array's lengths
    kernel: tuple[int, ...]  # elements in a window
    stride: tuple[int, ...]  # from one window to the next
    # elements before the array; after it there may be fewer or, when rounding up, more
    padding: tuple[int, ...]
    dilation: tuple[int, ...]  # from one element of a window to the next
    counts: tuple[int, ...]  # the numbers of windows

    @property
    def num_dims(self) -> int:
        """The number of pooled dimensions."""
        return len(self.kernel)

    @property
    def are_tiles(self) -> bool:
        """Whether the windows are side by side, all within the array."""
        inside = not any(before or after for before, after in self.pads(self.num_dims))
        return inside and self.stride == self.kernel and set(self.dilation) == {1}

    def pads(self, ndim: int) -> list[tuple[int, int]]:
        """Returns the padding before and after, for all dimensions of an array."""
        pads = []
        for i in range(self.num_dims):
            reach = (self.counts[i] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1) + 1
            pads.append((self.padding[i], max(reach - self.lengths[i] - self.padding[i], 0)))
        return [(0, 0)] * (ndim - self.num_dims) + pads

    def spread(self, values: tuple[int, ...], ndim: int) -> tuple[int, ...]:
        """Extends numbers of the pooled dimensions to all of an array's, with 1 for those before."""
        return (1,) * (ndim - self.num_dims) + values


def make_windows(
    shape: tuple[int, ...],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
    num_dims: int,
) -> Windows:
    """Makes the windows of an array of that shape."""
    kernel = per_dim(kernel, num_dims)
    stride = per_dim(stride, num_dims) if stride else kernel
    padding, dilation = per_dim(padding, num_dims), per_dim(dilation, num_dims)
    lengths = shape[len(shape) - num_dims :]
    counts = []
    for i in range(num_dims):
        free = lengths[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1
        count = free // stride[i] + 1
        if ceil_mode and free % stride[i] and count * stride[i] < lengths[i] + padding[i]:
            count += 1
        counts.append(count)
    return Windows(lengths, kernel, stride, padding, dilation, tuple(counts))


# Means.


def _divisors(windows: Windows, include_padding: bool) -> np.ndarray[Any, Any]:
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
        counts = _divisors(windows, count_include_pad)
        if (counts == counts.flat[0]).all():
            return total / float(counts.flat[0])
        return total / counts.astype(wide.dtype)

    return pool


lowers("avg_pool1d")(_average_pool(1))
lowers("avg_pool2d")(_average_pool(2))
lowers("avg_pool3d")(_average_pool(3))


def _adaptive_bounds(length: int, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns where each of `size` windows of an adaptive pooling begins and ends."""
    numbers = np.arange(size)
    return numbers * length // size, -(-(numbers + 1) * length // size)


def _average_axis(x: Array, axis: int, size: int) -> Array:
    """Takes means of `size` parts of an axis. They overlap if its length is not a multiple of `size`."""
    length = x.shape[axis]
    if length % size == 0:
        return jnp.mean(x.reshape(*x.shape[:axis], size, length // size, *x.shape[axis + 1 :]), axis + 1)
    starts, ends = _adaptive_bounds(length, size)
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


# Maxima over small windows side by side. On a CPU, XLA computes the gradient of `jax.lax.reduce_window` one
# element after another. Here whole arrays are compared instead: one for each place in a window.

_MOST_ELEMENTS = 16  # in a window: with more, `reduce_window` is as fast


def are_fast_tiles(x: Array, windows: Windows) -> bool:
    """Whether `largest_of_tiles` takes an array and its windows."""
    return is_float(x) and windows.are_tiles and math.prod(windows.kernel) <= _MOST_ELEMENTS


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def largest_of_tiles(x: Array, windows: Windows) -> Array:
    """Returns the largest element of each window. Its gradient goes to the first of equal ones."""
    return functools.reduce(jnp.maximum, _elements_by_place(x, windows))


def _elements_by_place(x: Array, windows: Windows) -> list[Array]:
    """Returns the elements (..., *counts) at each place in a window, row by row."""
    sizes = windows.kernel
    ends = [count * size for count, size in zip(windows.counts, sizes, strict=True)]
    offsets = itertools.product(*map(range, sizes))
    return [x[(..., *map(slice, offset, ends, sizes))] for offset in offsets]


def _largest_forward(x: Array, windows: Windows) -> tuple[Array, tuple[Array, tuple[int, ...]]]:
    # The place is kept, not the elements to be compared with the largest, because XLA may compute the same
    # element twice, and round it in two ways.
    largest, *later_elements = _elements_by_place(x, windows)
    place = jnp.zeros(largest.shape, jnp.int8)
    for number, elements in enumerate(later_elements, 1):
        is_larger = (elements > largest) | (jnp.isnan(elements) & ~jnp.isnan(largest))
        largest = jnp.where(is_larger, elements, largest)
        place = jnp.where(is_larger, jnp.int8(number), place)
    return largest, (place, x.shape)


def _largest_backward(
    windows: Windows, saved: tuple[Array, tuple[int, ...]], gradient: Array
) -> tuple[Array]:
    place, shape = saved
    num_dims, sizes = windows.num_dims, windows.kernel
    num_before = len(shape) - num_dims
    zero = jnp.zeros_like(gradient)
    parts = [jnp.where(place == number, gradient, zero) for number in range(math.prod(sizes))]
    by_window = jnp.stack(parts, -1).reshape(*gradient.shape, *sizes)
    beside = [num_before + axis + half for axis in range(num_dims) for half in (0, num_dims)]
    covered = [count * size for count, size in zip(windows.counts, sizes, strict=True)]
    joined = by_window.transpose(*range(num_before), *beside).reshape(*shape[:num_before], *covered)
    uncovered = [(0, length - size) for length, size in zip(windows.lengths, covered, strict=True)]
    return (jnp.pad(joined, [(0, 0)] * num_before + uncovered),)


largest_of_tiles.defvjp(_largest_forward, _largest_backward)


# Maxima and their positions. The gradient goes to the first of equal elements. Positions are counted in a
# plane, which is all pooled dimensions together. They are computed only if something reads them.


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
            starts, ends = _adaptive_bounds(length, size)
            index = starts[:, None] + np.arange((ends - starts).max())
            indices.append(index)
            valid.append(index < ends[:, None])
        positions = _positions_by_index(x, indices, valid)
        return _take(x, positions, num_dims), positions

    return pool


lowers("adaptive_max_pool2d")(_adaptive_max_pool(2))
lowers("adaptive_max_pool3d")(_adaptive_max_pool(3))


def _positions_by_index(x: Array, indices: list[Any], valid: list[Any] | None = None) -> Array:
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


def _fractional_starts(samples: Array, length: int, size: int, kernel: int) -> Array:
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
            starts = _fractional_starts(sample, x.shape[x.ndim - num_dims + i], sizes[i], kernel[i])
            indices.append(starts[..., None] + jnp.arange(kernel[i]))
        positions = _positions_by_index(x, indices)
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
    def unpool(x: Array, indices: Array, output_size: Sequence[int], *geometry: Any) -> Array:
        del geometry  # stride and padding; the output's size was made from them
        leading = x.shape[: x.ndim - num_dims]
        flat = x.reshape(math.prod(leading), -1)
        planes = _put(flat, indices.reshape(flat.shape), math.prod(output_size))
        return planes.reshape(*leading, *output_size)

    return unpool


lowers("max_unpool2d", keep=True)(_max_unpool(2))
lowers("max_unpool3d", keep=True)(_max_unpool(3))
