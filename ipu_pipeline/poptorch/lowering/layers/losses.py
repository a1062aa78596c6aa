"""Losses for which torch's decomposition has wrong gradients, or none."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__ = ["MEAN", "NONE", "SUM", "reduce_loss"]

NONE, MEAN, SUM = range(3)


def reduce_loss(losses: Array, reduction: int) -> Array:
    """Reduces losses by torch's numbers: 0 none, 1 mean, 2 sum."""
    if reduction == NONE:
        return losses
    return jnp.mean(losses) if reduction == MEAN else jnp.sum(losses)


@jax.custom_jvp
def _cross_entropy(x: Array, target: Array) -> Array:
    """Computes binary cross entropy with logarithms of at least -100, so that no loss is infinite."""
    log, log_rest = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    return (target - 1) * log_rest - target * log


@_cross_entropy.defjvp
def _cross_entropy_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Computes torch's gradient, which is also finite everywhere."""
    x, target = primals
    log, log_rest = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    by_x = (x - target) / jnp.maximum(x * (1 - x), jnp.asarray(1e-12, x.dtype))
    return (target - 1) * log_rest - target * log, by_x * tangents[0] + (log_rest - log) * tangents[1]


@lowers("binary_cross_entropy", keep=True)
def _binary_cross_entropy(
    x: Array, target: Array, weight: Array | None = None, reduction: int = MEAN
) -> Array:
    losses = _cross_entropy(*jnp.broadcast_arrays(widen(x), widen(target).astype(widen(x).dtype)))
    return reduce_loss(losses if weight is None else losses * widen(weight), reduction)
