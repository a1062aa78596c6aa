"""Everything on one device as a single jitted program: micro-batches, accumulation and weight updates.

The stage programs of a micro-batch are called one after another within it, so there is no dispatch per
micro-batch, and XLA sees them together. A call handles a block: a stack of micro-batches, as many of them
as its count says. Counts are traced, also that of micro-batches per weight update, so blocks of one size
share one compilation.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.residence import NO_LOSS_SCALE, Residence
from ipu_pipeline.engine.devices.rows import put, put_host_copies
from ipu_pipeline.engine.devices.stacking import StackedElement, Stacker
from ipu_pipeline.engine.execution.blocks.block_program import BlockProgram
from ipu_pipeline.engine.execution.blocks.micro_batches import MicroBatches
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.tracing.traced import Source
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind

__all__ = ["BlockResult", "OneProgram", "Position"]

# Blocks that the host runs ahead; XLA's CPU client has no more in flight than the most.
_LEAST_IN_FLIGHT, _MOST_IN_FLIGHT = 2, 32
_IN_FLIGHT_BYTES = 64 * 2**20  # of their feeds, where they are more than the least


class Position(NamedTuple):
    """Where a block begins.

    Attributes:
      accumulated: micro-batches in the accumulators.
      execution: executions of the pipeline before; of a loop, runs.
      iteration: of a loop, iterations of the run before.
    """

    accumulated: int
    execution: int
    iteration: int = 0


@dataclass(frozen=True, eq=False)
class BlockResult:
    """What a block leaves, still being computed.

    Attributes:
      variables: by full name.
      state_leaves: of the optimizer's state.
      accumulators: by full name.
      carried: what the next iteration of a loop takes.
      sums: over the micro-batches in the accumulators, of what is summed.
      collected: what was to be collected, stacked over the block's micro-batches, or the sums over its
        weight updates; the stack may be longer.
      count: int32 scalar, how many micro-batches ran: fewer than asked for if a loop's condition ended it.
    """

    variables: dict[str, Any]
    state_leaves: list[Any]
    accumulators: dict[str, Any]
    sums: list[Any]
    carried: list[Any]
    collected: list[Any]
    count: Any


def _max_in_flight(feed: Sequence[Any]) -> int:
    feed_bytes: int = sum(leaf.nbytes for leaf in feed)
    return max(_LEAST_IN_FLIGHT, min(_MOST_IN_FLIGHT, _IN_FLIGHT_BYTES // max(1, feed_bytes)))


class OneProgram:
    """The program of a pipeline, or of a loop, whose stages are all on one device."""

    def __init__(
        self,
        residence: Residence,
        programs: Sequence[StagePrograms],
        *,
        collected: Sequence[Source],
        summed: Sequence[Any] | None = None,
        group: int = 1,
        carried: Sequence[Source] | None = None,
        condition: Callable[[list[Any], list[Any]], Any] | None = None,
        options: Options | None = None,
    ) -> None:
        """Nothing is compiled yet.

        Args:
          residence: where the state lives, one row.
          programs: the programs of the stages.
          collected: the values of a micro-batch that are wanted.
          summed: the dtypes in which they are summed over the micro-batches of a weight update. None: each
            micro-batch's are wanted.
          group: how many micro-batches each stage handles before the next one starts.
          carried: of a loop, the values that are the first leaves of the next micro-batch. None: a
            pipeline, whose micro-batches are counted from each weight update.
          condition: of a loop that ends by itself, whether it goes on, from the inputs' leaves and the
            carried values.
          options: XLA's.
        """
        self._options = dict(options or {})
        self._residence = residence
        traced, updates = residence.traced, residence.updates
        self._update = None if updates is None else updates.updates[0]
        wanted = () if self._update is None else self._update.arguments
        self._program = BlockProgram(
            residence=residence,
            micro_batches=MicroBatches(traced, tuple(programs), residence),
            read={v.key: traced.outputs[v.key] for v in wanted if v.kind == UpdateKind.OUTPUT},
            collected=tuple(collected),
            summed=summed,
            group=group,
            carried=carried,
            condition=condition,
        )
        results = () if self._update is None else self._update.results
        self._trained = {value.key for value in results if value.kind == UpdateKind.PARAMETER}
        self._assigned = {spec.name for stage in traced.stages for spec in stage.assigned}
        self.stacker = Stacker()
        # Python may raise within the program, so the state before it must outlive it.
        self._has_callbacks = any(jaxprs.has_callbacks(stage.flat) for stage in traced.stages)
        self._in_flight: collections.deque[Any] = collections.deque()
        self._functions: dict[tuple[int, int, bool, bool], Callable[..., Any]] = {}
        self._peek = jax.jit(self._program.peek, compiler_options=self._options)
        self._zero_sums = jax.jit(
            self._program.make_sums, static_argnums=0, out_shardings=residence.rows[0].replicated
        )

    def place_feed(self, elements: Sequence[StackedElement], capacity: int) -> list[Any]:
        """Puts stacked micro-batches on the device.

        Args:
          elements: from the `stacker`.
          capacity: the size of the stack; what is not filled is never read.

        Returns:
          The stacked leaves.
        """
        return put(self.stacker.stack(elements, capacity), self._residence.rows[0])

    def run(
        self,
        variables: Mapping[str, Any],
        state_leaves: Sequence[Any],
        accumulators: Mapping[str, Any],
        sums: Sequence[Any] | None,
        carried: Sequence[Any],
        inputs: Sequence[Any],
        key: Any,
        position: Position,
        updated_every: int,
        feed: Sequence[Any],
        count: int,
        room: int,
        donate: bool,
        is_part: bool = False,
        num_sums: int = 0,
        loss_scale: Any = NO_LOSS_SCALE,
    ) -> BlockResult:
        """Runs a block. It takes the memory of accumulators and sums, and with `donate` that of all state.

        Args:
          variables: placed, by full name.
          state_leaves: of the optimizer's state, placed.
          accumulators: placed, by full name.
          sums: over the micro-batches in the accumulators, from the block before; None: there are none.
          carried: of a loop, placed.
          inputs: the leaves of the inputs that stay the same.
          key: the session's random key.
          position: where the block begins.
          updated_every: micro-batches per weight update.
          feed: from `place_feed`.
          count: how many micro-batches to run.
          room: the size of the block's stacks.
          donate: whether the memory of the state may be reused.
          is_part: whether no weight update falls into the block; then only what stages assign changes, and
            `state_leaves` are not needed.
          num_sums: where sums are wanted, at least the number of weight updates of the block.
          loss_scale: with `is_part`, what the backward starts from. Otherwise it is in the state.
        """
        changed = self._assigned if is_part else self._assigned | self._trained
        function = self._functions.get((room, num_sums, donate, is_part))
        if function is None:
            function = self._jit(room, num_sums, donate, is_part)
            self._functions[room, num_sums, donate, is_part] = function
        state = {name: variables[name] for name in changed}
        kept = {name: value for name, value in variables.items() if name not in changed}
        placed = self._place([*inputs, loss_scale], key)
        counts = np.array([*position, count, updated_every], np.int32)
        sums = self._zero_sums(()) if sums is None else list(sums)
        given = ((dict(accumulators), sums), state, list(state_leaves), list(carried))
        made = function(*given, kept, placed, counts, list(feed))
        self._in_flight.append(made[-1])
        limit = 0 if self._has_callbacks else _max_in_flight(feed)
        while len(self._in_flight) > limit:
            jax.block_until_ready(self._in_flight.popleft())
        new_accumulators, new_sums = made[0]
        return BlockResult({**variables, **made[1]}, made[2], new_accumulators, new_sums, *made[3:])

    def peek_outputs(
        self,
        variables: Mapping[str, Any],
        carried: Sequence[Any],
        inputs: Sequence[Any],
        key: Any,
        position: Position,
        feed: Sequence[Any],
    ) -> list[Any]:
        """What the last stage returns for the first micro-batch of a block, without any effects."""
        placed = self._place(inputs, key)
        counts = np.array(position, np.int32)
        outputs: list[Any] = self._peek(dict(variables), list(carried), placed, counts, list(feed))
        return outputs

    def _place(self, values: Sequence[Any], key: Any) -> list[Any]:
        row = self._residence.rows[0]
        return [*put_host_copies(values, row), self._residence.place_key(key, row)]

    def _jit(self, room: int, num_sums: int, donate: bool, is_part: bool) -> Callable[..., Any]:
        def block(*arguments: Any) -> Any:
            return self._program.run(room, num_sums, None if is_part else self._update, *arguments)

        block.__name__ = block.__qualname__ = "block"
        # The carried values are not donated: the first ones are the caller's.
        donated = () if self._has_callbacks else (0, 1, 2) if donate else (0,)
        return jax.jit(
            block,
            donate_argnums=donated,
            out_shardings=self._out_shardings(is_part),
            compiler_options=self._options,
        )

    def _out_shardings(self, is_part: bool) -> Any:
        """Where what a block returns goes."""
        residence = self._residence
        row = residence.rows[0]
        if not residence.offloads_anything:
            return row.replicated

        def sharding(is_offloaded: bool) -> Any:
            return row.host if is_offloaded else row.replicated

        changed = self._assigned if is_part else self._assigned | self._trained
        return (
            (sharding(residence.offloads_accumulators), row.replicated),
            {name: sharding(name in residence.offloaded) for name in changed},
            sharding(residence.offloads_state),
            *[row.replicated] * 3,
        )
