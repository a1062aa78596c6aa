"""Losses: those for which torch's decomposition has wrong gradients or none, or needs too much memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

NONE, MEAN, SUM = range(3)


def reduce_loss(losses: Array, reduction: int) -> Array:
    """Reduces losses by torch's numbers: 0 none, 1 mean, 2 sum."""
    if reduction == NONE:
        return losses
    return jnp.mean(losses) if reduction == MEAN else jnp.sum(losses)


@jax.custom_jvp
def _bounded_cross_entropy(x: Array, target: Array) -> Array:
    """Computes binary cross entropy with logarithms of at least -100, so that no loss is infinite."""
    log, log_rest = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    return (target - 1) * log_rest - target * log


@_bounded_cross_entropy.defjvp
def _bounded_cross_entropy_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Computes torch's gradient, which is also finite everywhere."""
    x, target = primals
    log, log_rest = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    by_x = (x - target) / jnp.maximum(x * (1 - x), jnp.asarray(1e-12, x.dtype))
    return (target - 1) * log_rest - target * log, by_x * tangents[0] + (log_rest - log) * tangents[1]


@lowers("binary_cross_entropy", keep=True)
def _binary_cross_entropy(
    x: Array, target: Array, weight: Array | None = None, reduction: int = MEAN
) -> Array:
    losses = _bounded_cross_entropy(*jnp.broadcast_arrays(widen(x), widen(target).astype(widen(x).dtype)))
    return reduce_loss(losses if weight is None else losses * widen(weight), reduction)


# The cross entropy of a linear layer's results, a chunk of rows at a time. torch computes gradients in the
# forward and keeps them; here the backward recomputes the rows' results.


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


def _losses_in_chunks(x: Array, target: Array, batch_chunk_size: int, *params: Any) -> tuple[Array, Array]:
    """Returns losses and divisors of all rows. The rows that fill up the last chunk are cut off."""
    count = -(-x.shape[0] // batch_chunk_size)
    missing = count * batch_chunk_size - x.shape[0]
    rows = jnp.pad(x, ((0, missing), (0, 0))).reshape(count, batch_chunk_size, -1)
    targets = jnp.pad(target, (0, missing)).reshape(count, batch_chunk_size)
    weight, bias, class_weights, ignore_index, label_smoothing = params

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def compute(rows: tuple[Array, Array]) -> tuple[Array, Array]:
        return _loss_of_rows(rows, weight, bias, class_weights, ignore_index, label_smoothing)

    losses, parts = jax.lax.map(compute, (rows, targets))
    return losses.reshape(-1)[: x.shape[0]], parts.reshape(-1)[: x.shape[0]]


@lowers("torch_nn::_linear_cross_entropy_batch_chunked")
def _linear_cross_entropy(
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
    losses, parts = _losses_in_chunks(
        x, target, batch_chunk_size, linear_weight, linear_bias, weight, ignore_index, label_smoothing
    )
    total = jnp.sum(losses)
    return (total / jnp.sum(parts) if reduction == "mean" else total), None, None, None


@lowers("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def _linear_cross_entropy_without_reduction(
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
    return _losses_in_chunks(
        x, target, batch_chunk_size, linear_weight, linear_bias, weight, ignore_index, 0
    )[0]


# The CTC loss: the probability of all alignments of a sequence with a shorter one, by a scan over time.
#
# Source: Graves et al., Connectionist Temporal Classification, 2006, section 4.1. Labels are extended to
# blank, label, blank, ..., blank; `alpha` is the logarithm of the probability of all beginnings of
# alignments that end at each of these.
#
# torch's gradient with respect to the logarithms is the gradient with respect to the unnormalized scores
# behind their softmax, and so is ours. Through log_softmax both give the same: only a caller that skips it
# sees a difference.


def _log_add(*values: Array) -> Array:
    """Computes log(sum(exp(values))), with the gradient 0 where all are -inf."""
    largest = jax.lax.stop_gradient(jnp.stack(values).max(0))
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    total = sum(jnp.exp(value - shift) for value in values)
    return jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + shift, -jnp.inf)


def _negative_log_likelihood(
    log_probs: Array, targets: Array, input_lengths: Array, target_lengths: Array, blank: int
) -> Array:
    """Takes log_probs (time, batch, classes), targets (batch, labels), lengths (batch). Returns (batch)."""
    num_times, batch = log_probs.shape[:2]
    extended = jnp.full((batch, 2 * targets.shape[1] + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    skips = jnp.pad((extended[:, 2:] != extended[:, :-2]) & (extended[:, 2:] != blank), ((0, 0), (2, 0)))
    emitted = jnp.take_along_axis(log_probs, extended[None], 2, mode="clip")

    def shifted(alpha: Array, by: int) -> Array:
        return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=-np.inf)[:, : alpha.shape[1]]

    def step(alpha: Array, at_time: tuple[Array, Array]) -> tuple[Array, None]:
        time, emits = at_time
        skipped = jnp.where(skips, shifted(alpha, 2), -jnp.inf)
        new = _log_add(alpha, shifted(alpha, 1), skipped) + emits
        return jnp.where((time < input_lengths)[:, None], new, alpha), None

    is_first = jnp.arange(extended.shape[1]) < jnp.where(target_lengths > 0, 2, 1)[:, None]
    first = jnp.where(is_first, emitted[0], -jnp.inf)
    alpha = jax.lax.scan(step, first, (jnp.arange(1, num_times), emitted[1:]))[0]
    last = jnp.take_along_axis(alpha, 2 * target_lengths[:, None], 1)[:, 0]
    label = jnp.take_along_axis(alpha, jnp.maximum(2 * target_lengths - 1, 0)[:, None], 1)[:, 0]
    return -_log_add(last, jnp.where(target_lengths > 0, label, -jnp.inf))


@jax.custom_vjp
def _losses_of_sequences(
    log_probs: Array, targets: Array, input_lengths: Array, target_lengths: Array, blank: Any
) -> Array:
    return _negative_log_likelihood(log_probs, targets, input_lengths, target_lengths, blank)


def _losses_of_sequences_forward(log_probs: Array, *arguments: Array) -> tuple[Array, Any]:
    loss, transpose = jax.vjp(lambda log_probs: _negative_log_likelihood(log_probs, *arguments), log_probs)
    return loss, (transpose, log_probs, arguments[1])


def _losses_of_sequences_backward(saved: Any, gradient: Array) -> tuple[Any, ...]:
    transpose, log_probs, input_lengths = saved
    (of_loss,) = transpose(gradient)
    is_counted = jnp.arange(log_probs.shape[0])[:, None] < input_lengths
    softmax = jnp.where(is_counted[..., None], jnp.exp(log_probs) * gradient[None, :, None], 0)
    return of_loss + softmax, None, None, None, None


_losses_of_sequences.defvjp(_losses_of_sequences_forward, _losses_of_sequences_backward)


def _padded_targets(targets: Array, target_lengths: Array) -> Array:
    """Returns labels (batch, labels). torch also accepts the labels of all sequences in a row."""
    if targets.ndim == 2:
        return targets
    starts = jnp.cumsum(target_lengths) - target_lengths
    return jnp.take(targets, starts[:, None] + jnp.arange(targets.shape[0]), mode="clip")


@lowers("ipu_poptorch::ctc_loss")
def _ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Array,
    target_lengths: Array,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> Array:
    is_batched = log_probs.ndim == 3
    if not is_batched:
        log_probs, targets = log_probs[:, None], targets[None]
    input_lengths, target_lengths = input_lengths.reshape(-1), target_lengths.reshape(-1)
    targets = _padded_targets(targets, target_lengths)
    loss = _losses_of_sequences(
        widen(log_probs), targets, input_lengths, target_lengths, jnp.asarray(blank, targets.dtype)
    )
    if zero_infinity:
        loss = jnp.where(jnp.isinf(loss), 0, loss)
    if reduction == MEAN:
        return jnp.mean(loss / jnp.maximum(target_lengths, 1).astype(loss.dtype))
    if reduction == SUM:
        return reduce_loss(loss, SUM)
    return loss if is_batched else loss[0]
