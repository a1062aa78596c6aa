"""A replica's part of a pipeline: its programs, on devices of its own, and its micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices import action_log
from ipu_pipeline.engine.devices.compiler_options import CompilerOptions
from ipu_pipeline.engine.devices.device_groups import WHOLE, DeviceGroup
from ipu_pipeline.engine.devices.feeds import Element, Feed, Take, gather
from ipu_pipeline.engine.devices.placing import put, put_host_copies
from ipu_pipeline.engine.devices.remote import absent
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.contract import Request
from ipu_pipeline.engine.execution.kept import jit_zeros
from ipu_pipeline.engine.execution.outputs import Outputs, Taken, Wanted
from ipu_pipeline.engine.execution.plans import make_plan
from ipu_pipeline.engine.execution.steps import ColumnRun, Devices, PhaseRun, Reading
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.execution.watched import Counting, WatchedDevices, watched_feed
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.programs.chunks import ChunkForm
from ipu_pipeline.engine.programs.collecting import Collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms, ValueKind
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.state import RunState
from ipu_pipeline.engine.tracing.keys import as_int32

__all__ = ["Column"]


@dataclass(frozen=True, eq=False)
class Steady:
    """The arguments of a program that stay the same during a step."""

    group: DeviceGroup  # where it runs
    num_arguments: int  # the number of all its arguments
    variables: tuple[tuple[int, str], ...]  # (argument, full name)
    partitions: list[Any]  # how these are divided over the devices of the group
    inputs: tuple[tuple[int, int], ...]  # (argument, position among the pipeline's inputs)
    key_numbers: tuple[tuple[int, int], ...]  # (argument, number)
    scalars: tuple[tuple[int, ValueKind], ...]  # (argument, kind)


def _find_steady(template: Template, lacking: Collection[str], partitions: Mapping[str, Any]) -> Steady:
    """Finds the steady arguments of a program. Variables in `lacking` are loaded for each call instead."""
    variables = tuple(one for one in template.taken(BindingKind.VARIABLE) if one[1] not in lacking)
    return Steady(
        template.group,
        len(template.arguments),
        variables,
        [partitions.get(name, WHOLE) for _place, name in variables],
        template.taken(BindingKind.INPUT),
        template.taken(BindingKind.KEY_NUMBER),
        template.taken(BindingKind.SCALAR),
    )


class Column:
    """The programs of a replica.

    Attributes:
      placement: where its part of the state lives.
      plan: its programs, and what they exchange.
      feed: puts micro-batches on the devices that read them, a whole chunk at a time.
      devices: the reading that runs a step when there is no watcher.
    """

    def __init__(
        self,
        placement: StatePlacement,
        programs: Sequence[StagePrograms],
        chunk: ChunkForm,
        collecting: Collecting,
        read: tuple[Collection[int], Collection[int]],
        carried: Sequence[int],
        options: CompilerOptions,
        gathered: frozenset[str],
        phases: ExecutionPhases | None,
        donates_accumulators: bool,
    ) -> None:
        """Jits the programs; XLA compiles each at its first call."""
        traced = placement.traced
        self.placement = placement
        self.plan = make_plan(
            traced,
            programs,
            placement.groups,
            placement.accumulator_plan.keys,
            options,
            placement.sharding_in_program,
            donates_accumulators,
        )
        self._chunk, self._collecting, self._phases = chunk, collecting, phases
        lacking = placement.offloaded | gathered
        templates = list(self.plan.templates.values())
        self._steady = [_find_steady(template, lacking, placement.partitions) for template in templates]
        last_group = self.plan.last_forward.group
        read_inputs = [(own.group, position) for own in self._steady for _place, position in own.inputs]
        read_inputs += [(last_group, position) for kind, position in self.plan.collected if kind == "input"]
        self._placed_inputs = tuple(dict.fromkeys(read_inputs))
        self._num_carried = len(carried)
        # Used in each step.
        self._num_slots, self._enqueued = self.plan.num_slots, traced.enqueued_avals
        self._all_fed = [feed_slot.slot for feed_slot in self.plan.feed_slots]
        self._fed_slots = [slot for slot in self.plan.feed_slots if slot.leaf >= len(carried)]
        self.feed = Feed(functools.partial(self._place_leaves, put, len(carried)), chunk.size)
        self.devices = Devices(placement.constants)
        self._wanted = Wanted(
            self.plan,
            chunk,
            collecting,
            read,
            carried,
            len(traced.outputs),
            phases is not None and not phases.keeps_values,
        )
        self._make_sums = last_group.program(jit_zeros(collecting.avals, last_group.replicated))

    # Micro-batches.

    def place_ahead(self, elements: Sequence[Element]) -> list[Element]:
        """Puts micro-batches on the devices that read them.

        Raises:
          ValueError: they do not make whole chunks.
        """
        size = self._chunk.size
        if len(elements) % size:
            raise ValueError(
                f"place_micro_batches: programs handle {size} micro-batches each, by the pipeline's "
                f"dispatch_plan; {len(elements)} do not make whole ones."
            )
        return self.feed.place_ahead(elements, size, size) if self.plan.feed_slots else list(elements)

    @property
    def fed_groups(self) -> list[DeviceGroup]:
        """The groups of the stages that read micro-batches, one for each value read."""
        return [slot.group for slot in self._fed_slots]

    @functools.cached_property
    def is_fed_here(self) -> bool:
        """Whether this process puts micro-batches on devices."""
        return any(feed_slot.group.is_here for feed_slot in self._fed_slots)

    @property
    def takes_elements(self) -> bool:
        """Whether this process has a stage that reads micro-batches, or there is nothing to read."""
        return not self._fed_slots or self.is_fed_here

    def feed_from(self, take: Take) -> Callable[[], Sequence[Any]]:
        """Returns a function that gives one placed chunk after the other, in the order of `feed_slots`."""
        size = self._chunk.size

        def next_chunk() -> Sequence[Any]:
            if self._fed_slots and not self.is_fed_here:
                return self._not_fed()
            elements = gather(take, size, size)
            if size == 1:
                return self.place_alone(elements[0])
            return self.feed.place(elements) if self._fed_slots else []

        return next_chunk

    def take_iteration(self, take: Take) -> Sequence[Any]:
        """Takes an iteration's elements from the feed of a loop."""
        return [] if self._fed_slots and not self.is_fed_here else take(1)

    def feed_iteration(self, elements: Sequence[Any], request: Request) -> Callable[[], Sequence[Any]]:
        """Returns a function that gives the placed carried values and micro-batch of an iteration."""
        placement = self.placement
        if placement.has_peers:
            placement.begin_step()

        def put_carried(arrays: Sequence[Any], group: DeviceGroup) -> list[Any]:
            return put_host_copies(arrays, group, tag=placement.tag(f"carried values to {group.ipu}"))

        carried = iter(self._place_leaves(put_carried, 0, request.carried))
        if self._fed_slots and not self.is_fed_here:
            fed = iter(self._not_fed())
        else:
            fed = iter(self.feed.place(elements) if self._fed_slots else [])
        slots = self.plan.feed_slots
        chunk = [next(carried if slot.leaf < self._num_carried else fed) for slot in slots]
        return lambda: chunk

    def _place_leaves(self, put: Callable[..., list[Any]], first: int, leaves: Sequence[Any]) -> list[Any]:
        """Puts the leaves of a micro-batch or chunk where they are needed, in the order of `feed_slots`."""
        places = range(first, first + len(leaves))
        feed_slots = [feed_slot for feed_slot in self.plan.feed_slots if feed_slot.leaf in places]
        placed: list[Any] = [None] * len(feed_slots)
        for group in dict.fromkeys(self.placement.groups):
            wanted = [p for p, feed_slot in enumerate(feed_slots) if feed_slot.group is group]
            if wanted:
                arrays = [leaves[feed_slots[p].leaf - first] for p in wanted]
                for p, array in zip(wanted, put(arrays, group), strict=True):
                    placed[p] = array
        return placed

    def _not_fed(self) -> list[Any]:
        """Stand-ins for the leaves of a micro-batch or chunk in a process that has none of them."""
        element = jax.tree.leaves(self.placement.traced.element)
        return [
            absent((*self._chunk.axes, *element[leaf].shape), element[leaf].dtype, group.replicated)
            for leaf, group, _slot in self._fed_slots
        ]

    def place_alone(self, element: Element) -> Sequence[Any]:
        """Puts a micro-batch, also one of a chunk, on the devices, for programs that handle one."""
        if not self._fed_slots:
            return []
        stack = element.stack
        if stack is not None and stack.num_rows > 1 and stack.placed is not None:
            return [leaf[element.row] for leaf in stack.placed]
        if stack is None or stack.num_rows > 1:
            element = self.feed.add(element.leaves)
        return self.feed.place([element])

    # A step.

    def begin_outputs(self) -> Taken:
        """What is taken of the outputs of a step before its first micro-batch."""
        return Taken(sums=self._make_sums() if self._collecting.is_summed else [])

    def begin(
        self,
        state: RunState,
        request: Request,
        next_chunk: Callable[[], Sequence[Any]],
        num_chunks: int,
        runner: Any,
        taken: Taken,
    ) -> ColumnRun:
        """Begins a step, which will take the memory of the accumulators. Tells the watcher, if any.

        `taken` has what was collected before.
        """
        step = int(as_int32(state.pipeline.execution_count))
        reading: Reading = self.devices
        watcher = watching.current()
        if watcher is not None:
            counting = Counting(step, request.iteration, self._chunk.size)
            reading = WatchedDevices(self.placement.constants, watcher, runner, counting)
            next_chunk = watched_feed(watcher, step, self._chunk.size, next_chunk)
        prepared, inputs = self.prepare(state, request.inputs)
        outputs = Outputs(self._wanted, num_chunks, inputs, taken)
        run = self.run_of(reading, state, prepared, outputs, next_chunk, request.iteration, step)
        run.starting = runner.starting
        run.starting.begin(step, request.iteration, self._chunk.size)
        run.log = action_log.current() if self.placement.has_peers else None
        return run

    def run_of(
        self,
        reading: Reading,
        state: RunState,
        prepared: list[list[Any]],
        outputs: Outputs | None,
        next_chunk: Callable[[], Sequence[Any]],
        first: int = 0,
        step: int = 0,
    ) -> ColumnRun:
        """Makes a `ColumnRun` of the given fields."""
        return ColumnRun(
            reading=reading,
            prepared=prepared,
            accumulators=dict(state.accumulators),
            next_chunk=next_chunk,
            outputs=outputs,
            feed_slots=self._all_fed,
            num_slots=self._num_slots,
            size=self._chunk.size,
            step=step,
            first=first,
            num_accumulated=state.num_accumulated,
            phase=self._begin_phases(reading),
            enqueued=[[] for _leaf in self._enqueued],
            stored=state.pipeline.variables,
        )

    def _begin_phases(self, reading: Reading) -> PhaseRun | None:
        if self._phases is None:
            return None
        return PhaseRun(self._phases, self.plan, self.placement.offloads_activations, reading)

    def prepare(
        self, state: RunState, inputs: Sequence[Any]
    ) -> tuple[list[list[Any]], dict[tuple[DeviceGroup, int], Any]]:
        """Prepares the steady arguments of each program for a step, and places the inputs."""
        placement, pipeline = self.placement, state.pipeline
        loss_scale = placement.loss_scale(pipeline.optimizer_state)
        if placement.has_peers:
            placement.begin_step()
        placed = {
            (group, position): put_host_copies(
                [inputs[position]], group, tag=placement.tag(f"input {position} to {group.ipu}")
            )[0]
            for group, position in self._placed_inputs
        }
        prepared: list[list[Any]] = []
        for steady in self._steady:
            group, index = steady.group, len(prepared)
            arguments: list[Any] = [None] * steady.num_arguments
            # A shared variable is copied from its home once per step.
            shared = placement.tag("variables of others", index)
            here = [pipeline.variables[name] for _place, name in steady.variables]
            read = put(here, group, False, shared, steady.partitions)
            for (place, _name), value in zip(steady.variables, read, strict=True):
                arguments[place] = value
            for place, position in steady.inputs:
                arguments[place] = placed[group, position]
            for place, number in steady.key_numbers:
                arguments[place] = placement.constants.key_number(number, group)
            for place, kind in steady.scalars:
                if kind is ValueKind.KEY:
                    arguments[place] = placement.constants.key(pipeline.key, group)
                elif kind is ValueKind.LOSS_SCALE:
                    (arguments[place],) = put([loss_scale], group, tag=placement.tag("loss scale", index))
                elif kind is ValueKind.EXECUTION_COUNT:
                    (arguments[place],) = put([as_int32(pipeline.execution_count)], group)
                elif kind is ValueKind.UPDATE_COUNT:
                    (arguments[place],) = put([as_int32(pipeline.update_count)], group)
            prepared.append(arguments)
        return prepared, placed
