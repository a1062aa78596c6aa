"""Everything in a session that runs change, as immutable records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

__all__ = ["KeptGradients", "KeptOptimizer", "Record", "SessionState"]


@dataclass(frozen=True, eq=False)
class KeptOptimizer:
    """An optimizer's state: its leaves by path, and the pytree that they are the leaves of."""

    shapes: dict[str, jax.ShapeDtypeStruct]
    tree: Any

    def find_differences(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
        """The paths at which another optimizer's state, given by its `shapes`, differs from this one."""
        paths = shapes.keys() | self.shapes.keys()
        return sorted(path for path in paths if shapes.get(path) != self.shapes.get(path))


@dataclass(frozen=True, eq=False)
class KeptGradients:
    """Gradients of a loop's iterations since its last weight update, and how they were accumulated."""

    settings: str
    accumulators: dict[str, Any]
    count: int


@dataclass(frozen=True, eq=False)
class Record:
    """The state that the session keeps under the name of a pipeline, or of a loop's optimizer."""

    optimizer: KeptOptimizer | None = None
    update_count: int = 0
    execution_count: int = 0
    accumulated: KeptGradients | None = None


@dataclass(frozen=True, eq=False)
class SessionState:
    """Everything that runs change. Replaced whole, so that an interrupt finds the old or the new one."""

    variables: dict[str, Any] = field(default_factory=dict)
    pipelines: dict[str, Record] = field(default_factory=dict)

    @property
    def arrays(self) -> Any:
        """All arrays, as a pytree."""
        return self.variables, [_arrays_of(record) for record in self.pipelines.values()]

    def with_arrays(self, arrays: Any) -> SessionState:
        """A copy with other arrays, in the structure of `arrays`."""
        variables, kept = arrays
        records = map(_with_arrays, self.pipelines.values(), kept)
        return SessionState(variables, dict(zip(self.pipelines, records, strict=True)))


def _arrays_of(record: Record) -> tuple[Any, Any]:
    """The optimizer's state and the accumulators."""
    return (
        None if record.optimizer is None else record.optimizer.tree,
        None if record.accumulated is None else record.accumulated.accumulators,
    )


def _with_arrays(record: Record, arrays: tuple[Any, Any]) -> Record:
    """The inverse of `_arrays_of`."""
    tree, accumulators = arrays
    optimizer, accumulated = record.optimizer, record.accumulated
    if optimizer is not None:
        optimizer = dataclasses.replace(optimizer, tree=tree)
    if accumulated is not None:
        accumulated = dataclasses.replace(accumulated, accumulators=accumulators)
    return dataclasses.replace(record, optimizer=optimizer, accumulated=accumulated)
