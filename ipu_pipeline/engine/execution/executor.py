"""Runs the dispatches of a step over several devices: starts programs and transfers, and nothing else.

Dispatch is asynchronous: the host runs ahead of the devices, which wait for data only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices import action_log
from ipu_pipeline.engine.devices.compiler_options import NO_OPTIONS, CompilerOptions
from ipu_pipeline.engine.devices.elsewhere import absent
from ipu_pipeline.engine.devices.feeds import Element, Feed, Take, gather
from ipu_pipeline.engine.devices.placing import copy_to, put, put_host_copies
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.devices.rows import WHOLE, Row
from ipu_pipeline.engine.execution import watched
from ipu_pipeline.engine.execution.agreeing import take_everywhere
from ipu_pipeline.engine.execution.compiling import Column, Compiled, compile_ahead
from ipu_pipeline.engine.execution.contract import Iterated, Request, Runner
from ipu_pipeline.engine.execution.dispatches import Dispatch, make_plan
from ipu_pipeline.engine.execution.dispatching import Accumulated, Dispatching, Gather, Together, finish
from ipu_pipeline.engine.execution.kept import jit_zeros
from ipu_pipeline.engine.execution.phase_memory import (
    Bringing,
    find_brought,
    find_host_memory,
    find_slot_bytes,
)
from ipu_pipeline.engine.execution.phases import PhaseRun
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.execution.weight_updates import WeightUpdate
from ipu_pipeline.engine.planning.dispatch_plans import ONE_BY_ONE, DispatchPlan
from ipu_pipeline.engine.planning.memory_plans import Brought
from ipu_pipeline.engine.programs.chunks import ChunkForm, chunk_programs
from ipu_pipeline.engine.programs.collecting import Collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.state import Collected, Handed, Progress, RunState
from ipu_pipeline.engine.tracing.keys import as_int32
from ipu_pipeline.engine.updates.environment import UpdateCounts

__all__ = ["Executor", "Observer"]

_MAX_ORDERS = 8  # of dispatches that are kept, where the number of micro-batches is known at run only


# Told, after each dispatch, its template, its chunk, and the slots of all chunks.
Observer: TypeAlias = "Callable[[Template, int, Sequence[Sequence[Any] | None]], None]"


@dataclass(frozen=True, eq=False)
class PendingStep:
    """Micro-batches that have run, or of a loop the one that will.

    Attributes:
      request: what they are a part of.
      count: how many there are.
      accumulated: what they gave; None of a loop, whose accumulators are part of its state.
      elements: of a loop, what the iteration takes of the feed.
    """

    request: Request
    count: int
    accumulated: Accumulated | None
    elements: Sequence[Any] = ()


class Executor(Runner[PendingStep]):
    """Runs a pipeline or loop over several devices.

    Attributes:
      plan: its programs, and what they exchange.
      observer: told what is held after each dispatch; None for nobody.
      gathered: full names of variables that it does not have, and asks for before each program.
      told_as: the runner that a watcher knows; another one if this one runs only a part.
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
        iterated: Iterated | None = None,
        phases: ExecutionPhases | None = None,
    ) -> None:
        """Jits the programs; XLA compiles each at its first call.

        Args:
          residence: where its state lives.
          programs: the programs of its stages.
          make_timetable: the checked schedule for so many micro-batches, or chunks of them.
          donate: whether an update may reuse the memory of the variables and optimizer state before it.
          collecting: what is wanted of the last stage.
          options: XLA's, per program.
          dispatch_plan: how many micro-batches a program handles.
          iterated: for the body of a loop, of which one iteration runs at a time.
          phases: in which its programs run, if they do.
        """
        super().__init__(residence, programs, iterated)
        self.observer: Observer | None = None
        self.told_as: Runner[Any] = self
        self.gathered: frozenset[str] = frozenset()
        self._collecting = collecting
        self._phases = phases
        traced = residence.traced
        self._chunk = ChunkForm(dispatch_plan.chunk_size)
        self.plan = make_plan(
            traced,
            chunk_programs(traced, self.programs, self._chunk.size),
            residence.rows,
            residence.accumulator_plan.keys,
            options,
            residence.sharding_in_program,
            not self.has_callbacks,
        )
        carried = () if iterated is None else iterated.carried
        self._carried_places = [traced.outputs.index(source) for source in carried]
        self._fed_slots = [slot for slot in self.plan.feed_slots if slot.leaf >= len(carried)]
        self._feed = Feed(functools.partial(self._place_leaves, put, len(carried)), self._chunk.size)
        self._is_compiled = False
        self._options = options
        self._make_timetable = make_timetable
        self._dispatches: dict[int, list[Dispatch]] = {}  # by the number of chunks
        # (template, variable that it assigns) -> (template, argument) of its stage that read it
        self._readers = {
            (template.index, name): [
                (other.index, place)
                for other in self.plan.templates.values()
                if other.stage == template.stage
                for place, read in other.variables
                if read == name
            ]
            for template in self.plan.templates.values()
            for _place, name in template.assigned
        }
        self._received = {  # slots of values that other processes send
            slot
            for template in self.plan.templates.values()
            for target, _places, slots in template.transfers
            for slot in slots
            if target.is_here and not template.row.is_here
        }
        last_row = self.plan.last_forward.row
        self._zero_sums = last_row.program(jit_zeros(collecting.avals, last_row.replicated))
        if iterated is None:  # of a pipeline, `fetch` waits for what stages call
            self.waits_for_python = residence.updates is not None and residence.updates.has_callbacks
        self._weight_update = WeightUpdate(residence, donate, options.update, self.waits_for_python)

    @property
    def weight_update(self) -> WeightUpdate:
        """What follows the micro-batches."""
        return self._weight_update

    def place_element(self, leaves: Sequence[Any]) -> Element:
        """A micro-batch, on the devices that read it; of a chunk, when that is whole."""
        return self._feed.add(leaves)

    def place_ahead(self, elements: Sequence[Element]) -> list[Element]:
        """Micro-batches on the devices that read them.

        Raises:
          ValueError: they do not make whole chunks.
        """
        size = self._chunk.size
        if len(elements) % size:
            raise ValueError(
                f"place_micro_batches: programs handle {size} micro-batches each, by the pipeline's "
                f"dispatch_plan; {len(elements)} do not make whole ones."
            )
        return self._feed.place_ahead(elements, size, size) if self.plan.feed_slots else list(elements)

    def num_fetched(self, total: int, every: int) -> int:
        """Four chunks, as the host takes several before devices are busy; of a loop one iteration.

        Where there are several processes, all of a step, which are there before it begins (`agreeing`).
        """
        del total
        if self.iterated is not None:
            return 1
        return max(4 * self._chunk.size, every if self.residence.has_peers else 0)

    def num_waiting(self, total: int, every: int) -> int:
        """Those that are fetched ahead."""
        return self.num_fetched(total, every)

    def fetch(self, state: RunState, request: Request, take: Take) -> PendingStep:
        """Runs the micro-batches of an update; of a loop, only gets that of an iteration."""
        if not self._is_compiled:
            self.compile(state, request)
        if self.iterated is not None:
            return PendingStep(request, 1, None, self.take_iteration(take))
        return PendingStep(request, request.every, finish(self.accumulating(state, request, take)))

    def accumulating(self, state: RunState, request: Request, take: Take) -> Dispatching:
        """Runs the micro-batches of an update, and stops after each dispatch; arguments as of `fetch`."""
        take = self._take_everywhere(take, request.every)

        def next_chunk() -> Sequence[Any]:
            if self._fed_slots and not self.is_fed_here:
                return self._not_fed()
            elements = gather(take, self.chunk_size, self.chunk_size)
            return self._feed.place(elements) if self._fed_slots else []

        return self._accumulate(state, request, next_chunk, request.every)

    def take_iteration(self, take: Take) -> Sequence[Any]:
        """What an iteration of a loop takes of the feed."""
        take = self._take_everywhere(take, 1)
        return [] if self._fed_slots and not self.is_fed_here else take(1)

    def iterating(self, state: RunState, request: Request, elements: Sequence[Any]) -> Dispatching:
        """Runs an iteration of a loop, and stops after each dispatch.

        Args:
          state: before it; its accumulators' memory is taken.
          request: as of `fetch`.
          elements: from `take_iteration`.
        """
        residence = self.residence
        if residence.has_peers:
            residence.begin_step()

        def put_carried(arrays: Sequence[Any], row: Row) -> list[Any]:
            return put_host_copies(arrays, row, tag=residence.tag(f"carried values to {row.ipu}"))

        carried = iter(self._place_leaves(put_carried, 0, request.carried))
        if self._fed_slots and not self.is_fed_here:
            fed = iter(self._not_fed())
        else:
            fed = iter(self._feed.place(elements) if self._fed_slots else [])
        num_carried = len(request.carried)
        chunk = [next(carried if slot.leaf < num_carried else fed) for slot in self.plan.feed_slots]
        return self._accumulate(state, request, lambda: chunk, 1)

    def _take_everywhere(self, take: Take, count: int) -> Take:
        """Takes so many micro-batches in all processes, or in none; replicas have seen to it themselves."""
        residence = self.residence
        if not residence.has_peers or self.told_as is not self:
            return take
        residence.begin_step()
        return take_everywhere(residence, self.fed_rows, take, count)

    @property
    def fed_rows(self) -> list[Row]:
        """The rows of the stages that read micro-batches, one for each thing that they read."""
        return [slot.row for slot in self._fed_slots]

    @property
    def chunk_size(self) -> int:
        """How many micro-batches a program handles."""
        return self._chunk.size

    @functools.cached_property
    def is_fed_here(self) -> bool:
        """Whether this process puts micro-batches on devices."""
        return any(feed_slot.row.is_here for feed_slot in self._fed_slots)

    @property
    def takes_elements(self) -> bool:
        """Whether this process has a stage that reads micro-batches; or there is nothing to read."""
        return not self._fed_slots or self.is_fed_here

    def _not_fed(self) -> list[Any]:
        """What stands for the leaves of a micro-batch or chunk in a process that has none of them."""
        element = jax.tree.leaves(self.residence.traced.element)
        return [
            absent((*self._chunk.axes, *element[leaf].shape), element[leaf].dtype, row.replicated)
            for leaf, row, _slot in self._fed_slots
        ]

    def compile(self, state: RunState, request: Request) -> None:
        """Compiles the programs of all stages, and those of the weight update."""
        if not self._is_compiled:
            column = self.as_column(state, request)
            self.note_compiled(
                compile_ahead(
                    [column],
                    self._weight_update,
                    self._chunk,
                    self._options,
                    not self.has_callbacks,
                    self.kept,
                )
            )

    def as_column(self, state: RunState, request: Request) -> Column:
        """What is to be compiled for its micro-batches; arguments as of `compile`."""
        return Column(
            self.plan,
            self._prepare(state, request.inputs)[0],
            state.accumulators,
            self.residence,
            self.gathered,
        )

    def note_compiled(self, found: Compiled) -> None:
        """Takes what the programs of each IPU take at most besides arguments and results."""
        self.temporary_bytes, self.residual_bytes = found
        self._is_compiled = True

    def run(self, state: RunState, pending: PendingStep) -> Progress:
        """Runs the weight update, and of a loop the iteration before."""
        request, accumulated = pending.request, pending.accumulated
        if accumulated is None:
            accumulated = finish(self.iterating(state, request, pending.elements))
        state = self.with_optimizer(state, accumulated.first_outputs)
        before = state.pipeline
        leaves = jax.tree.leaves(before.optimizer_state)
        variables, accumulators = accumulated.assigned, accumulated.accumulators
        is_full = state.num_accumulated + pending.count == request.every
        updated: list[Handed] = []
        if is_full and self.residence.updates is not None:
            made = self._weight_update.run(
                before.variables,
                leaves,
                accumulators,
                accumulated.last_outputs,
                UpdateCounts(request.every, int(as_int32(before.update_count))),
                watched.watched_updates(self, self._weight_update, int(as_int32(before.execution_count))),
            )
            leaves, accumulators = made.state_leaves, made.accumulators
            variables = {**variables, **made.variables}
            updated += [Handed(made.enqueued, None)] * bool(made.enqueued)
        after = self.advance(state, variables, leaves, accumulators, pending.count, request.every)
        return Progress(
            after, accumulated.carried, accumulated.collected, pending.count, accumulated.enqueued, updated
        )

    def _place_leaves(self, put: Callable[..., list[Any]], first: int, leaves: Sequence[Any]) -> list[Any]:
        """Leaves of a micro-batch or chunk where they are needed, in the order of `feed_slots`.

        Args:
          put: puts arrays on a row.
          first: the number of the first one that is given.
          leaves: all that follow, or some.
        """
        places = range(first, first + len(leaves))
        feed_slots = [feed_slot for feed_slot in self.plan.feed_slots if feed_slot.leaf in places]
        placed: list[Any] = [None] * len(feed_slots)
        for row in dict.fromkeys(self.residence.rows):
            wanted = [p for p, feed_slot in enumerate(feed_slots) if feed_slot.row is row]
            if wanted:
                arrays = [leaves[feed_slots[p].leaf - first] for p in wanted]
                for p, array in zip(wanted, put(arrays, row), strict=True):
                    placed[p] = array
        return placed

    def _accumulate(
        self,
        state: RunState,
        request: Request,
        next_chunk: Callable[[], Sequence[Any]],
        count: int,
    ) -> Dispatching:
        """Runs micro-batches by the schedule, and stops after each dispatch.

        It takes the memory of the accumulators.

        Args:
          state: before them.
          request: what they are a part of.
          next_chunk: returns the placed leaves of the next micro-batch or chunk, in the order of
            `feed_slots`. What it raises ends the step; the variables then have not changed.
          count: how many micro-batches to run, a multiple of the chunks' size.

        Returns:
          What the micro-batches gave, still being computed.
        """
        accumulators = dict(state.accumulators)
        variables = state.pipeline.variables
        prepared, placed_inputs = self._prepare(state, request.inputs)
        chunk_size = self._chunk.size
        num_chunks = count // chunk_size
        values: list[Any] = [None] * num_chunks
        first_outputs: list[Any] = []
        last_outputs: list[Any] = []
        carried: list[Any] = []
        collecting = self._collecting
        collected: list[Collected] = []
        sums = self._zero_sums() if collecting.is_summed else []
        enqueued: list[list[Any]] = [[] for _aval in self.residence.traced.enqueued_avals]
        assigned: dict[str, Any] = {}
        residence = self.residence
        constant = residence.constants.scalar
        empties_devices = self._phases is not None and not self._phases.keeps_values
        offloads = residence.offloads_in_micro_batches or empties_devices
        num_outputs = len(residence.traced.outputs)
        read_first, read_last = self._weight_update.read
        last_forward = self.plan.last_forward
        has_peers, tag = residence.has_peers, None
        feed_slots = [feed_slot.slot for feed_slot in self.plan.feed_slots]
        num_slots = self.plan.num_slots
        first_number, num_accumulated = request.iteration, state.num_accumulated
        phases = self._begin_phases()
        watcher, step = watching.current(), int(as_int32(state.pipeline.execution_count))
        log = action_log.current() if has_peers else None
        if watcher is not None:
            next_chunk = watched.watched_feed(watcher, step, chunk_size, next_chunk)
        for template, chunk in self._order(num_chunks):
            slots = values[chunk]
            if slots is None:
                slots = values[chunk] = [None] * num_slots
                for slot, array in zip(feed_slots, next_chunk(), strict=True):
                    slots[slot] = array
            if phases is not None:
                phases.enter(template, chunk, slots)
            row = template.row
            arguments = prepared[template.index].copy()
            names = template.accumulators
            for place, name in enumerate(names):
                arguments[place] = accumulators[name]
            for place, slot in template.loads:
                arguments[place] = slots[slot]
            for place in template.micro_batches:
                arguments[place] = constant(first_number + chunk * chunk_size, row)
            for place in template.accumulated:
                arguments[place] = constant(num_accumulated + chunk * chunk_size, row)
            if self.gathered and (asked := [n for _p, n in template.variables if n in self.gathered]):
                weights = iter((yield Gather(template.stage, asked)) or ())
                for place, name in template.variables:
                    if name in self.gathered:
                        arguments[place] = next(weights)
            if offloads and row.is_here:
                self._load(template, arguments, variables, None if phases is None else phases.weights)
            if template.joint is not None:
                sent = yield Together(template, arguments, step, first_number + chunk * chunk_size)
                assert sent is not None
                results = sent
            elif watcher is None or not row.is_here:
                results = template.function(*arguments)
            else:
                first = first_number + chunk * chunk_size
                launch = watched.launch_of(self.told_as, template, step, first, chunk_size)
                results = watcher.run(launch, template.function, arguments)
            if log is not None and row.is_here:
                kind, first = template.kind.name.lower(), first_number + chunk * chunk_size
                action = action_log.Action(kind, template.stage, step, first, chunk_size)
                awaited = [slots[slot] for _place, slot in template.loads if slot in self._received]
                log.note(action, results, awaited)
            accumulators.update(zip(names, results, strict=False))
            stored: list[Any] = []
            if residence.offloads_accumulators and names:
                stored = put(results[: len(names)], row, offloaded=True)
                accumulators.update(zip(names, stored, strict=True))
            for place, name in template.assigned:
                assigned[name] = results[place]
                for index, argument in self._readers[template.index, name]:
                    prepared[index][argument] = results[place]
            for place, leaf in template.enqueued:
                enqueued[leaf].append(results[place])
            for place, slot in template.stores:
                slots[slot] = results[place]
            for target, moved, targets in template.transfers:
                if has_peers:
                    tag = residence.tag(
                        f"{template.kind.name} of stage {template.stage} to {target.ipu}", chunk
                    )
                copies = copy_to([results[place] for place in moved], target, tag)
                for slot, array in zip(targets, copies, strict=True):
                    slots[slot] = array
                if watcher is not None and row.is_here and template.joint is None:
                    watcher.moved(launch, target.first_devices, copies)
            if template is last_forward:
                leaves = self._find_collected(slots, placed_inputs)
                if empties_devices:
                    leaves = put(leaves, row)
                if chunk == 0:
                    first_outputs = self._only(leaves[:num_outputs], read_first, 0)
                if chunk == num_chunks - 1:
                    last_outputs = self._only(leaves[:num_outputs], read_last, -1)
                    carried = [leaves[place] for place in self._carried_places]
                wanted = self._wanted(leaves)
                if collecting.is_summed:
                    sums = _add(sums, wanted) if row.is_here else sums
                else:
                    collected.append(collecting.collect(wanted, self._chunk.num_stacked))
            if phases is not None:
                phases.note(template, [*results, *stored])
                # Nothing else holds on to what a phase had: not the next one either, before it has its own.
                arguments = results = copies = leaves = stored = []
                array = None
            elif residence.offloads_activations and template.kept:
                self._store(template, slots)
            for slot in template.releases:
                slots[slot] = None
            if self.observer is not None:
                self.observer(template, chunk, values)
            yield None
        if phases is not None:
            phases.end()
        if collecting.is_summed:
            collected = [collecting.collect(sums, None)]
        if self.has_callbacks:
            made = [(part.outputs, part.loss) for part in collected]
            jax.block_until_ready((made, last_outputs, enqueued, assigned, accumulators))
        handed = [Handed(list(leaves), self._chunk.num_stacked) for leaves in zip(*enqueued, strict=True)]
        return Accumulated(first_outputs, last_outputs, carried, collected, handed, assigned, accumulators)

    def _order(self, num_chunks: int) -> list[Dispatch]:
        known = self._dispatches.get(num_chunks)
        if known is None:
            if len(self._dispatches) == _MAX_ORDERS:
                del self._dispatches[next(iter(self._dispatches))]
            known = self._make_order(num_chunks)
            self._dispatches[num_chunks] = known
        return known

    def find_brought(self, accumulator_dtypes: Mapping[str, Any], every: int) -> Mapping[int, Brought]:
        """What execution phases bring, by IPU; arguments as of `plan_memory`."""
        return self.find_brought_for(self._weight_update, accumulator_dtypes, every)

    def find_brought_for(
        self, update: WeightUpdate, accumulator_dtypes: Mapping[str, Any], every: int
    ) -> Mapping[int, Brought]:
        """What is brought, if a weight update ends the step; other arguments as of `plan_memory`."""
        bringing = self._find_bringing(update, accumulator_dtypes)
        if bringing is None:
            return {}
        return find_brought(bringing, every // self.chunk_size, self._make_order)

    def find_host_memory(self, accumulator_dtypes: Mapping[str, Any], link: LinkSpeed) -> HostMemory | None:
        """What execution phases bring and take away, for the simulator; None if nothing."""
        bringing = self._find_bringing(self._weight_update, accumulator_dtypes)
        return None if bringing is None else find_host_memory(bringing, self._make_order, link)

    def _find_bringing(
        self, update: WeightUpdate, accumulator_dtypes: Mapping[str, Any]
    ) -> Bringing | None:
        if self._phases is None:
            return None
        sizes = find_slot_bytes(
            self.plan, self.residence, self.programs, self.chunk_size, self.residual_bytes
        )
        return Bringing(
            self._phases,
            self.plan,
            self.residence,
            update.residence,
            self.gathered,
            sizes,
            accumulator_dtypes,
            donates_accumulators=not self.has_callbacks,
            donates_state=update.donates,
        )

    def _make_order(self, num_chunks: int) -> list[Dispatch]:
        return self.plan.dispatches(self._make_timetable(num_chunks))

    def _begin_phases(self) -> PhaseRun | None:
        if self._phases is None:
            return None
        levels = self.residence.traced.levels
        return PhaseRun(self._phases, levels, self.plan, self.residence.offloads_activations)

    def _load(
        self,
        template: Template,
        arguments: list[Any],
        variables: Mapping[str, Any],
        known: dict[tuple[int, str], Any] | None,
    ) -> None:
        """Puts those of a program's arguments that are in host memory on its row.

        Args:
          template: of the program.
          arguments: its own.
          variables: by full name.
          known: (IPU, full name) -> variables that are there already, to which those are added that are
            brought; None: nobody else needs them.
        """
        brought = []
        for place, name in template.variables:
            if name in self.residence.offloaded and name not in self.gathered:
                arguments[place] = (known or {}).get((template.row.ipu, name), variables[name])
                brought.append((place, name))
        places = [place for place, value in enumerate(arguments) if value is not None]
        named = dict(template.variables)
        partitions = [self.residence.partitions.get(named.get(place, ""), WHOLE) for place in places]
        loaded = put([arguments[place] for place in places], template.row, partitions=partitions)
        for place, value in zip(places, loaded, strict=True):
            arguments[place] = value
        if known is not None:
            known.update({(template.row.ipu, name): arguments[place] for place, name in brought})

    def _find_collected(self, slots: Sequence[Any], inputs: Mapping[tuple[Row, int], Any]) -> list[Any]:
        """What the last stage returned, and then the loss: of a chunk stacked, except inputs."""
        row = self.plan.last_forward.row
        return [
            slots[number] if kind == "slot" else inputs[row, number] for kind, number in self.plan.collected
        ]

    def _only(self, leaves: Sequence[Any], places: Collection[int], number: int) -> list[Any]:
        """The leaves of one micro-batch of a chunk, None in other places."""
        only: list[Any] = [None] * len(leaves)
        row = self.plan.last_forward.row
        for place in places:
            is_stacked = self.plan.collected[place][0] == "slot"
            if is_stacked and not row.is_here:
                shape = leaves[place].shape[len(self._chunk.axes) :]
                only[place] = absent(shape, leaves[place].dtype, row.replicated)
                continue
            only[place] = self._chunk.pick(leaves[place], number) if is_stacked else leaves[place]
        return only

    def _wanted(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that are collected, of a chunk stacked."""
        spread = self.plan.last_forward.row.program(self._chunk.spread)
        places = [*self._collecting.places, *([-1] if self._collecting.has_loss else [])]
        is_stacked = [self.plan.collected[place][0] == "slot" for place in places]
        return [
            leaves[place] if is_own else spread(leaves[place])
            for place, is_own in zip(places, is_stacked, strict=True)
        ]

    def _store(self, template: Template, slots: list[Any]) -> None:
        """Moves what is kept for backwards to host memory, on the row where it is."""
        for row in dict.fromkeys(self.plan.slot_rows[slot] for slot in template.kept):
            own = [slot for slot in template.kept if self.plan.slot_rows[slot] is row]
            stored = put([slots[slot] for slot in own], row, offloaded=True)
            for slot, value in zip(own, stored, strict=True):
                slots[slot] = value

    def _prepare(
        self, state: RunState, inputs: Sequence[Any]
    ) -> tuple[list[list[Any]], dict[tuple[Row, int], Any]]:
        """What stays the same during a step.

        Returns:
          Per template its arguments, None where they differ by micro-batch; and the inputs by row and
          position, where they are needed.
        """
        pipeline, tag = state.pipeline, self.residence.tag
        loss_scale = self.find_loss_scale(state)
        if self.residence.has_peers:
            self.residence.begin_step()
        templates = self.plan.templates.values()
        wanted = {(t.row, position): None for t in templates for _place, position in t.inputs}
        last_row = self.plan.last_forward.row
        wanted.update(
            {(last_row, position): None for kind, position in self.plan.collected if kind == "input"}
        )
        placed = {
            (row, position): put_host_copies(
                [inputs[position]], row, tag=tag(f"input {position} to {row.ipu}")
            )[0]
            for row, position in wanted
        }
        prepared = []
        for template in templates:
            row = template.row
            arguments: list[Any] = [None] * template.num_arguments
            lacking = self.residence.offloaded | self.gathered
            here = [(p, name) for p, name in template.variables if name not in lacking]
            # A shared variable is copied from its home once per step.
            shared = tag("variables of others", template.index)
            partitions = [self.residence.partitions.get(name, WHOLE) for _place, name in here]
            read = put([pipeline.variables[name] for _place, name in here], row, False, shared, partitions)
            for (place, _name), value in zip(here, read, strict=True):
                arguments[place] = value
            for place, position in template.inputs:
                arguments[place] = placed[row, position]
            for place in template.keys:
                arguments[place] = self.residence.constants.key(pipeline.key, row)
            for place in template.loss_scales:
                (arguments[place],) = put([loss_scale], row, tag=tag("loss scale", template.index))
            for place in template.execution_counts:
                (arguments[place],) = put([as_int32(pipeline.execution_count)], row)
            for place in template.update_counts:
                (arguments[place],) = put([as_int32(pipeline.update_count)], row)
            prepared.append(arguments)
        return prepared, placed


@functools.partial(jax.jit, donate_argnums=0)
def _add(totals: Any, parts: Any) -> Any:
    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        chunk_axes = tuple(range(part.ndim - total.ndim))
        return total + part.sum(chunk_axes, dtype=total.dtype)  # else JAX sums integers in 64 bits

    return jax.tree.map(add, totals, parts)
