"""Normalizations. Statistics are computed in at least 32 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.reductions import variance
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


def _scaled(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * widen(weight)
    return x if bias is None else x + widen(bias)


def _by_channel(x: Array, values: Array | None) -> Array | None:
    """Reshapes one value for each channel (dimension 1) so that it broadcasts."""
    return None if values is None else values.reshape(1, -1, *(1,) * (x.ndim - 2))


def _normalize(x: Array, weight: Array | None, bias: Array | None, mean: Array, inverse: Array) -> Array:
    """Computes `(x - mean) * inverse`, then weight and bias, each with one value per channel."""
    scale = inverse if weight is None else inverse * widen(weight)
    return _scaled(widen(x) - _by_channel(x, mean), _by_channel(x, scale), _by_channel(x, bias))


def _statistics(x: Array, eps: float) -> tuple[Array, Array, Array]:
    """Returns the mean, the variance and the inverse deviation of each channel."""
    squares, mean = variance(x, (0, *range(2, x.ndim)), 0, keepdim=False)
    return mean, squares, jax.lax.rsqrt(squares + eps)


def _constant(mean: Array, inverse: Array) -> tuple[Array, Array]:
    """Returns the statistics as results, which have no gradient in torch (group statistics have)."""
    return jax.lax.stop_gradient(mean), jax.lax.stop_gradient(inverse)


@lowers("_native_batch_norm_legit_functional", keep=True)
def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Uses the batch's statistics in training, and moves the running ones towards them, unbiased."""
    if not training:
        return (
            *_batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps),
            running_mean,
            running_var,
        )
    mean, squares, inverse = _statistics(x, eps)
    count = math.prod(x.shape) // x.shape[1]
    unbiased = squares * (count / max(count - 1, 1))
    moved = [
        (1 - momentum) * widen(old) + momentum * jax.lax.stop_gradient(new)
        for old, new in ((running_mean, mean), (running_var, unbiased))
    ]
    return _normalize(x, weight, bias, mean, inverse), *_constant(mean, inverse), *moved


@lowers("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    del training, momentum
    mean, _, inverse = _statistics(x, eps)
    return _normalize(x, weight, bias, mean, inverse), *_constant(mean, inverse)


@lowers("_native_batch_norm_legit_no_training")
def _batch_norm_inference(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Uses only the running statistics. The batch statistics for a backward have no elements."""
    del momentum
    inverse = jax.lax.rsqrt(widen(running_var) + eps)
    nothing = jnp.zeros((0,), jnp.float32)
    return _normalize(x, weight, bias, widen(running_mean), inverse), nothing, nothing


@lowers("native_layer_norm")
def _layer_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Any, ...]:
    """Normalizes over the last dimensions."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    squares, mean = variance(x, axes, 0, keepdim=True)
    inverse = jax.lax.rsqrt(squares + eps)
    return _scaled((widen(x) - mean) * inverse, weight, bias), *_constant(mean, inverse)


@lowers("native_group_norm")
def _group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    batch: int,
    channels: int,
    plane: int,
    groups: int,
    eps: float,
) -> tuple[Any, ...]:
    """Normalizes over the channels of a group and their planes."""
    grouped = x.reshape(batch, groups, channels // groups * plane)
    squares, mean = variance(grouped, (2,), 0, keepdim=True)
    inverse = jax.lax.rsqrt(squares + eps)
    made = ((widen(grouped) - mean) * inverse).reshape(x.shape)
    return (
        _scaled(made, _by_channel(x, weight), _by_channel(x, bias)),
        mean.reshape(batch, groups),
        inverse.reshape(batch, groups),
    )
