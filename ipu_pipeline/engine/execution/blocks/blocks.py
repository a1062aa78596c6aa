"""Pipelines whose stages are all on one device, block by block.

A block is as many whole weight updates as fit a given size. One that does not fit by itself is cut: the
parts before its last one leave the state as it is, so that it can still be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.feeds import Take, gather
from ipu_pipeline.engine.devices.residence import NO_LOSS_SCALE, Residence
from ipu_pipeline.engine.devices.stacking import StackedElement
from ipu_pipeline.engine.execution.blocks.block_sizes import BlockSizes, block_sizes
from ipu_pipeline.engine.execution.blocks.one_program import BlockResult, OneProgram, Position
from ipu_pipeline.engine.jaxprs.shapes import num_bytes
from ipu_pipeline.engine.programs.collecting import Collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.state import Collected, Updated

__all__ = ["BlockExecutor", "PendingBlock"]


class _Part(NamedTuple):
    """Where it begins, micro-batches per update, its own stacked, how many they are, the stack's size."""

    position: Position
    updated_every: int
    feed: list[Any]
    size: int
    room: int


@dataclass(frozen=True, eq=False)
class PendingBlock:
    """A block, or the last part of one, that is ready to run.

    Attributes:
      num_updates: how many weight updates it will do.
      variables: those before it, with the values that earlier parts assigned.
      accumulators: before it; this block will take their memory.
      sums: before it, likewise; None if it begins an update.
      inputs: the leaves of the inputs.
      key: the session's random key.
      part: its micro-batches.
      collected: what earlier parts gave.
      first_outputs: what the last stage returns for the first micro-batch, if that was asked for.
    """

    num_updates: int
    variables: Mapping[str, Any]
    accumulators: dict[str, Any]
    sums: list[Any] | None
    inputs: Sequence[Any]
    key: Any
    part: _Part
    collected: list[Collected]
    first_outputs: list[Any] | None


class BlockExecutor:
    """Runs the micro-batches and weight updates of a pipeline on one device."""

    def __init__(
        self,
        residence: Residence,
        programs: Sequence[StagePrograms],
        collecting: Collecting,
        *,
        donate: bool,
        block_bytes: int,
        num_serialized: int,
        has_fixed_room: bool,
        options: Options,
    ) -> None:
        """Nothing is compiled yet.

        Args:
          residence: where its state lives, one row.
          programs: the programs of its stages.
          collecting: what is wanted of the last stage.
          donate: whether an update may reuse the memory of the state before it.
          block_bytes: how much of the device a block's feed and outputs may take.
          num_serialized: how many micro-batches each stage handles before the next one starts.
          has_fixed_room: whether blocks have one size however many micro-batches an update has.
          options: XLA's.
        """
        traced = residence.traced
        self.residence = residence
        self._donate = donate
        self._block_bytes = block_bytes
        self._num_serialized = num_serialized
        self._has_fixed_room = has_fixed_room
        self._collecting = collecting
        self._bytes_each = num_bytes([*collecting.avals, *jax.tree.leaves(traced.element)])
        self._assigned = {spec.name for stage in traced.stages for spec in stage.assigned}
        self._program = OneProgram(
            residence,
            programs,
            collected=collecting.sources,
            summed=[aval.dtype for aval in collecting.avals] if collecting.is_summed else None,
            group=num_serialized,
            options=options,
        )

    def place_element(self, leaves: Sequence[Any]) -> StackedElement:
        """A micro-batch on the host, sharing no memory with NumPy arrays that are given."""
        return self._program.stacker.add(leaves)

    def place_ahead(self, elements: Sequence[StackedElement]) -> list[StackedElement]:
        """The micro-batches of one update, as `place_element` left them, on the device."""
        if not elements or not elements[0].stack:
            return list(elements)
        stack = self._program.place_feed(elements, self.sizes(1, len(elements)).room)
        return [StackedElement(stack, row) for row in range(len(elements))]

    def sizes(self, num_updates: int, updated_every: int) -> BlockSizes:
        """The blocks into which so many weight updates of so many micro-batches are cut."""
        sizes = block_sizes(
            num_updates * updated_every,
            updated_every,
            self._bytes_each,
            self._block_bytes,
            self._num_serialized,
            self._has_fixed_room,
        )
        self._program.stacker.set_capacity(sizes.room)
        return sizes

    def fetch(
        self,
        variables: Mapping[str, Any],
        key: Any,
        execution_count: int,
        inputs: Sequence[Any],
        take: Take,
        accumulators: dict[str, Any],
        num_updates: int,
        updated_every: int,
        sizes: BlockSizes,
        needs_first_outputs: bool,
        loss_scale: Any,
    ) -> PendingBlock:
        """Gets a block's micro-batches, and runs the parts before its last one.

        Args:
          variables: placed variables by full name.
          key: the session's random key.
          execution_count: how often the pipeline was executed before.
          inputs: the leaves of the inputs that stay the same.
          take: returns up to so many micro-batches, as `place_element` left them, and at least one; what it
            raises ends the run, and the state has not changed.
          accumulators: placed zeros by full name.
          num_updates: at most so many.
          updated_every: micro-batches per weight update, or execution.
          sizes: from `sizes`.
          needs_first_outputs: whether the first micro-batch's outputs are wanted beforehand.
          loss_scale: the scale that the backward starts from.

        Returns:
          The block.
        """
        every = updated_every
        if sizes.unit == every:
            wanted = min(num_updates * every, sizes.capacity)
            elements = gather(take, wanted, every)
            elements = elements[: len(elements) // every * every]  # the rest is of an update that ends
            part = self._make_part(execution_count, 0, every, elements, sizes)
            first_outputs = None
            if needs_first_outputs:
                first_outputs = self._peek(variables, key, inputs, part)
            return PendingBlock(
                len(elements) // every, variables, accumulators, None, inputs, key, part, [], first_outputs
            )
        collected: list[Collected] = []
        first_outputs = sums = None
        accumulated = 0
        while True:
            wanted = min(sizes.capacity, every - accumulated)
            elements = gather(take, wanted, wanted)
            part = self._make_part(execution_count, accumulated, every, elements, sizes)
            if needs_first_outputs and accumulated == 0:
                first_outputs = self._peek(variables, key, inputs, part)
            accumulated += wanted
            if accumulated == every:
                return PendingBlock(
                    1, variables, accumulators, sums, inputs, key, part, collected, first_outputs
                )
            result = self._run(variables, (), accumulators, sums, inputs, key, part, True, loss_scale)
            accumulators, sums = result.accumulators, result.sums
            variables = {**variables, **{name: result.variables[name] for name in self._assigned}}
            if not self._collecting.is_summed:
                collected.append(self._collecting.collect(result.collected, wanted))

    def update(self, state_leaves: Sequence[Any], pending: PendingBlock) -> Updated:
        """Runs what `fetch` returned; with `donate` the state before it is gone then.

        Args:
          state_leaves: placed leaves of the optimizer's state.
          pending: the block.
        """
        result = self._run(
            pending.variables,
            state_leaves,
            pending.accumulators,
            pending.sums,
            pending.inputs,
            pending.key,
            pending.part,
            is_part=False,
        )
        size = pending.num_updates if self._collecting.is_summed else pending.part.size
        collected = [*pending.collected, self._collecting.collect(result.collected, size)]
        return Updated(result.variables, result.state_leaves, result.accumulators, collected)

    def _make_part(
        self, execution: int, accumulated: int, every: int, elements: Sequence[Any], sizes: BlockSizes
    ) -> _Part:
        has_feed = bool(jax.tree.leaves(self.residence.traced.element))
        feed = self._program.place_feed(elements, sizes.room) if has_feed else []
        return _Part(Position(accumulated, execution), every, feed, len(elements), sizes.room)

    def _run(
        self,
        variables: Mapping[str, Any],
        state_leaves: Sequence[Any],
        accumulators: dict[str, Any],
        sums: list[Any] | None,
        inputs: Sequence[Any],
        key: Any,
        part: _Part,
        is_part: bool,
        loss_scale: Any = NO_LOSS_SCALE,
    ) -> BlockResult:
        num_sums = 0
        if self._collecting.is_summed and not is_part:
            # With a fixed room an update may be as short as a group.
            shortest = self._num_serialized if self._has_fixed_room else part.updated_every
            num_sums = max(1, part.room // shortest)
        return self._program.run(
            variables,
            state_leaves,
            accumulators,
            sums,
            (),
            inputs,
            key,
            *part,
            donate=self._donate and not is_part,
            is_part=is_part,
            loss_scale=loss_scale,
            num_sums=num_sums,
        )

    def _peek(
        self, variables: Mapping[str, Any], key: Any, inputs: Sequence[Any], part: _Part
    ) -> list[Any]:
        return self._program.peek_outputs(variables, (), inputs, key, part.position, part.feed)
