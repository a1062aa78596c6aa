"""Stage meshes: their axes `replica` and `model`, and what stages compute across these."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.faults import find_line
from ipu_pipeline.engine.tracing.frames import OutsideOfBodyError
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.checks import check_positive, require

# What stages compute with other replicas are primitives of JAX. They are lowered for one replica, unless
# they are within the program of several (`jax.shard_map` over the axis `replica`), so nothing has to be
# known about replicas when a stage is traced. A program that has any of them runs on all replicas at once.

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
    _check_in_stage("cross_replica_sum")
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
    _check_in_stage("replica_index")
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
    _check_in_stage("replica_count")
    count: jax.Array = replica_count_p.bind()
    return count


def _check_in_stage(name: str) -> None:
    if frames.is_outside() and _mesh.get() is not None:
        return  # a derivative rule, which JAX calls when the stage has been traced
    frame = frames.current_frame(name)
    if not frame.is_stage:
        raise frames.OutsideOfBodyError(
            f"{name} was called in {frame.place}, which is the same for all replicas. Call it in a stage "
            "of a pipeline."
        )


def uses_replicas(equations: Sequence[Any]) -> bool:
    """Whether equations compute with the other replicas, or with the replica's number.

    Those of a stage do not show what its derivative rules compute; those of its programs do.
    """

    def find(equations: Any) -> Iterator[bool]:
        for equation in equations:
            yield equation.primitive in _PRIMITIVES
            for inner in jax_core.jaxprs_in_params(equation.params):
                yield from find(inner.eqns)

    return any(find(equations))


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


# Tensor parallelism: a stage runs on a group of devices along the axis `model`. Variables and intermediate
# values carry a `jax.sharding.PartitionSpec` that says which of their axes is divided. XLA's partitioner
# decides from these which device computes what, and where devices exchange results (Xu et al., "GSPMD",
# 2021).

MODEL = "model"  # the axis of the devices that compute a stage together

# Full name of a variable -> how it is divided. Variables that are missing are whole on each device.
Partitions: TypeAlias = "Mapping[str, PartitionSpec]"


@dataclass(frozen=True)
class TensorParallel:
    """The number of devices that compute each stage together, and what they divide.

    Example:
      >>> parallel = ipu.pipelining_ops.TensorParallel(2, {"block0/up": jax.P(None, "model")})

    Attributes:
      size: the number of devices per stage, at least 1.
      variables: full name -> the `PartitionSpec` of a variable, whose only axis name is "model", at most
        once; or a function from each variable (`VariableSpec`, with `name`, `shape`, `dtype`) to one, or to
        None. Other variables are whole on each device. Gradients, their accumulators and the optimizer's
        state of a variable are divided like it.
    """

    size: int
    variables: Partitions | Callable[[VariableSpec], PartitionSpec | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_positive("TensorParallel: size", self.size)
        rule = "TensorParallel: variables must be a dict from full names to PartitionSpecs, or a function"
        require(callable(self.variables) or isinstance(self.variables, Mapping), rule, self.variables)
        if isinstance(self.variables, Mapping):  # later changes by the caller do not count
            object.__setattr__(self, "variables", dict(self.variables))

    def resolve(self, variables: Mapping[str, VariableSpec]) -> dict[str, PartitionSpec]:
        """Finds the partitions of all divided variables; none if there is one device.

        Args:
          variables: all variables of the pipeline, by full name.

        Raises:
          ValueError: a name is no variable's, or a variable cannot be divided like that.
        """
        rules = self.variables
        if callable(rules):
            partitions = {name: rules(spec) for name, spec in variables.items()}
        else:
            partitions = dict(rules)
            for name in partitions.keys() - variables.keys():
                raise ValueError(
                    f"TensorParallel: there is no variable {name!r}; there are "
                    f"{', '.join(variables) or 'none'}."
                )
        divided = {}
        for name, partition in partitions.items():
            if partition is None:
                continue
            shape, label = variables[name].shape, f"TensorParallel: variable {name}"
            axis = _check_partition(partition, shape, label)
            if axis is None or self.size == 1:
                continue
            if shape[axis] % self.size:
                raise ValueError(
                    f"{label}: axis {axis} of its shape {shape} must be a multiple of size {self.size} to "
                    "be divided. Divide another axis, or leave it whole."
                )
            divided[name] = normal_partition(
                [MODEL if place == axis else None for place in range(axis + 1)]
            )
        return divided


def normal_partition(names: Sequence[str | None]) -> PartitionSpec:
    """Makes a `PartitionSpec` as JAX returns it, without None at the end; other forms are not equal."""
    entries = list(names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


@dataclass
class _Tracing:
    """A pipeline whose stages are being traced."""

    size: int  # devices per stage
    is_used: bool = False  # whether a stage has divided anything


_tracing: contextvars.ContextVar[_Tracing | None] = contextvars.ContextVar("tensor_parallel", default=None)


@contextlib.contextmanager
def dividing(size: int) -> Iterator[_Tracing]:
    """Sets the number of devices that compute each stage, while stages are traced."""
    tracing = _Tracing(size)
    token = _tracing.set(tracing)
    try:
        yield tracing
    finally:
        _tracing.reset(token)


def mesh_of_stages() -> AbstractMesh:
    """The mesh of the stages that are being traced: a replica's devices, by default one."""
    tracing = _tracing.get()
    shape = (1, 1 if tracing is None else tracing.size)
    # "Explicit" ones, which a newer JAX has by default, would have each stage say how its values lie.
    return AbstractMesh(shape, (REPLICA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def constrain(x: Any, partition: PartitionSpec) -> Any:
    """Says how a value within a stage is divided over the devices that compute the stage together.

    Without it the partitioner decides, from how variables are divided. Outside of stages, as in optimizers,
    and where a stage has one device, this returns the value as it is.

    Example:
      >>> def stage(x):
      ...     hidden = x @ ipu.get_variable("kernel", [8, 32])
      ...     return ipu.pipelining_ops.constrain(hidden, jax.P(None, "model"))
      >>> parallel = ipu.pipelining_ops.TensorParallel(2, {"kernel": jax.P(None, "model")})
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1, tensor_parallel=parallel)
      >>> pipeline.trace(np.ones([4, 8], np.float32))
      >>> pipeline.num_devices
      2

    Args:
      x: an array.
      partition: has "model" in the place of the axis that is divided, None for others;
        `PartitionSpec()` for a value that is whole on each device.

    Returns:
      The same value.

    Raises:
      ValueError: the partition does not fit the array.
    """
    x = jax.numpy.asarray(x)
    axis = _check_partition(partition, x.shape, "constrain")
    tracing = _tracing.get()
    if tracing is None or tracing.size == 1:
        return x
    if axis is not None and x.shape[axis] % tracing.size:
        raise ValueError(
            f"constrain: axis {axis} of the shape {x.shape} must be a multiple of the {tracing.size} "
            "devices of a stage to be divided. Divide another axis, or leave it whole."
        )
    tracing.is_used = True
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of_stages(), partition))


def _check_partition(partition: Any, shape: Sequence[int], label: str) -> int | None:
    """Checks a partition. Returns the axis that it divides."""
    if not isinstance(partition, PartitionSpec):
        raise ValueError(f"{label}: its partition must be a jax.sharding.PartitionSpec; got {partition!r}.")
    is_summed = getattr(partition, "unreduced", None) or getattr(partition, "reduced", None)
    entries = () if is_summed else tuple(partition)  # JAX warns of summed axes
    names = [
        tuple(name or ()) if isinstance(name, (tuple, type(None))) else (str(name),) for name in entries
    ]
    unknown = {name for some in names for name in some} - {MODEL}
    axes = [axis for axis, some in enumerate(names) if some]
    wrong = None
    if is_summed:
        wrong = "has axes that are summed (unreduced, reduced). Leave them out"
    elif unknown:
        named = ", ".join(map(repr, sorted(unknown)))
        wrong = f"names {named}. The one axis of devices that there is to divide over is {MODEL!r}"
    elif len(axes) > 1:
        wrong = (
            f"divides axes {axes[0]} and {axes[1]}. Only one axis can be divided: put None for the others"
        )
    elif len(names) > len(shape):
        wrong = (
            f"has {len(names)} places, and the shape {tuple(shape)} {len(shape)}. Leave out the last ones"
        )
    if wrong is not None:
        raise ValueError(f"{label}: {partition} {wrong}.")
    return axes[0] if axes else None


# The mesh of a stage's devices is JAX's current mesh while the stage's functions run. In it
# `jax.shard_map`, `jax.lax.with_sharding_constraint` with a `PartitionSpec`, and what Flax makes of its
# annotations work in a stage as in plain JAX. While a stage is traced the mesh is abstract, without
# devices, so equal stages stay equal; only where stage functions are called as Python does it have devices.

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
    """Sets the mesh of the stage that is traced or called in a `with` block."""
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
