"""Maxima over windows side by side, with a gradient that is fast on CPUs.

On a CPU, XLA computes the gradient of `jax.lax.reduce_window` one element after another. For small windows,
whole arrays are compared instead: one for each place in a window.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, is_float
from ipu_pipeline.poptorch.lowering.layers.windows import Windows

__all__ = ["are_fast_tiles", "largest_of_tiles"]

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


def _forward(x: Array, windows: Windows) -> tuple[Array, tuple[Array, tuple[int, ...]]]:
    # The place is kept, not the elements to be compared with the largest, because XLA may compute the same
    # element twice, and round it in two ways.
    largest, *others = _elements_by_place(x, windows)
    place = jnp.zeros(largest.shape, jnp.int8)
    for number, elements in enumerate(others, 1):
        is_larger = (elements > largest) | (jnp.isnan(elements) & ~jnp.isnan(largest))
        largest = jnp.where(is_larger, elements, largest)
        place = jnp.where(is_larger, jnp.int8(number), place)
    return largest, (place, x.shape)


def _backward(windows: Windows, kept: tuple[Array, tuple[int, ...]], gradient: Array) -> tuple[Array]:
    place, shape = kept
    num_dims, sizes = windows.num_dims, windows.kernel
    num_before = len(shape) - num_dims
    zero = jnp.zeros_like(gradient)
    parts = [jnp.where(place == number, gradient, zero) for number in range(math.prod(sizes))]
    by_window = jnp.stack(parts, -1).reshape(*gradient.shape, *sizes)
    beside = [num_before + axis + half for axis in range(num_dims) for half in (0, num_dims)]
    covered = [count * size for count, size in zip(windows.counts, sizes, strict=True)]
    joined = by_window.transpose(*range(num_before), *beside).reshape(*shape[:num_before], *covered)
    rest = [(0, length - size) for length, size in zip(windows.lengths, covered, strict=True)]
    return (jnp.pad(joined, [(0, 0)] * num_before + rest),)


largest_of_tiles.defvjp(_forward, _backward)
