"""The arguments of a block's single program, the state of its loops, and its results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

__all__ = ["BlockKind", "Carry", "Given", "Left", "Position", "Totals"]


@dataclass(frozen=True)
class BlockKind:
    """The kind of block that a compilation is for."""

    room: int  # the size of the block's stacks
    num_updates: int  # the size of the stacks with an entry per weight update; 0 if none is kept
    updates: bool  # whether weight updates may fall into the block
    every: int = 0  # micro-batches per weight update, if the block has whole updates only; 0 if it may not


@dataclass(frozen=True)
class Position:
    """The position of a block in the run; all are int32."""

    accumulated: int  # micro-batches in the accumulators where it begins
    execution: int  # executions of the pipeline so far, or runs of the loop
    updates: int  # weight updates before the block
    iteration: int  # in a loop, iterations of the run so far
    count: int  # micro-batches to run
    every: int  # micro-batches per weight update

    def pack(self) -> np.ndarray[Any, Any]:
        """The numbers as one array, which is one argument to transfer."""
        # Spelled out: `dataclasses.astuple` copies each number, and this is done for every block.
        return np.array(
            (self.accumulated, self.execution, self.updates, self.iteration, self.count, self.every),
            np.int32,
        )

    @classmethod
    def unpack(cls, numbers: Any) -> Position:
        """The inverse of `pack`, also for a traced array."""
        return cls(*(numbers[place] for place in range(len(dataclasses.fields(cls)))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """The sums that grow with each micro-batch until the next weight update."""

    accumulators: Any  # a dict, by key
    sums: Any  # a list: the sums of what is collected in sums


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """What stays the same during a block."""

    variables: dict[str, Any]  # those that the block does not change, by full name
    inputs: list[Any]  # the leaves of the pipeline's inputs
    loss_scale: Any  # the scale that the backward starts from, unless it is in the optimizer's state
    key: Any  # the session's random key
    position: Any  # packed
    feed: list[Any]  # stacked micro-batches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """What a block changes; the state of its loops."""

    done: Any  # micro-batches that ran
    num_kept: Any  # weight updates with an entry in the stacks
    accumulated: Any  # micro-batches in the accumulators
    totals: Totals  # accumulators and sums
    variables: dict[str, Any]  # by full name
    state_leaves: list[Any]  # of the optimizer's state
    carried: list[Any]  # in a loop, the values that the next iteration takes
    latest: dict[int, Any]  # the outputs of the last micro-batch that the update reads, by their number
    stacks: list[Any]  # what was collected
    enqueued: list[Any]  # what stages enqueued, stacked
    updated: list[Any]  # what weight updates enqueued, stacked


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Left:
    """What a block leaves: the parts of its `Carry` that are read; or their shardings.

    JAX gives the memory of donated arguments to results of the same shape, in order, whatever memory they
    are in. So results that take memory come first, in the order of the arguments.
    """

    totals: Totals  # accumulators and sums
    variables: dict[str, Any]  # the variables that it changed, by full name
    state_leaves: Any  # of the optimizer's state
    carried: Any  # in a loop, the carried values
    # what was collected, stacked over micro-batches, or the sums over weight updates; a stack may be longer
    stacks: Any
    enqueued: Any  # what stages enqueued, stacked over micro-batches; may be longer
    updated: Any  # what weight updates enqueued, stacked over them; may be longer
    done: Any  # micro-batches that ran, int32 scalar; fewer than asked for if a loop's condition ended it
