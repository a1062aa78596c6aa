"""The mesh of the devices that compute a stage, set for JAX while the stage's functions run.

In it `jax.shard_map`, `jax.lax.with_sharding_constraint` with a `PartitionSpec`, and what Flax makes of its
annotations work in a stage as in plain JAX. While a stage is traced the mesh is abstract, without devices,
so equal stages stay equal; only where stage functions are called as Python does it have devices.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing.faults import find_line
from ipu_pipeline.engine.tracing.frames import OutsideOfBodyError
from ipu_pipeline.engine.tracing.replicas import REPLICA

__all__ = ["StageMesh", "check_mesh", "in_mesh", "stage_mesh"]

StageMesh: TypeAlias = AbstractMesh | Mesh

_mesh: contextvars.ContextVar[StageMesh | None] = contextvars.ContextVar("stage_mesh", default=None)


def stage_mesh() -> StageMesh:
    """Returns the mesh of the devices that compute the calling stage, in one replica.

    Its axes are "replica", of size 1, and "model", of `TensorParallel.size`, 1 without tensor parallelism.
    It is already JAX's current mesh in the stage, as set by `jax.set_mesh`, so functions that use the
    current mesh need no argument. To compute across replicas, use `cross_replica_sum`.

    Example:
      >>> from jax.sharding import PartitionSpec
      >>> def stage(w, x):
      ...     def part(w, x):  # each device has its rows of w and its columns of x
      ...         return jax.lax.psum(x @ w, "model")
      ...     specs = PartitionSpec("model"), PartitionSpec(None, "model")
      ...     mesh = engine.stage_mesh()
      ...     return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(w, x)
      >>> parallel = engine.TensorParallel(2, {"stage0/parameter": PartitionSpec("model")})
      >>> pipeline = engine.Pipeline(
      ...     [stage],
      ...     parameters=[np.ones([8, 4], np.float32)],
      ...     num_micro_batches=1,
      ...     tensor_parallel=parallel,
      ... )
      >>> x = np.ones([2, 8], np.float32)
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x])
      >>> float(outputs.outputs[0][0, 0])
      8.0

    Returns:
      A `jax.sharding.AbstractMesh`; a `Mesh` with devices if a step runs op by op (`jax.disable_jit`).

    Raises:
      RuntimeError: not called in a stage of a pipeline, in its loss, or in a derivative rule of these.
    """
    mesh = _mesh.get()
    if mesh is None:
        raise OutsideOfBodyError(
            "stage_mesh was called outside of a stage. Call it in a stage function of a pipeline: only "
            "there is it known which devices compute together."
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


def check_mesh(closed_jaxpr: Any, place: str) -> None:
    """Raises a ValueError if a stage names devices, or computes along the axis of replicas in its mesh."""
    for equation in jaxprs.find_other_devices(closed_jaxpr.jaxpr.eqns):
        raise ValueError(
            f"{place}: {equation.primitive.name} names the devices of a mesh, but a stage is computed by "
            "devices of its own. Give it a PartitionSpec alone, or engine.stage_mesh() in place of that "
            f"mesh.{_at(equation)}"
        )
    for equation in jaxprs.find_collectives(closed_jaxpr.jaxpr.eqns, REPLICA):
        raise ValueError(
            f"{place}: {equation.primitive.name} along the axis {REPLICA!r} would see one replica, because "
            "a stage's mesh has the devices of its own replica only. Use engine.cross_replica_sum, "
            f"replica_index or replica_count for all replicas, or leave it out.{_at(equation)}"
        )


def _at(equation: Any) -> str:
    line = find_line(equation)
    return line and f"\n  at {line}"
