"""Loops on devices: a body, again and again, with a training step every so many iterations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.devices.offloading import Offload
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.devices.rows import make_rows, put_host_copies
from ipu_pipeline.engine.execution.blocks.block_sizes import block_sizes
from ipu_pipeline.engine.execution.blocks.one_program import OneProgram, Position
from ipu_pipeline.engine.execution.executor import Executor
from ipu_pipeline.engine.jaxprs.shapes import num_bytes
from ipu_pipeline.engine.loops.bodies import TracedBody
from ipu_pipeline.engine.programs import differentiation
from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.collecting import make_collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.updates import cutting
from ipu_pipeline.engine.updates.accumulators import plan_accumulators

__all__ = ["Loop", "LoopResult", "LoopState"]

_NEVER = 2**31 - 1  # iterations per weight update of a loop that does not train


@dataclass(frozen=True, eq=False)
class LoopState:
    """Everything that a loop changes.

    Attributes:
      pipeline: variables, optimizer state, counts and key.
      accumulators: sums or means of gradients by full name.
      num_accumulated: of how many iterations.
    """

    pipeline: PipelineState
    accumulators: dict[str, Any]
    num_accumulated: int


@dataclass(frozen=True, eq=False)
class LoopResult:
    """What some iterations leave, still being computed.

    Attributes:
      state: the new state.
      changing: the carried values that change.
      enqueued: per entry of the body's `enqueued`, the leaves.
      size: None if these are of one iteration; else of how many they are stacked.
      count: how many iterations ran.
    """

    state: LoopState
    changing: list[Any]
    enqueued: list[list[Any]]
    size: int | None
    count: int


class Loop:
    """A traced body with its programs.

    With all its operations on one device, a call runs a block of iterations as one program. With several
    shards, it runs one iteration, shard after shard. State that goes in is gone afterwards: its memory is
    reused.
    """

    def __init__(
        self,
        body: TracedBody,
        condition: Callable[[list[Any]], Any] | None = None,
        block_bytes: int = 64 * 2**20,
    ) -> None:
        """Builds the programs. It does not start JAX's backend.

        Args:
          body: the body.
          condition: of a loop that ends by itself: whether it goes on, from the carried values.
          block_bytes: how much of the device a block's feed and what it enqueues may take.
        """
        self.body = body
        self._condition = condition
        self._block_bytes = block_bytes
        training = body.training
        traced = body.pipeline
        self.updated_every = _NEVER if training is None else training.num_mini_batches
        self.updates: cutting.Updates | None = None
        self._goes_on = None if condition is None else jax.jit(self._holds)
        if training is None:
            self.programs: tuple[StagePrograms, ...] = differentiation.build(traced, (), Reduction.SUM)
        else:
            homes = {name: body.shards.index(body.shards[stage]) for name, stage in traced.owners.items()}
            self.updates = cutting.cut_updates(training.optimizer, homes, len(body.shards) - 1)
            self.programs = differentiation.build(
                traced,
                training.optimizer.trained,
                training.reduction,
                training.gradient_map,
                is_scaled=self.updates.loss_scale is not None,
            )
        self._timetable = schedules.timetable(
            "sequential", len(traced.stages), 1, body.shards, training is not None
        )
        self._devices: list[Any] | None = None
        self._runner: OneProgram | Executor | None = None
        self._residence: Residence | None = None
        self._place_feed: Callable[[Sequence[Any]], Any] | None = None

    @property
    def num_ipus(self) -> int:
        """How many devices it needs."""
        return max(self.body.shards) + 1

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables by full name."""
        return self.body.pipeline.variables

    @property
    def is_one_program(self) -> bool:
        """Whether all operations are on one device."""
        return len(self.body.shards) == 1

    def block_size(self, count: int) -> int:
        """How many iterations a call runs at most.

        Args:
          count: how many may be run together; a compilation serves one size only.
        """
        if not isinstance(self._runner, OneProgram):
            return 1
        traced = self.body.pipeline
        stacked = traced.output_avals[self._num_not_stacked :]
        feed = traced.element[len(self.body.changing) :]
        sizes = block_sizes(max(count, 1), 1, num_bytes([*stacked, *feed]), self._block_bytes)
        self._runner.stacker.set_capacity(sizes.room)
        return sizes.capacity

    @property
    def _num_not_stacked(self) -> int:
        return self.body.num_read + len(self.body.changing)

    def prepare(self, devices: Sequence[Any]) -> Residence:
        """Where the state lives; starts JAX's backend.

        Args:
          devices: the JAX device of each IPU. With other devices than before, everything is compiled again.
        """
        used = [devices[shard] for shard in self.body.shards]
        if self._residence is not None and used == self._devices:
            return self._residence
        traced = self.body.pipeline
        rows = make_rows(devices, self.body.shards)
        self._devices = used
        training = self.body.training
        reduction = Reduction.SUM if training is None else training.reduction
        accumulators = plan_accumulators(traced, self.programs, self.body.shards, reduction)
        offload = [Offload.WEIGHT_UPDATE_VARIABLES] if training and training.offloads_state else []
        self._residence = residence = Residence(traced, self.updates, rows, accumulators, offload)
        first, last = self.body.num_read, self._num_not_stacked
        if self.is_one_program:
            program = self._runner = OneProgram(
                residence,
                self.programs,
                collected=traced.outputs[last:],
                carried=traced.outputs[first:last],
                condition=None if self._condition is None else self._holds,
            )
            self._place_feed = program.stacker.add
        else:
            executor = self._runner = Executor(
                residence, self.programs, lambda _count: self._timetable, True, make_collecting(traced)
            )
            self._place_feed = functools.partial(executor.place_leaves, first=len(self.body.changing))
        return residence

    def place(self, state: LoopState) -> LoopState:
        """The state with its leaves on the devices of their shards."""
        residence = self._residence
        assert residence is not None
        optimizer_state = state.pipeline.optimizer_state
        if self.updates is not None and optimizer_state is not None:
            leaves = residence.place_optimizer_state(jax.tree.leaves(optimizer_state))
            optimizer_state = self.updates.state_tree.unflatten(leaves)
        pipeline = dataclasses.replace(
            state.pipeline,
            variables=residence.place_variables(state.pipeline.variables),
            optimizer_state=optimizer_state,
        )
        accumulators = {}
        if self.body.training is not None:
            dtypes = self.body.training.accumulator_dtypes
            accumulators = residence.make_accumulators(dtypes, state.accumulators)
        return LoopState(pipeline, accumulators, state.num_accumulated)

    def init_optimizer_state(self, state: PipelineState, outputs: Sequence[Any] | None) -> PipelineState:
        """The state with an optimizer's state, if it can be made.

        Args:
          state: placed.
          outputs: of the first iteration; None if there was none yet.
        """
        updates = self.updates
        if updates is None or state.optimizer_state is not None:
            return state
        if updates.init_needs_outputs and outputs is None:
            return state
        assert self._residence is not None
        leaves = self._residence.init_optimizer_state(state.variables, outputs)
        return dataclasses.replace(state, optimizer_state=updates.state_tree.unflatten(leaves))

    def split_carried(self, carried: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The carried values that stay the same, and those that change."""
        changing = set(self.body.changing)
        constant = [value for number, value in enumerate(carried) if number not in changing]
        return constant, [carried[number] for number in self.body.changing]

    def join_carried(self, constant: Sequence[Any], changing: Sequence[Any]) -> list[Any]:
        """The inverse of `split_carried`."""
        rest, changed = iter(constant), iter(changing)
        numbers = range(self.body.num_carried)
        return [next(changed if number in self.body.changing else rest) for number in numbers]

    def goes_on(self, inputs: Sequence[Any], changing: Sequence[Any]) -> bool:
        """Whether the condition holds; True without one. Waits for the values."""
        if self._goes_on is None:
            return True
        assert self._residence is not None
        row = self._residence.rows[0]
        placed = [put_host_copies(values, row) for values in (inputs, changing)]
        return bool(self._goes_on(*placed))

    def _holds(self, inputs: list[Any], changing: list[Any]) -> Any:
        assert self._condition is not None
        return self._condition(self.join_carried(inputs[len(self.body.captured) :], changing))

    @property
    def place_feed(self) -> Callable[[Sequence[Any]], Any]:
        """Makes a micro-batch of the feed what `run` takes. Safe to call from another thread.

        It is another function after `prepare` on other devices.
        """
        assert self._place_feed is not None
        return self._place_feed

    def run(
        self,
        state: LoopState,
        inputs: Sequence[Any],
        changing: Sequence[Any],
        elements: Sequence[Any],
        iteration: int,
        capacity: int,
    ) -> LoopResult:
        """Runs one iteration per element, fewer if the condition ends the loop.

        Args:
          state: placed; not to be used afterwards.
          inputs: what the body captured, and the carried values that stay the same.
          changing: the carried values that change.
          elements: from `place_feed`; at most `capacity`.
          iteration: how many iterations the run had before.
          capacity: from `block_size`.
        """
        if isinstance(self._runner, OneProgram):
            return self._run_block(self._runner, state, inputs, changing, elements, iteration, capacity)
        assert isinstance(self._runner, Executor)
        return self._run_once(self._runner, state, inputs, changing, elements[0], iteration)

    def _run_block(
        self,
        program: OneProgram,
        state: LoopState,
        inputs: Sequence[Any],
        changing: Sequence[Any],
        elements: Sequence[Any],
        iteration: int,
        capacity: int,
    ) -> LoopResult:
        before = state.pipeline
        has_feed = len(self.body.pipeline.element) > len(self.body.changing)
        feed = program.place_feed(elements, capacity) if has_feed else []
        position = Position(state.num_accumulated, int(before.execution_count), iteration)
        assert self._residence is not None
        changing = put_host_copies(list(changing), self._residence.rows[0])
        if before.optimizer_state is None and self.updates is not None:
            outputs = None
            if self.updates.init_needs_outputs:
                outputs = program.peek_outputs(
                    before.variables, changing, inputs, before.key, position, feed
                )
            before = self.init_optimizer_state(before, outputs)
        leaves = jax.tree.leaves(before.optimizer_state)
        result = program.run(
            before.variables,
            leaves,
            state.accumulators,
            None,
            changing,
            inputs,
            before.key,
            position,
            self.updated_every,
            feed,
            len(elements),
            capacity,
            donate=True,
        )
        count = len(elements) if self._condition is None else int(result.count)
        new_state = self._advance(
            dataclasses.replace(state, pipeline=before),
            result.variables,
            result.state_leaves,
            result.accumulators,
            count,
        )
        enqueued = self._group(result.collected)
        return LoopResult(new_state, result.carried, enqueued, count, count)

    def _run_once(
        self,
        executor: Executor,
        state: LoopState,
        inputs: Sequence[Any],
        changing: Sequence[Any],
        element: Sequence[Any],
        iteration: int,
    ) -> LoopResult:
        before = state.pipeline
        num_changing = len(self.body.changing)
        carried, fed = iter(executor.place_leaves(changing, 0)), iter(element)
        placed = [
            next(carried if feed_slot.leaf < num_changing else fed)
            for feed_slot in executor.plan.feed_slots
        ]
        assert self._residence is not None
        optimizer_state = before.optimizer_state
        loss_scale = self._residence.loss_scale(
            None if optimizer_state is None else jax.tree.leaves(optimizer_state)
        )
        accumulated = executor.accumulate(
            before.variables,
            before.key,
            int(before.execution_count),
            inputs,
            lambda: placed,
            state.accumulators,
            1,
            iteration,
            state.num_accumulated,
            loss_scale,
        )
        outputs = accumulated.collected[0].outputs
        before = self.init_optimizer_state(before, outputs)
        variables = {**before.variables, **accumulated.assigned}
        accumulators, leaves = accumulated.accumulators, jax.tree.leaves(before.optimizer_state)
        if state.num_accumulated + 1 == self.updated_every:
            updated = executor.weight_update.run(before.variables, leaves, accumulated, self.updated_every)
            variables, leaves, accumulators = updated.variables, updated.state_leaves, updated.accumulators
        state = dataclasses.replace(state, pipeline=before)
        new_state = self._advance(state, variables, leaves, accumulators, 1)
        new_changing = outputs[self.body.num_read : self._num_not_stacked]
        enqueued = self._group(outputs[self._num_not_stacked :])
        return LoopResult(new_state, new_changing, enqueued, None, 1)

    def _group(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """What is enqueued, per entry of the body's `enqueued`."""
        first = self._num_not_stacked
        return [[leaves[place - first] for place in places] for _entry, places in self.body.enqueued]

    def _advance(
        self,
        state: LoopState,
        variables: dict[str, Any],
        leaves: Sequence[Any],
        accumulators: dict[str, Any],
        count: int,
    ) -> LoopState:
        pipeline = dataclasses.replace(state.pipeline, variables=variables)
        if self.updates is None:
            return LoopState(pipeline, {}, 0)
        num_updates, num_accumulated = divmod(state.num_accumulated + count, self.updated_every)
        pipeline = dataclasses.replace(
            pipeline,
            optimizer_state=self.updates.state_tree.unflatten(leaves),
            update_count=np.int32(pipeline.update_count + num_updates),
        )
        return LoopState(pipeline, accumulators, num_accumulated)
