"""What goes into the single program of a block, what it carries, and what it leaves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

__all__ = ["BlockKind", "Carry", "Given", "Left", "Position", "Totals"]


@dataclass(frozen=True)
class BlockKind:
    """What a compilation is for.

    Attributes:
      room: the size of the block's stacks.
      num_updates: the size of the stacks of what there is per weight update; 0 where nothing is kept.
      updates: whether weight updates may fall into the block.
    """

    room: int
    num_updates: int
    updates: bool


@dataclass(frozen=True)
class Position:
    """Where a block is, all int32.

    Attributes:
      accumulated: micro-batches in the accumulators where it begins.
      execution: executions of the pipeline before; of a loop, runs.
      updates: weight updates before.
      iteration: of a loop, iterations of the run before.
      count: micro-batches to run.
      every: micro-batches per weight update.
    """

    accumulated: int
    execution: int
    updates: int
    iteration: int
    count: int
    every: int

    def pack(self) -> np.ndarray[Any, Any]:
        """The numbers as one array, which is one argument to transfer."""
        # Spelled out: `dataclasses.astuple` copies each number, and this is done for every block.
        return np.array(
            (self.accumulated, self.execution, self.updates, self.iteration, self.count, self.every),
            np.int32,
        )

    @classmethod
    def unpack(cls, numbers: Any) -> Position:
        """The inverse of `pack`, also of a traced array."""
        return cls(*(numbers[place] for place in range(len(dataclasses.fields(cls)))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """What grows with each micro-batch until the next weight update.

    Attributes:
      accumulators: by key, a dict.
      sums: of what is collected in sums, a list.
    """

    accumulators: Any
    sums: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """What stays the same during a block.

    Attributes:
      variables: those that the block does not change, by full name.
      inputs: the leaves of the pipeline's inputs.
      loss_scale: what the backward starts from, unless it is in the optimizer's state.
      key: the session's random key.
      position: packed.
      feed: stacked micro-batches.
    """

    variables: dict[str, Any]
    inputs: list[Any]
    loss_scale: Any
    key: Any
    position: Any
    feed: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """What a block changes; the state of its loops.

    Attributes:
      done: micro-batches that ran.
      num_kept: weight updates of which something is in the stacks.
      accumulated: micro-batches in the accumulators.
      totals: accumulators and sums.
      variables: by full name.
      state_leaves: of the optimizer's state.
      carried: of a loop, the values that the next iteration takes.
      latest: the outputs of the last micro-batch that the update reads, by their number.
      stacks: what was collected.
      enqueued: what stages enqueued, stacked.
      updated: what weight updates enqueued, stacked.
    """

    done: Any
    num_kept: Any
    accumulated: Any
    totals: Totals
    variables: dict[str, Any]
    state_leaves: list[Any]
    carried: list[Any]
    latest: dict[int, Any]
    stacks: list[Any]
    enqueued: list[Any]
    updated: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Left:
    """What a block leaves: of its `Carry` what somebody reads; or the shardings of that.

    JAX gives the memory of donated arguments to results of the same shape, in order, whatever memory they
    are in. So what is taken comes first, in the order in which it is taken.

    Attributes:
      totals: accumulators and sums.
      variables: those that it changed, by full name.
      state_leaves: of the optimizer's state.
      carried: of a loop.
      stacks: what was collected, stacked over micro-batches, or the sums over weight updates; a stack may
        be longer.
      enqueued: what stages enqueued, stacked over micro-batches, likewise.
      updated: what weight updates enqueued, stacked over these, likewise.
      done: micro-batches that ran, int32 scalar; fewer than asked for if a loop's condition ended it.
    """

    totals: Totals
    variables: dict[str, Any]
    state_leaves: Any
    carried: Any
    stacks: Any
    enqueued: Any
    updated: Any
    done: Any
