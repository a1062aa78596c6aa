"""Sums and means over replicas within stages, as Graphcore's `ipu.cross_replica_ops` has them.

Micro-batch k of a replica is joined with micro-batch k of the others. Gradients are the same as in one
large model: each replica's result is differentiated with respect to every replica's value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline import engine
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import is_int

__all__ = ["cross_replica_mean", "cross_replica_sum"]


def cross_replica_sum(x: Any, replica_group_size: int | None = None, name: str | None = None) -> jax.Array:
    """Returns the sum of the replicas' values; `x` itself if there is one replica.

    All replicas have to call it, for the same micro-batches: it must not be under a condition that differs
    between them.

    Example:
      >>> def stage(x):
      ...     return ipu.cross_replica_ops.cross_replica_sum(x)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1, num_replicas=2)
      >>> batches = [np.float32([1, 2]), np.float32([10, 20])]  # one for each replica
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), batches[0]), batches)
      >>> np.asarray(outputs.outputs[0])  # [replica, ...]
      array([[11., 22.],
             [11., 22.]], dtype=float32)

    Args:
      x: numbers, of the same shape and dtype in each replica.
      replica_group_size: None for one group of all replicas; 1 makes each a group, and returns `x`.
      name: the name of an operation in TensorFlow; not used here.

    Returns:
      The shape and dtype of `x`, the same values in each replica.

    Raises:
      NotImplementedError: groups have another size.
      RuntimeError: not called within a stage.
      TypeError: `x` is not an array of numbers.
    """
    del name
    value = _as_numbers(x, "cross_replica_sum")
    return value if _is_alone(replica_group_size, "cross_replica_sum") else engine.cross_replica_sum(value)


def cross_replica_mean(x: Any, replica_group_size: int | None = None, name: str | None = None) -> jax.Array:
    """Returns the mean of the replicas' values; `x` itself if there is one replica.

    Example:
      >>> def stage(x):
      ...     return ipu.cross_replica_ops.cross_replica_mean(x)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1, num_replicas=2)
      >>> batches = [np.float32([1, 2]), np.float32([3, 4])]  # one for each replica
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), batches[0]), batches)
      >>> np.asarray(outputs.outputs[0])  # [replica, ...]
      array([[2., 3.],
             [2., 3.]], dtype=float32)

    Args:
      x: floating-point numbers, of the same shape and dtype in each replica.
      replica_group_size: see `cross_replica_sum`.
      name: the name of an operation in TensorFlow; not used here.

    Returns:
      The shape and dtype of `x`, the same values in each replica.

    Raises:
      NotImplementedError: groups have a size other than one or all.
      RuntimeError: not called within a stage.
      TypeError: `x` is not an array of floating-point numbers.
    """
    del name
    value = _as_numbers(x, "cross_replica_mean")
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(
            f"cross_replica_mean: x must be floating-point numbers; got {value.dtype.name}. Cast it, or "
            "take cross_replica_sum."
        )
    if _is_alone(replica_group_size, "cross_replica_mean"):
        return value
    return engine.cross_replica_sum(value) / engine.replica_count().astype(value.dtype)


def _as_numbers(x: Any, caller: str) -> jax.Array:
    try:
        value = jnp.asarray(x)
    except TypeError as error:
        raise TypeError(f"{caller}: x must be an array of numbers; got {type(x).__name__}.") from error
    if not jnp.issubdtype(value.dtype, jnp.number):
        raise TypeError(f"{caller}: x must be an array of numbers; got {value.dtype}.")
    return value


def _is_alone(replica_group_size: Any, caller: str) -> bool:
    """Whether each replica is a group of its own."""
    if replica_group_size is None:
        return False
    if not is_int(replica_group_size):
        raise TypeError(
            f"{caller}: replica_group_size must be an integer, or None; got {replica_group_size!r}."
        )
    if replica_group_size != 1:
        raise NotImplementedError(
            f"{caller}: replica_group_size must be None, for one group of all replicas, or 1; got "
            f"{replica_group_size}."
        )
    return True


explain_missing(__name__)
