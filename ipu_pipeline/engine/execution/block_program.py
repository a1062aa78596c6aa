"""The single program of a block of micro-batches on one device: its arguments, computation and results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.devices.state_placement import StatePlacement, load
from ipu_pipeline.engine.plan.traced_code import Environment, TracedCode
from ipu_pipeline.engine.programs.accumulation import Collecting
from ipu_pipeline.engine.programs.stage_programs import Binding, BindingKind, ValueKind
from ipu_pipeline.engine.tracing.stages import Source
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind
from ipu_pipeline.engine.updates.update_programs import UpdateProgram


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
class BlockConstants:
    """The values that stay the same during a block."""

    variables: dict[str, Any]  # those that the block does not change, by full name
    inputs: list[Any]  # the leaves of the pipeline's inputs
    loss_scale: Any  # the scale that the backward starts from, unless it is in the optimizer's state
    key: Any  # the session's random key
    position: Any  # packed
    feed: list[Any]  # stacked micro-batches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """The values that a block changes: the state of its loops."""

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
class BlockResults:
    """The results of a block: the parts of its `Carry` that are read; or their shardings.

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


@dataclass(frozen=True, eq=False)
class BlockProgram:
    """The functions that a block's runner compiles."""

    code: TracedCode  # of micro-batches and weight updates
    collecting: Collecting  # which outputs of the last stage are wanted
    num_serialized: int = 1  # micro-batches that each stage handles before the next one starts
    # in a loop, the values that are the first leaves of the next micro-batch. None: a pipeline, whose
    # micro-batches are counted from each weight update.
    carried: Sequence[Source] | None = None
    # in a loop that ends by itself, whether it goes on, from the inputs' leaves and the carried values
    condition: Callable[[list[Any], list[Any]], Any] | None = None
    # the accumulators, by key, if blocks of whole updates begin each update with zeros and return none
    accumulators: Mapping[str, jax.ShapeDtypeStruct] | None = None

    @property
    def placement(self) -> StatePlacement:
        """The placement of state."""
        return self.code.placement

    @functools.cached_property
    def update(self) -> UpdateProgram | None:
        """The weight update; None without training."""
        updates = self.placement.updates
        return None if updates is None else updates.updates[0]

    @functools.cached_property
    def read(self) -> dict[int, Source]:
        """The outputs that the update reads, by their number."""
        arguments = () if self.update is None else self.update.arguments
        outputs = self.placement.traced.outputs
        return {value.key: outputs[value.key] for value in arguments if value.kind == UpdateKind.OUTPUT}

    def make_sums(self, axes: tuple[int, ...] = ()) -> list[Any]:
        """Makes zeros for sums, stacked over some axes."""
        if not self.collecting.is_summed:
            return []
        return [jnp.zeros((*axes, *aval.shape), aval.dtype) for aval in self.collecting.avals]

    def run(
        self,
        kind: BlockKind,
        totals: Totals,
        variables: dict[str, Any],
        state_leaves: list[Any],
        carried: list[Any],
        constants: BlockConstants,
    ) -> BlockResults:
        """Computes a block."""
        position = Position.unpack(constants.position)
        zero = jnp.int32(0)
        first = Carry(
            zero,
            zero,
            position.accumulated,
            totals,
            variables,
            state_leaves,
            carried,
            self._make_latest(),
            self._make_stacks(kind),
            _make_zeros(kind.room, self.placement.traced.enqueued_avals),
            _make_zeros(kind.num_updates, self.updated_avals) if kind.num_updates else [],
        )

        def goes_on(carry: Carry, end: Any) -> Any:
            is_wanted = True if self.condition is None else self.condition(constants.inputs, carry.carried)
            return (carry.done < end) & is_wanted

        # A fixed number of turns: a GPU asks the host before each turn of a loop that may end, which made a
        # step of 16 micro-batches up to half as long again.
        def whole_update(carry: Carry) -> Carry:
            given = carry.totals
            if self.accumulators is not None:
                zeros = {key: jnp.zeros(aval.shape, aval.dtype) for key, aval in self.accumulators.items()}
                carry = dataclasses.replace(carry, totals=Totals(zeros, self.make_sums()))
            scale = self._find_loss_scale(kind, carry, constants)
            turns = kind.every // self.num_serialized
            run = functools.partial(self._run_micro_batches, constants, position, scale)
            carry = jax.lax.fori_loop(0, turns, lambda _turn, carry: run(carry), carry)
            if self.update is not None:
                carry = self._update(position, carry)
            if kind.num_updates:
                carry = _end_update(carry)
            if self.accumulators is not None:
                carry = dataclasses.replace(carry, totals=given)
            return dataclasses.replace(carry, accumulated=zero)

        # Where a block may begin or end within an update, the update stands in a loop of one turn or none,
        # which works in place: a conditional would copy whatever it may change.
        def until_update(carry: Carry) -> Carry:
            num_micro_batches = jnp.minimum(position.count - carry.done, position.every - carry.accumulated)
            end = carry.done + num_micro_batches
            loss_scale = self._find_loss_scale(kind, carry, constants)
            carry = jax.lax.while_loop(
                lambda carry: goes_on(carry, end),
                functools.partial(self._run_micro_batches, constants, position, loss_scale),
                carry,
            )
            is_full = carry.accumulated == position.every
            num_turns = is_full.astype(jnp.int32)
            if self.update is not None and kind.updates:
                carry = jax.lax.fori_loop(
                    0,
                    num_turns,
                    lambda _turn, carry: self._update(position, carry),
                    carry,
                )
            if kind.num_updates:
                carry = jax.lax.fori_loop(0, num_turns, lambda _turn, carry: _end_update(carry), carry)
            return dataclasses.replace(carry, accumulated=jnp.where(is_full, 0, carry.accumulated))

        body = whole_update if kind.every else until_update
        if kind.every == kind.room:
            last = body(first)
        else:
            last = jax.lax.while_loop(lambda carry: goes_on(carry, position.count), body, first)
        return BlockResults(
            last.totals,
            last.variables,
            last.state_leaves,
            last.carried,
            last.stacks,
            last.enqueued,
            last.updated,
            last.done,
        )

    @property
    def updated_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the leaves that a weight update enqueues."""
        updates = self.placement.updates
        return () if updates is None else updates.enqueued_avals

    def _make_latest(self) -> dict[int, Any]:
        avals = self.placement.traced.output_avals
        return {number: jnp.zeros(avals[number].shape, avals[number].dtype) for number in self.read}

    def _make_stacks(self, kind: BlockKind) -> list[Any]:
        if self.collecting.is_summed:
            return self.make_sums((kind.num_updates,)) if kind.num_updates else []
        return _make_zeros(kind.room, self.collecting.avals)

    def _find_loss_scale(self, kind: BlockKind, carry: Carry, constants: BlockConstants) -> Any:
        updates = self.placement.updates
        loss_scale = None if updates is None else updates.loss_scale
        if loss_scale is None or not kind.updates:
            return constants.loss_scale
        scale = carry.state_leaves[loss_scale.leaf]
        return load(scale, self.placement.groups[0]) if self.placement.offloads_state else scale

    def _run_micro_batches(
        self, constants: BlockConstants, position: Position, loss_scale: Any, carry: Carry
    ) -> Carry:
        """Runs one micro-batch, or the `num_serialized` of a group."""
        # Counts and data of the micro-batches, and their stages.
        size = self.num_serialized
        num_updates = (position.accumulated + carry.done) // position.every
        execution, index = position.execution, position.iteration + carry.done
        if self.carried is None:
            execution, index = execution + num_updates, carry.accumulated
        updates = position.updates + (0 if self.update is None else num_updates)
        if size == 1:
            fed = [jax.lax.dynamic_index_in_dim(leaf, carry.done, 0, False) for leaf in constants.feed]
        else:
            fed = [jax.lax.dynamic_slice_in_dim(leaf, carry.done, size) for leaf in constants.feed]
        environment = self.code.run(
            self._make_environment(
                {**constants.variables, **carry.variables},
                carry.totals.accumulators,
                (constants.key, execution, updates, index, carry.accumulated, loss_scale),
                constants.inputs,
                [*carry.carried, *fed],
            ),
            size,
        )

        def find(source: Source) -> Any:
            return self.code.find(environment, source, size)

        def last(source: Source) -> Any:
            return find(source) if size == 1 else find(source)[-1]

        def stacked(source: Source) -> Any:
            return jnp.expand_dims(find(source), 0) if size == 1 else find(source)

        # What goes into stacks and sums.
        stacks, sums = carry.stacks, carry.totals.sums
        collected = [stacked(source) for source in self.collecting.sources]
        if self.collecting.is_summed:
            sums = [
                total + jnp.sum(value, axis=0, dtype=total.dtype)
                for total, value in zip(sums, collected, strict=True)
            ]
        else:
            stacks = _write(stacks, collected, carry.done)
        enqueued = [environment[Binding(BindingKind.ENQUEUED, leaf)] for leaf in range(len(carry.enqueued))]
        if size == 1:
            enqueued = [jnp.expand_dims(value, 0) for value in enqueued]
        keys = carry.totals.accumulators
        results = environment.items()
        assigned = {
            binding.key: value for binding, value in results if binding.kind is BindingKind.ASSIGNED
        }
        return dataclasses.replace(
            carry,
            done=carry.done + size,
            accumulated=carry.accumulated + size,
            totals=Totals({key: environment[Binding(BindingKind.ACCUMULATOR, key)] for key in keys}, sums),
            variables={**carry.variables, **assigned},
            carried=[last(source) for source in self.carried or ()],
            latest={number: last(source) for number, source in self.read.items()},
            stacks=stacks,
            enqueued=_write(carry.enqueued, enqueued, carry.done),
        )

    def _make_environment(
        self,
        variables: dict[str, Any],
        accumulators: dict[str, Any],
        scalars: tuple[Any, Any, Any, Any, Any, Any],
        inputs: Sequence[Any],
        element: Sequence[Any],
    ) -> Environment:
        """Makes the argument of `TracedCode.run`; `scalars` are in the order of `_SCALARS`."""
        environment = {Binding(BindingKind.VARIABLE, name): value for name, value in variables.items()}
        environment |= {Binding(BindingKind.ACCUMULATOR, key): value for key, value in accumulators.items()}
        environment |= {
            Binding(BindingKind.SCALAR, kind): value for kind, value in zip(_SCALARS, scalars, strict=True)
        }
        environment |= {Binding(BindingKind.INPUT, number): value for number, value in enumerate(inputs)}
        environment |= {
            Binding(BindingKind.VALUE, Source("element", number)): value
            for number, value in enumerate(element)
        }
        return environment

    def _update(self, position: Position, carry: Carry) -> Carry:
        accumulators = dict(carry.totals.accumulators)
        variables, state_leaves = dict(carry.variables), list(carry.state_leaves)
        before = position.updates + (position.accumulated + carry.done) // position.every - 1

        def find_argument(label: Any) -> Any:
            if isinstance(label, Binding):
                is_gradient = label.kind is BindingKind.ACCUMULATOR
                return (carry.totals.accumulators if is_gradient else carry.variables)[label.key]
            if isinstance(label, int):
                return carry.latest[label]
            if label.kind == UpdateKind.STATE:
                return carry.state_leaves[label.key]
            return position.every if label.kind == UpdateKind.COUNT else before

        enqueued: dict[int, Any] = {}
        of_kinds: dict[str, Any] = {
            UpdateKind.PARAMETER: variables,
            UpdateKind.GRADIENT: accumulators,
            UpdateKind.STATE: state_leaves,
            UpdateKind.ENQUEUED: enqueued,
        }
        for label, value in self.code.update(accumulators, self.read, find_argument).items():
            if isinstance(label, str):
                accumulators[label] = value
            else:
                of_kinds[label.kind][label.key] = value
        return dataclasses.replace(
            carry,
            totals=dataclasses.replace(carry.totals, accumulators=accumulators),
            variables=variables,
            state_leaves=state_leaves,
            updated=_write(
                carry.updated,
                [jnp.expand_dims(enqueued[leaf], 0) for leaf in range(len(carry.updated))],
                carry.num_kept,
            ),
        )

    def peek(self, variables: dict[str, Any], carried: list[Any], constants: BlockConstants) -> list[Any]:
        """Computes the last stage's outputs for the first micro-batch of a block, without any effects."""
        position = Position.unpack(constants.position)
        index = position.accumulated if self.carried is None else position.iteration
        traced = self.placement.traced
        specs = traced.variables
        keys = {name: name for name in specs}
        extra = self.placement.accumulator_plan.extra
        keys |= {key: accumulator.variable for key, accumulator in extra.items()}
        accumulators = {key: jnp.zeros(specs[name].shape, specs[name].dtype) for key, name in keys.items()}
        counts = position.execution, position.updates, index, position.accumulated
        scalars = constants.key, *counts, jnp.float32(1)
        element = [*carried, *(leaf[0] for leaf in constants.feed)]
        environment = self._make_environment(variables, accumulators, scalars, constants.inputs, element)
        places, values = list(environment), list(environment.values())

        def outputs(values: list[Any]) -> list[Any]:
            environment = self.code.run(dict(zip(places, values, strict=True)))
            return [self.code.find(environment, source) for source in traced.outputs]

        flat = jaxprs.flatten(jax.make_jaxpr(outputs)(values))
        program = jaxprs.extract(flat, flat.outputs)  # prints and the like run with the block
        inputs = dict(zip(flat.inputs, values, strict=True))
        return program(*(inputs[var] for var in program.inputs))


_SCALARS = (
    ValueKind.KEY,
    ValueKind.EXECUTION_COUNT,
    ValueKind.UPDATE_COUNT,
    ValueKind.MICRO_BATCH,
    ValueKind.ACCUMULATED,
    ValueKind.LOSS_SCALE,
)


def _end_update(carry: Carry) -> Carry:
    """Counts a weight update, and puts its sums into the stacks."""
    sums = carry.totals.sums
    carry = dataclasses.replace(carry, num_kept=carry.num_kept + 1)
    if not sums:
        return carry
    return dataclasses.replace(
        carry,
        totals=dataclasses.replace(carry.totals, sums=[jnp.zeros_like(total) for total in sums]),
        stacks=_write(carry.stacks, [jnp.expand_dims(total, 0) for total in sums], carry.num_kept - 1),
    )


def _make_zeros(size: int, avals: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Makes stacks of `size` values each."""
    return [jnp.zeros((size, *aval.shape), aval.dtype) for aval in avals]


def _write(stacks: Sequence[Any], values: Sequence[Any], place: Any) -> list[Any]:
    """Writes stacked values into stacks, from a place on."""
    return [
        jax.lax.dynamic_update_slice_in_dim(stack, value, place, 0)
        for stack, value in zip(stacks, values, strict=True)
    ]
