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
from ipu_pipeline.engine.planning.memory_records import Brought, IpuMemory, Moments, StageMemory
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

# Shapes of values. All micro-batches of some shapes are alike, so each block is followed once.


def find_shapes(
    plan: Plan,
    layout: Layout,
    shape_of: Callable[[Value], Any],
    launch: Callable[[Program, Sequence[Any]], Sequence[Any]] | None = None,
) -> dict[Value, Any]:
    """The shape, dtype and sharding of each value."""
    shapes: dict[Value, Any] = {}
    launch = launch or trace

    def read(value: Value) -> Any:
        if value not in shapes:
            shapes[value] = shape_of(value)
        return shapes[value]

    for block in dict.fromkeys(numbered.block for numbered in plan.blocks):
        for instruction in block.code:
            if instruction.op in (Op.FEED, Op.COUNT):
                results = list(map(shape_of, instruction.writes))
            elif instruction.op is Op.RUN:
                assert instruction.program is not None
                results = list(launch(instruction.program, list(map(read, instruction.reads))))
            elif instruction.op in (Op.WAIT, Op.COLLECT):
                results = []
            else:
                results = _move(instruction, layout, list(map(read, instruction.reads)))
            shapes.update(zip(instruction.writes, results, strict=True))
    return shapes


def trace(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """The shapes of a program's results."""
    shapes = jax.eval_shape(program.jitted, *arguments)
    shardings = program.shardings
    if not isinstance(shardings, (list, tuple)):
        shardings = [shardings] * len(shapes)
    replicated = program.group.replicated
    pairs = zip(shapes, shardings, strict=True)
    return [shape.update(sharding=sharding or replicated) for shape, sharding in pairs]


def _move(instruction: Instruction, layout: Layout, values: Sequence[Any]) -> list[Any]:
    """The shapes of the results of an instruction that computes nothing."""
    if instruction.op is Op.SPLIT:
        number = len(instruction.writes) // len(values)
        values = [value for value in values for _part in range(number)]
    elif instruction.op is Op.JOIN:
        values = values[:: len(values) // len(instruction.writes)]
    shapes = []
    for value, target in zip(values, instruction.writes, strict=True):
        value = value.wait() if hasattr(value, "wait") else value
        old, partition = value.sharding, WHOLE
        if isinstance(old, jax.sharding.NamedSharding):
            is_apart = instruction.op in (Op.LOAD, Op.STORE) and old.mesh == target.group.replicated.mesh
            is_apart = is_apart or instruction.op is Op.SAME
            partition = old.spec if is_apart else divided_in_replica(old)
            if instruction.op is Op.SEND or (instruction.op is Op.LOAD and not is_apart):
                partition = layout.partition(target)
        sharding = target.group.divided(partition)
        kind = HOST_MEMORY if target.is_away else target.group.replicated.memory_kind
        shapes.append(
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding.with_memory_kind(kind))
        )
    return shapes


# The memory of a plan on the devices of a replica: values are sizes.
#
# What is split, joined or renamed is the same memory, which is free when none of its registers is used
# any more. Results take the memory of what is donated. The host may start all of a piece of work (an
# execution phase of a micro-batch, or a program of a weight update) before devices have done any of it,
# so all that is made in a piece may be there at once, until the piece has ended. A piece begins when all
# but a given number of those before it have ended; when a step begins, the last pieces of the step before
# may still be there.

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
            residuals = self.programs[stage].residuals
            size = num_bytes([residuals[number]])
            if stage in self.residual_bytes:
                size = round(size * self.residual_bytes[stage] / num_bytes(residuals))
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
    """The memory of the devices behind an instruction."""

    instruction: Instruction
    micro_batch: int
    on_devices: Counter[Place]  # behind it, before it frees anything; changes with the next one
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
    on_devices: Counter[Place] = Counter()
    memories: dict[int, _Memory] = {}
    ended: Counter[Place] = Counter()

    def drop(register: int, is_given: bool = False) -> None:
        memory = memories.pop(register, None)
        if memory is None or memory.users == 0:
            return  # its memory has been taken over, whatever other names it has
        memory.users = 0 if is_given else memory.users - 1
        if memory.users == 0:
            on_devices[memory.place] -= memory.size
            if not is_given:
                ended[memory.place] += memory.size

    def enter(register: int, memory: _Memory | None) -> None:
        drop(register)
        if memory is not None:
            on_devices[memory.place] += 0 if memory.users else memory.size
            memory.users += 1
            memories[register] = memory

    def make(register: int) -> _Memory | None:
        value = plan.names[register]
        if value.is_away or value.replica > 0 or value.group is None or not counts(value):
            return None
        return _Memory((value.group.ipu, category_of(value)), size(value))

    for register in plan.given:
        enter(register, make(register))
    for instruction, micro_batch in plan.instructions():
        # These write other names for the same memory.
        if instruction.op in (Op.SAME, Op.SPLIT, Op.JOIN) and instruction.writes:
            num_reads, num_writes = len(instruction.reads), len(instruction.writes)
            sources = [instruction.reads[place * num_reads // num_writes] for place in range(num_writes)]
            pairs = zip(instruction.writes, map(memories.get, sources), strict=True)
            new_memories = [None if plan.names[target].replica > 0 else memory for target, memory in pairs]
        else:
            new_memories = [make(register) for register in instruction.writes]
        for place in instruction.program.donated if instruction.program is not None else ():
            drop(instruction.reads[place], is_given=True)
        for register, memory in zip(instruction.writes, new_memories, strict=True):
            enter(register, memory)
        yield Moment(instruction, micro_batch, on_devices, ended)
        for register in instruction.frees:
            drop(register)


def category_of(value: Value) -> str:
    """The category of a value."""
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
    temporary: Counter[Place]  # what is on the devices until it has ended
    lasting: Counter[Place]  # what stays beyond that, when all of it has been started


def find_brought(step: Step) -> dict[int, Brought]:
    """The bytes on each device at the fullest moment of a step, besides what stays there."""
    if not step.leaves_devices:
        return {}
    pieces = _find_pieces(step)
    ahead = step.phases.num_ahead
    if ahead is None:  # everything of a step may be there
        moments = [_sum([piece.temporary for piece in pieces])]
    else:
        moments = []
        for number, piece in enumerate(pieces):
            overlapping = pieces[max(0, number - ahead) : number + 1]
            if number <= ahead:
                overlapping = [*overlapping, *pieces[max(0, len(pieces) - ahead) :]]
            moments.append(_sum([*(part.temporary for part in dict.fromkeys(overlapping)), piece.lasting]))
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
        if moment.instruction.op is Op.WAIT:
            pieces.append(_Piece(moment.ended - before, +moment.on_devices))
            before = moment.ended.copy()
    if moment is not None and not pieces:  # nothing is waited for
        pieces.append(_Piece(moment.ended - before, +moment.on_devices))
    return pieces


def _sum(parts: Sequence[Counter[Place]]) -> Counter[Place]:
    total: Counter[Place] = Counter()
    for part in parts:
        total.update(part)
    return total


def find_host_memory(step: Step, link: LinkSpeed) -> HostMemory | None:
    """The bytes that are brought to the devices and taken away, for the simulator.

    `step` has two micro-batches or chunks, the second of which counts.
    """
    if not step.leaves_devices:
        return None
    moved: Counter[tuple[str, str, int]] = Counter()
    names = step.plan.names
    for numbered, micro_batch in zip(step.plan.blocks, step.plan.micro_batches, strict=True):
        brought, place = 0, None
        for instruction in numbered.instructions:
            registers, program = (*instruction.reads, *instruction.writes), instruction.program
            is_other = any(names[register].replica > 0 for register in registers)
            if is_other and instruction.op not in (Op.SPLIT, Op.JOIN):
                continue
            if instruction.op is Op.RUN and program is not None and program.binds:
                kind = "update" if program.kind is None else program.kind.name.lower()
                place = kind, program.stage
                if kind == "update" or micro_batch == 1:
                    moved["to", *place] += brought
                brought = 0
            elif instruction.op is Op.STORE:
                assert place is not None or micro_batch == ALL
                if place is not None and (micro_batch == 1 or place[0] == "update"):
                    moved["from", *place] += sum(
                        step.size(names[register]) for register in instruction.reads
                    )
            elif instruction.op in (Op.LOAD, Op.SEND, Op.GATHER):
                brought += sum(
                    step.size(names[target])
                    for register, target in zip(instruction.reads, instruction.writes, strict=True)
                    if names[register].is_away or instruction.op is Op.GATHER
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


# The memory of stages and devices: only this part adds it up.
#
# Between its forward and its backward of a micro-batch a stage holds the residuals that its forward
# returns and the inputs that its backward takes; between the halves, what the second one reads. It holds
# them of 2(N-i)-1 micro-batches or chunks with Grouped, N-i with Interleaved and 1 with Sequential (stage
# i of N). The last stage holds nothing where its forward and backward are one program, and only what is
# between the halves where its forward does the first half.


def plan_stages(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    ipus: Sequence[int],
    fullest: Sequence[Moments],
    residual_bytes: Mapping[int, int] = MappingProxyType({}),
) -> tuple[StageMemory, ...]:
    """Plans what each stage holds of micro-batches in flight."""
    plans = []
    columns = zip(traced.stages, programs, fullest, strict=True)
    for index, (stage, stage_programs, moments) in enumerate(columns):
        residuals, weights = stage_programs.residuals, stage_programs.weights
        share = residual_bytes[index] / num_bytes(residuals) if index in residual_bytes else 1
        of_forward = _find_residuals(itertools.chain.from_iterable(stage_programs.forward.results))
        sizes = _find_held(traced, stage, stage_programs, stage_programs.backwards, of_forward)
        between = (0, 0) if weights is None else _find_held(traced, stage, stage_programs, [weights])
        plans.append(
            StageMemory(
                index,
                ipus[index],
                max(before + after for before, after in moments),
                round(share * sizes[0]),
                sizes[1],
                round(share * between[0]) + between[1],
                moments if stage_programs.is_halved else (),
            )
        )
    return tuple(plans)


def find_moments(programs: Sequence[StagePrograms], timetable: Timetable) -> list[Moments]:
    """The moments when each stage may hold most; see `StageMemory.fullest`."""
    moments = list(timetable.fullest)
    for stage, stage_programs in enumerate(programs):
        weights = stage_programs.weights
        if stage_programs.backward is None and weights is not None:
            gradients = [value for value in weights.arguments if value.kind is ValueKind.COTANGENT]
            sending = {(value.consumer, _sends_in(programs[value.consumer])) for value in gradients}
            moments[stage] = timetable.fullest_after(stage, sending) if sending else moments[stage]
    return moments


def _sends_in(programs: StagePrograms) -> ActionKind:
    """The action in which a stage makes the gradients of its inputs."""
    if programs.backward is None:
        return ActionKind.FORWARD
    return ActionKind.INPUT_GRADIENTS if programs.is_halved else ActionKind.BACKWARD


def _find_held(
    traced: TracedPipeline,
    stage: TracedStage,
    stage_programs: StagePrograms,
    readers: Sequence[StageProgram],
    among: Collection[int] | None = None,
) -> tuple[int, int]:
    """The bytes of what programs read of a micro-batch: residuals, and values that come from other stages.

    `among`: residuals that count. None: all, and gradients that have come from other stages.
    """
    values = {value for program in readers for value in program.arguments}
    numbers = _find_residuals(values)
    residuals = [stage_programs.residuals[number] for number in numbers if among is None or number in among]
    inputs = [traced.aval(source) for source in read_sources(stage, *readers) if source.is_of_micro_batch]
    if among is None:
        inputs += [stage.output_avals[v.index] for v in values if v.kind is ValueKind.COTANGENT]
    return num_bytes(residuals), num_bytes(inputs)


def _find_residuals(values: Iterable[ProgramValue]) -> set[int]:
    return {value.index for value in values if value.kind is ValueKind.RESIDUAL}


def find_copies(traced: TracedPipeline, ipus: Sequence[int]) -> list[list[VariableSpec]]:
    """The variables copied to each stage's device, if the stage is the first there to read them."""
    present: set[tuple[str, int]] = set()
    copies = []
    for stage, ipu in zip(traced.stages, ipus, strict=True):
        new = [spec for spec in stage.variables if (spec.name, ipu) not in present]
        copies.append([spec for spec in new if ipus[traced.owners[spec.name]] != ipu])
        present.update((spec.name, ipu) for spec in new)
    return copies


def find_fed(
    traced: TracedPipeline, programs: Sequence[StagePrograms], ipus: Sequence[int], first: int = 0
) -> dict[int, list[Any]]:
    """Finds shapes and dtypes of a micro-batch's leaves, by the device that reads them."""
    sources: dict[int, set[Source]] = {ipu: set() for ipu in ipus}
    sources[ipus[-1]].update(traced.outputs)  # outputs are collected where the last stage is
    for ipu, stage, stage_programs in zip(ipus, traced.stages, programs, strict=True):
        sources[ipu] |= read_sources(stage, stage_programs.forward, *stage_programs.backwards)

    def is_fed(source: Source) -> bool:
        return source.kind == "element" and source.index >= first

    return {ipu: list(map(traced.aval, filter(is_fed, group))) for ipu, group in sources.items()}


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
    avals: dict[tuple[str, int, bool], list[Any]] = {}  # by kind, device, and whether it is in host memory

    def add(kind: str, stage: int, is_offloaded: bool, aval: Any) -> None:
        avals.setdefault((kind, ipus[stage], is_offloaded), []).append(aval)

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
        return num_bytes(avals.get((kind, ipu, is_offloaded), ()))

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
