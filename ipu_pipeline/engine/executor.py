"""Follows a plan of dispatches: starts stage programs, transfers and weight updates, and nothing else.

Dispatch is asynchronous: the host runs ahead of the devices, which wait for data only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine import placement
from ipu_pipeline.engine.dispatches import make_plan
from ipu_pipeline.engine.placement import Row
from ipu_pipeline.engine.programs import StagePrograms
from ipu_pipeline.engine.schedules import Timetable
from ipu_pipeline.engine.stages import TracedPipeline
from ipu_pipeline.engine.updates import UpdateKind, UpdateProgram, Updates, UpdateValue

__all__ = ["Accumulated", "Executor"]


@dataclass(frozen=True, eq=False)
class Accumulated:
    """What a step has before its weight update.

    Attributes:
      outputs: per micro-batch, the leaves of what the last stage returned.
      losses: per micro-batch, the loss; empty without training.
      assigned: new values of the variables that stages assign, by full name.
      accumulators: by full name; empty without training.
    """

    outputs: list[list[Any]]
    losses: list[Any]
    assigned: dict[str, Any]
    accumulators: dict[str, Any]


class Executor:
    """Runs steps of one traced pipeline on given devices."""

    def __init__(
        self,
        traced: TracedPipeline,
        programs: Sequence[StagePrograms],
        updates: Updates | None,
        rows: Sequence[Row],
        timetable: Timetable,
        num_micro_batches: int,
        donate: bool,
    ) -> None:
        """Jits the programs; XLA compiles each at its first call.

        Args:
          traced: the pipeline.
          programs: the programs of its stages.
          updates: its optimizer; None without training.
          rows: where its stages live.
          timetable: the checked schedule.
          num_micro_batches: per step.
          donate: whether an update may reuse the memory of the variables and optimizer state before it.
        """
        self._traced = traced
        self._updates = updates
        self._rows = tuple(rows)
        self._num_micro_batches = num_micro_batches
        self._accumulators: dict[str, Any] | None = None
        self._constants: dict[tuple[int, int], Any] = {}  # (IPU, integer) -> int32 scalar there
        self.plan = make_plan(traced, programs, rows, timetable)
        self._trained = {
            traced.stages[index].variables[position].name: traced.stages[index].variables[position]
            for index, stage_programs in enumerate(programs)
            for position in stage_programs.trained
        }
        self._update_functions: list[Callable[..., list[Any]]] = []
        self._init_functions: list[Callable[..., list[Any]]] = []
        if updates is not None:
            self._update_functions = [_jit_update(program, donate, updates) for program in updates.updates]
            self._init_functions = [_jit_update(program, False, updates) for program in updates.inits]

    def place_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the variables that the pipeline has, each on its stage's row.

        They share no memory with NumPy arrays that are given.
        """
        placed: dict[str, Any] = {}
        for index, stage in enumerate(self._traced.stages):
            names = [spec.name for spec in stage.variables if spec.name in variables]
            arrays = placement.put_host_copies([variables[name] for name in names], self._rows[index])
            placed.update(zip(names, arrays, strict=True))
        return placed

    def place_optimizer_state(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the optimizer's state, each on its stage's row."""
        assert self._updates is not None
        return [
            placement.put_host_copies([leaf], self._rows[self._home(known.stage)])[0]
            for known, leaf in zip(self._updates.state_leaves, leaves, strict=True)
        ]

    def place_element(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a micro-batch where they are needed, in the order of the plan's `feed_slots`.

        Safe to call from another thread; shares no memory with NumPy arrays that are given.
        """
        placed: list[Any] = [None] * len(self.plan.feed_slots)
        for row in dict.fromkeys(self._rows):
            wanted = [p for p, feed_slot in enumerate(self.plan.feed_slots) if feed_slot.row is row]
            if wanted:
                arrays = [leaves[self.plan.feed_slots[p].leaf] for p in wanted]
                for p, array in zip(wanted, placement.put_host_copies(arrays, row), strict=True):
                    placed[p] = array
        return placed

    def accumulate(
        self,
        variables: Mapping[str, Any],
        key: Any,
        execution_count: int,
        inputs: Sequence[Any],
        next_element: Callable[[], Sequence[Any]],
    ) -> Accumulated:
        """Runs all micro-batches of a step.

        Args:
          variables: placed variables by full name.
          key: the session's random key.
          execution_count: how often the pipeline was executed before.
          inputs: the leaves of the inputs that are constant during the step.
          next_element: returns the placed leaves of the next micro-batch (see `place_element`). What it
            raises ends the step; the variables then have not changed.

        Returns:
          What the micro-batches gave, still being computed.
        """
        accumulators = self._take_accumulators()
        prepared, placed_inputs = self._prepare(variables, key, execution_count, inputs)
        values: list[Any] = [None] * self._num_micro_batches
        outputs: list[list[Any]] = [[] for _ in values]
        assigned: dict[str, Any] = {}
        last_forward = self.plan.last_forward
        feed_slots = [feed_slot.slot for feed_slot in self.plan.feed_slots]
        for template, micro_batch in self.plan.dispatches:
            slots = values[micro_batch]
            if slots is None:
                slots = values[micro_batch] = [None] * self.plan.num_slots
                for slot, array in zip(feed_slots, next_element(), strict=True):
                    slots[slot] = array
            arguments = prepared[template.index].copy()
            names = template.accumulators
            for place, name in enumerate(names):
                arguments[place] = accumulators[name]
            for place, slot in template.loads:
                arguments[place] = slots[slot]
            for place in template.micro_batches:
                arguments[place] = self._constant(micro_batch, template.row)
            results = template.function(*arguments)
            for name, result in zip(names, results, strict=False):
                accumulators[name] = result
            for place, slot in template.stores:
                slots[slot] = results[place]
            for row, moved, targets in template.transfers:
                copies = placement.copy_to([results[place] for place in moved], row)
                for slot, array in zip(targets, copies, strict=True):
                    slots[slot] = array
            for place, name in template.assigned:
                assigned[name] = results[place]
                for argument, read in template.variables:
                    if read == name:
                        prepared[template.index][argument] = results[place]
            if template is last_forward:
                outputs[micro_batch] = [
                    slots[number] if kind == "slot" else placed_inputs[last_forward.row, number]
                    for kind, number in self.plan.collected
                ]
            for slot in template.releases:
                slots[slot] = None
        losses = [leaves.pop() for leaves in outputs] if self._traced.loss is not None else []
        return Accumulated(outputs, losses, assigned, accumulators)

    def update(
        self,
        variables: Mapping[str, Any],
        state_leaves: Sequence[Any],
        accumulated: Accumulated,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Runs the weight update.

        Args:
          variables: what was given to `accumulate`.
          state_leaves: placed leaves of the optimizer's state.
          accumulated: what it returned.

        Returns:
          The new variables and the new leaves of the optimizer's state.
        """
        updates = self._updates
        assert updates is not None
        new_variables = {**variables, **accumulated.assigned}
        new_leaves = list(state_leaves)
        # All arguments first: an update may reuse memory that another one's copy is still made from.
        prepared = [
            self._update_arguments(program, stage, variables, accumulated, state_leaves)
            for program, stage in zip(updates.updates, updates.stages, strict=True)
        ]
        zeros: dict[str, Any] = {}
        for program, function, arguments in zip(
            updates.updates, self._update_functions, prepared, strict=True
        ):
            for value, result in zip(program.results, function(*arguments), strict=True):
                if value.kind == UpdateKind.PARAMETER:
                    new_variables[value.key] = result
                elif value.kind == UpdateKind.GRADIENT:
                    zeros[value.key] = result
                else:
                    new_leaves[value.key] = result
        self._accumulators = zeros
        return new_variables, new_leaves

    def init_optimizer_state(
        self, variables: Mapping[str, Any], outputs: Sequence[Any] | None
    ) -> list[Any]:
        """The leaves of the optimizer's state at the start.

        Args:
          variables: placed variables by full name.
          outputs: the leaves of the last stage's outputs for the first micro-batch; None if they are not
            needed.

        Returns:
          The leaves, placed.
        """
        updates = self._updates
        assert updates is not None
        leaves: list[Any] = [None] * len(updates.state_leaves)
        accumulated = Accumulated([list(outputs or ())], [], {}, {})
        for program, function, stage in zip(
            updates.inits, self._init_functions, updates.stages, strict=True
        ):
            arguments = self._update_arguments(program, stage, variables, accumulated, ())
            for value, result in zip(program.results, function(*arguments), strict=True):
                leaves[value.key] = result
        return self.place_optimizer_state(leaves)

    def _home(self, stage: int | None) -> int:
        """The stage that holds a leaf of the optimizer's state."""
        assert self._updates is not None
        return self._updates.stages[0] if stage is None else stage

    def _update_arguments(
        self,
        program: UpdateProgram,
        stage: int,
        variables: Mapping[str, Any],
        accumulated: Accumulated,
        state_leaves: Sequence[Any],
    ) -> list[Any]:
        row = self._rows[stage]

        def find(value: UpdateValue) -> Any:
            if value.kind == UpdateKind.PARAMETER:
                return variables[value.key]
            if value.kind == UpdateKind.GRADIENT:
                return accumulated.accumulators[value.key]
            if value.kind == UpdateKind.STATE:
                return state_leaves[value.key]
            if value.kind == UpdateKind.OUTPUT:
                return accumulated.outputs[-1][value.key]
            return self._constant(self._num_micro_batches, row)

        return placement.put([find(value) for value in program.arguments], row)

    def _take_accumulators(self) -> dict[str, Any]:
        """The zeros that the last update left; made anew if there are none."""
        accumulators, self._accumulators = self._accumulators, None
        if accumulators is None:
            accumulators = {}
            for name, spec in self._trained.items():
                row = self._rows[self._traced.owners[name]]
                (accumulators[name],) = placement.put([np.zeros(spec.shape, spec.dtype)], row)
        return accumulators

    def _prepare(
        self, variables: Mapping[str, Any], key: Any, execution_count: int, inputs: Sequence[Any]
    ) -> tuple[list[list[Any]], dict[tuple[Row, int], Any]]:
        """What stays the same during a step.

        Returns:
          Per template its arguments, None where they differ by micro-batch; and the inputs by row and
          position, where they are needed.
        """
        wanted = {(t.row, position): None for t in self.plan.templates for _place, position in t.inputs}
        last_row = self.plan.last_forward.row
        wanted.update(
            {(last_row, position): None for kind, position in self.plan.collected if kind == "input"}
        )
        placed = {
            (row, position): placement.put_host_copies([inputs[position]], row)[0]
            for row, position in wanted
        }
        prepared = []
        for template in self.plan.templates:
            row = template.row
            arguments: list[Any] = [None] * template.num_arguments
            for place, name in template.variables:
                arguments[place] = variables[name]
            for place, position in template.inputs:
                arguments[place] = placed[row, position]
            for place in template.keys:
                (arguments[place],) = placement.put([key], row)
            for place in template.execution_counts:
                (arguments[place],) = placement.put([np.int32(execution_count)], row)
            prepared.append(arguments)
        return prepared, placed

    def _constant(self, number: int, row: Row) -> Any:
        """An int32 scalar on a row, made once."""
        known = self._constants.get((row.ipu, number))
        if known is None:
            (known,) = placement.put([np.int32(number)], row)
            self._constants[row.ipu, number] = known
        return known


def _jit_update(program: UpdateProgram, donate: bool, updates: Updates) -> Callable[..., list[Any]]:
    """Jits an update. It donates the accumulators, and with `donate` what else it returns anew."""

    def is_donated(value: UpdateValue) -> bool:
        if value not in program.results:
            return False
        if value.kind == UpdateKind.STATE and updates.state_leaves[value.key].stage is None:
            # Replicated: another stage on the same IPU may read the same array.
            return donate and len(updates.stages) == 1
        return donate or value.kind == UpdateKind.GRADIENT

    donated = tuple(place for place, value in enumerate(program.arguments) if is_donated(value))

    def function(*arguments: Any) -> list[Any]:
        return program.function(*arguments)

    function.__name__ = function.__qualname__ = program.name
    jitted: Callable[..., list[Any]] = jax.jit(function, donate_argnums=donated)
    return jitted
