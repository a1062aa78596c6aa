"""The last stage's results: what was to be collected, and what the optimizer and a loop read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.remote import absent
from ipu_pipeline.engine.execution.plans import Plan
from ipu_pipeline.engine.programs.chunks import ChunkForm
from ipu_pipeline.engine.programs.collecting import Collecting
from ipu_pipeline.engine.state import Collected, Handed

__all__ = ["Accumulated", "Outputs", "Taken", "Wanted", "join_accumulated"]


@dataclass(frozen=True, eq=False)
class Accumulated:
    """The results of a column's micro-batches before a weight update."""

    # the last stage's leaves for the first micro-batch; None where the optimizer does not read them
    first_outputs: list[Any]
    last_outputs: list[Any]  # the same for the last micro-batch
    carried: list[Any]  # in a loop, what the next iteration takes
    collected: list[Collected]  # what was to be collected, per micro-batch or chunk; or one entry: sums
    enqueued: list[Handed]  # what stages enqueued, per micro-batch or chunk
    assigned: dict[str, Any]  # new values of the variables that stages assign, by full name
    accumulators: dict[str, Any]  # by key; empty without training. Joining them takes their memory


@dataclass(frozen=True, eq=False)
class Wanted:
    """Which of the last stage's outputs are wanted."""

    plan: Plan  # the programs of the column
    chunk: ChunkForm
    collecting: Collecting
    read: tuple[Collection[int], Collection[int]]  # places read in the first and last micro-batch's outputs
    carried: Sequence[int]  # in a loop, the places of what the next iteration takes
    num_outputs: int  # without the loss, which comes after them
    empties_devices: bool  # whether outputs may be in host memory

    @functools.cached_property
    def places(self) -> list[int]:
        """The places of what is collected; the loss is the last one."""
        return [*self.collecting.places, *([-1] if self.collecting.has_loss else [])]

    @functools.cached_property
    def num_stacked(self) -> int | None:
        """The number of micro-batches stacked in a chunk."""
        return self.chunk.num_stacked

    @functools.cached_property
    def spread(self) -> Callable[[Any], Any]:
        """Repeats an input of the pipeline for each micro-batch of a chunk."""
        return self.plan.last_forward.group.program(self.chunk.spread)


@dataclass(eq=False)
class Taken:
    """What was taken of a step's micro-batches; with several shapes, the `Outputs` of each share it."""

    # the leaves that the last stage returned for the first micro-batch; None where not read
    first: list[Any] = field(default_factory=list)
    last: list[Any] = field(default_factory=list)  # the same for the last micro-batch
    carried: list[Any] = field(default_factory=list)  # in a loop, what the next iteration takes
    sums: list[Any] = field(default_factory=list)  # of what is collected, if it is summed
    # what was to be collected, per micro-batch or chunk, if it is not
    collected: list[Collected] = field(default_factory=list)


class Outputs:
    """Collects the results of a step's micro-batches, one after another.

    Attributes:
      taken: what was taken so far.
    """

    def __init__(
        self,
        wanted: Wanted,
        num_chunks: int,
        inputs: Mapping[tuple[DeviceGroup, int], Any],
        taken: Taken,
    ) -> None:
        """Begins a step."""
        self.taken = taken
        self._wanted, self._last_chunk, self._inputs = wanted, num_chunks - 1, inputs

    def take(self, put: Callable[..., list[Any]], slots: Sequence[Any], chunk: int) -> None:
        """Takes what is in the slots of a micro-batch or chunk."""
        wanted, group, taken = self._wanted, self._wanted.plan.last_forward.group, self.taken
        collected, number = wanted.plan.collected, wanted.num_outputs
        leaves = [slots[key] if kind == "slot" else self._inputs[group, key] for kind, key in collected]
        if wanted.empties_devices:
            leaves = put(leaves, group)
        if not taken.first:
            taken.first = self._only(leaves[:number], wanted.read[0], 0)
        if chunk == self._last_chunk:
            taken.last = self._only(leaves[:number], wanted.read[1], -1)
            taken.carried = [leaves[place] for place in wanted.carried]
        own = [
            leaves[place] if collected[place][0] == "slot" else wanted.spread(leaves[place])
            for place in wanted.places
        ]
        if not wanted.collecting.is_summed:
            taken.collected.append(wanted.collecting.collect(own, wanted.num_stacked))
        elif group.is_here:
            taken.sums = _add(taken.sums, own)

    @property
    def collected(self) -> list[Collected]:
        """What was collected, per micro-batch or chunk; or one entry with the sums."""
        collecting = self._wanted.collecting
        return [collecting.collect(self.taken.sums, None)] if collecting.is_summed else self.taken.collected

    def _only(self, leaves: Sequence[Any], places: Collection[int], number: int) -> list[Any]:
        """The leaves of one micro-batch of a chunk, None in other places."""
        only: list[Any] = [None] * len(leaves)
        group, chunk = self._wanted.plan.last_forward.group, self._wanted.chunk
        for place in places:
            is_stacked = self._wanted.plan.collected[place][0] == "slot"
            if is_stacked and not group.is_here:
                shape = leaves[place].shape[len(chunk.axes) :]
                only[place] = absent(shape, leaves[place].dtype, group.replicated)
                continue
            only[place] = chunk.pick(leaves[place], number) if is_stacked else leaves[place]
        return only


def join_accumulated(before: Accumulated, after: Accumulated) -> Accumulated:
    """The results of micro-batches and of others that follow them, which have the same `Taken`."""
    return dataclasses.replace(
        after,
        enqueued=[*before.enqueued, *after.enqueued],
        assigned={**before.assigned, **after.assigned},
    )


@functools.partial(jax.jit, donate_argnums=0)
def _add(totals: Any, parts: Any) -> Any:
    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        chunk_axes = tuple(range(part.ndim - total.ndim))
        return total + part.sum(chunk_axes, dtype=total.dtype)  # else JAX sums integers in 64 bits

    return jax.tree.map(add, totals, parts)
