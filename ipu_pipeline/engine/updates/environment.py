"""The values that the programs of a weight update read and make, by what they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = ["UpdateCounts", "UpdateEnvironment"]


class UpdateCounts(NamedTuple):
    """The numbers that a weight update can compute with."""

    micro_batches: Any  # per weight update
    updates: Any  # the number of weight updates before


class UpdateEnvironment:
    """The values of one weight update: arrays, traced values, or shapes and dtypes.

    Programs read the values before the update, and what they make for each other.

    Attributes:
      variables: the updated variables, by full name.
      accumulators: the zeroed accumulators, by full name.
      state_leaves: the leaves of the optimizer's state; those that no program makes are as they were.
      sent: what programs made for others, by number.
      enqueued: the leaves of what the update enqueues, by number.
    """

    def __init__(
        self,
        variables: Mapping[str, Any],
        accumulators: Mapping[str, Any],
        state_leaves: Sequence[Any],
        outputs: Mapping[int, Any] | Sequence[Any],
        counts: UpdateCounts,
    ) -> None:
        """Begins with the values before the update."""
        self.sent: dict[int, Any] = {}
        self.enqueued: dict[int, Any] = {}
        self._counts = counts
        self._known: dict[str, Any] = {
            UpdateKind.PARAMETER: variables,
            UpdateKind.GRADIENT: accumulators,
            UpdateKind.STATE: state_leaves,
            UpdateKind.OUTPUT: outputs,
            UpdateKind.SENT: self.sent,
        }
        self.variables: dict[str, Any] = {}
        self.accumulators: dict[str, Any] = {}
        self.state_leaves: list[Any] = list(state_leaves)
        self._made: dict[str, Any] = {
            UpdateKind.PARAMETER: self.variables,
            UpdateKind.GRADIENT: self.accumulators,
            UpdateKind.STATE: self.state_leaves,
            UpdateKind.SENT: self.sent,
            UpdateKind.ENQUEUED: self.enqueued,
        }

    @property
    def updates(self) -> Any:
        """The number of weight updates before."""
        return self._counts.updates

    def __getitem__(self, value: UpdateValue) -> Any:
        """Returns a value that a program reads."""
        if value.kind == UpdateKind.COUNT:
            return self._counts.micro_batches
        if value.kind == UpdateKind.UPDATE_COUNT:
            return self._counts.updates
        return self._known[value.kind][value.key]

    def __setitem__(self, value: UpdateValue, result: Any) -> None:
        """Takes a result of a program."""
        self._made[value.kind][value.key] = result
