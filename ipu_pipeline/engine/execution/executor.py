"""Follows a plan of dispatches: starts stage programs and transfers, and nothing else.

Dispatch is asynchronous: the host runs ahead of the devices, which wait for data only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.devices.compiler_options import NO_OPTIONS, CompilerOptions
from ipu_pipeline.engine.devices.feeds import ChunkFeed, FedElement, Take, gather
from ipu_pipeline.engine.devices.residence import NO_LOSS_SCALE, Residence
from ipu_pipeline.engine.devices.rows import Row, copy_to, put, put_host_copies
from ipu_pipeline.engine.execution.compiling import compile_ahead
from ipu_pipeline.engine.execution.dispatches import Dispatch, make_plan
from ipu_pipeline.engine.execution.templates import Part, Template
from ipu_pipeline.engine.execution.weight_updates import WeightUpdate
from ipu_pipeline.engine.planning.dispatch_plans import ONE_BY_ONE, DispatchPlan
from ipu_pipeline.engine.programs.chunks import chunk_programs
from ipu_pipeline.engine.programs.collecting import Collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.state import Accumulated, Collected

__all__ = ["Executor", "Observer"]

_MAX_ORDERS = 8  # of dispatches that are kept, where the number of micro-batches is known at run only


# Told, after each dispatch, its template, the chunk of each of its parts, and the slots of all chunks.
Observer: TypeAlias = "Callable[[Template, tuple[int, ...], Sequence[Sequence[Any] | None]], None]"


class Executor:
    """Runs micro-batches and weight updates of one traced pipeline on given devices.

    Attributes:
      residence: where the pipeline's state lives.
      plan: its programs, and what they exchange.
      weight_update: what follows the micro-batches.
      observer: told what is held after each dispatch; None for nobody.
    """

    def __init__(
        self,
        residence: Residence,
        programs: Sequence[StagePrograms],
        make_timetable: Callable[[int], Timetable],
        donate: bool,
        collecting: Collecting,
        options: CompilerOptions = NO_OPTIONS,
        dispatch_plan: DispatchPlan = ONE_BY_ONE,
    ) -> None:
        """Jits the programs; XLA compiles each at its first call.

        Args:
          residence: where its state lives.
          programs: the programs of its stages.
          make_timetable: the checked schedule for so many micro-batches, or chunks of them.
          donate: whether an update may reuse the memory of the variables and optimizer state before it.
          collecting: what is wanted of the last stage.
          options: XLA's, per program.
          dispatch_plan: how many micro-batches a program handles, and what is fused.
        """
        self.residence = residence
        self.observer: Observer | None = None
        self._collecting = collecting
        keys = residence.accumulator_plan.keys
        # Python may raise within a program, so what goes into a step must outlive it.
        stages = residence.traced.stages
        self._has_callbacks = any(jaxprs.has_callbacks(stage.flat) for stage in stages)
        self.chunk_size = chunk_size = dispatch_plan.chunk_size
        self.plan = make_plan(
            residence.traced,
            chunk_programs(residence.traced, programs, chunk_size),
            residence.rows,
            keys,
            options,
            not self._has_callbacks,
            dispatch_plan.is_fused,
        )
        self._feed = ChunkFeed(chunk_size, self.place_leaves)
        self._is_compiled = False
        self._options = options
        self._make_timetable = make_timetable
        self._dispatches: dict[int, list[Dispatch]] = {}  # by the number of chunks
        # (template, variable that it assigns) -> (template, argument) of its stage that read it
        self._readers = {
            (template.index, name): [
                (other.index, place)
                for other in self.plan.templates.values()
                if other.parts[0].stage == template.parts[0].stage
                for place, read in other.variables
                if read == name
            ]
            for template in self.plan.templates.values()
            for _place, name in template.assigned
        }
        last_row = self.plan.last_forward.row
        self._zero_sums = jax.jit(
            lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in collecting.avals],
            out_shardings=last_row.replicated,
        )
        self.weight_update = WeightUpdate(residence, donate, options.update)

    def place_element(self, leaves: Sequence[Any]) -> Sequence[Any] | FedElement:
        """A micro-batch for `take_chunk` or `place_ahead`.

        Safe to call from another thread; shares no memory with NumPy arrays that are given.
        """
        return self.place_leaves(leaves) if self.chunk_size == 1 else self._feed.add(leaves)

    def take_chunk(self, take: Take) -> Sequence[Any]:
        """The leaves of the next chunk where they are needed, in the order of the plan's `feed_slots`.

        Args:
          take: returns up to so many micro-batches, as `place_element` left them.
        """
        if self.chunk_size == 1:
            element: Sequence[Any] = take(1)[0]
            return element
        elements = gather(take, self.chunk_size, self.chunk_size)
        return self._feed.stack(elements) if self.plan.feed_slots else []

    def place_ahead(self, elements: Sequence[Any]) -> list[Any]:
        """Micro-batches, as `place_element` left them, on the devices that read them."""
        if self.chunk_size == 1:
            return list(elements)
        size = self.chunk_size
        if len(elements) % size:
            raise ValueError(
                f"place_micro_batches: programs handle {size} micro-batches each, by the pipeline's "
                f"dispatch_plan; {len(elements)} do not make whole ones."
            )
        if not self.plan.feed_slots:
            return list(elements)
        chunks = [elements[first : first + size] for first in range(0, len(elements), size)]
        return [element for chunk in chunks for element in self._feed.place_ahead(chunk)]

    def place_leaves(self, leaves: Sequence[Any], first: int = 0) -> list[Any]:
        """The leaves of a micro-batch or chunk where they are needed, in the order of `feed_slots`.

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
                for p, array in zip(wanted, put_host_copies(arrays, row), strict=True):
                    placed[p] = array
        return placed

    def accumulate(
        self,
        variables: Mapping[str, Any],
        key: Any,
        execution_count: int,
        inputs: Sequence[Any],
        next_chunk: Callable[[], Sequence[Any]],
        accumulators: dict[str, Any],
        num_micro_batches: int,
        first_micro_batch: int = 0,
        num_accumulated: int = 0,
        loss_scale: Any = NO_LOSS_SCALE,
    ) -> Accumulated:
        """Runs the micro-batches of the schedule.

        Args:
          variables: placed variables by full name.
          key: the session's random key.
          execution_count: how often the pipeline was executed before.
          inputs: the leaves of the inputs that are constant during the step.
          next_chunk: returns the placed leaves of the next micro-batch or chunk (see `take_chunk`). What it
            raises ends the step; the variables then have not changed.
          accumulators: placed, by key; their memory is reused.
          num_micro_batches: how many to run, a multiple of the chunks' size.
          first_micro_batch: the index of the first one.
          num_accumulated: how many micro-batches the accumulators have taken in.
          loss_scale: of an optimizer with loss scaling, the scale.

        Returns:
          What the micro-batches gave, still being computed.
        """
        accumulators = dict(accumulators)
        prepared, placed_inputs = self._prepare(variables, key, execution_count, inputs, loss_scale)
        chunk_size = self.chunk_size
        num_chunks = num_micro_batches // chunk_size
        order = self._order(num_chunks)
        if not self._is_compiled:
            functions = self.weight_update.functions
            compile_ahead(
                self.plan,
                order,
                prepared,
                accumulators,
                self.residence,
                functions,
                chunk_size,
                self._options,
                is_shared=not self._has_callbacks,
            )
            self._is_compiled = True
        values: list[Any] = [None] * num_chunks
        first_outputs: list[Any] = []
        last_outputs: list[Any] = []
        collecting = self._collecting
        collected: list[Collected] = []
        sums = self._zero_sums() if collecting.is_summed else []
        assigned: dict[str, Any] = {}
        residence = self.residence
        constant = residence.constant
        offloads = residence.offloads_in_micro_batches
        num_outputs = len(residence.traced.outputs)
        last_forward = self.plan.last_forward
        feed_slots = [feed_slot.slot for feed_slot in self.plan.feed_slots]
        num_slots = self.plan.num_slots
        for template, chunks in order:
            arguments = prepared[template.index].copy()
            names = template.accumulators
            for place, name in enumerate(names):
                arguments[place] = accumulators[name]
            for part, chunk in zip(template.parts, chunks, strict=True):
                slots = values[chunk]
                if slots is None:
                    slots = values[chunk] = [None] * num_slots
                    for slot, array in zip(feed_slots, next_chunk(), strict=True):
                        slots[slot] = array
                for place, slot in part.loads:
                    arguments[place] = slots[slot]
                for place in part.micro_batches:
                    arguments[place] = constant(first_micro_batch + chunk * chunk_size, template.row)
                for place in part.accumulated:
                    arguments[place] = constant(num_accumulated + chunk * chunk_size, template.row)
            if offloads:
                self._load(template, arguments, variables)
            results = template.function(*arguments)
            for name, result in zip(names, results, strict=False):
                accumulators[name] = result
            if residence.offloads_accumulators and names:
                stored = put(results[: len(names)], template.row, offloaded=True)
                accumulators.update(zip(names, stored, strict=True))
            for place, name in template.assigned:
                assigned[name] = results[place]
                for index, argument in self._readers[template.index, name]:
                    prepared[index][argument] = results[place]
            for part, chunk in zip(template.parts, chunks, strict=True):
                slots = values[chunk]
                for place, slot in part.stores:
                    slots[slot] = results[place]
                for row, moved, targets in part.transfers:
                    copies = copy_to([results[place] for place in moved], row)
                    for slot, array in zip(targets, copies, strict=True):
                        slots[slot] = array
                if template is last_forward:
                    leaves = self._find_collected(slots, placed_inputs)
                    if chunk == 0:
                        first_outputs = self._only(leaves[:num_outputs], self.weight_update.read[0], 0)
                    if chunk == num_chunks - 1:
                        last_outputs = self._only(leaves[:num_outputs], self.weight_update.read[1], -1)
                    wanted = self._wanted(leaves)
                    if collecting.is_summed:
                        sums = _add(sums, wanted)
                    else:
                        collected.append(
                            collecting.collect(wanted, None if chunk_size == 1 else chunk_size)
                        )
                if residence.offloads_activations and part.kept:
                    self._store(part, slots)
                for slot in part.releases:
                    slots[slot] = None
            if self.observer is not None:
                self.observer(template, chunks, values)
        if collecting.is_summed:
            collected = [collecting.collect(sums, None)]
        if self._has_callbacks:
            made = [(part.outputs, part.loss) for part in collected]
            jax.block_until_ready((made, last_outputs, assigned, accumulators))
        return Accumulated(
            num_micro_batches, first_outputs, last_outputs, collected, assigned, accumulators
        )

    def _order(self, num_chunks: int) -> list[Dispatch]:
        known = self._dispatches.get(num_chunks)
        if known is None:
            if len(self._dispatches) == _MAX_ORDERS:
                del self._dispatches[next(iter(self._dispatches))]
            known = self.plan.dispatches(self._make_timetable(num_chunks))
            self._dispatches[num_chunks] = known
        return known

    def _load(self, template: Template, arguments: list[Any], variables: Mapping[str, Any]) -> None:
        """Puts those of a program's arguments that are in host memory on its row."""
        for place, name in template.variables:
            if name in self.residence.offloaded:
                arguments[place] = variables[name]
        places = [place for place, value in enumerate(arguments) if value is not None]
        loaded = put([arguments[place] for place in places], template.row)
        for place, value in zip(places, loaded, strict=True):
            arguments[place] = value

    def _find_collected(self, slots: Sequence[Any], inputs: Mapping[tuple[Row, int], Any]) -> list[Any]:
        """What the last stage returned, and then the loss: of a chunk stacked, except inputs."""
        row = self.plan.last_forward.row
        return [
            slots[number] if kind == "slot" else inputs[row, number] for kind, number in self.plan.collected
        ]

    def _only(self, leaves: Sequence[Any], places: Collection[int], number: int) -> list[Any]:
        """The leaves of one micro-batch of a chunk, None in other places."""
        only: list[Any] = [None] * len(leaves)
        for place in places:
            is_stacked = self.chunk_size > 1 and self.plan.collected[place][0] == "slot"
            only[place] = _pick(leaves[place], number) if is_stacked else leaves[place]
        return only

    def _wanted(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that are collected, of a chunk stacked."""
        places = [*self._collecting.places, *([-1] if self._collecting.has_loss else [])]
        if self.chunk_size == 1:
            return [leaves[place] for place in places]
        return [
            leaves[place]
            if self.plan.collected[place][0] == "slot"
            else _repeat(leaves[place], self.chunk_size)
            for place in places
        ]

    def _store(self, part: Part, slots: list[Any]) -> None:
        """Moves what is kept for backwards to host memory, on the row where it is."""
        for row in dict.fromkeys(self.plan.slot_rows[slot] for slot in part.kept):
            own = [slot for slot in part.kept if self.plan.slot_rows[slot] is row]
            stored = put([slots[slot] for slot in own], row, offloaded=True)
            for slot, value in zip(own, stored, strict=True):
                slots[slot] = value

    def _prepare(
        self,
        variables: Mapping[str, Any],
        key: Any,
        execution_count: int,
        inputs: Sequence[Any],
        loss_scale: Any,
    ) -> tuple[list[list[Any]], dict[tuple[Row, int], Any]]:
        """What stays the same during a step.

        Returns:
          Per template its arguments, None where they differ by micro-batch; and the inputs by row and
          position, where they are needed.
        """
        templates = self.plan.templates.values()
        wanted = {(t.row, position): None for t in templates for _place, position in t.inputs}
        last_row = self.plan.last_forward.row
        wanted.update(
            {(last_row, position): None for kind, position in self.plan.collected if kind == "input"}
        )
        placed = {(row, position): put_host_copies([inputs[position]], row)[0] for row, position in wanted}
        prepared = []
        for template in templates:
            row = template.row
            arguments: list[Any] = [None] * template.num_arguments
            here = [(p, name) for p, name in template.variables if name not in self.residence.offloaded]
            # A shared variable is copied from its home once per step.
            read = put([variables[name] for _place, name in here], row)
            for (place, _name), value in zip(here, read, strict=True):
                arguments[place] = value
            for place, position in template.inputs:
                arguments[place] = placed[row, position]
            for place in template.keys:
                arguments[place] = self.residence.place_key(key, row)
            for place in template.loss_scales:
                (arguments[place],) = put([loss_scale], row)
            for place in template.execution_counts:
                (arguments[place],) = put([np.int32(execution_count)], row)
            prepared.append(arguments)
        return prepared, placed


@functools.partial(jax.jit, donate_argnums=0)
def _add(totals: Any, parts: Any) -> Any:
    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        chunk_axes = tuple(range(part.ndim - total.ndim))
        return total + part.sum(chunk_axes, dtype=total.dtype)  # else JAX sums integers in 64 bits

    return jax.tree.map(add, totals, parts)


@functools.partial(jax.jit, static_argnums=1)
def _pick(stack: jax.Array, number: int) -> jax.Array:
    return stack[number]


@functools.partial(jax.jit, static_argnums=1)
def _repeat(value: jax.Array, size: int) -> jax.Array:
    return jnp.broadcast_to(value, (size, *value.shape))
