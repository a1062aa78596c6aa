"""What the single program of a block computes: micro-batches, accumulation and weight updates, traced.

Loops run until the next weight update, then update, then start over. The update stands in a loop of one
turn or none, which works in place; a conditional would copy what it may change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.devices.offloading import load, store
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.execution.blocks.micro_batches import MicroBatches
from ipu_pipeline.engine.tracing.traced import Source
from ipu_pipeline.engine.updates.cutting import UpdateProgram
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = ["BlockProgram"]


@dataclass(frozen=True, eq=False)
class BlockProgram:
    """The functions that `OneProgram` compiles.

    Attributes:
      residence: says what lies in host memory.
      micro_batches: forwards and backwards.
      read: the outputs that the update reads, by their number.
      collected: as for `OneProgram`, like all that follows.
      summed: the dtypes of sums; None for no sums.
      group: how many micro-batches each stage handles before the next one starts.
      carried: of a loop, the values that the next micro-batch takes.
      condition: of a loop, whether it goes on.
    """

    residence: Residence
    micro_batches: MicroBatches
    read: dict[int, Source]
    collected: Sequence[Source]
    summed: Sequence[Any] | None
    group: int
    carried: Sequence[Source] | None
    condition: Callable[[list[Any], list[Any]], Any] | None

    def _avals(self, sources: Sequence[Source]) -> list[jax.ShapeDtypeStruct]:
        traced = self.residence.traced
        known = dict(zip(traced.outputs, traced.output_avals, strict=True))
        if traced.loss is not None:
            known[traced.loss] = traced.loss_avals[0]
        return [known[source] for source in sources]

    def make_sums(self, axes: tuple[int, ...]) -> list[Any]:
        """Zeros for sums, stacked over some axes."""
        avals = self._avals(self.collected)
        dtypes = self.summed or []
        return [jnp.zeros((*axes, *aval.shape), dtype) for aval, dtype in zip(avals, dtypes, strict=False)]

    def run(
        self,
        room: int,
        num_sums: int,
        update_program: UpdateProgram | None,
        accumulators_and_sums: tuple[dict[str, Any], list[Any]],
        state: dict[str, Any],
        state_leaves: list[Any],
        carried: list[Any],
        kept: dict[str, Any],
        inputs_and_key: list[Any],
        counts: Any,
        feed: list[Any],
    ) -> Any:
        """A block, see `OneProgram.run`.

        Args:
          room: the size of the block's stacks.
          num_sums: the size of the stacks of sums.
          update_program: the weight update; None if none falls into the block.
          accumulators_and_sums: what the block begins with.
          state: the variables that it changes, by full name.
          state_leaves: of the optimizer's state.
          carried: of a loop.
          kept: the other variables.
          inputs_and_key: the inputs' leaves, a scale of the loss and the session's key.
          counts: where it begins (a `Position`), how many micro-batches it has, and an update.
          feed: stacked micro-batches.

        Returns:
          Accumulators and sums, changed variables, optimizer state, carried values, what was collected, and
          how many micro-batches ran.
        """
        *inputs, given_scale, key = inputs_and_key
        first_accumulated, first_execution, first_iteration, count, every = (counts[n] for n in range(5))
        accumulators, sums = accumulators_and_sums
        group = self.group
        residence, row = self.residence, self.residence.rows[0]

        def goes_on(carried: list[Any]) -> Any:
            return True if self.condition is None else self.condition(inputs, carried)

        def find_scale(leaves: list[Any]) -> Any:
            known = None if residence.updates is None else residence.updates.loss_scale
            if known is None or update_program is None:
                return given_scale
            return load(leaves[known.leaf], row) if residence.offloads_state else leaves[known.leaf]

        def micro_batches(loss_scale: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
            done, accumulated, accumulators, sums, state, carried, latest, stacks = values
            execution, index = first_execution, first_iteration + done
            if self.carried is None:
                execution, index = execution + (first_accumulated + done) // every, accumulated
            random = (key, execution, index, accumulated, loss_scale)
            arguments = ({**kept, **state}, accumulators, random)
            if group == 1:
                fed = [jax.lax.dynamic_index_in_dim(leaf, done, 0, False) for leaf in feed]
                given = [*inputs, *carried, *fed]
                accumulators, assigned, found = self.micro_batches.run(*arguments, given, len(inputs))
                last = found
                collected = [jnp.expand_dims(found[source], 0) for source in self.collected]
            else:
                fed = [jax.lax.dynamic_slice_in_dim(leaf, done, group) for leaf in feed]
                accumulators, assigned, found = self.micro_batches.run(
                    *arguments, [*inputs, *fed], len(inputs), group
                )
                last = {source: found[source][-1] for source in self.read.values()}
                collected = [found[source] for source in self.collected]
            if self.summed is None:
                stacks = [
                    jax.lax.dynamic_update_slice_in_dim(stack, value, done, 0)
                    for stack, value in zip(stacks, collected, strict=True)
                ]
            else:
                sums = [
                    total + jnp.sum(value, axis=0, dtype=total.dtype)
                    for total, value in zip(sums, collected, strict=True)
                ]
            latest = {number: last[source] for number, source in self.read.items()}
            carried = [last[source] for source in self.carried or ()]
            return (
                done + group,
                accumulated + group,
                accumulators,
                sums,
                {**state, **assigned},
                carried,
                latest,
                stacks,
            )

        def update(number: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
            del number
            accumulators, state, leaves, latest = values
            assert update_program is not None
            plan = self.residence.accumulator_plan
            loaded = accumulators
            if residence.offloads_accumulators:
                loaded = {key: load(value, row) for key, value in accumulators.items()}
            merged = plan.merge(loaded, lambda _accumulator, total, part: total + part)
            known = {
                UpdateKind.PARAMETER: state,
                UpdateKind.GRADIENT: merged,
                UpdateKind.STATE: leaves,
                UpdateKind.OUTPUT: latest,
            }

            def argument(value: UpdateValue) -> Any:
                if value.kind == UpdateKind.COUNT:
                    return every
                found = known[value.kind][value.key]
                is_away = residence.is_offloaded(value) and value.kind != UpdateKind.GRADIENT
                return load(found, row) if is_away else found

            results = update_program.function(*map(argument, update_program.arguments))
            zeros = {key: jnp.zeros_like(loaded[key]) for key in plan.extra}
            if residence.offloads_accumulators:
                zeros = {key: store(value, row) for key, value in zeros.items()}
            accumulators, state, leaves = {**accumulators, **zeros}, dict(state), list(leaves)
            made = {
                UpdateKind.PARAMETER: state,
                UpdateKind.GRADIENT: accumulators,
                UpdateKind.STATE: leaves,
            }
            for value, result in zip(update_program.results, results, strict=True):
                result = store(result, row) if residence.is_offloaded(value) else result
                made[value.kind][value.key] = result  # type: ignore[index]  # a dict or a list
            return accumulators, state, leaves, latest

        def keep_sums(number: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
            del number
            num_kept, sums, stacks = values
            stacks = [
                jax.lax.dynamic_update_index_in_dim(stack, total, num_kept, 0)
                for stack, total in zip(stacks, sums, strict=True)
            ]
            return num_kept + 1, [jnp.zeros_like(total) for total in sums], stacks

        def until_update(values: tuple[Any, ...]) -> tuple[Any, ...]:
            done, num_kept, accumulated, accumulators, sums, state, leaves, carried, latest, stacks = values
            end = done + jnp.minimum(count - done, every - accumulated)
            done, accumulated, accumulators, sums, state, carried, latest, stacks = jax.lax.while_loop(
                lambda values: (values[0] < end) & goes_on(values[5]),
                functools.partial(micro_batches, find_scale(leaves)),
                (done, accumulated, accumulators, sums, state, carried, latest, stacks),
            )
            is_full = accumulated == every
            num_turns = is_full.astype(jnp.int32)
            if update_program is not None:
                accumulators, state, leaves, latest = jax.lax.fori_loop(
                    0, num_turns, update, (accumulators, state, leaves, latest)
                )
            if num_sums:
                num_kept, sums, stacks = jax.lax.fori_loop(
                    0, num_turns, keep_sums, (num_kept, sums, stacks)
                )
            accumulated = jnp.where(is_full, 0, accumulated)
            return done, num_kept, accumulated, accumulators, sums, state, leaves, carried, latest, stacks

        avals = self._avals(self.collected)
        if self.summed is None:
            stacks = [jnp.zeros((room, *aval.shape), aval.dtype) for aval in avals]
        else:
            stacks = self.make_sums((num_sums,)) if num_sums else []
        latest = {
            number: jnp.zeros(aval.shape, aval.dtype)
            for number, aval in zip(self.read, self._avals(list(self.read.values())), strict=True)
        }
        zero = jnp.int32(0)
        counted = (zero, zero, first_accumulated)
        first = (*counted, accumulators, sums, state, state_leaves, carried, latest, stacks)
        done, _kept, _number, accumulators, sums, state, leaves, carried, _latest, stacks = (
            jax.lax.while_loop(lambda values: (values[0] < count) & goes_on(values[7]), until_update, first)
        )
        return (accumulators, sums), state, leaves, carried, stacks, done

    def peek(
        self,
        variables: dict[str, Any],
        carried: list[Any],
        inputs_and_key: list[Any],
        counts: Any,
        feed: list[Any],
    ) -> list[Any]:
        """What the last stage returns for the first micro-batch of a block."""
        *inputs, key = inputs_and_key
        element = carried + [leaf[0] for leaf in feed]
        index = counts[0] if self.carried is None else counts[2]
        random = (key, counts[1], index, counts[0], jnp.float32(1))
        specs = self.residence.traced.variables
        keys = {name: name for name in specs}
        extra = self.residence.accumulator_plan.extra
        keys |= {key: accumulator.variable for key, accumulator in extra.items()}
        accumulators = {key: jnp.zeros(specs[name].shape, specs[name].dtype) for key, name in keys.items()}

        def outputs(variables: dict[str, Any], random: Any, given: list[Any]) -> list[Any]:
            found = self.micro_batches.run(variables, accumulators, random, given, len(inputs))[2]
            return [found[source] for source in self.residence.traced.outputs]

        arguments = (variables, random, [*inputs, *element])
        flat = jaxprs.flatten(jax.make_jaxpr(outputs)(*arguments))
        program = jaxprs.extract(flat, flat.outputs)  # prints and the like run with the block
        values = dict(zip(flat.inputs, jax.tree.leaves(arguments), strict=True))
        return program(*(values[var] for var in program.inputs))
