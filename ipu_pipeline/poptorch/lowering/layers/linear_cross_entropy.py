"""The cross entropy of a linear layer's results, a chunk of rows at a time: only its results are kept.

torch computes gradients in the forward and keeps them; here the backward recomputes the rows' results.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


def _loss_of_rows(
    rows: tuple[Array, Array],
    weight: Array,
    bias: Array | None,
    class_weights: Array | None,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Array, Array]:
    """Returns losses, and the divisor of their sum for the mean, for (rows, features), targets (rows)."""
    x, target = rows
    scores = x @ weight.T.astype(x.dtype)
    scores = widen(scores if bias is None else scores + bias.astype(x.dtype))
    logs = jax.nn.log_softmax(scores, -1)
    counts = target != ignore_index
    classes = jnp.where(counts, target, 0)[:, None]
    importance = jnp.ones(logs.shape[1], logs.dtype) if class_weights is None else widen(class_weights)
    parts = counts * importance[classes[:, 0]]
    losses = -parts * jnp.take_along_axis(logs, classes, 1)[:, 0]
    if label_smoothing:
        smooth = -counts * (logs @ importance) / logs.shape[1]
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    return losses, parts


def _losses(x: Array, target: Array, batch_chunk_size: int, *rest: Any) -> tuple[Array, Array]:
    """Returns the same for all rows. The rows that fill up the last chunk are cut off."""
    count = -(-x.shape[0] // batch_chunk_size)
    missing = count * batch_chunk_size - x.shape[0]
    rows = jnp.pad(x, ((0, missing), (0, 0))).reshape(count, batch_chunk_size, -1)
    targets = jnp.pad(target, (0, missing)).reshape(count, batch_chunk_size)
    weight, bias, class_weights, ignore_index, label_smoothing = rest

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def compute(rows: tuple[Array, Array]) -> tuple[Array, Array]:
        return _loss_of_rows(rows, weight, bias, class_weights, ignore_index, label_smoothing)

    losses, parts = jax.lax.map(compute, (rows, targets))
    return losses.reshape(-1)[: x.shape[0]], parts.reshape(-1)[: x.shape[0]]


@lowers("torch_nn::_linear_cross_entropy_batch_chunked")
def _chunked(
    x: Array,
    linear_weight: Array,
    target: Array,
    linear_bias: Array | None,
    weight: Array | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_chunk_size: int,
    *policies: Any,
) -> tuple[Any, ...]:
    """Returns the loss, and results that only torch's backward reads."""
    del policies  # how torch accumulates, and which gradients it computes: here float32, and those needed
    losses, parts = _losses(
        x, target, batch_chunk_size, linear_weight, linear_bias, weight, ignore_index, label_smoothing
    )
    total = jnp.sum(losses)
    return (total / jnp.sum(parts) if reduction == "mean" else total), None, None, None


@lowers("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def _chunked_without_reduction(
    x: Array,
    linear_weight: Array,
    target: Array,
    linear_bias: Array | None,
    weight: Array | None,
    ignore_index: int,
    batch_chunk_size: int,
    *policies: Any,
) -> Array:
    del policies
    return _losses(x, target, batch_chunk_size, linear_weight, linear_bias, weight, ignore_index, 0)[0]
