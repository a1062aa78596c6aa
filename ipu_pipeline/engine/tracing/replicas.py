"""Functions for stages that use the number of replicas, or compute together with other replicas.

These are primitives of JAX. They are lowered for one replica, unless they are within the program of
several (`jax.shard_map` over the axis `replica`), so nothing has to be known about replicas when a stage is
traced. A program that has any of them runs on all replicas at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["REPLICA", "cross_replica_sum", "replica_count", "replica_index", "uses_replicas"]

REPLICA = "replica"  # the axis of the replicas
T = TypeVar("T")

cross_replica_sum_p = jax_core.Primitive("cross_replica_sum")
replica_index_p = jax_core.Primitive("replica_index")
replica_count_p = jax_core.Primitive("replica_count")
_PRIMITIVES = (cross_replica_sum_p, replica_index_p, replica_count_p)


def cross_replica_sum(x: T) -> T:
    """Returns the sum of all replicas' values at this point of a stage.

    Its derivative is the sum of the replicas' derivatives, because a replica's value contributes to all
    replicas' losses, whose gradients are averaged.

    Args:
      x: an array, or a pytree of arrays, of numbers. Each replica passes its own.

    Returns:
      The sums, with the structure of x; with one replica, x.

    Raises:
      RuntimeError: not called in a stage of a pipeline.
    """
    _check("cross_replica_sum")
    total: T = jax.tree.map(lambda leaf: cross_replica_sum_p.bind(jnp.asarray(leaf)), x)
    return total


def replica_index() -> jax.Array:
    """Returns the index of the current replica, from 0: an int32 scalar.

    Example:
      >>> def stage(x):
      ...     return x + engine.replica_index()
      >>> x = np.float32([0, 0])
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1, num_replicas=2)
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x, x])
      >>> np.asarray(outputs.outputs[0])
      array([[0., 0.],
             [1., 1.]], dtype=float32)

    Raises:
      RuntimeError: not called in a stage of a pipeline.
    """
    _check("replica_index")
    index: jax.Array = replica_index_p.bind()
    return index


def replica_count() -> jax.Array:
    """Returns the number of replicas: an int32 scalar.

    Example:
      >>> def stage(x):
      ...     return engine.cross_replica_sum(x) / engine.replica_count()
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1, num_replicas=2)
      >>> batches = [np.float32([1, 2]), np.float32([3, 4])]  # one for each replica
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), batches[0]), batches)
      >>> np.asarray(outputs.outputs[0])  # [replica, ...]
      array([[2., 3.],
             [2., 3.]], dtype=float32)

    Raises:
      RuntimeError: not called in a stage of a pipeline.
    """
    _check("replica_count")
    count: jax.Array = replica_count_p.bind()
    return count


def _check(name: str) -> None:
    frame = frames.current_frame(name)
    if not frame.is_stage:
        raise frames.OutsideOfBodyError(
            f"{name} was called in {frame.place}, which is the same for all replicas. Call it in a stage "
            "of a pipeline."
        )


def uses_replicas(flat: jaxprs.FlatJaxpr) -> bool:
    """Whether a stage computes with the other replicas, or with its number among them."""

    def find(equations: Any) -> Iterator[bool]:
        for equation in equations:
            yield equation.primitive in _PRIMITIVES
            for inner in jax_core.jaxprs_in_params(equation.params):
                yield from find(inner.eqns)

    return any(find(flat.equations))


# The primitives' rules in JAX.


def _sum(x: jax.Array) -> jax.Array:
    # XLA's client for CPUs crashes on the sum of a constant in an executable from JAX's cache (seen with
    # jaxlib 0.10.2), so the operand is made non-constant: no index is negative.
    x = jnp.where(jax.lax.axis_index(REPLICA) < 0, jnp.zeros_like(x), x)
    total: jax.Array = jax.lax.psum(x, REPLICA)
    return total


def _int32_scalar() -> Any:
    return jax_compat.shaped_array((), np.dtype(np.int32))


cross_replica_sum_p.def_abstract_eval(lambda x: x)
cross_replica_sum_p.def_impl(lambda x: x)
jax_compat.make_own_transpose(cross_replica_sum_p)
jax_compat.lower_by_axis(cross_replica_sum_p, REPLICA, lambda x: x, _sum)

replica_index_p.def_abstract_eval(_int32_scalar)
replica_index_p.def_impl(lambda: jnp.int32(0))
jax_compat.lower_by_axis(
    replica_index_p,
    REPLICA,
    lambda: jnp.int32(0),
    lambda: jax.lax.axis_index(REPLICA).astype(jnp.int32),
)

replica_count_p.def_abstract_eval(_int32_scalar)
replica_count_p.def_impl(lambda: jnp.int32(1))
jax_compat.lower_by_axis(replica_count_p, REPLICA, lambda: jnp.int32(1), lambda: _sum(jnp.int32(1)))
