"""The mesh of the devices that compute a stage, set for JAX while the stage's functions run.

In it `jax.shard_map`, `jax.lax.with_sharding_constraint` with a `PartitionSpec`, and what Flax makes of its
annotations work in a stage as in plain JAX. While a stage is traced it is an abstract mesh, without devices,
so equal stages stay equal; only where stage functions are called as Python does it have devices.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing.frames import OutsideOfBodyError

__all__ = ["StageMesh", "in_mesh", "stage_mesh", "uses_mesh"]

StageMesh: TypeAlias = AbstractMesh | Mesh

_USING = ("shard_map", "sharding_constraint")  # primitives that name a mesh

_mesh: contextvars.ContextVar[StageMesh | None] = contextvars.ContextVar("stage_mesh", default=None)


def stage_mesh() -> StageMesh:
    """The mesh of the devices that compute the stage that calls this, in one replica.

    It has the axis "model" of `TensorParallel.size` devices, which is 1 without tensor parallelism, and
    `TensorParallel.unit_axes`, each of size 1. It is also JAX's mesh in the stage, as by `jax.set_mesh`, so
    functions that take that one need not be given it. Replicas are no axis of it: they have stages of their
    own, which `cross_replica_sum` joins.

    Example:
      def stage(w, x):
          def part(w, x):  # each device has its rows of w and columns of x
              return jax.lax.psum(x @ w, "model")

          specs = (PartitionSpec("model"), PartitionSpec(None, "model"))
          return jax.shard_map(part, mesh=engine.stage_mesh(), in_specs=specs, out_specs=PartitionSpec())(w, x)

    Returns:
      A `jax.sharding.AbstractMesh`; a `Mesh` with devices where a step runs op by op (`jax.disable_jit`).

    Raises:
      RuntimeError: not called in a stage of a pipeline, its loss, or their derivative rules.
    """
    mesh = _mesh.get()
    if mesh is None:
        raise OutsideOfBodyError(
            "stage_mesh was called outside of a stage. Call it in a stage function of a pipeline: only there "
            "is it known which devices compute together."
        )
    return mesh


@contextlib.contextmanager
def in_mesh(mesh: StageMesh) -> Iterator[None]:
    """Makes a mesh that of the stage that is traced or called in a `with` block."""
    token = _mesh.set(mesh)
    entered = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    try:
        with entered:
            yield
    finally:
        _mesh.reset(token)


def uses_mesh(equations: Sequence[jaxprs.Equation]) -> bool:
    """Whether equations compute with a mesh or constrain how values lie on it, at any depth."""
    return any(jaxprs.has_primitive(equation, name) for equation in equations for name in _USING)
