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
from ipu_pipeline.engine.optimizer_tracing import UpdateKind
from ipu_pipeline.engine.placement import Row
from ipu_pipeline.engine.programs import StagePrograms
from ipu_pipeline.engine.residence import Residence
from ipu_pipeline.engine.schedules import Timetable
from ipu_pipeline.engine.state import Collected, Updated
from ipu_pipeline.engine.updates import UpdateProgram, Updates

__all__ = ["Accumulated", "Executor"]


@dataclass(frozen=True, eq=False)
class Accumulated:
    """What micro-batches give before a weight update.

    Attributes:
      outputs: per micro-batch, the leaves of what the last stage returned; empty where they are not wanted.
      losses: per micro-batch, the loss; empty without training.
      assigned: new values of the variables that stages assign, by full name.
      accumulators: by full name; empty without training.
    """

    outputs: list[list[Any]]
    losses: list[Any]
    assigned: dict[str, Any]
    accumulators: dict[str, Any]

    def collect(self) -> list[Collected]:
        """What each micro-batch gave."""
        losses = self.losses or [None] * len(self.outputs)
        return [Collected(out, loss, None) for out, loss in zip(self.outputs, losses, strict=True)]


class Executor:
    """Runs micro-batches and weight updates of one traced pipeline on given devices."""

    def __init__(
        self,
        residence: Residence,
        programs: Sequence[StagePrograms],
        timetable: Timetable,
        num_micro_batches: int,
        updated_every: int,
        donate: bool,
        collect_outputs: bool,
    ) -> None:
        """Jits the programs; XLA compiles each at its first call.

        Args:
          residence: where its state lives.
          programs: the programs of its stages.
          timetable: the checked schedule.
          num_micro_batches: in the schedule.
          updated_every: micro-batches per weight update.
          donate: whether an update may reuse the memory of the variables and optimizer state before it.
          collect_outputs: whether what the last stage returns is wanted for all micro-batches, and not
            for the first and the last one only.
        """
        self.residence = residence
        self._num_micro_batches = num_micro_batches
        self._updated_every = updated_every
        self._collect_outputs = collect_outputs
        self.plan = make_plan(residence.traced, programs, residence.rows, timetable)
        self._update_functions: list[Callable[..., list[Any]]] = []
        if residence.updates is not None:
            self._update_functions = [
                _jit_update(program, donate, residence.updates) for program in residence.updates.updates
            ]

    def place_element(self, leaves: Sequence[Any], first: int = 0) -> list[Any]:
        """The leaves of a micro-batch where they are needed, in the order of the plan's `feed_slots`.

        Safe to call from another thread; shares no memory with NumPy arrays that are given.

        Args:
          leaves: all leaves, or some in a row.
          first: the number of the first one that is given.
        """
        places = range(first, first + len(leaves))
        feed_slots = [feed_slot for feed_slot in self.plan.feed_slots if feed_slot.leaf in places]
        placed: list[Any] = [None] * len(feed_slots)
        for row in dict.fromkeys(self.residence.rows):
            wanted = [p for p, feed_slot in enumerate(feed_slots) if feed_slot.row is row]
            if wanted:
                arrays = [leaves[feed_slots[p].leaf - first] for p in wanted]
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
        accumulators: dict[str, Any],
        first_micro_batch: int = 0,
        num_accumulated: int = 0,
    ) -> Accumulated:
        """Runs the micro-batches of the schedule.

        Args:
          variables: placed variables by full name.
          key: the session's random key.
          execution_count: how often the pipeline was executed before.
          inputs: the leaves of the inputs that are constant during the step.
          next_element: returns the placed leaves of the next micro-batch (see `place_element`). What it
            raises ends the step; the variables then have not changed.
          accumulators: placed, by full name; their memory is reused.
          first_micro_batch: the index of the first one.
          num_accumulated: how many micro-batches the accumulators have taken in.

        Returns:
          What the micro-batches gave, still being computed.
        """
        accumulators = dict(accumulators)
        prepared, placed_inputs = self._prepare(variables, key, execution_count, inputs)
        values: list[Any] = [None] * self._num_micro_batches
        outputs: list[list[Any]] = [[] for _ in values]
        losses: list[Any] = []
        assigned: dict[str, Any] = {}
        constant = self.residence.constant
        has_loss = self.residence.traced.loss is not None
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
                arguments[place] = constant(first_micro_batch + micro_batch, template.row)
            for place in template.accumulated:
                arguments[place] = constant(num_accumulated + micro_batch, template.row)
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
                leaves = [
                    slots[number] if kind == "slot" else placed_inputs[last_forward.row, number]
                    for kind, number in self.plan.collected
                ]
                if has_loss:
                    losses.append(leaves.pop())
                if self._collect_outputs or micro_batch in (0, self._num_micro_batches - 1):
                    outputs[micro_batch] = leaves
            for slot in template.releases:
                slots[slot] = None
        return Accumulated(outputs, losses, assigned, accumulators)

    def update(
        self, variables: Mapping[str, Any], state_leaves: Sequence[Any], accumulated: Accumulated
    ) -> Updated:
        """Runs the weight update.

        Args:
          variables: what was given to `accumulate`.
          state_leaves: placed leaves of the optimizer's state.
          accumulated: what it returned.
        """
        updates = self.residence.updates
        new_variables = {**variables, **accumulated.assigned}
        if updates is None:
            return Updated(new_variables, [], {}, accumulated.collect())
        new_leaves = list(state_leaves)
        # All arguments first: an update may reuse memory that another one's copy is still made from.
        prepared = [
            self.residence.update_arguments(
                program,
                stage,
                variables,
                accumulated.accumulators,
                state_leaves,
                accumulated.outputs[-1],
                self._updated_every,
            )
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
        return Updated(new_variables, new_leaves, zeros, accumulated.collect())

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


def _jit_update(program: UpdateProgram, donate: bool, updates: Updates) -> Callable[..., list[Any]]:
    """Jits an update. It donates the accumulators, and with `donate` what else it returns anew."""

    def is_donated(value: Any) -> bool:
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
