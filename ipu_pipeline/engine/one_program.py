"""Everything on one device as a single jitted program: micro-batches, accumulation and weight updates.

The stage programs of a micro-batch are called one after another within it, so there is no dispatch per
micro-batch, and XLA sees them together. A call handles a block: a stack of micro-batches, as many of them
as its count says. Counts are traced, so blocks of one capacity share one compilation.

Loops run until the next weight update, then update, then start over. The update stands in a loop of one
turn or none, which works in place; a conditional would copy what it may change.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs, placement
from ipu_pipeline.engine.micro_batches import run_micro_batch
from ipu_pipeline.engine.optimizer_tracing import UpdateKind
from ipu_pipeline.engine.programs import StagePrograms
from ipu_pipeline.engine.residence import Residence
from ipu_pipeline.engine.stacking import StackedElement, Stacker
from ipu_pipeline.engine.stages import Source
from ipu_pipeline.engine.updates import UpdateProgram

__all__ = ["BlockResult", "BlockSizes", "OneProgram", "Position", "block_sizes"]

_MAX_MICRO_BATCHES = 1024  # in a block, so that Ctrl-C does not wait long
_MAX_IN_FLIGHT = 2  # blocks that the host runs ahead, whose feeds take memory


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
      collected: what was to be collected, stacked over the block's capacity.
      count: int32 scalar, how many micro-batches ran: fewer than asked for if a loop's condition ended it.
    """

    variables: dict[str, Any]
    state_leaves: list[Any]
    accumulators: dict[str, Any]
    carried: list[Any]
    collected: list[Any]
    count: Any


class BlockSizes(NamedTuple):
    """Into which blocks micro-batches are cut: `unit`s of one size, `capacity` micro-batches at most."""

    unit: int
    capacity: int


def block_sizes(num_micro_batches: int, unit: int, bytes_each: int, block_bytes: int) -> BlockSizes:
    """Cuts micro-batches into blocks of about equal size.

    Args:
      num_micro_batches: in all, a multiple of `unit`.
      unit: micro-batches that should stay together: those of a weight update; 1 for a loop.
      bytes_each: what a micro-batch takes on the device, feed and collected outputs.
      block_bytes: how much a block may take.

    Returns:
      The sizes. The unit is 1 if not even one of the units asked for fits.
    """
    limit = max(1, min(_MAX_MICRO_BATCHES, block_bytes // max(1, bytes_each)))
    if unit > limit:
        num_blocks = -(-unit // limit)
        return BlockSizes(1, -(-unit // num_blocks))
    num_units = max(1, -(-num_micro_batches // unit))
    num_blocks = -(-num_units // (limit // unit))
    return BlockSizes(unit, -(-num_units // num_blocks) * unit)


class OneProgram:
    """The program of a pipeline, or of a loop, whose stages are all on one device."""

    def __init__(
        self,
        residence: Residence,
        programs: Sequence[StagePrograms],
        *,
        updated_every: int,
        collected: Sequence[Source],
        carried: Sequence[Source] | None = None,
        condition: Callable[[list[Any], list[Any]], Any] | None = None,
    ) -> None:
        """Nothing is compiled yet.

        Args:
          residence: where the state lives, one row.
          programs: the programs of the stages.
          updated_every: micro-batches per weight update.
          collected: the values of a micro-batch that are wanted.
          carried: of a loop, the values that are the first leaves of the next micro-batch. None: a
            pipeline, whose micro-batches are counted from each weight update.
          condition: of a loop that ends by itself, whether it goes on, from the inputs' leaves and the
            carried values.
        """
        self._residence = residence
        self._traced = residence.traced
        self._programs = tuple(programs)
        self._updated_every = updated_every
        self._collected = tuple(collected)
        self._carried = carried
        self._condition = condition
        updates = residence.updates
        self._update = None if updates is None else updates.updates[0]
        wanted = () if self._update is None else self._update.arguments
        self._read = {
            value.key: self._traced.outputs[value.key]
            for value in wanted
            if value.kind == UpdateKind.OUTPUT
        }
        results = () if self._update is None else self._update.results
        self._trained = {value.key for value in results if value.kind == UpdateKind.PARAMETER}
        self._assigned = {spec.name for stage in self._traced.stages for spec in stage.assigned}
        self.stacker = Stacker()
        # Python may raise within the program, so the state before it must outlive it.
        stages = self._traced.stages
        self._has_callbacks = any(jaxprs.has_callbacks(stage.flat) for stage in stages)
        self._in_flight: collections.deque[Any] = collections.deque()
        self._functions: dict[tuple[int, bool, bool], Callable[..., Any]] = {}
        self._peek = jax.jit(self._peek_outputs)

    def place_feed(self, elements: Sequence[StackedElement], capacity: int) -> list[Any]:
        """Puts stacked micro-batches on the device.

        Args:
          elements: from the `stacker`.
          capacity: the size of the stack; what is not filled is never read.

        Returns:
          The stacked leaves.
        """
        return placement.put(self.stacker.stack(elements, capacity), self._residence.rows[0])

    def run(
        self,
        variables: Mapping[str, Any],
        state_leaves: Sequence[Any],
        accumulators: Mapping[str, Any],
        carried: Sequence[Any],
        inputs: Sequence[Any],
        key: Any,
        position: Position,
        feed: Sequence[Any],
        count: int,
        capacity: int,
        donate: bool,
        is_part: bool = False,
    ) -> BlockResult:
        """Runs a block. It takes the memory of the accumulators, and with `donate` that of all state.

        Args:
          variables: placed, by full name.
          state_leaves: of the optimizer's state, placed.
          accumulators: placed, by full name.
          carried: of a loop, placed.
          inputs: the leaves of the inputs that stay the same.
          key: the session's random key.
          position: where the block begins.
          feed: from `place_feed`.
          count: how many micro-batches to run.
          capacity: of the block.
          donate: whether the memory of the state may be reused.
          is_part: whether no weight update falls into the block; then only what stages assign changes, and
            `state_leaves` are not needed.
        """
        row = self._residence.rows[0]
        changed = self._assigned if is_part else self._assigned | self._trained
        function = self._functions.get((capacity, donate, is_part))
        if function is None:
            function = self._jit(capacity, donate, is_part)
            self._functions[capacity, donate, is_part] = function
        state = {name: variables[name] for name in changed}
        kept = {name: value for name, value in variables.items() if name not in changed}
        placed = placement.put_host_copies([*inputs, key], row)
        counts = np.array([*position, count], np.int32)
        given = (dict(accumulators), state, list(state_leaves), list(carried))
        made = function(*given, kept, placed, counts, list(feed))
        self._in_flight.append(made[-1])
        while len(self._in_flight) > (0 if self._has_callbacks else _MAX_IN_FLIGHT):
            jax.block_until_ready(self._in_flight.popleft())
        return BlockResult({**variables, **made[1]}, made[2], made[0], *made[3:])

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
        placed = placement.put_host_copies([*inputs, key], self._residence.rows[0])
        counts = np.array([*position, 1], np.int32)
        outputs: list[Any] = self._peek(dict(variables), list(carried), placed, counts, list(feed))
        return outputs

    def _jit(self, capacity: int, donate: bool, is_part: bool) -> Callable[..., Any]:
        def block(*arguments: Any) -> Any:
            return self._block(capacity, None if is_part else self._update, *arguments)

        block.__name__ = block.__qualname__ = "block"
        sharding = self._residence.rows[0].replicated
        # The carried values are not donated: the first ones are the caller's.
        donated = () if self._has_callbacks else (0, 1, 2) if donate else (0,)
        return jax.jit(block, donate_argnums=donated, out_shardings=sharding)

    def _avals(self, sources: Sequence[Source]) -> list[jax.ShapeDtypeStruct]:
        known = dict(zip(self._traced.outputs, self._traced.output_avals, strict=True))
        if self._traced.loss is not None:
            known[self._traced.loss] = self._traced.loss_avals[0]
        return [known[source] for source in sources]

    def _block(
        self,
        capacity: int,
        update_program: UpdateProgram | None,
        accumulators: dict[str, Any],
        state: dict[str, Any],
        state_leaves: list[Any],
        carried: list[Any],
        kept: dict[str, Any],
        inputs_and_key: list[Any],
        counts: Any,
        feed: list[Any],
    ) -> Any:
        *inputs, key = inputs_and_key
        first_accumulated, first_execution, first_iteration, count = (counts[place] for place in range(4))
        every = jnp.int32(self._updated_every)

        def goes_on(carried: list[Any]) -> Any:
            return True if self._condition is None else self._condition(inputs, carried)

        def micro_batch(values: tuple[Any, ...]) -> tuple[Any, ...]:
            done, accumulated, accumulators, state, carried, latest, collected = values
            element = carried + [jax.lax.dynamic_index_in_dim(leaf, done, 0, False) for leaf in feed]
            execution, index = first_execution, first_iteration + done
            if self._carried is None:
                execution, index = execution + (first_accumulated + done) // every, accumulated
            accumulators, assigned, found = run_micro_batch(
                self._traced,
                self._programs,
                {**kept, **state},
                accumulators,
                (key, execution, index, accumulated),
                [*inputs, *element],
                len(inputs),
            )
            collected = [
                jax.lax.dynamic_update_index_in_dim(stack, found[source], done, 0)
                for stack, source in zip(collected, self._collected, strict=True)
            ]
            latest = {number: found[source] for number, source in self._read.items()}
            carried = [found[source] for source in self._carried or ()]
            return (
                done + 1,
                accumulated + 1,
                accumulators,
                {**state, **assigned},
                carried,
                latest,
                collected,
            )

        def update(number: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
            del number
            accumulators, state, leaves, latest = values
            assert update_program is not None
            arguments = {UpdateKind.PARAMETER: state, UpdateKind.GRADIENT: accumulators}
            results = update_program.function(
                *(
                    every
                    if value.kind == UpdateKind.COUNT
                    else {**arguments, UpdateKind.STATE: leaves, UpdateKind.OUTPUT: latest}[value.kind][
                        value.key
                    ]
                    for value in update_program.arguments
                )
            )
            accumulators, state, leaves = dict(accumulators), dict(state), list(leaves)
            made = {
                UpdateKind.PARAMETER: state,
                UpdateKind.GRADIENT: accumulators,
                UpdateKind.STATE: leaves,
            }
            for value, result in zip(update_program.results, results, strict=True):
                made[value.kind][value.key] = result  # type: ignore[index]  # a dict or a list
            return accumulators, state, leaves, latest

        def until_update(values: tuple[Any, ...]) -> tuple[Any, ...]:
            done, accumulated, accumulators, state, leaves, carried, latest, collected = values
            end = done + jnp.minimum(count - done, every - accumulated)
            done, accumulated, accumulators, state, carried, latest, collected = jax.lax.while_loop(
                lambda values: (values[0] < end) & goes_on(values[4]),
                micro_batch,
                (done, accumulated, accumulators, state, carried, latest, collected),
            )
            is_full = accumulated == every
            if update_program is not None:
                accumulators, state, leaves, latest = jax.lax.fori_loop(
                    0, is_full.astype(jnp.int32), update, (accumulators, state, leaves, latest)
                )
            accumulated = jnp.where(is_full, 0, accumulated)
            return done, accumulated, accumulators, state, leaves, carried, latest, collected

        zeros = [jnp.zeros((capacity, *aval.shape), aval.dtype) for aval in self._avals(self._collected)]
        latest = {
            number: jnp.zeros(aval.shape, aval.dtype)
            for number, aval in zip(self._read, self._avals(list(self._read.values())), strict=True)
        }
        first = (jnp.int32(0), first_accumulated, accumulators, state, state_leaves, carried, latest, zeros)
        done, _number, accumulators, state, leaves, carried, _latest, collected = jax.lax.while_loop(
            lambda values: (values[0] < count) & goes_on(values[5]), until_update, first
        )
        return accumulators, state, leaves, carried, collected, done

    def _peek_outputs(
        self,
        variables: dict[str, Any],
        carried: list[Any],
        inputs_and_key: list[Any],
        counts: Any,
        feed: list[Any],
    ) -> list[Any]:
        *inputs, key = inputs_and_key
        element = carried + [leaf[0] for leaf in feed]
        random = (key, counts[1], counts[0] if self._carried is None else counts[2], counts[0])
        accumulators = {
            spec.name: jnp.zeros(spec.shape, spec.dtype) for spec in self._traced.variables.values()
        }

        def outputs(variables: dict[str, Any], random: Any, given: list[Any]) -> list[Any]:
            found = run_micro_batch(
                self._traced, self._programs, variables, accumulators, random, given, len(inputs)
            )[2]
            return [found[source] for source in self._traced.outputs]

        arguments = (variables, random, [*inputs, *element])
        flat = jaxprs.flatten(jax.make_jaxpr(outputs)(*arguments))
        program = jaxprs.extract(flat, flat.outputs)  # prints and the like run with the block
        values = dict(zip(flat.inputs, jax.tree.leaves(arguments), strict=True))
        return program(*(values[var] for var in program.inputs))
