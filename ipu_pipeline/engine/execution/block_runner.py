"""Everything on one device as a single jitted program, block by block.

The stage programs of a micro-batch are called one after another within it, so there is no dispatch per
micro-batch, and XLA sees them together. A call handles a block, a stack of micro-batches. A block of a
pipeline holds all whole weight updates that fit a given size. An update that does not fit by itself is
cut: all parts but its last leave the state as it is, so that the update can still be dropped. A block of a
loop may begin and end anywhere.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices.device_groups import absent
from ipu_pipeline.engine.devices.feeds import Element, Feed, Supply, Take, gather, shapes_of, take_nothing
from ipu_pipeline.engine.devices.placement import put, put_host_copies
from ipu_pipeline.engine.devices.state_placement import NO_LOSS_SCALE, StatePlacement
from ipu_pipeline.engine.devices.xla_settings import Options
from ipu_pipeline.engine.execution.block_program import (
    BlockConstants,
    BlockKind,
    BlockProgram,
    BlockResults,
    Position,
    Totals,
)
from ipu_pipeline.engine.execution.compilation import identify, jit_zeros, note_temporaries, text_of
from ipu_pipeline.engine.execution.contract import Iterated, Request, Runner
from ipu_pipeline.engine.execution.observation import watched_take
from ipu_pipeline.engine.plan.traced_code import TracedCode
from ipu_pipeline.engine.planning.memory_records import IpuMemory, StageMemory
from ipu_pipeline.engine.programs.accumulation import Collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.progress import compiling
from ipu_pipeline.engine.state import Collected, Handed, PipelineState, Progress
from ipu_pipeline.engine.tracing.stage_markers import as_int32
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind
from ipu_pipeline.engine.watching import Launch, LaunchKind
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.pytrees import num_bytes

_MAX_MICRO_BATCHES = 1024  # in a block, so that Ctrl-C does not wait long
_MAX_FIXED = 64  # in a block of one size whatever the count, since it is allocated whole
# Blocks that the host runs ahead; XLA's CPU client has no more in flight than the most.
_LEAST_IN_FLIGHT, _MOST_IN_FLIGHT = 2, 32
_IN_FLIGHT_BYTES = 64 * 2**20  # the most that the feeds of more than the least may take


class BlockSizes(NamedTuple):
    """The sizes of the blocks into which micro-batches are cut."""

    unit: int  # micro-batches that stay together
    capacity: int  # the most micro-batches in a block, a multiple of `unit`
    room: int  # the size of a block's stack, at least the capacity; compiled once per size


@dataclass(frozen=True, eq=False)
class EarlierParts:
    """The results of the earlier parts of an update."""

    totals: Totals  # accumulators and sums; the next part will take their memory
    assigned: Mapping[str, Any]  # values that stages assigned, by full name
    collected: list[Collected]  # what was collected
    enqueued: list[Handed]  # what stages enqueued
    count: int = 0  # the number of micro-batches that ran
    # what the last stage returns for the first micro-batch, if that is needed
    first_outputs: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PendingBlock:
    """A block that is ready to run, or the last part of an update that does not fit a block."""

    request: Request  # the request that it is a part of
    earlier: EarlierParts  # the earlier parts of its update
    position: Position  # where it begins
    room: int  # the size of its stacks
    feed: list[Any]  # its micro-batches, stacked, on the device
    runner: BlockRunner  # the runner for their shapes

    @property
    def count(self) -> int:
        """The number of micro-batches, including those of earlier parts."""
        return self.earlier.count + self.position.count


class BlockRunner(Runner[PendingBlock]):
    """Runs a pipeline or loop whose stages are all on one device."""

    def __init__(
        self,
        placement: StatePlacement,
        programs: Sequence[StagePrograms],
        collecting: Collecting,
        accumulator_dtypes: Mapping[str, Any],
        *,
        donate: bool,
        block_bytes: int,
        num_serialized: int = 1,
        has_fixed_room: bool = False,
        iterated: Iterated | None = None,
        options: Options | None = None,
        lead: BlockRunner | None = None,
        shapes: int = 0,
    ) -> None:
        """Compiles nothing yet.

        `lead` is the runner that leads, which is given micro-batches of all shapes; None: this one.
        `shapes` is the number of the shapes.
        """
        super().__init__(placement, programs, iterated)
        self.of_shapes: list[BlockRunner] = self.of_shapes if lead is None else lead.of_shapes
        self.shapes = shapes
        self._collecting = collecting
        self._donate = donate
        self._block_bytes = block_bytes
        self._has_fixed_room = has_fixed_room
        self._options = dict(options or {})
        self._accumulator_dtypes = accumulator_dtypes
        self._begins_with_zeros = iterated is None and not placement.offloads_accumulators
        self.program = BlockProgram(
            TracedCode(placement, self.programs),
            collecting,
            num_serialized,
            None if iterated is None else iterated.carried,
            None if iterated is None else iterated.condition,
            placement.find_accumulators(accumulator_dtypes) if self._begins_with_zeros else None,
        )
        traced = placement.traced
        num_carried = 0 if iterated is None else len(iterated.carried)
        self._fed = jax.tree.leaves(traced.element)[num_carried:]
        self._bytes_each = num_bytes([*collecting.avals, *traced.enqueued_avals, *self._fed])
        self._bytes_per_update = num_bytes(self.program.updated_avals)
        update = self.program.update
        results = () if update is None else update.results
        self._trained = {value.key for value in results if value.kind == UpdateKind.PARAMETER}
        self._feed = Feed(functools.partial(put, group=placement.groups[0]), is_block=True)
        self._feed.shapes = shapes
        # what the host has run ahead, of all shapes
        self.in_flight: collections.deque[Any] = collections.deque() if lead is None else lead.in_flight
        self._functions: dict[tuple[BlockKind, bool], Any] = {}
        group = placement.groups[0]
        peek = jax.jit(self.program.peek, compiler_options=self._options, **group.results)
        self._peek = group.program(peek)
        self._make_sums = group.program(jit_zeros(collecting.avals, group.replicated))

    @property
    def takes_elements(self) -> bool:
        """Whether its device belongs to this process."""
        return self.placement.groups[0].is_here

    def place_element(self, leaves: Sequence[Any]) -> Element:
        """Takes a micro-batch on the host."""
        return self._feed.add(leaves)

    def place_ahead(self, elements: Sequence[Element]) -> list[Element]:
        """Puts the micro-batches of one update on the device."""
        if not elements or not self._fed or len(set(map(shapes_of, elements))) > 1:
            return list(elements)
        if (runner := self.of_shapes[shapes_of(elements[0])]) is not self:
            return runner.place_ahead(elements)
        sizes = self.sizes(len(elements), len(elements))
        return self._feed.place_ahead(elements, sizes.capacity, sizes.room)

    def make_accumulators(
        self, dtypes: Mapping[str, Any], initial: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Makes none for a pipeline: only updates that do not fit a block need them, see `_compile`."""
        return {} if self._begins_with_zeros else super().make_accumulators(dtypes, initial)

    def num_fetched(self, total: int, every: int) -> int:
        """The size of a block."""
        return self.sizes(total, every).capacity

    def num_waiting(self, total: int, every: int) -> int:
        """The number of micro-batches in the blocks that the host runs ahead."""
        room = self._find_sizes(total, every).room
        return room * _max_in_flight(room * num_bytes(self._fed))

    def plan_memory(
        self, accumulator_dtypes: Mapping[str, Any], stages: Sequence[StageMemory], every: int
    ) -> tuple[IpuMemory, ...]:
        """Plans the device's memory. What stages hold counts among the program's temporaries."""
        del stages
        (plan,) = super().plan_memory(accumulator_dtypes, (), every)
        is_whole = self._find_sizes(every, every).unit == every and not self._has_fixed_room
        if self._begins_with_zeros and is_whole and plan.num_temporary_bytes is not None:
            # The program's temporaries have the accumulators.
            others = max(0, plan.num_temporary_bytes - plan.num_accumulator_bytes)
            plan = dataclasses.replace(plan, num_temporary_bytes=others)
        return (plan,)

    def sizes(self, total: int, every: int) -> BlockSizes:
        """The sizes of blocks into which `total` micro-batches are cut; the feed then fills such blocks."""
        sizes = self._find_sizes(total, every)
        self._feed.set_size(sizes.room)
        return sizes

    def _find_sizes(self, total: int, every: int) -> BlockSizes:
        # With a fixed room an update may be as short as a group.
        shortest = self.program.num_serialized if self._has_fixed_room else every
        return block_sizes(
            max(total, 1),
            every if self.iterated is None else 1,
            self._bytes_each + self._bytes_per_update // shortest,
            self._block_bytes,
            self.program.num_serialized,
            self._has_fixed_room,
        )

    def compile(self, state: PipelineState, request: Request) -> None:
        """Compiles a block's program, or the programs of an update's parts if it does not fit a block."""
        sizes = self.sizes(request.total, request.every)
        element = jax.tree.leaves(self.placement.traced.element)
        zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in element]
        earlier = EarlierParts(Totals(state.accumulators, self._zero_sums()), {}, [], [])
        if state.optimizer_state is None and self.needs_outputs and self.has_callbacks:
            return  # Python would notice that a stage runs, on zeros
        block = self.make_block(state, request, earlier, [self._feed.add(zeros)], sizes.room)
        if sizes.unit == request.every:
            position = dataclasses.replace(block.position, count=request.every)
            block = dataclasses.replace(block, position=position)
        state = self.with_optimizer(state, [block.earlier.first_outputs])
        leaves = jax.tree.leaves(state.optimizer_state)
        has_parts = sizes.unit != request.every and request.every > sizes.capacity
        with compiling(1 + has_parts, self.note):
            if has_parts:
                self._compile(state, [], block, updates=False)
            self._compile(state, leaves, block, updates=True)

    def fetch(self, state: PipelineState, request: Request, take: Take) -> PendingBlock:
        """Gets a block's micro-batches. Of an update that fits no block, runs all parts but the last."""
        sizes = self.sizes(request.total, request.every)
        num_wanted = min(request.limit, sizes.capacity)
        if not self.placement.groups[0].is_here:
            take = take_nothing
        earlier = EarlierParts(Totals(state.accumulators, self._zero_sums()), {}, [], [])
        step, first = int(as_int32(state.execution_count)), request.iteration
        if self.iterated is not None:
            elements = watched_take(take, step, first)(num_wanted)
            return self.make_block(state, request, earlier, elements, sizes.room)
        supply = take if isinstance(take, Supply) else Supply(take)
        # The feed has so many ready, whatever fits the blocks of other shapes.
        most = sizes.capacity
        with supply.through(lambda inner: watched_take(_at_most(most, inner), step, first)):
            return self._fetch_updates(state, request, earlier, supply, sizes, num_wanted)

    def _fetch_updates(
        self,
        state: PipelineState,
        request: Request,
        earlier: EarlierParts,
        supply: Supply,
        sizes: BlockSizes,
        most: int,
    ) -> PendingBlock:
        """The block of whole updates that comes next, or the last part of an update that is cut."""
        every = request.every
        if sizes.unit == every:
            elements = gather(supply, most, every)
            shapes = shapes_of(elements[0])
            runner = self.of_shapes[shapes]
            own_sizes = runner.sizes(request.total, every)
            alike = list(itertools.takewhile(lambda element: shapes_of(element) == shapes, elements))
            num_whole = min(len(alike), own_sizes.capacity) // every * every
            supply.give_back(elements[num_whole:])  # of other shapes, or of an incomplete update
            if num_whole:
                return runner.make_block(state, request, earlier, elements[:num_whole], own_sizes.room)
        while True:
            runner = self.of_shapes[supply.next_shapes()]
            sizes = runner.sizes(request.total, every)
            elements = supply.in_a_row(min(sizes.capacity, every - earlier.count))
            runner.check_groups(elements, earlier.count)
            part = runner.make_block(state, request, earlier, elements, sizes.room)
            if part.count == every:
                return part
            result = runner.call(state, [], part, updates=False)
            assigned = {name: result.variables[name] for name in self.assigned}
            collected = [] if self._collecting.is_summed else self._collect(result, len(elements))
            earlier = dataclasses.replace(
                part.earlier,
                totals=result.totals,
                assigned={**earlier.assigned, **assigned},
                collected=[*earlier.collected, *collected],
                enqueued=[*earlier.enqueued, *_hand(result.enqueued, len(elements))],
                count=part.count,
            )

    def make_block(
        self,
        state: PipelineState,
        request: Request,
        earlier: EarlierParts,
        elements: Sequence[Any],
        room: int,
    ) -> PendingBlock:
        """Makes a block of micro-batches from `place_element` with the shapes of this runner."""
        position = Position(
            accumulated=state.num_accumulated + earlier.count,
            execution=int(as_int32(state.execution_count)),
            updates=int(as_int32(state.update_count)),
            iteration=request.iteration,
            count=len(elements),
            every=request.every,
        )
        group = self.placement.groups[0]
        if group.is_here:
            feed = self._feed.place(elements, room) if self._fed else []
        else:
            feed = [absent((room, *leaf.shape), leaf.dtype, group.replicated) for leaf in self._fed]
        block = PendingBlock(request, earlier, position, room, feed, self)
        if earlier.count or state.optimizer_state is not None or not self.needs_outputs:
            return block
        carried, constants = (
            self._place_carried(request),
            self._make_constants(state, {}, block, NO_LOSS_SCALE),
        )
        outputs: list[Any] = self._peek(dict(state.variables), carried, constants)
        return dataclasses.replace(
            block, earlier=dataclasses.replace(earlier, first_outputs=dict(enumerate(outputs)))
        )

    def check_groups(self, elements: Sequence[Any], number: int) -> None:
        """Raises if micro-batches that stages handle together have different shapes."""
        size = self.program.num_serialized
        if len(elements) % size:
            first = number + len(elements) // size * size
            raise ValueError(
                f"num_serialized is {size}: the micro-batches from {first} to {first + size - 1} of a step "
                "are handled together, so they must have the same shapes; they have different ones."
            )

    def run(self, state: PipelineState, pending: PendingBlock) -> Progress:
        """Runs what `fetch` returned."""
        earlier, every = pending.earlier, pending.request.every
        state = self.with_optimizer(state, [earlier.first_outputs])
        leaves = jax.tree.leaves(state.optimizer_state)
        result = pending.runner.call(state, leaves, pending, updates=True)
        count = pending.count
        if self.iterated is not None and self.iterated.condition is not None:
            count = int(result.done)
        num_own, num_updates = count - earlier.count, (state.num_accumulated + count) // every
        after = self.advance(
            state,
            {**earlier.assigned, **result.variables},
            result.state_leaves,
            result.totals.accumulators,
            count,
            every,
        )
        collected = self._collect(result, num_updates if self._collecting.is_summed else num_own)
        return Progress(
            after,
            result.carried,
            [*earlier.collected, *collected],
            count,
            [*earlier.enqueued, *_hand(result.enqueued, num_own)],
            _hand(result.updated, num_updates),
        )

    def _collect(self, result: BlockResults, size: int) -> list[Collected]:
        return [self._collecting.collect(result.stacks, size)]

    def _zero_sums(self) -> list[Any]:
        zeros: list[Any] = self._make_sums() if self._collecting.is_summed else []
        return zeros

    def call(
        self, state: PipelineState, state_leaves: list[Any], block: PendingBlock, updates: bool
    ) -> BlockResults:
        """Runs a block. Takes the memory of accumulators and sums, and possibly of all state."""
        function, arguments = self._compile(state, state_leaves, block, updates)
        watcher = watching.current()
        if watcher is None:
            results: BlockResults = function(*arguments)
        else:
            results = watcher.run(self._make_launch(block, updates), function, arguments)
        self.in_flight.append(results.done)
        limit = 0 if self.has_callbacks else _max_in_flight(num_bytes(block.feed))
        while len(self.in_flight) > limit:
            jax.block_until_ready(self.in_flight.popleft())
        return results

    def _make_launch(self, block: PendingBlock, updates: bool) -> Launch:
        position = block.position
        return Launch(
            runner=self.of_shapes[0],
            kind=LaunchKind.BLOCK,
            stage=0,
            step=position.execution,
            first=position.accumulated if self.iterated is None else position.iteration,
            count=position.count,
            accumulated=position.accumulated,
            devices=self.placement.groups[0].devices,
            name="block",
            every=position.every,
            updates=updates and self.placement.updates is not None,
        )

    def _compile(
        self, state: PipelineState, state_leaves: list[Any], block: PendingBlock, updates: bool
    ) -> tuple[Any, tuple[Any, ...]]:
        """Compiles the function of a block. Returns it, and the arguments to call it with."""
        num_updates = 0
        if updates and (self._collecting.is_summed or self.program.updated_avals):
            # With a fixed room an update may be as short as a group.
            shortest = self.program.num_serialized if self._has_fixed_room else block.request.every
            num_updates = max(1, block.room // shortest)
        kind = BlockKind(block.room, num_updates, updates, self._find_every(block, updates))
        donate = self._donate and updates
        changed = self._changed(kind)
        variables = {**state.variables, **block.earlier.assigned}
        unchanged = {name: value for name, value in variables.items() if name not in changed}
        # With updates, the scale is in the optimizer's state, and changes with it.
        loss_scale = NO_LOSS_SCALE if updates else self.placement.loss_scale(state.optimizer_state)
        totals = block.earlier.totals
        if self._begins_with_zeros and kind.every:
            totals = Totals({}, [])
        elif self._begins_with_zeros and not totals.accumulators:
            totals = Totals(super().make_accumulators(self._accumulator_dtypes), totals.sums)
        arguments = (
            totals,
            {name: variables[name] for name in changed},
            state_leaves,
            self._place_carried(block.request),
            self._make_constants(state, unchanged, block, loss_scale),
        )
        function = self._functions.get((kind, donate))
        group = self.placement.groups[0]
        if function is None and not group.is_here:
            function = self._functions[kind, donate] = group.program(self._jit(kind, donate))
        elif function is None:
            function = self._jit(kind, donate)
            lowered, key, compiled = function.lower(*arguments), None, None
            if self.kept is not None:
                key = identify(lowered, text_of(lowered), group.devices, self._options)
                compiled = self.kept.find(key)
            with compiling(1, self.note) as compilation:
                if compiled is not None:
                    function = compiled
                    compilation.note_kept()
                else:
                    with compilation.program():
                        compiled = _compile(lowered)  # the call below finds it
            if self.kept is not None:
                self.kept.keep(key, compiled)
            note_temporaries(self.temporary_bytes, group, compiled)
            self._functions[kind, donate] = function
        return function, arguments

    def _find_every(self, block: PendingBlock, updates: bool) -> int:
        """Micro-batches per update, if a block has whole updates; 0 otherwise, or if the number varies."""
        position = block.position
        is_whole = updates and position.accumulated == 0 and position.count % position.every == 0
        varies = self.iterated is not None or self._has_fixed_room
        return position.every if is_whole and not varies else 0

    def _changed(self, kind: BlockKind) -> set[str]:
        """Full names of the variables that a block changes."""
        return {*self.assigned, *(self._trained if kind.updates else ())}

    def _make_constants(
        self, state: PipelineState, variables: dict[str, Any], block: PendingBlock, loss_scale: Any
    ) -> BlockConstants:
        group = self.placement.groups[0]
        *inputs, loss_scale = put_host_copies([*block.request.inputs, loss_scale], group)
        key = self.placement.constants.key(state.key, group)
        return BlockConstants(variables, inputs, loss_scale, key, block.position.pack(), block.feed)

    def _place_carried(self, request: Request) -> list[Any]:
        return put_host_copies(list(request.carried), self.placement.groups[0])

    def _jit(self, kind: BlockKind, donate: bool) -> Any:
        def block(*arguments: Any) -> BlockResults:
            return self.program.run(kind, *arguments)

        # An error raised in Python must find the state unchanged. Carried values are not donated, since the
        # first ones are the caller's.
        donated = () if self.has_callbacks else (0, 1, 2) if donate else (0,)
        return jax.jit(
            block,
            donate_argnums=donated,
            out_shardings=self._out_shardings(kind),
            compiler_options=self._options,
        )

    def _out_shardings(self, kind: BlockKind) -> Any:
        """The shardings of a block's results."""
        placement = self.placement
        group = placement.groups[0]
        if not placement.offloads_anything:
            return group.replicated

        def sharding(is_offloaded: bool) -> Any:
            return group.host if is_offloaded else group.replicated

        return BlockResults(
            done=group.replicated,
            totals=Totals(sharding(placement.offloads_accumulators), group.replicated),
            variables={name: sharding(name in placement.offloaded) for name in self._changed(kind)},
            state_leaves=sharding(placement.offloads_state),
            carried=group.replicated,
            stacks=group.replicated,
            enqueued=group.replicated,
            updated=group.replicated,
        )


def block_sizes(
    num_micro_batches: int,
    unit: int,
    bytes_each: int,
    block_bytes: int,
    group: int = 1,
    is_fixed: bool = False,
) -> BlockSizes:
    """The size of blocks for micro-batches: the same for all, so that each run compiles one program."""
    limit = min(_MAX_FIXED if is_fixed else _MAX_MICRO_BATCHES, block_bytes // max(1, bytes_each))
    limit = max(1, limit // group) * group
    if unit > limit:
        num_blocks = -(-unit // limit)
        capacity, unit = -(-unit // group // num_blocks) * group, group
    else:
        num_units = max(1, -(-num_micro_batches // unit))
        num_blocks = -(-num_units // (limit // unit))
        capacity = -(-num_units // num_blocks) * unit
    return BlockSizes(unit, capacity, limit if is_fixed else capacity)


def _compile(lowered: Any) -> Any:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if (explanation := jax_compat.explain_compilation(error)) is None:
            raise
        raise ValueError(explanation) from error


def _at_most(most: int, take: Take) -> Take:
    """A take that asks for no more than `most` micro-batches at once."""
    return lambda number: take(min(number, most))


def _hand(stacks: list[Any], size: int) -> list[Handed]:
    return [Handed(stacks, size)] if stacks and size else []


def _max_in_flight(feed_bytes: int) -> int:
    return max(_LEAST_IN_FLIGHT, min(_MOST_IN_FLIGHT, _IN_FLIGHT_BYTES // max(1, feed_bytes)))
