"""Memory of a pipeline and of its plan: shapes and bytes, before anything has run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax

from ipu_pipeline.engine.devices.device_groups import HOST_MEMORY, WHOLE, divided_in_replica
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.plan.lowering import Layout
from ipu_pipeline.engine.plan.plan import ALL, Instruction, Op, Plan, Program, Value
from ipu_pipeline.engine.planning.memory_plans import Brought, IpuMemory, Moments, StageMemory
from ipu_pipeline.engine.programs.stage_programs import (
    Binding,
    BindingKind,
    StageProgram,
    StagePrograms,
    ValueKind,
    read_sources,
)
from ipu_pipeline.engine.programs.stage_programs import (
    Value as ProgramValue,
)
from ipu_pipeline.engine.schedules.clusters import ExecutionPhases, HostMemory, LinkSpeed
from ipu_pipeline.engine.schedules.timetables import ActionKind, Timetable
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline, TracedStage
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.ground.pytrees import num_bytes

# Reads a plan with shapes for values: what every register will hold, before anything has run.
#
# All micro-batches of some shapes are alike, so each block is followed once.


def find_shapes(
    plan: Plan,
    layout: Layout,
    given: Callable[[Value], Any],
    launch: Callable[[Program, Sequence[Any]], Sequence[Any]] | None = None,
) -> dict[Value, Any]:
    """The shape, dtype and sharding of each value."""
    known: dict[Value, Any] = {}
    launch = launch or trace

    def read(value: Value) -> Any:
        if value not in known:
            known[value] = given(value)
        return known[value]

    for block in dict.fromkeys(numbered.block for numbered in plan.blocks):
        for one in block.code:
            if one.op in (Op.FEED, Op.COUNT):
                made = list(map(given, one.writes))
            elif one.op is Op.RUN:
                assert one.program is not None
                made = list(launch(one.program, list(map(read, one.reads))))
            elif one.op in (Op.WAIT, Op.COLLECT):
                made = []
            else:
                made = _move(one, layout, list(map(read, one.reads)))
            known.update(zip(one.writes, made, strict=True))
    return known


def trace(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """The shapes of a program's results."""
    found = jax.eval_shape(program.jitted, *arguments)
    given = program.shardings
    shardings = given if isinstance(given, (list, tuple)) else [given] * len(found)
    whole = program.group.replicated
    return [made.update(sharding=own or whole) for made, own in zip(found, shardings, strict=True)]


def _move(one: Instruction, layout: Layout, values: Sequence[Any]) -> list[Any]:
    """What instructions that compute nothing make of shapes."""
    if one.op is Op.SPLIT:
        number = len(one.writes) // len(values)
        values = [value for value in values for _part in range(number)]
    elif one.op is Op.JOIN:
        values = values[:: len(values) // len(one.writes)]
    found = []
    for value, there in zip(values, one.writes, strict=True):
        value = value.wait() if hasattr(value, "wait") else value
        old, partition = value.sharding, WHOLE
        if isinstance(old, jax.sharding.NamedSharding):
            is_apart = one.op in (Op.LOAD, Op.STORE) and old.mesh == there.group.replicated.mesh
            is_apart = is_apart or one.op is Op.SAME
            partition = old.spec if is_apart else divided_in_replica(old)
            if one.op is Op.SEND or (one.op is Op.LOAD and not is_apart):
                partition = layout.partition(there)
        sharding = there.group.divided(partition)
        kind = HOST_MEMORY if there.is_away else there.group.replicated.memory_kind
        found.append(
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding.with_memory_kind(kind))
        )
    return found


# What a plan has on the devices of a replica: values are sizes. Nothing is compiled or run.
#
# What is split, joined or renamed is the same memory, which is free when none of its registers is used any
# more. Results take the memory of what is donated.
#
# The host may start all of a piece of work (an execution phase of a micro-batch, or a program of a weight
# update) before devices have done any of it, so all that is made in a piece may be there at once, until the
# piece has ended. A piece begins when all but a given number of those before it have ended. When a step
# begins, the last pieces of the step before may still be there.

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


# Adds up how much memory a pipeline or loop takes: the only place that does.
#
# Between its forward and its backward of a micro-batch a stage holds what the backward reads: the residuals
# that its forward returns, and those of its inputs that the backward takes. Between the halves of a
# backward it holds what the second half, the weight gradients, reads. The formula for a stage is
#
#     live activation bytes = micro-batches in flight x bytes that are held per micro-batch
#
# where a stage has 2(N-i)-1 micro-batches in flight with Grouped, N-i with Interleaved and 1 with
# Sequential (stage i of N, never more than there are micro-batches; see `schedules`), or the same number of
# chunks of them; with halves, micro-batches before the first one and between the two count each with their
# own bytes. The last stage holds nothing where its forward and backward are one program, and only what is
# between the halves where its forward does the first half.
#
# A device takes what its stages hold, the state that lives there, its accumulators, the micro-batches that
# wait there, and the temporary memory of the program that runs. What execution phases bring from host
# memory counts as it is at the fullest moment (`execution.phase_memory`).


def plan_stages(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    ipus: Sequence[int],
    fullest: Sequence[Moments],
    residual_bytes: Mapping[int, int] = MappingProxyType({}),
) -> tuple[StageMemory, ...]:
    """Plans what each stage holds of micro-batches in flight."""
    plans = []
    for index, (stage, own, moments) in enumerate(zip(traced.stages, programs, fullest, strict=True)):
        share = residual_bytes[index] / num_bytes(own.residuals) if index in residual_bytes else 1
        of_forward = _find_residuals(itertools.chain.from_iterable(own.forward.results))
        sizes = _find_held(traced, stage, own, own.backwards, of_forward)
        between = (0, 0) if own.weights is None else _find_held(traced, stage, own, [own.weights])
        plans.append(
            StageMemory(
                index,
                ipus[index],
                max(before + after for before, after in moments),
                round(share * sizes[0]),
                sizes[1],
                round(share * between[0]) + between[1],
                moments if own.is_halved else (),
            )
        )
    return tuple(plans)


def find_moments(programs: Sequence[StagePrograms], timetable: Timetable) -> list[Moments]:
    """When each stage may hold most; see `StageMemory.fullest`."""
    found = list(timetable.fullest)
    for stage, own in enumerate(programs):
        if own.backward is None and own.weights is not None:
            gradients = [value for value in own.weights.arguments if value.kind is ValueKind.COTANGENT]
            sending = {(value.consumer, _sends_in(programs[value.consumer])) for value in gradients}
            found[stage] = timetable.fullest_after(stage, sending) if sending else found[stage]
    return found


def _sends_in(programs: StagePrograms) -> ActionKind:
    """The action in which a stage makes the gradients of its inputs."""
    if programs.backward is None:
        return ActionKind.FORWARD
    return ActionKind.INPUT_GRADIENTS if programs.is_halved else ActionKind.BACKWARD


def _find_held(
    traced: TracedPipeline,
    stage: TracedStage,
    own: StagePrograms,
    readers: Sequence[StageProgram],
    among: Collection[int] | None = None,
) -> tuple[int, int]:
    """The bytes of what programs read of a micro-batch: residuals, and values that come from other stages.

    `among`: residuals that count. None: all, and gradients that have come from other stages.
    """
    values = {value for program in readers for value in program.arguments}
    read = _find_residuals(values)
    residuals = [own.residuals[number] for number in read if among is None or number in among]
    taken = [traced.aval(source) for source in read_sources(stage, *readers) if source.is_of_micro_batch]
    if among is None:
        taken += [stage.output_avals[v.index] for v in values if v.kind is ValueKind.COTANGENT]
    return num_bytes(residuals), num_bytes(taken)


def _find_residuals(values: Iterable[ProgramValue]) -> set[int]:
    return {value.index for value in values if value.kind is ValueKind.RESIDUAL}


def find_copies(traced: TracedPipeline, ipus: Sequence[int]) -> list[list[VariableSpec]]:
    """Per stage, the variables copied to its device, if the stage is the first there that reads them."""
    known: set[tuple[str, int]] = set()
    found = []
    for stage, ipu in zip(traced.stages, ipus, strict=True):
        new = [spec for spec in stage.variables if (spec.name, ipu) not in known]
        found.append([spec for spec in new if ipus[traced.owners[spec.name]] != ipu])
        known.update((spec.name, ipu) for spec in new)
    return found


def find_fed(
    traced: TracedPipeline, programs: Sequence[StagePrograms], ipus: Sequence[int], first: int = 0
) -> dict[int, list[Any]]:
    """Finds shapes and dtypes of a micro-batch's leaves, by the device that reads them."""
    read: dict[int, set[Source]] = {ipu: set() for ipu in ipus}
    read[ipus[-1]].update(traced.outputs)  # outputs are collected where the last stage is
    for ipu, stage, own in zip(ipus, traced.stages, programs, strict=True):
        read[ipu] |= read_sources(stage, own.forward, *own.backwards)

    def is_fed(source: Source) -> bool:
        return source.kind == "element" and source.index >= first

    return {ipu: [traced.aval(source) for source in found if is_fed(source)] for ipu, found in read.items()}


def plan_ipus(
    placement: StatePlacement,
    accumulator_dtypes: Mapping[str, Any],
    activations: Mapping[int, int],
    feeds: Mapping[int, int],
    temporaries: Mapping[int, int],
    brought: Mapping[int, Brought] = MappingProxyType({}),
) -> tuple[IpuMemory, ...]:
    """Plans what each device takes."""
    traced, updates = placement.traced, placement.updates
    ipus = [group.ipu for group in placement.groups]
    held: dict[tuple[str, int, bool], list[Any]] = {}  # by kind, device, and whether it is in host memory

    def add(kind: str, stage: int, is_offloaded: bool, aval: Any) -> None:
        held.setdefault((kind, ipus[stage], is_offloaded), []).append(aval)

    for name in traced.variables:
        add("variables", traced.owners[name], name in placement.offloaded, placement.part_of_variable(name))
    for stage, copies in enumerate(find_copies(traced, ipus)):
        for spec in copies:
            if spec.name not in placement.offloaded:
                add("variables", stage, False, spec)
    if updates is not None:
        for number, leaf in enumerate(updates.state_leaves):
            add("state", leaf.stage, placement.offloads_state, placement.part_of_leaf(number))
        owned = [(name, traced.owners[name]) for name in accumulator_dtypes]
        for name, stage in (*owned, *placement.accumulator_plan.extra.values()):
            aval = placement.part_of_gradient(name, accumulator_dtypes[name])
            add("accumulators", stage, placement.offloads_accumulators, aval)

    def size(kind: str, ipu: int, is_offloaded: bool = False) -> int:
        return num_bytes(held.get((kind, ipu, is_offloaded), ()))

    def of_micro_batches(ipu: int) -> int:
        return brought[ipu].num_activation_bytes if ipu in brought else activations.get(ipu, 0)

    nothing = Brought(0, 0, 0, 0)
    return tuple(
        IpuMemory(
            ipu=ipu,
            num_variable_bytes=size("variables", ipu),
            num_optimizer_bytes=size("state", ipu),
            num_accumulator_bytes=size("accumulators", ipu),
            num_activation_bytes=of_micro_batches(ipu),
            num_feed_bytes=feeds.get(ipu, 0),
            num_temporary_bytes=temporaries.get(ipu),
            num_host_bytes=sum(size(kind, ipu, True) for kind in ("variables", "state", "accumulators")),
            num_brought_variable_bytes=brought.get(ipu, nothing).num_variable_bytes,
            num_brought_optimizer_bytes=brought.get(ipu, nothing).num_optimizer_bytes,
            num_brought_accumulator_bytes=brought.get(ipu, nothing).num_accumulator_bytes,
        )
        for ipu in sorted(set(ipus))
    )
