"""What goes into a step and comes out of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

__all__ = [
    "Collected",
    "Handed",
    "OfReplicas",
    "PipelineState",
    "Progress",
    "RunState",
    "StepOutputs",
    "is_readable",
    "of_replica",
]


def is_readable(array: Any) -> bool:
    """Whether this process has all of an array, which may be on devices of several."""
    if getattr(array, "is_fully_addressable", True):
        return True
    return bool(array.is_fully_replicated and array.addressable_shards)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class OfReplicas:
    """A value of which each replica has its own, as what a replicated loop carries; a pytree.

    Attributes:
      values: in the order of the replicas.
    """

    values: tuple[Any, ...]


def of_replica(value: Any, replica: int) -> Any:
    """What a replica has: its own value, or the one that is the same for all."""
    return value.values[replica] if isinstance(value, OfReplicas) else value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """Everything that training changes, a pytree.

    Attributes:
      variables: full name -> array.
      optimizer_state: what the optimizer's `init` returns for the trained variables, a flat dict. None
        without training, and until the first step if it depends on what the last stage returns.
      update_count: an int, weight updates so far.
      execution_count: an int, steps so far, those without training included; random keys are folded from
        it, modulo 2**32.
      key: the random key that all others are folded from.
    """

    variables: dict[str, Any]
    optimizer_state: Any
    update_count: int
    execution_count: int
    key: Any


@dataclass(frozen=True)
class StepOutputs:
    """What a step returns besides the new state.

    Attributes:
      collected: the leaves, as they were made: stacked where one program handled several micro-batches.
      unflatten: makes an output of its leaves; None where outputs are not collected.
      read_metrics: reads what stages and the optimizer reported, by full name, one value each.
    """

    collected: Sequence[Collected]
    unflatten: Callable[[list[Any]], Any] | None
    read_metrics: Callable[[], dict[str, Any]] = dict

    @property
    def is_here(self) -> bool:
        """Whether this process has what was collected: the one of the last stage does, of several."""
        return all(
            map(is_readable, jax.tree.leaves([(part.outputs, part.loss) for part in self.collected]))
        )

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """What the last stage returned, one entry per micro-batch; none in processes without that stage."""
        if self.unflatten is None or not self.is_here:
            return []
        found: list[Any] = []
        for part in self.collected:
            if part.size is None:
                found.append(self.unflatten(part.outputs))
                continue
            leaves = [_unstack(leaf, part.size) for leaf in part.outputs]
            found += [self.unflatten([leaf[number] for leaf in leaves]) for number in range(part.size)]
        return found

    @functools.cached_property
    def losses(self) -> list[Any]:
        """The loss of each micro-batch, scalars; empty without training, and likewise."""
        found: list[Any] = []
        if not self.is_here:
            return found
        for part in self.collected:
            if part.loss is not None:
                found += [part.loss] if part.size is None else _unstack(part.loss, part.size)
        return found

    @functools.cached_property
    def metrics(self) -> dict[str, Any]:
        """What stages and the optimizer reported (see `metric`), NumPy scalars by full name."""
        return {name: values[0] for name, values in self.read_metrics().items()}


@dataclass(frozen=True, eq=False)
class Collected:
    """What the last stage gave for one micro-batch, or for several in a row.

    Attributes:
      outputs: the leaves of what it returned.
      loss: the loss; None without training.
      size: None for one micro-batch. For several, how many: the others are then stacked on a first axis,
        which may be longer; what is beyond `size` means nothing.
    """

    outputs: list[Any]
    loss: Any
    size: int | None


@dataclass(frozen=True, eq=False)
class Handed:
    """What was enqueued at once, for one micro-batch or weight update or for several in a row.

    Attributes:
      leaves: by the number of the leaf.
      size: as of `Collected`.
    """

    leaves: list[Any]
    size: int | None


@dataclass(frozen=True, eq=False)
class RunState:
    """Everything that running changes, also between two weight updates.

    Attributes:
      pipeline: variables, optimizer state, counts and key.
      accumulators: sums or means of gradients, by key; empty without training.
      num_accumulated: of how many micro-batches they are.
    """

    pipeline: PipelineState
    accumulators: dict[str, Any]
    num_accumulated: int = 0


@dataclass(frozen=True, eq=False)
class Progress:
    """What some micro-batches leave, still being computed.

    Attributes:
      state: the new state.
      carried: of a loop, the values that the next iteration takes.
      collected: what was to be collected, in the order of the micro-batches.
      count: how many micro-batches ran.
      enqueued: what stages enqueued, likewise.
      updated: what weight updates enqueued, in their order.
    """

    state: RunState
    carried: list[Any]
    collected: list[Collected]
    count: int
    enqueued: list[Handed]
    updated: list[Handed]


def _unstack(stack: Any, size: int) -> list[Any]:
    # All of the stack, whose length does not depend on the number of micro-batches: that compiles once.
    return list(stack)[:size]
