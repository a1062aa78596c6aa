"""Activations as functions, as Graphcore's `ipu.nn_ops` has them, and losses of TensorFlow 1's `tf.nn`.

As in TensorFlow, the gradient of the logits is softmax(logits) - labels, also where labels do not sum to 1,
and a label that is no class gives NaN (`xent_op` and `sparse_xent_op` of tf2xla in TensorFlow 1.15, which
compiled them for IPUs).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.tf1.layers.base import at_least_float32

__all__ = [
    "gelu",
    "hard_sigmoid",
    "softmax_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits_v2",
    "sparse_softmax_cross_entropy_with_logits",
]


def gelu(x: Any, approximate: bool = True, name: str | None = None) -> jax.Array:
    """GELU: x times the normal distribution's probability of less than x (arXiv:1606.08415).

    Example:
      >>> ipu.nn_ops.gelu(np.array([-1, 0, 1], np.float32))
      Array([-0.1588..., 0. , 0.8411...], dtype=float32)

    Args:
      x: floating-point numbers, of any shape.
      approximate: True, as on IPUs: by tanh; False: by erf, as in `layers.Activation("gelu")`.
      name: the name of an operation in TensorFlow; not used here.

    Raises:
      TypeError: `approximate` is neither True nor False.
    """
    del name
    if not isinstance(approximate, bool):
        raise TypeError(
            f"gelu: approximate must be True or False; got {approximate!r}. The first SDKs had name "
            "second: pass it as name=."
        )
    return jax.nn.gelu(jnp.asarray(x), approximate=approximate)


def hard_sigmoid(x: Any, name: str | None = None) -> jax.Array:
    """Returns 0.2 x + 0.5, clipped to 0 and 1, as in Keras.

    Example:
      >>> ipu.nn_ops.hard_sigmoid(np.array([-5, 0, 1], np.float32))
      Array([0. , 0.5, 0.7], dtype=float32)

    Args:
      x: floating-point numbers, of any shape.
      name: the name of an operation in TensorFlow; not used here.
    """
    del name
    x = jnp.asarray(x)
    return jnp.clip(x * jnp.asarray(0.2, x.dtype) + jnp.asarray(0.5, x.dtype), 0, 1)


def softmax_cross_entropy_with_logits(
    *, labels: Any, logits: Any, axis: int | None = None, name: str | None = None, dim: int | None = None
) -> jax.Array:
    """The same as `softmax_cross_entropy_with_logits_v2`, without a gradient of the labels.

    Example:
      >>> logits, labels = np.array([[0, 0]], np.float32), np.array([[0, 2]], np.float32)
      >>> ipu.nn_ops.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
      Array([1.3862944], dtype=float32)
    """
    labels = jax.lax.stop_gradient(jnp.asarray(labels))
    return softmax_cross_entropy_with_logits_v2(labels, logits, axis, name, dim)


def softmax_cross_entropy_with_logits_v2(
    labels: Any, logits: Any, axis: int | None = None, name: str | None = None, dim: int | None = None
) -> jax.Array:
    """The cross entropy of the logits' softmax with respect to labels: -sum(labels * log(softmax(logits))).

    The gradient of the logits is softmax(logits) - labels, whatever the labels sum to, and that of the
    labels -log(softmax(logits)).

    Example:
      >>> logits, labels = np.array([[0, 0]], np.float32), np.array([[0, 2]], np.float32)
      >>> jax.grad(lambda x: ipu.nn_ops.softmax_cross_entropy_with_logits_v2(labels, x).sum())(logits)
      Array([[ 0.5, -1.5]], dtype=float32)

    Args:
      labels: the part of each class, of the shape of the logits.
      logits: floating-point numbers, [..., classes].
      axis: that of the classes; None: the last one.
      name: the name of an operation in TensorFlow; not used here.
      dim: the older name of `axis`.

    Returns:
      The shape of the logits without the axis of the classes, in their dtype; computed in float32 at least.

    Raises:
      TypeError: the logits are not floating-point numbers.
      ValueError: the shapes differ, or there is no such axis.
    """
    del name
    caller = "softmax_cross_entropy_with_logits"
    logits, labels = _as_logits(caller, logits), jnp.asarray(labels)
    if labels.shape != logits.shape:
        raise ValueError(
            f"{caller}: labels must have the shape of the logits; got {labels.shape} and {logits.shape}. "
            "sparse_softmax_cross_entropy_with_logits takes the numbers of classes."
        )
    if axis is not None and dim is not None:
        raise ValueError(f"{caller}: axis and dim are the same argument; got {axis} and {dim}.")
    axis = next((number for number in (axis, dim) if number is not None), -1)
    if not isinstance(axis, int) or not -logits.ndim <= axis < logits.ndim:
        raise ValueError(
            f"{caller}: axis must be one of the logits; got {axis!r} for shape {logits.shape}."
        )
    wide = at_least_float32(logits.dtype)
    logarithms = jax.nn.log_softmax(logits.astype(wide), axis)
    labels = labels.astype(wide)
    loss = -jnp.sum(labels * logarithms, axis)
    # Of value 0. Its gradient makes up for labels that do not sum to 1, whose softmax has another factor.
    norms = jax.nn.logsumexp(logits.astype(wide), axis)
    missing_share = jax.lax.stop_gradient(1 - jnp.sum(labels, axis))
    return (loss + missing_share * (norms - jax.lax.stop_gradient(norms))).astype(logits.dtype)


def sparse_softmax_cross_entropy_with_logits(
    *, labels: Any, logits: Any, name: str | None = None
) -> jax.Array:
    """The cross entropy of the logits' softmax with respect to classes: -log(softmax(logits)[label]).

    For a label that is no class, such as -1, the loss and the gradient of its logits are NaN.

    Example:
      >>> logits = np.zeros([2, 4], np.float32)
      >>> labels = np.array([3, -1], np.int32)
      >>> ipu.nn_ops.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
      Array([1.3862944,       nan], dtype=float32)

    Args:
      labels: integers from 0 to less than the number of classes, of the shape of the logits without their
        last axis.
      logits: floating-point numbers, [..., classes].
      name: the name of an operation in TensorFlow; not used here.

    Returns:
      The shape of the labels, in the dtype of the logits; computed in float32 at least.

    Raises:
      TypeError: the logits are not floating-point numbers, or the labels no integers.
      ValueError: the shapes do not fit.
    """
    del name
    caller = "sparse_softmax_cross_entropy_with_logits"
    logits, labels = _as_logits(caller, logits), jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{caller}: labels must be integers; got {labels.dtype.name}.")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"{caller}: labels must have the shape of the logits without their last axis; got "
            f"{labels.shape} and {logits.shape}."
        )
    logarithms = jax.nn.log_softmax(logits.astype(at_least_float32(logits.dtype)))
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    indices = jnp.where(is_class, labels, 0)[..., jnp.newaxis]
    chosen = jnp.take_along_axis(logarithms, indices, -1)[..., 0]
    return (jnp.where(is_class, -1.0, jnp.nan).astype(chosen.dtype) * chosen).astype(logits.dtype)


def _as_logits(caller: str, logits: Any) -> jax.Array:
    logits = jnp.asarray(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating) or logits.ndim == 0:
        raise TypeError(
            f"{caller}: logits must be floating-point numbers, [..., classes]; got "
            f"{logits.dtype.name}{list(logits.shape)}."
        )
    return logits


explain_missing(__name__)
