"""What running the micro-batches of an update gives, and what it asks for on the way.

An executor's dispatches are a generator, so that those of several replicas can take turns.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.state import Collected, Handed

__all__ = ["Accumulated", "Dispatching", "Gather", "Together", "finish"]


@dataclass(frozen=True, eq=False)
class Accumulated:
    """What micro-batches give before a weight update.

    Attributes:
      first_outputs: the leaves of what the last stage returned for the first one; None where the optimizer
        does not read them.
      last_outputs: likewise for the last one.
      carried: of a loop, what the next iteration takes.
      collected: what was to be collected, per micro-batch or chunk; or one entry, the sums.
      enqueued: what stages enqueued, per micro-batch or chunk.
      assigned: new values of the variables that stages assign, by full name.
      accumulators: by key; empty without training.
    """

    first_outputs: list[Any]
    last_outputs: list[Any]
    carried: list[Any]
    collected: list[Collected]
    enqueued: list[Handed]
    assigned: dict[str, Any]
    accumulators: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Together:
    """A dispatch that waits for those of the other replicas.

    Attributes:
      template: the program, whose results are wanted.
      arguments: of this replica.
      step: the execution that it is a part of.
      first: the number of its first micro-batch.
    """

    template: Template
    arguments: list[Any]
    step: int
    first: int


@dataclass(frozen=True, eq=False)
class Gather:
    """Before a dispatch: what it asks for, of which the replicas have parts.

    Attributes:
      stage: whose program is next.
      names: full names of variables.
    """

    stage: int
    names: list[str]


# Stops after each dispatch; and before one for all replicas at once, whose results it is sent, and one that
# needs variables, which it is sent.
Dispatching: TypeAlias = "Generator[Together | Gather | None, list[Any] | None, Accumulated]"


def finish(dispatching: Dispatching) -> Accumulated:
    """Goes on to the end, with one replica."""
    while True:
        try:
            next(dispatching)
        except StopIteration as stop:
            accumulated: Accumulated = stop.value
            return accumulated
