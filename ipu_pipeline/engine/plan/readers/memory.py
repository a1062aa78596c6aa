"""What a plan has on the devices of a replica: values are sizes. Nothing is compiled or run.

What is split, joined or renamed is the same memory, which is free when none of its registers is used any
more. Results take the memory of what is donated.

The host may start all of a piece of work (an execution phase of a micro-batch, or a program of a weight
update) before devices have done any of it, so all that is made in a piece may be there at once, until the
piece has ended. A piece begins when all but a given number of those before it have ended. When a step
begins, the last pieces of the step before may still be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import jax

from ipu_pipeline.engine.plan.lowering import Layout
from ipu_pipeline.engine.plan.plan import ALL, Instruction, Op, Plan, Value
from ipu_pipeline.engine.planning.memory_plans import Brought
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["Sizes", "Step", "find_brought", "find_host_memory", "follow_memory"]

_CATEGORIES = ("variables", "optimizer", "accumulators", "activations")

Place: TypeAlias = "tuple[int, str]"  # the device's number and the category


@dataclass(frozen=True, eq=False)
class Sizes:
    """The bytes of values, on each device."""

    layout: Layout
    programs: Sequence[StagePrograms]  # for one micro-batch
    chunk_size: int
    residual_bytes: dict[int, int]  # by stage, a device's part of the residuals, where devices have parts
    dtypes: dict[str, object]  # of the accumulators of trained variables, by full name

    def __call__(self, value: Value) -> int:
        """The bytes of a value; 0 for scalars and what is no array."""
        what, placement = value.what, self.layout.whole
        if isinstance(what, UpdateValue):
            return self._in_update(what, value)
        if not isinstance(what, Binding):
            if what[0] == "new":
                return self._in_update(what[1], value)
            is_sum = what[0] in ("mean", "merged", "zeros", "joined", "joined zeros")
            name = what[2] if what[0] == "joined" else what[1] if is_sum else None
            return 0 if name is None else self._of_gradient(name)
        kind, key = what
        if kind is BindingKind.ACCUMULATOR:
            return self._of_gradient(key)
        if kind in (BindingKind.VARIABLE, BindingKind.ASSIGNED):
            if value.micro_batch == ALL and value.replica == ALL:
                return self._in_update(UpdateValue(UpdateKind.PARAMETER, key), value)
            dtype = placement.traced.variables[key].dtype
            return num_bytes([placement.part_of_gradient(key, dtype)])
        if not what.is_of_micro_batch:
            return 0
        if kind is BindingKind.RESIDUAL:
            stage, number = key
            own = self.programs[stage].residuals
            size = num_bytes([own[number]])
            if stage in self.residual_bytes:
                size = round(size * self.residual_bytes[stage] / num_bytes(own))
            return size * self.chunk_size
        source = key if kind is BindingKind.VALUE else key[0]
        return num_bytes([placement.traced.aval(source)]) * self.chunk_size

    def _of_gradient(self, key: str) -> int:
        name = self.layout.variable_of(key)
        if name not in self.dtypes:
            return 0
        return num_bytes([self.layout.whole.part_of_gradient(name, self.dtypes[name])])

    def _in_update(self, what: UpdateValue, value: Value) -> int:
        placement = self.layout.whole
        if what.kind == UpdateKind.GRADIENT:
            return self._of_gradient(what.key)
        if what.kind == UpdateKind.STATE:
            assert placement.updates is not None
            aval = placement.updates.state_leaves[what.key].aval
        elif what.kind == UpdateKind.PARAMETER:
            aval = placement.traced.variables[what.key]
        else:
            return 0
        part = placement.sharding_in_update(what, value.group).shard_shape(aval.shape)
        return num_bytes([jax.ShapeDtypeStruct(part, aval.dtype)])


class Moment(NamedTuple):
    """What an instruction does to the memory of the devices."""

    one: Instruction
    micro_batch: int
    held: Counter[Place]  # behind it, before it frees anything; changes with the next one
    ended: Counter[Place]  # what is not held any more, besides memory that was taken over


@dataclass(eq=False)
class _Memory:
    place: Place
    size: int
    users: int = field(default=0)


def follow_memory(
    plan: Plan, size: Callable[[Value], int], counts: Callable[[Value], bool] = lambda _value: True
) -> Iterator[Moment]:
    """Follows a step on the devices of the first replica. `counts` says which values do."""
    held: Counter[Place] = Counter()
    memories: dict[int, _Memory] = {}
    ended: Counter[Place] = Counter()

    def drop(register: int, is_given: bool = False) -> None:
        memory = memories.pop(register, None)
        if memory is None or memory.users == 0:
            return  # its memory has been taken over, whatever other names it has
        memory.users = 0 if is_given else memory.users - 1
        if memory.users == 0:
            held[memory.place] -= memory.size
            if not is_given:
                ended[memory.place] += memory.size

    def enter(register: int, memory: _Memory | None) -> None:
        drop(register)
        if memory is not None:
            held[memory.place] += 0 if memory.users else memory.size
            memory.users += 1
            memories[register] = memory

    def make(register: int) -> _Memory | None:
        value = plan.names[register]
        if value.is_away or value.replica > 0 or value.group is None or not counts(value):
            return None
        return _Memory((value.group.ipu, category_of(value)), size(value))

    for register in plan.given:
        enter(register, make(register))
    for one, micro_batch in plan.instructions():
        if one.op in (Op.SAME, Op.SPLIT, Op.JOIN) and one.writes:  # other names for the same memory
            num_reads, num_writes = len(one.reads), len(one.writes)
            sources = [one.reads[place * num_reads // num_writes] for place in range(num_writes)]
            pairs = zip(one.writes, map(memories.get, sources), strict=True)
            made = [None if plan.names[there].replica > 0 else memory for there, memory in pairs]
        else:
            made = [make(register) for register in one.writes]
        for place in one.program.donated if one.program is not None else ():
            drop(one.reads[place], is_given=True)
        for register, memory in zip(one.writes, made, strict=True):
            enter(register, memory)
        yield Moment(one, micro_batch, held, ended)
        for register in one.frees:
            drop(register)


def category_of(value: Value) -> str:
    """What a value counts as."""
    what = value.what
    if type(what) is tuple:
        if what[0] != "new":
            return "accumulators"
        what = what[1]
    if isinstance(what, UpdateValue):
        named = {UpdateKind.PARAMETER: "variables", UpdateKind.GRADIENT: "accumulators"}
        return named.get(what.kind, "optimizer")
    if what.kind in (BindingKind.VARIABLE, BindingKind.ASSIGNED):
        return "variables"
    return "accumulators" if what.kind is BindingKind.ACCUMULATOR else "activations"


# Execution phases.


@dataclass(frozen=True, eq=False)
class Step:
    """A step in execution phases, as its memory is planned."""

    plan: Plan
    layout: Layout
    phases: ExecutionPhases
    size: Sizes

    @property
    def leaves_devices(self) -> bool:
        """Whether there is anything to bring."""
        return self.layout.whole.offloads_anything or not self.phases.keeps_values

    def counts(self, value: Value) -> bool:
        """Whether a value is not planned elsewhere: state that stays on the devices, and what is fed."""
        what, placement = value.what, self.layout.whole
        if value.micro_batch != ALL:
            is_fed = isinstance(what, Binding) and what.kind is BindingKind.VALUE and not value.copy
            return not (is_fed and what.key.kind == "element")
        if type(what) is tuple and what[0] == "new":
            return bool(value.copy) and placement.is_offloaded(what[1])
        category = category_of(value)
        if category == "accumulators":
            return placement.offloads_accumulators
        if not value.copy:
            return False
        if category == "optimizer":
            return placement.offloads_state
        return category == "variables" and what.key in placement.offloaded


@dataclass(eq=False)
class _Piece:
    own: Counter[Place]  # what is on the devices until it has ended
    kept: Counter[Place]  # what stays beyond that, when all of it has been started


def find_brought(step: Step) -> dict[int, Brought]:
    """What is on each device at the fullest moment of a step, besides what stays there."""
    if not step.leaves_devices:
        return {}
    pieces = _find_pieces(step)
    ahead = step.phases.num_ahead
    if ahead is None:  # everything of a step may be there
        moments = [_sum([piece.own for piece in pieces])]
    else:
        moments = []
        for number, piece in enumerate(pieces):
            there = pieces[max(0, number - ahead) : number + 1]
            if number <= ahead:
                there = [*there, *pieces[max(0, len(pieces) - ahead) :]]
            moments.append(_sum([*(one.own for one in dict.fromkeys(there)), piece.kept]))
    ipus = {group.ipu for group in step.layout.whole.groups}
    return {
        ipu: max((Brought(*(moment[ipu, name] for name in _CATEGORIES)) for moment in moments), key=sum)
        for ipu in ipus
    }


def _find_pieces(step: Step) -> list[_Piece]:
    pieces: list[_Piece] = []
    before: Counter[Place] = Counter()
    moment: Moment | None = None
    for moment in follow_memory(step.plan, step.size, step.counts):
        if moment.one.op is Op.WAIT:
            pieces.append(_Piece(moment.ended - before, +moment.held))
            before = moment.ended.copy()
    if moment is not None and not pieces:  # nothing is waited for
        pieces.append(_Piece(moment.ended - before, +moment.held))
    return pieces


def _sum(parts: Sequence[Counter[Place]]) -> Counter[Place]:
    total: Counter[Place] = Counter()
    for part in parts:
        total.update(part)
    return total


def find_host_memory(step: Step, link: LinkSpeed) -> HostMemory | None:
    """What is brought to the devices and taken away, for the simulator.

    `step` has two micro-batches or chunks, the second of which counts.
    """
    if not step.leaves_devices:
        return None
    moved: Counter[tuple[str, str, int]] = Counter()
    names = step.plan.names
    for numbered, micro_batch in zip(step.plan.blocks, step.plan.micro_batches, strict=True):
        brought, place = 0, None
        for one in numbered.instructions:
            is_other = any(names[register].replica > 0 for register in (*one.reads, *one.writes))
            if is_other and one.op not in (Op.SPLIT, Op.JOIN):
                continue
            if one.op is Op.RUN and one.program is not None and one.program.binds:
                kind = "update" if one.program.kind is None else one.program.kind.name.lower()
                place = kind, one.program.stage
                if kind == "update" or micro_batch == 1:
                    moved["to", *place] += brought
                brought = 0
            elif one.op is Op.STORE:
                assert place is not None or micro_batch == ALL
                if place is not None and (micro_batch == 1 or place[0] == "update"):
                    moved["from", *place] += sum(step.size(names[register]) for register in one.reads)
            elif one.op in (Op.LOAD, Op.SEND, Op.GATHER):
                brought += sum(
                    step.size(names[there])
                    for register, there in zip(one.reads, one.writes, strict=True)
                    if names[register].is_away or one.op is Op.GATHER
                )

    def of(way: str, kind: str) -> tuple[float, ...]:
        return tuple(moved[way, kind, stage] for stage in range(len(step.layout.whole.groups)))

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
