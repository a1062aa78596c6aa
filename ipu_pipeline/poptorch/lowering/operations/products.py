"""Computes a matrix product in a loop that makes one part at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.enums import MatMulSerializationMode
from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.registry import lowers
from ipu_pipeline.poptorch.operations.products import SERIALIZED

__all__: list[str] = []


@dataclass(frozen=True)
class _Cut:
    """The axes that operands and result are cut along. None: each part has all, and results are added."""

    lhs: int | None  # an axis of (..., m, n)
    rhs: int | None  # an axis of (..., n, p)
    result: int | None  # an axis of (..., m, p)


def _cut_of(mode: str, rhs: Array) -> _Cut:
    match MatMulSerializationMode(mode):
        case MatMulSerializationMode.InputChannels:
            return _Cut(-2, None, -1 if rhs.ndim == 1 else -2)
        case MatMulSerializationMode.OutputChannels:
            return _Cut(None, -1, -1)
        case _:
            return _Cut(-1, -1 if rhs.ndim == 1 else -2, None)


@lowers(SERIALIZED, keep=True)
def _serialized_matmul(lhs: Array, rhs: Array, mode: str, factor: int, keep_precision: bool) -> Array:
    cut = _cut_of(mode, rhs)
    widened = widen if keep_precision else _same

    def in_parts(lhs: Array, rhs: Array) -> Array:
        shape = jax.eval_shape(jnp.matmul, lhs, rhs)

        def add_part(number: Array, made: Array) -> Array:
            product = jnp.matmul(_part(lhs, cut.lhs, number, factor), _part(rhs, cut.rhs, number, factor))
            return _joined(made, product, cut.result, number, factor)

        return _loop(factor, add_part, _start(shape, cut.result, widened)).astype(shape.dtype)

    @jax.custom_vjp
    def product(lhs: Array, rhs: Array) -> Array:
        return in_parts(lhs, rhs)

    def forward(lhs: Array, rhs: Array) -> tuple[Array, tuple[Array, Array]]:
        return in_parts(lhs, rhs), (lhs, rhs)

    def backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        def add_part(number: Array, made: tuple[Array, Array]) -> tuple[Array, Array]:
            parts = [
                _part(array, axis, number, factor)
                for array, axis in zip(saved, (cut.lhs, cut.rhs), strict=True)
            ]
            _product, transpose = jax.vjp(jnp.matmul, *parts)
            of_parts = transpose(_part(gradient, cut.result, number, factor))
            of_lhs, of_rhs = (
                _joined(array, part, axis, number, factor)
                for array, part, axis in zip(made, of_parts, (cut.lhs, cut.rhs), strict=True)
            )
            return of_lhs, of_rhs

        starts = tuple(
            _start(array, axis, widened) for array, axis in zip(saved, (cut.lhs, cut.rhs), strict=True)
        )
        made = _loop(factor, add_part, starts)
        return made[0].astype(saved[0].dtype), made[1].astype(saved[1].dtype)

    product.defvjp(forward, backward)
    return product(lhs, rhs)


def _same(x: Array) -> Array:
    return x


def _loop(count: int, body: Callable[[Array, Any], Any], start: Any) -> Any:
    return jax.lax.fori_loop(0, count, body, start)


def _start(like: Array, axis: int | None, widened: Callable[[Array], Array]) -> Array:
    """Makes the zeros that parts are put into or added to; in the second case wider, if wanted."""
    zeros = jnp.zeros(like.shape, like.dtype)
    return widened(zeros) if axis is None else zeros


def _part(array: Array, axis: int | None, number: Array, factor: int) -> Array:
    if axis is None:
        return array
    axis %= array.ndim
    size = array.shape[axis] // factor
    return jax.lax.dynamic_slice_in_dim(array, number * size, size, axis)


def _joined(made: Array, part: Array, axis: int | None, number: Array, factor: int) -> Array:
    if axis is None:
        return made + part.astype(made.dtype)
    axis %= made.ndim
    return jax.lax.dynamic_update_slice_in_dim(made, part, number * (made.shape[axis] // factor), axis)
