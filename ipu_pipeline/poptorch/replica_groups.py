"""Groups of replicas that get the same inputs, or have the same value of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.poptorch.enums import CommGroupType, VariableRetrievalMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations import checks


def find_groups(kind: CommGroupType, size: int, num_replicas: int) -> tuple[int, ...]:
    """Returns the number of each replica's group, from 0."""
    if kind is CommGroupType.All:
        return (0,) * num_replicas
    if kind is CommGroupType.NoGrouping:
        return tuple(range(num_replicas))
    number = num_replicas // size
    if kind is CommGroupType.Orthogonal:
        return tuple(replica % number for replica in range(num_replicas))
    return tuple(replica // size for replica in range(num_replicas))


@dataclass(frozen=True)
class ReplicaGrouping:
    """The arguments of a parameter's `replicaGrouping`.

    Attributes:
      kind: how groups are chosen; `All` is the same as no groups.
      size: the size of a group, see `find_groups`.
      mode: whether the parameter on the host has a row for each group, or for each replica.
    """

    kind: CommGroupType
    size: int
    mode: VariableRetrievalMode

    @staticmethod
    def check(name: str, values: Any, num_replicas: int) -> ReplicaGrouping:
        """Makes a grouping from a user's arguments."""
        if not isinstance(values, tuple) or len(values) != 3:
            raise checks.fail(name, "comm_group_type, size_of_group and retrieval_mode", values)
        kind, size, mode = values
        checks.member(CommGroupType)(f"{name}: comm_group_type", kind)
        if not is_int(size):
            raise checks.fail(f"{name}: size_of_group", "an integer", size)
        checks.member(VariableRetrievalMode)(f"{name}: retrieval_mode", mode)
        is_sized = kind in (CommGroupType.Consecutive, CommGroupType.Orthogonal)
        if is_sized and (size < 1 or num_replicas % size):
            raise ValueError(
                f"{name}: size_of_group must be a factor of the replicationFactor, {num_replicas}; got "
                f"{size}."
            )
        return ReplicaGrouping(kind, size, mode)

    def rows(self, num_replicas: int) -> GroupRows | None:
        """Returns the parameter's rows; None if it has none because all replicas have the same value."""
        if self.kind is CommGroupType.All:
            return None
        groups = find_groups(self.kind, self.size, num_replicas)
        return GroupRows(groups, self.mode is VariableRetrievalMode.AllReplicas)


@dataclass(frozen=True)
class GroupRows:
    """The rows of a parameter that differs between groups of replicas.

    On the devices it has one row for each group.

    Attributes:
      group_of: the group of each replica.
      has_all: whether it has one row for each replica on the host.
    """

    group_of: tuple[int, ...]
    has_all: bool

    @property
    def number(self) -> int:
        """The number of rows on the host."""
        return len(self.group_of) if self.has_all else self.num_groups

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return max(self.group_of) + 1

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Checks the shape of a parameter."""
        if not shape or shape[0] != self.number:
            whose = "replica (VariableRetrievalMode.AllReplicas)" if self.has_all else "group of replicas"
            raise Error(
                f"Parameter {name} has a replicaGrouping, so its first dimension must be "
                f"{self.number}, a row for each {whose}; its shape is {shape}."
            )

    def to_device(self, name: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the rows of the groups."""
        if not self.has_all:
            return value
        rows = value[[self.group_of.index(group) for group in range(self.num_groups)]]
        if not np.array_equal(rows[list(self.group_of)], value, equal_nan=value.dtype.kind in "fV"):
            raise Error(
                f"Parameter {name} must have the same values in the rows of replicas that are in one "
                f"group; the groups of the replicas are {list(self.group_of)}."
            )
        return rows

    def to_host(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the rows as the host has them."""
        return value[list(self.group_of)] if self.has_all else value
