"""Resizes images, and reads them at places given by a grid."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

# Resizing. Sources and weights along each dimension are known when a program is compiled. Linear and cubic
# interpolation are products with a matrix of weights, as in `jax.image.resize`. Nearest neighbours are a
# slice or a repetition where the sizes allow it.

Matrix = np.ndarray[Any, Any]

CUBIC_TAPS = (-1, 0, 1, 2)
_CUBIC = -0.75  # torch's parameter of the cubic kernel


def _targets(
    x: Array, size: Sequence[int] | None, scales: Sequence[Any], num_dims: int
) -> list[tuple[int, Any]]:
    """Returns each dimension's new length, and its factor or None. `scales` is one list, or numbers."""
    if len(scales) == 1 and isinstance(scales[0], (list, tuple)):
        scales = scales[0]
    factors = list(scales) if scales and scales[0] is not None else [None] * num_dims
    lengths = x.shape[x.ndim - num_dims :]
    if size is None:
        size = [int(length * factor) for length, factor in zip(lengths, factors, strict=True)]
    return list(zip(size, factors, strict=True))


def _nearest_sources(length: int, target: int, factor: float | None, is_exact: bool) -> Matrix:
    """Returns the source of each target, rounded in 32 bits as in torch."""
    step = np.float32(1 / factor if factor else np.float32(length) / np.float32(target))
    places = np.arange(target, dtype=np.float32)
    sources = np.floor((places + np.float32(0.5)) * step if is_exact else places * step)
    return np.minimum(sources.astype(np.int64), length - 1)


def _take_nearest(x: Array, axis: int, sources: Matrix) -> Array:
    length, target = x.shape[axis], len(sources)
    if target % length == 0 and (sources == np.repeat(np.arange(length), target // length)).all():
        return jnp.repeat(x, target // length, axis)
    step = int(sources[1] - sources[0]) if target > 1 else 1
    if step > 0 and (sources == sources[0] + step * np.arange(target)).all():
        return jax.lax.slice_in_dim(x, int(sources[0]), int(sources[-1]) + 1, step, axis)
    return jnp.take(x, jnp.asarray(sources), axis, mode="clip")


def _nearest(num_dims: int, is_exact: bool) -> Callable[..., Array]:
    def resample(x: Array, size: Sequence[int] | None, *scales: Any) -> Array:
        for i, (target, factor) in enumerate(_targets(x, size, scales, num_dims)):
            axis = x.ndim - num_dims + i
            x = _take_nearest(x, axis, _nearest_sources(x.shape[axis], target, factor, is_exact))
        return x

    return resample


for _num_dims in (1, 2, 3):
    lowers(f"upsample_nearest{_num_dims}d", keep=True)(_nearest(_num_dims, is_exact=False))
    lowers(f"_upsample_nearest_exact{_num_dims}d", keep=True)(_nearest(_num_dims, is_exact=True))


def _step_of_targets(
    length: int, target: int, factor: float | None, align_corners: bool, dtype: Any
) -> Any:
    """Returns a target's width in sources, in the precision of the result."""
    real = np.dtype(dtype).type
    if align_corners:
        return real(length - 1) / real(target - 1) if target > 1 else real(0)
    return real(1 / factor) if factor else real(length) / real(target)


def _coordinates(target: int, step: Any, align_corners: bool) -> Matrix:
    """Returns the place of each target's centre between the sources' centres."""
    places = np.arange(target, dtype=step.dtype)
    half = step.dtype.type(0.5)
    return places * step if align_corners else step * (places + half) - half


def _matrix(sources: list[tuple[Matrix, Matrix]], length: int) -> Matrix:
    """Makes weights (target, source) from pairs of sources and weights. Beyond the ends are the ends."""
    rows = np.arange(len(sources[0][0]))
    matrix = np.zeros((len(rows), length), sources[0][1].dtype)
    for places, weights in sources:
        np.add.at(matrix, (rows, np.clip(places, 0, length - 1)), weights)
    return matrix


def _linear_matrix(coordinates: Matrix, length: int, step: Any) -> Matrix:
    del step
    coordinates = np.maximum(coordinates, 0)
    first = np.floor(coordinates).astype(np.int64)
    weight = coordinates - first
    return _matrix([(first, 1 - weight), (first + 1, weight)], length)


def _cubic_matrix(coordinates: Matrix, length: int, step: Any) -> Matrix:
    del step
    first = np.floor(coordinates).astype(np.int64)
    fraction = coordinates - first
    return _matrix([(first + tap, cubic_weight(fraction, tap)) for tap in CUBIC_TAPS], length)


def cubic_weight(fraction: Any, tap: int) -> Any:
    """Returns a pixel's weight for a place between pixels, by the kernel of Keys, 1981."""
    distance = fraction - tap if tap <= 0 else tap - fraction
    if tap in (0, 1):
        return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


def _smooth_matrix(coordinates: Matrix, length: int, step: Any, is_cubic: bool = False) -> Matrix:
    """Makes the weights of an antialiasing filter as wide as the sources that make one target."""
    coordinates = _coordinates(
        len(coordinates), step, align_corners=False
    )  # whatever is asked for, as in torch
    width = max(step, 1)
    distances = np.abs(np.arange(length) - coordinates[:, None]) / width
    if is_cubic:  # Keys' kernel with the parameter -0.5, as in Pillow
        near = (1.5 * distances - 2.5) * distances * distances + 1
        far = ((-0.5 * distances + 2.5) * distances - 4) * distances + 2
        weights = np.where(distances < 1, near, np.where(distances < 2, far, 0))
    else:
        weights = np.maximum(1 - distances, 0)
    return weights / weights.sum(1, keepdims=True)


def _interpolator(num_dims: int, make_matrix: Callable[[Matrix, int, Any], Matrix]) -> Callable[..., Array]:
    def resample(x: Array, size: Sequence[int] | None, align_corners: bool, *scales: Any) -> Array:
        wide = widen(x)
        for i, (target, factor) in enumerate(_targets(x, size, scales, num_dims)):
            axis = x.ndim - num_dims + i
            length = x.shape[axis]
            if target == length and (align_corners or factor in (None, 1)):
                continue
            step = _step_of_targets(length, target, factor, align_corners, wide.dtype)
            matrix = make_matrix(_coordinates(target, step, align_corners), length, step)
            weights = jnp.asarray(matrix, wide.dtype)
            wide = jnp.moveaxis(
                jnp.tensordot(wide, weights, ((axis,), (1,)), precision="highest"), -1, axis
            )
        return wide

    return resample


lowers("upsample_linear1d", keep=True)(_interpolator(1, _linear_matrix))
lowers("upsample_bilinear2d", keep=True)(_interpolator(2, _linear_matrix))
lowers("upsample_trilinear3d", keep=True)(_interpolator(3, _linear_matrix))
lowers("upsample_bicubic2d", keep=True)(_interpolator(2, _cubic_matrix))
lowers("_upsample_bilinear2d_aa", keep=True)(_interpolator(2, _smooth_matrix))
lowers("_upsample_bicubic2d_aa", keep=True)(
    _interpolator(2, functools.partial(_smooth_matrix, is_cubic=True))
)


# Reading at places given by a grid: from -1 to 1 along each dimension, the last one first. Beyond the image
# there are zeros, the edge, or a reflection.

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
    remainder = distance - turns * span
    return jnp.where(turns % 2 == 0, remainder + low, span - remainder + low)
