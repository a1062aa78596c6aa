"""Stages that several devices compute together: what is divided over the axis `model`.

Each stage then runs on a group of devices. Variables and intermediate values carry a
`jax.sharding.PartitionSpec` that says which of their axes is divided. XLA's partitioner decides from these
which device computes what, and where devices exchange results (Xu et al., "GSPMD", 2021).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ipu_pipeline.engine.tracing.replicas import REPLICA
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground.checks import is_integer

__all__ = [
    "MODEL",
    "Partitions",
    "TensorParallel",
    "constrain",
    "dividing",
    "mesh_of_stages",
    "normal_partition",
]

MODEL = "model"  # the axis of the devices that compute a stage together

# Full name of a variable -> how it is divided. Variables that are missing are whole on each device.
Partitions: TypeAlias = "Mapping[str, PartitionSpec]"


@dataclass(frozen=True)
class TensorParallel:
    """How many devices compute each stage together, and what they divide.

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
        if not is_integer(self.size, 1):
            raise ValueError(f"TensorParallel: size must be an integer of at least 1; got {self.size!r}.")
        if not callable(self.variables) and not isinstance(self.variables, Mapping):
            raise ValueError(
                "TensorParallel: variables must be a dict from full names to PartitionSpecs, or a "
                f"function; got {self.variables!r}."
            )
        if isinstance(self.variables, Mapping):  # later changes by the caller do not count
            object.__setattr__(self, "variables", dict(self.variables))

    def resolve(self, variables: Mapping[str, VariableSpec]) -> dict[str, PartitionSpec]:
        """Finds the partitions of all divided variables; none if there is one device.

        Args:
          variables: all variables of the pipeline, by full name.

        Raises:
          ValueError: a name is no variable's, or a variable cannot be divided like that.
        """
        given = self.variables
        if callable(given):
            found = {name: given(spec) for name, spec in variables.items()}
        else:
            found = dict(given)
            for name in found.keys() - variables.keys():
                raise ValueError(
                    f"TensorParallel: there is no variable {name!r}; there are "
                    f"{', '.join(variables) or 'none'}."
                )
        divided = {}
        for name, partition in found.items():
            if partition is None:
                continue
            shape, what = variables[name].shape, f"TensorParallel: variable {name}"
            axis = _check(partition, shape, what)
            if axis is None or self.size == 1:
                continue
            if shape[axis] % self.size:
                raise ValueError(
                    f"{what}: axis {axis} of its shape {shape} must be a multiple of size {self.size} to "
                    "be divided. Divide another axis, or leave it whole."
                )
            divided[name] = normal_partition(
                [MODEL if place == axis else None for place in range(axis + 1)]
            )
        return divided


def normal_partition(names: Sequence[str | None]) -> PartitionSpec:
    """Makes a `PartitionSpec` as JAX returns it, without None at the end; other forms are not equal."""
    found = list(names)
    while found and found[-1] is None:
        found.pop()
    return PartitionSpec(*found)


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
    """The mesh of the stages that are being traced: a replica's devices, one where nobody said more."""
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
    axis = _check(partition, x.shape, "constrain")
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


def _check(partition: Any, shape: Sequence[int], what: str) -> int | None:
    """Checks a partition. Returns the axis that it divides."""
    if not isinstance(partition, PartitionSpec):
        raise ValueError(f"{what}: its partition must be a jax.sharding.PartitionSpec; got {partition!r}.")
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
        raise ValueError(f"{what}: {partition} {wrong}.")
    return axes[0] if axes else None
