"""The CTC loss: the probability of all alignments of a sequence with a shorter one, by a scan over time.

Source: Graves et al., Connectionist Temporal Classification, 2006, section 4.1. Labels are extended to
blank, label, blank, ..., blank; `alpha` is the logarithm of the probability of all beginnings of
alignments that end at each of these.

torch's gradient with respect to the logarithms is the gradient with respect to the unnormalized scores
behind their softmax, and so is ours. Through log_softmax both give the same: only a caller that skips it
sees a difference.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.layers.losses import MEAN, SUM, reduce_loss
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


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
def _loss(
    log_probs: Array, targets: Array, input_lengths: Array, target_lengths: Array, blank: Any
) -> Array:
    return _negative_log_likelihood(log_probs, targets, input_lengths, target_lengths, blank)


def _loss_forward(log_probs: Array, *rest: Array) -> tuple[Array, Any]:
    loss, transpose = jax.vjp(lambda log_probs: _negative_log_likelihood(log_probs, *rest), log_probs)
    return loss, (transpose, log_probs, rest[1])


def _loss_backward(saved: Any, gradient: Array) -> tuple[Any, ...]:
    transpose, log_probs, input_lengths = saved
    (of_loss,) = transpose(gradient)
    read = jnp.arange(log_probs.shape[0])[:, None] < input_lengths
    softmax = jnp.where(read[..., None], jnp.exp(log_probs) * gradient[None, :, None], 0)
    return of_loss + softmax, None, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _padded(targets: Array, target_lengths: Array) -> Array:
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
    targets = _padded(targets, target_lengths)
    loss = _loss(
        widen(log_probs), targets, input_lengths, target_lengths, jnp.asarray(blank, targets.dtype)
    )
    if zero_infinity:
        loss = jnp.where(jnp.isinf(loss), 0, loss)
    if reduction == MEAN:
        return jnp.mean(loss / jnp.maximum(target_lengths, 1).astype(loss.dtype))
    if reduction == SUM:
        return reduce_loss(loss, SUM)
    return loss if is_batched else loss[0]
