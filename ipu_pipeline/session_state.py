"""Everything in a session that runs change, as immutable records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

__all__ = ["KeptGradients", "KeptOptimizer", "Record", "SessionState"]


@dataclass(frozen=True, eq=False)
class KeptOptimizer:
    """An optimizer's state: its leaves by path, and the pytree that they are the leaves of."""

    shapes: dict[str, jax.ShapeDtypeStruct]
    tree: Any


@dataclass(frozen=True, eq=False)
class KeptGradients:
    """Gradients of a loop's iterations since its last weight update, and how they were accumulated."""

    settings: str
    accumulators: dict[str, Any]
    count: int


@dataclass(frozen=True, eq=False)
class Record:
    """What the session keeps under the name of a pipeline, or of a loop's optimizer."""

    optimizer: KeptOptimizer | None = None
    update_count: int = 0
    execution_count: int = 0
    accumulated: KeptGradients | None = None


@dataclass(frozen=True, eq=False)
class SessionState:
    """Everything that runs change. Replaced whole, so that an interrupt finds the old or the new one."""

    variables: dict[str, Any] = field(default_factory=dict)
    pipelines: dict[str, Record] = field(default_factory=dict)
