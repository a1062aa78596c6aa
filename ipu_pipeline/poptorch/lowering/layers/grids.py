"""Reads images at places given by a grid: from -1 to 1 along each dimension, the last one first.

Beyond the image there are zeros, the edge, or a reflection.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.layers.resampling import CUBIC_TAPS, cubic_weight
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


@lowers("grid_sampler_2d", "grid_sampler_3d", keep=True)
def _grid_sampler(x: Array, grid: Array, mode: int, padding: int, align_corners: bool) -> Array:
    """Takes x (batch, channels, *lengths) and grid (batch, *places, dimensions)."""
    lengths = x.shape[2:]
    image = widen(x).reshape(*x.shape[:2], -1)
    grid = widen(grid)
    coordinates = [
        _unnormalize(grid[..., -1 - i], length, align_corners) for i, length in enumerate(lengths)
    ]

    def bounded(coordinate: Array, length: int) -> Array:
        return _bound(coordinate, length, padding, align_corners)

    def read(places: tuple[Array, ...]) -> Array:
        """Reads pixels, 0 outside of the image."""
        inside: Any = True
        flat: Any = 0
        for place, length in zip(places, lengths, strict=True):
            inside = inside & (place >= 0) & (place <= length - 1)
            flat = flat * length + jnp.clip(place, 0, length - 1).astype(int)
        pixels = jnp.take_along_axis(image, flat.reshape(flat.shape[0], 1, -1), 2, mode="clip")
        return jnp.where(inside[:, None], pixels.reshape(*x.shape[:2], *flat.shape[1:]), 0)

    if mode == _BICUBIC:
        taps = [
            [
                (
                    bounded(jnp.floor(coordinate) + tap, length),
                    cubic_weight(coordinate - jnp.floor(coordinate), tap),
                )
                for tap in CUBIC_TAPS
            ]
            for coordinate, length in zip(coordinates, lengths, strict=True)
        ]
    else:
        coordinates = [bounded(*pair) for pair in zip(coordinates, lengths, strict=True)]
        if mode == _NEAREST:
            return read(tuple(map(jnp.round, coordinates)))
        floors = [jax.lax.stop_gradient(jnp.floor(coordinate)) for coordinate in coordinates]
        taps = [
            [(floor, 1 - (coordinate - floor)), (floor + 1, coordinate - floor)]
            for coordinate, floor in zip(coordinates, floors, strict=True)
        ]
    terms = []
    for corner in itertools.product(*taps):
        places, weights = zip(*corner, strict=True)
        terms.append(read(places) * math.prod(weights[1:], start=weights[0])[:, None])
    return sum(terms[1:], terms[0])


def _unnormalize(coordinate: Array, length: int, align_corners: bool) -> Array:
    if align_corners:
        return (coordinate + 1) / 2 * (length - 1)
    return ((coordinate + 1) * length - 1) / 2


def _bound(coordinate: Array, length: int, padding: int, align_corners: bool) -> Array:
    if padding == _ZEROS:
        return coordinate
    if padding == _REFLECTION:
        low, high = (0, 2 * (length - 1)) if align_corners else (-1, 2 * length - 1)
        coordinate = _reflect(coordinate, low / 2, (high - low) / 2)
    inside = (coordinate > 0) & (coordinate < length - 1)
    return jnp.where(inside, coordinate, jax.lax.stop_gradient(jnp.clip(coordinate, 0, length - 1)))


def _reflect(coordinate: Array, low: float, span: float) -> Array:
    """Reflects coordinates back and forth between `low` and `low + span`."""
    if span == 0:
        return jnp.zeros_like(coordinate)
    distance = jnp.abs(coordinate - low)
    turns = jax.lax.stop_gradient(jnp.floor(distance / span))
    rest = distance - turns * span
    return jnp.where(turns % 2 == 0, rest + low, span - rest + low)
