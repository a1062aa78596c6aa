"""What execution phases have on the devices: brought from host memory, or on its way there.

A step is walked through as `phases` and `Residence.run_update` do it. A piece of work is a phase of a
micro-batch, or a program of the weight update. Nobody waits within a piece: all that its programs are
brought, and all that leaves at its end, may be on the devices at once, and until the piece has ended. A
piece begins when all but `num_ahead` of those before it have ended. Micro-batches and updates are counted
apart, so that at the begin of either the last pieces of the other may still be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.execution.dispatches import Dispatch, Plan
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.jaxprs.shapes import num_bytes
from ipu_pipeline.engine.planning.memory_plans import Brought
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.updates.accumulators import variable_of
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = ["Bringing", "find_brought", "find_host_memory", "find_slot_bytes"]

_CATEGORIES = ("variables", "optimizer", "accumulators", "activations")

Sizes: TypeAlias = "Counter[tuple[int, str]]"  # (IPU, category) -> bytes


@dataclass(frozen=True, eq=False)
class Bringing:
    """A pipeline in phases, as its memory is planned.

    Attributes:
      phases: of the pipeline.
      plan: the programs of a replica.
      residence: where their state lives.
      updating: where the state lives that the weight update reads; of replicas that of all of them.
      gathered: full names of variables that are gathered for each program.
      slot_bytes: of each slot of a micro-batch, on each device.
      accumulator_dtypes: of each trained variable's accumulators, by full name.
      donates_accumulators: whether a program takes the memory of the accumulators that it adds to.
      donates_state: whether an update takes the memory of what it replaces.
    """

    phases: ExecutionPhases
    plan: Plan
    residence: Residence
    updating: Residence
    gathered: Collection[str]
    slot_bytes: Sequence[int]
    accumulator_dtypes: Mapping[str, Any]
    donates_accumulators: bool
    donates_state: bool

    @property
    def leaves_devices(self) -> bool:
        """Whether there is anything to bring."""
        return self.residence.offloads_anything or not self.phases.keeps_values


def find_slot_bytes(
    plan: Plan,
    residence: Residence,
    programs: Sequence[StagePrograms],
    chunk_size: int,
    residual_bytes: Mapping[int, int],
) -> list[int]:
    """Bytes of each slot of a micro-batch or chunk, on each device.

    Args:
      plan: with the slots.
      residence: of its pipeline.
      programs: of the stages, for one micro-batch.
      chunk_size: how many micro-batches a program handles.
      residual_bytes: by stage, what a device has of all its residuals, where devices have parts.
    """
    sizes = []
    for kind, key in plan.slot_values:
        if kind is BindingKind.RESIDUAL:
            stage, number = key
            own = programs[stage].residuals
            size = num_bytes([own[number]])
            if stage in residual_bytes:
                size = round(size * residual_bytes[stage] / num_bytes(own))
        else:
            source = key if kind is BindingKind.VALUE else key[0]
            size = num_bytes([residence.traced.aval(source)])
        sizes.append(size * chunk_size)
    return sizes


def find_brought(
    bringing: Bringing, count: int, order: Callable[[int], list[Dispatch]]
) -> dict[int, Brought]:
    """What is on each IPU at the fullest moment of a step, besides what stays there.

    Args:
      bringing: the pipeline.
      count: micro-batches, or chunks of them, per weight update.
      order: what is dispatched for so many.

    Returns:
      By IPU; empty if nothing leaves the devices.
    """
    if not bringing.leaves_devices:
        return {}
    ahead = bringing.phases.num_ahead
    if ahead is not None:
        count = min(count, 2 + ahead)  # which have all moments that there are
    micro_batches = _MicroBatches(bringing, order(count)).pieces
    updates = _find_updates(bringing)
    if ahead is None:  # all of a step may be there
        moments = [_add([piece.own for piece in (*micro_batches, *updates)])]
    else:
        moments = [
            *_find_moments(micro_batches, updates, ahead),
            *_find_moments(updates, micro_batches, ahead),
        ]
    ipus = {row.ipu for row in bringing.residence.rows}
    return {
        ipu: max((Brought(*(moment[ipu, name] for name in _CATEGORIES)) for moment in moments), key=sum)
        for ipu in ipus
    }


def find_host_memory(
    bringing: Bringing, order: Callable[[int], list[Dispatch]], link: LinkSpeed
) -> HostMemory | None:
    """What is brought and taken away, for the simulator.

    Args:
      bringing: the pipeline.
      order: what is dispatched for so many micro-batches, or chunks of them.
      link: between each IPU and host memory.

    Returns:
      That of a micro-batch or chunk behind the first, and of an update; None if nothing leaves the devices.
    """
    if not bringing.leaves_devices:
        return None
    moved = _MicroBatches(bringing, order(2)).moved
    updating = bringing.updating
    programs = () if updating.updates is None else updating.updates.updates
    for program in programs:
        for way, values in (("to", program.arguments), ("from", program.results)):
            moved[way, "update", program.stage] += sum(
                _size_in_update(bringing, value, program.stage)
                for value in values
                if updating.is_offloaded(value)
            )

    def of(way: str, kind: str) -> tuple[float, ...]:
        return tuple(moved[way, kind, stage] for stage in range(len(bringing.residence.rows)))

    return HostMemory(
        phases=bringing.phases,
        link=link,
        num_bytes_to_forward=of("to", "forward"),
        num_bytes_to_backward=of("to", "backward"),
        num_bytes_to_update=of("to", "update"),
        num_bytes_from_forward=of("from", "forward"),
        num_bytes_from_backward=of("from", "backward"),
        num_bytes_from_update=of("from", "update"),
    )


@dataclass
class _Piece:
    """A piece of work.

    Attributes:
      own: what is there until it has ended.
      kept: what stays beyond that, when all of it has been started.
    """

    own: Sizes = field(default_factory=Counter)
    kept: Sizes = field(default_factory=Counter)


def _find_moments(pieces: Sequence[_Piece], before: Sequence[_Piece], ahead: int) -> list[Sizes]:
    """What is there while each piece is on its way, those before the first one being of the other kind."""
    moments = []
    for number, piece in enumerate(pieces):
        there = list(pieces[max(0, number - ahead) : number + 1])
        if number <= ahead:
            there += before[max(0, len(before) - ahead) :]
        moments.append(_add([*(one.own for one in there), piece.kept]))
    return moments


def _add(parts: Sequence[Sizes]) -> Sizes:
    total: Sizes = Counter()
    for part in parts:
        total.update(part)
    return total


@dataclass(eq=False)
class _Value:
    """An array that programs exchange."""

    ipu: int
    size: int
    num_slots: int = 0


class _MicroBatches:
    """Goes through the programs of micro-batches.

    Attributes:
      pieces: their phases.
      moved: what the last one's programs are brought ("to") and leave ("from"), by the direction, the kind
        of the program and its stage.
    """

    def __init__(self, bringing: Bringing, order: Sequence[Dispatch]) -> None:
        """Walks.

        Args:
          bringing: the pipeline.
          order: what is dispatched.
        """
        self.pieces: list[_Piece] = []
        self.moved: Counter[tuple[str, str, int]] = Counter()
        self._given = bringing
        self._slots: dict[int, _Value | None] = {}  # of the micro-batch; None: in host memory
        self._live: Sizes = Counter()
        self._kept: dict[int, tuple[str, int]] = {}  # slot -> kind and stage of the program that leaves it
        self._last = ("", 0)
        self._weights: set[tuple[int, str]] = set()  # that the phase has
        fed = {feed_slot.slot for feed_slot in bringing.plan.feed_slots}
        levels = bringing.residence.traced.levels
        now: Any = None
        for template, chunk in order:
            phase = (chunk, *bringing.phases.find(template.kind, levels[template.stage]))
            if phase != now:
                self._end()
                if now is None or now[0] != chunk:
                    # Micro-batches that are fed are in the plan of the feed.
                    self._slots = {slot: _Value(0, 0, 1) for slot in fed}
                    self.moved.clear()
                now = phase
                self.pieces.append(_Piece())
            self._last = template.kind.name.lower(), template.stage
            self._bring(template)
            self._make(template)
        self._end()

    def _bring(self, template: Template) -> None:
        given, ipu, own = self._given, template.row.ipu, self.pieces[-1].own
        residence, brought = given.residence, 0
        for _place, name in template.variables:
            is_known = (ipu, name) in self._weights
            if name in given.gathered or (name in residence.offloaded and not is_known):
                dtype = residence.traced.variables[name].dtype
                size = num_bytes([residence.part_of_gradient(name, dtype)])
                own[ipu, "variables"] += size
                brought += size
                self._weights.add((ipu, name))
        if residence.offloads_accumulators:
            for key in template.accumulators:
                size = _accumulator_bytes(given, residence, key)
                own[ipu, "accumulators"] += size if given.donates_accumulators else 2 * size
                brought += size
                self.moved["from", *self._last] += size
        for _place, slot in template.loads:
            if self._slots.get(slot, 0) is None:
                own[ipu, "activations"] += given.slot_bytes[slot]
                brought += given.slot_bytes[slot]
        self.moved["to", *self._last] += brought

    def _make(self, template: Template) -> None:
        sizes, ipu = self._given.slot_bytes, template.row.ipu
        made: dict[int, _Value] = {}
        for place, slot in template.stores:
            self._put(slot, made.setdefault(place, _Value(ipu, sizes[slot])))
        for target, places, slots in template.transfers:
            for place, slot in zip(places, slots, strict=True):
                if place not in made:
                    made[place] = _Value(ipu, sizes[slot])
                    self.pieces[-1].own[ipu, "activations"] += sizes[slot]  # until it has been sent
                self._put(slot, _Value(target.ipu, sizes[slot]))
        self._kept |= dict.fromkeys(template.kept, self._last)
        for slot in template.releases:
            self._drop(slot)
            self._slots.pop(slot, None)

    def _put(self, slot: int, value: _Value) -> None:
        if not value.num_slots:
            self._live[value.ipu, "activations"] += value.size
        value.num_slots += 1
        self._slots[slot] = value

    def _drop(self, slot: int) -> None:
        """Takes a value out of a slot; it may be on the device until the phase has ended."""
        value = self._slots.get(slot)
        if value is not None:
            value.num_slots -= 1
            if not value.num_slots:
                self._live[value.ipu, "activations"] -= value.size
                self.pieces[-1].own[value.ipu, "activations"] += value.size

    def _end(self) -> None:
        if not self.pieces:
            return
        stored: Collection[int] = ()
        if not self._given.phases.keeps_values:
            stored = list(self._slots)
        elif self._given.residence.offloads_activations:
            stored = [slot for slot in self._kept if slot in self._slots]
        for slot in stored:
            if self._slots[slot] is not None:
                self.moved["from", *self._kept.get(slot, self._last)] += self._given.slot_bytes[slot]
            self._drop(slot)
            self._slots[slot] = None
        self.pieces[-1].kept = Counter(self._live)
        self._kept, self._weights = {}, set()


def _accumulator_bytes(given: Bringing, residence: Residence, key: str) -> int:
    name = variable_of(key)
    return num_bytes([residence.part_of_gradient(name, given.accumulator_dtypes[name])])


def _find_updates(given: Bringing) -> list[_Piece]:
    """The programs of the weight update."""
    residence, pieces = given.updating, []
    if residence.updates is None:
        return []
    programs = residence.updates.updates
    last_read = {value: number for number, program in enumerate(programs) for value in program.arguments}
    # What was brought, until nobody reads it any more.
    there: dict[tuple[UpdateValue, int], int] = {}
    merged, are_there = _find_merged(given), _has_replicas(residence)
    for number, program in enumerate(programs):
        ipu, piece = residence.rows[program.stage].ipu, _Piece(kept=Counter(merged))
        for value in program.arguments:
            is_there = are_there and value.kind == UpdateKind.GRADIENT
            if residence.is_offloaded(value) and not is_there:
                there.setdefault((value, ipu), _size_in_update(given, value, program.stage))
        for value in program.results:
            is_donated = value.kind == UpdateKind.GRADIENT or given.donates_state
            takes_memory = is_donated and last_read.get(value) == number
            if residence.is_offloaded(value) and not takes_memory:
                piece.own[ipu, _category_of(value)] += _size_in_update(given, value, program.stage)
        for (value, place), size in list(there.items()):
            is_over = last_read[value] == number
            (piece.own if is_over else piece.kept)[place, _category_of(value)] += size
            if is_over:
                del there[value, place]
        pieces.append(piece)
    if are_there:  # zeros that were made in the memory of what was added up, on their way
        pieces[0].own.update(merged)
    return pieces


def _find_merged(given: Bringing) -> Sizes:
    """The accumulators that are added up before the update: of shared variables, or over replicas.

    They stay for all of the update.
    """
    residence, found = given.updating, Counter[tuple[int, str]]()
    if not residence.offloads_accumulators:
        return found
    owners, extra = residence.traced.owners, residence.accumulator_plan.extra
    for key, (name, stage) in extra.items():
        size = _accumulator_bytes(given, residence, key)
        found[residence.rows[owners[name]].ipu, "accumulators"] += 2 * size
        found[residence.rows[stage].ipu, "accumulators"] += size
    if _has_replicas(residence):
        for name in given.accumulator_dtypes:
            size = _accumulator_bytes(given, residence, name)
            found[residence.rows[owners[name]].ipu, "accumulators"] += size
    return found


def _has_replicas(residence: Residence) -> bool:
    return residence.rows[0].num_replicas > 1


def _category_of(value: UpdateValue) -> str:
    named = {UpdateKind.PARAMETER: "variables", UpdateKind.GRADIENT: "accumulators"}
    return named.get(value.kind, "optimizer")


def _size_in_update(given: Bringing, value: UpdateValue, stage: int) -> int:
    """Bytes of a variable, gradient or leaf of the optimizer's state on a device that updates it."""
    residence = given.updating
    assert residence.updates is not None
    if value.kind == UpdateKind.STATE:
        aval = residence.updates.state_leaves[value.key].aval
        shape, dtype = aval.shape, aval.dtype
    else:
        spec = residence.traced.variables[value.key]
        is_gradient = value.kind == UpdateKind.GRADIENT
        shape, dtype = spec.shape, given.accumulator_dtypes[value.key] if is_gradient else spec.dtype
    part = residence.sharding_in_update(value, residence.rows[stage]).shard_shape(shape)
    return num_bytes([jax.ShapeDtypeStruct(part, dtype)])
