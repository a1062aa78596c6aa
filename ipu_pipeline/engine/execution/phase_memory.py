"""What execution phases have on the devices: brought from host memory, or on its way there.

A piece of work is a phase of a micro-batch, or a program of the weight update. Nothing waits within a
piece: all that is brought for its programs, and all that leaves at its end, may be on the devices at once,
until the piece has ended. A piece begins when all but `num_ahead` of those before it have ended.
Micro-batches and updates are counted apart, so when one of them begins, the last pieces of the other may
still be there.

This module replays the actions of a step with ghosts in place of arrays (`Ghosts`), which shows how much
of the devices they take and when they are released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.devices.underway import Underway
from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.plans import Plan
from ipu_pipeline.engine.execution.steps import Call, ColumnRun, Order, StepRun, follow
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.planning.memory_plans import Brought
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.state import PipelineState, RunState
from ipu_pipeline.engine.updates.accumulators import variable_of
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["PhasedStep", "find_brought", "find_host_memory"]

_CATEGORIES = ("variables", "optimizer", "accumulators", "activations")

Sizes: TypeAlias = "Counter[tuple[int, str]]"  # (device, category) -> bytes


@dataclass(frozen=True, eq=False)
class PhasedStep:
    """A pipeline in phases, as its memory is planned."""

    phases: ExecutionPhases  # of the pipeline
    column: Column  # the programs of a replica
    # where the state lives that the weight update reads, for all replicas
    updating: StatePlacement
    programs: Sequence[StagePrograms]  # of the stages, for one micro-batch
    order: Callable[[int], Order]  # the actions of a number of micro-batches, or of chunks
    chunk_size: int  # the number of micro-batches that a program handles
    # by stage, a device's part of the residuals, where devices have parts
    residual_bytes: Mapping[int, int]
    accumulator_dtypes: Mapping[str, Any]  # of each trained variable's accumulators, by full name
    donates_accumulators: bool  # whether a program takes the memory of the accumulators that it adds to
    donates_state: bool  # whether an update takes the memory of what it replaces

    @property
    def placement(self) -> StatePlacement:
        """Where the replica's state lives."""
        return self.column.placement

    @property
    def leaves_devices(self) -> bool:
        """Whether there is anything to bring."""
        return self.placement.offloads_anything or not self.phases.keeps_values


def _find_slot_bytes(
    plan: Plan,
    placement: StatePlacement,
    programs: Sequence[StagePrograms],
    chunk_size: int,
    residual_bytes: Mapping[int, int],
) -> list[int]:
    """Bytes of each slot of a micro-batch or chunk, on each device."""
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
            size = num_bytes([placement.traced.aval(source)])
        sizes.append(size * chunk_size)
    return sizes


def find_brought(step: PhasedStep, count: int) -> dict[int, Brought]:
    """What is on each device at the fullest moment of a step, besides what stays there."""
    if not step.leaves_devices:
        return {}
    ahead = step.phases.num_ahead
    if ahead is not None:
        count = min(count, 2 + ahead)  # more micro-batches have no other moments
    micro_batches = _go_through(step, count).pieces
    updates = _find_updates(step)
    if ahead is None:  # everything of a step may be there
        moments = [_add([piece.own for piece in (*micro_batches, *updates)])]
    else:
        moments = [
            *_find_moments(micro_batches, updates, ahead),
            *_find_moments(updates, micro_batches, ahead),
        ]
    ipus = {group.ipu for group in step.placement.groups}
    return {
        ipu: max((Brought(*(moment[ipu, name] for name in _CATEGORIES)) for moment in moments), key=sum)
        for ipu in ipus
    }


def find_host_memory(step: PhasedStep, link: LinkSpeed) -> HostMemory | None:
    """What is brought to the devices and taken away, for the simulator."""
    if not step.leaves_devices:
        return None
    moved = _go_through(step, 2).moved[1]
    updating = step.updating
    programs = () if updating.updates is None else updating.updates.updates
    for program in programs:
        for way, values in (("to", program.arguments), ("from", program.results)):
            moved[way, "update", program.stage] += sum(
                _size_in_update(step, value, program.stage)
                for value in values
                if updating.is_offloaded(value)
            )

    def of(way: str, kind: str) -> tuple[float, ...]:
        return tuple(moved[way, kind, stage] for stage in range(len(step.placement.groups)))

    return HostMemory(
        phases=step.phases,
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
    """A piece of work."""

    own: Sizes = field(default_factory=Counter)  # what is on the devices until it has ended
    kept: Sizes = field(default_factory=Counter)  # what stays beyond that, when all of it has been started


def _find_moments(pieces: Sequence[_Piece], before: Sequence[_Piece], ahead: int) -> list[Sizes]:
    """What is on the devices during each piece; `before`: earlier pieces, of the other kind."""
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


class _Meter:
    """Measures how much of the devices ghosts take, and where they go.

    Attributes:
      pieces: phases that have ended.
      moved: bytes that are brought for programs ("to") and that they leave ("from"), by the number of the
        micro-batch or chunk, then by the direction, the kind of the program and its stage.
    """

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.moved: dict[int, Counter[tuple[str, str, int]]] = {}
        self._last: Template | None = None  # the last program started
        self._live: Sizes = Counter()
        self._own: Sizes = Counter()
        self._brought = 0  # bytes for the next program
        self._now: Counter[tuple[str, str, int]] = Counter()

    def change(self, ghost: _Ghost, sign: int) -> None:
        """Notes that a ghost has come or gone; it may be on the device until the phase has ended."""
        self._live[ghost.ipu, ghost.category] += sign * ghost.here
        if sign < 0:
            self._own[ghost.ipu, ghost.category] += ghost.here

    def forget(self, ghost: _Ghost) -> None:
        """Notes that another ghost has taken a ghost's memory."""
        self._live[ghost.ipu, ghost.category] -= ghost.here

    def bring(self, size: int) -> None:
        """Notes bytes that are brought for the next program."""
        self._brought += size

    def start(self, template: Template, chunk: int) -> None:
        """Notes that a program is started for a micro-batch or chunk."""
        self._last, self._now = template, self.moved.setdefault(chunk, Counter())
        self._now["to", template.kind.name.lower(), template.stage] += self._brought
        self._brought = 0

    def leave(self, size: int, leaver: Template | None) -> None:
        """Notes bytes that go to host memory, left by a program: `leaver`, or the last one started."""
        template = leaver or self._last
        assert template is not None
        self._now["from", template.kind.name.lower(), template.stage] += size

    def close(self) -> None:
        """Notes that a phase has ended."""
        self.pieces.append(_Piece(+self._own, +self._live))
        self._own = Counter()


class _Ghost:
    """Stands in for an array: has only its size.

    Attributes:
      group: the group that it lies on; None in host memory.
      size: the bytes on each device.
      category: one of `_CATEGORIES`.
      here: the bytes that it takes of the device, besides what is planned elsewhere.
    """

    def __init__(
        self, meter: _Meter, group: DeviceGroup | None, size: int, category: str, here: int | None = None
    ) -> None:
        self.meter, self.group, self.size, self.category = meter, group, size, category
        self.ipu = -1 if group is None else group.ipu
        self.here = 0 if group is None else size if here is None else here
        meter.change(self, 1)

    def give(self) -> int:
        """Gives its memory to another ghost. Returns the bytes that it took of the device."""
        here = self.here
        self.meter.forget(self)
        self.here = 0
        return here

    def __del__(self) -> None:
        self.meter.change(self, -1)


class Ghosts:
    """A reading of a step, see `steps.Reading`: values are ghosts, or None where they are not counted."""

    def __init__(self, step: PhasedStep, meter: _Meter, slot_bytes: Sequence[int]) -> None:
        """Begins."""
        self._step, self._meter, self._slot_bytes = step, meter, slot_bytes

    def scalar(self, number: int, group: DeviceGroup) -> None:
        """Returns None: scalars are not counted."""

    def put(
        self, values: Sequence[Any], group: DeviceGroup, partitions: Sequence[PartitionSpec] | None = None
    ) -> list[Any]:
        """Returns ghosts on a group, and counts what is brought there."""
        del partitions
        return [
            value if value is None or value.group is group else self._bring(value, group)
            for value in values
        ]

    def _bring(self, ghost: _Ghost, group: DeviceGroup) -> _Ghost:
        self._meter.bring(ghost.size)
        return _Ghost(self._meter, group, ghost.size, ghost.category)

    def store(
        self, values: Sequence[Any], group: DeviceGroup, leavers: Sequence[Template | None] | None = None
    ) -> list[Any]:
        """Returns ghosts in host memory, and counts what is taken there."""
        del group
        of_each = [None] * len(values) if leavers is None else leavers
        return [
            ghost if ghost.group is None else self._leave(ghost, leaver)
            for ghost, leaver in zip(values, of_each, strict=True)
        ]

    def _leave(self, ghost: _Ghost, leaver: Template | None) -> _Ghost:
        self._meter.leave(ghost.size, leaver)
        return _Ghost(self._meter, None, ghost.size, ghost.category)

    def copy_to(self, values: Sequence[Any], group: DeviceGroup, tag: Any = None) -> list[Any]:
        """Returns ghosts on another group."""
        del tag
        return [_Ghost(self._meter, group, ghost.size, ghost.category) for ghost in values]

    def underway(self, limit: int | None) -> Underway:
        """Returns a counter that ends a piece in place of waiting."""
        return _Pieces(limit, self._meter)

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> list[Any]:
        """Returns ghosts of a program's results."""
        meter = self._meter
        meter.start(template, chunk)
        results: list[Any] = [None] * len(template.results)
        for place, _key in enumerate(template.accumulators):
            before = arguments[place]
            here = before.give() if self._step.donates_accumulators else before.here
            results[place] = _Ghost(meter, template.group, before.size, "accumulators", here)
        for place, slot in template.stores:
            results[place] = results[place] or _Ghost(
                meter, template.group, self._slot_bytes[slot], "activations"
            )
        return results


class _Pieces(Underway):
    """Tells a meter when all of a piece of work has been started."""

    def __init__(self, limit: int | None, meter: _Meter) -> None:
        super().__init__(limit)
        self._meter = meter

    def add(self, arrays: Any) -> None:
        """Keeps nothing."""

    def wait(self) -> None:
        """Ends the piece: the phase has released all that it will."""
        self._meter.close()


class _GhostsTogether:
    """Does with ghosts what columns do at the same time; see `steps.Together`."""

    def __init__(self, meter: _Meter, sizes: Mapping[str, int], groups: Sequence[DeviceGroup]) -> None:
        self._meter, self._sizes, self._groups = meter, sizes, groups

    def gather(self, stage: int, names: Sequence[str]) -> list[list[Any]]:
        """Counts the gathered variables as brought."""
        self._meter.bring(sum(self._sizes[name] for name in names))
        group = self._groups[stage]
        return [[_Ghost(self._meter, group, self._sizes[name], "variables") for name in names]]

    def launch(self, calls: Sequence[Call], chunk: int) -> list[Sequence[Any]]:
        """Does what each column would do by itself."""
        return [call.column.reading.launch(call.template, call.arguments, chunk) for call in calls]

    def reduce(self, group: DeviceGroup, columns: Sequence[ColumnRun]) -> None:
        """Does nothing: the join is counted with the update."""


def _go_through(step: PhasedStep, count: int) -> _Meter:
    """Goes through the micro-batches of a step."""
    column, placement, meter = step.column, step.placement, _Meter()
    plan, variables = column.plan, placement.traced.variables
    slot_bytes = _find_slot_bytes(plan, placement, step.programs, step.chunk_size, step.residual_bytes)
    sizes = {
        name: num_bytes([placement.part_of_gradient(name, spec.dtype)]) for name, spec in variables.items()
    }
    accumulators = {}
    for template in plan.templates.values():
        for key in template.accumulators:
            group = None if placement.offloads_accumulators else template.group
            size = _accumulator_bytes(step, placement, key)
            accumulators[key] = _Ghost(meter, group, size, "accumulators", 0)
    stored = {name: _Ghost(meter, None, size, "variables") for name, size in sizes.items()}

    def fed() -> list[Any]:  # fed micro-batches are counted in the plan of the feed
        return [
            _Ghost(meter, slot.group, slot_bytes[slot.slot], "activations", 0) for slot in plan.feed_slots
        ]

    reading = Ghosts(step, meter, slot_bytes)
    prepared = [[None] * len(template.arguments) for template in plan.templates.values()]
    state = RunState(PipelineState(stored, None, 0, 0, None), accumulators)
    run = StepRun(
        [column.run_of(reading, state, prepared, None, fed)],
        _GhostsTogether(meter, sizes, placement.groups),
    )
    del accumulators, state
    follow(step.order(count), run)
    return meter


def _accumulator_bytes(given: PhasedStep, placement: StatePlacement, key: str) -> int:
    name = variable_of(key)
    return num_bytes([placement.part_of_gradient(name, given.accumulator_dtypes[name])])


def _find_updates(given: PhasedStep) -> list[_Piece]:
    """The programs of the weight update."""
    placement, pieces = given.updating, []
    if placement.updates is None:
        return []
    programs = placement.updates.updates
    last_read = {value: number for number, program in enumerate(programs) for value in program.arguments}
    # What was brought, until its last reader.
    there: dict[tuple[UpdateValue, int], int] = {}
    merged, are_there = _find_merged(given), _has_replicas(placement)
    for number, program in enumerate(programs):
        ipu, piece = placement.groups[program.stage].ipu, _Piece(kept=Counter(merged))
        for value in program.arguments:
            is_there = are_there and value.kind == UpdateKind.GRADIENT
            if placement.is_offloaded(value) and not is_there:
                there.setdefault((value, ipu), _size_in_update(given, value, program.stage))
        for value in program.results:
            is_donated = value.kind == UpdateKind.GRADIENT or given.donates_state
            takes_memory = is_donated and last_read.get(value) == number
            if placement.is_offloaded(value) and not takes_memory:
                piece.own[ipu, _category_of(value)] += _size_in_update(given, value, program.stage)
        for (value, place), size in list(there.items()):
            is_over = last_read[value] == number
            (piece.own if is_over else piece.kept)[place, _category_of(value)] += size
            if is_over:
                del there[value, place]
        pieces.append(piece)
    if are_there:  # zeros, made in the memory of the sums, on their way
        pieces[0].own.update(merged)
    return pieces


def _find_merged(given: PhasedStep) -> Sizes:
    """The accumulators that are added up before the update: of shared variables, or over replicas.

    They stay for all of the update.
    """
    placement, found = given.updating, Counter[tuple[int, str]]()
    if not placement.offloads_accumulators:
        return found
    owners, extra = placement.traced.owners, placement.accumulator_plan.extra
    for key, (name, stage) in extra.items():
        size = _accumulator_bytes(given, placement, key)
        found[placement.groups[owners[name]].ipu, "accumulators"] += 2 * size
        found[placement.groups[stage].ipu, "accumulators"] += size
    if _has_replicas(placement):
        for name in given.accumulator_dtypes:
            size = _accumulator_bytes(given, placement, name)
            found[placement.groups[owners[name]].ipu, "accumulators"] += size
    return found


def _has_replicas(placement: StatePlacement) -> bool:
    return placement.groups[0].num_replicas > 1


def _category_of(value: UpdateValue) -> str:
    named = {UpdateKind.PARAMETER: "variables", UpdateKind.GRADIENT: "accumulators"}
    return named.get(value.kind, "optimizer")


def _size_in_update(given: PhasedStep, value: UpdateValue, stage: int) -> int:
    """Bytes of a variable, gradient or leaf of the optimizer's state on a device that updates it."""
    placement = given.updating
    assert placement.updates is not None
    if value.kind == UpdateKind.STATE:
        aval = placement.updates.state_leaves[value.key].aval
        shape, dtype = aval.shape, aval.dtype
    else:
        spec = placement.traced.variables[value.key]
        is_gradient = value.kind == UpdateKind.GRADIENT
        shape, dtype = spec.shape, given.accumulator_dtypes[value.key] if is_gradient else spec.dtype
    part = placement.sharding_in_update(value, placement.groups[stage]).shard_shape(shape)
    return num_bytes([jax.ShapeDtypeStruct(part, dtype)])
