"""Plans: a step as data, blocks of instructions over numbered registers, and in words."""

from __future__ import annotations

import array
import enum
import heapq
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

#     schedule, traced stages, layout
#             |  lowering           the code of one micro-batch, and of the weight update, over named values
#             |  passes             sends, offloading, replicas, sharding, phases
#             v
#     Maker                         blocks along the schedule
#             |  Registers          numbers, and when each register is free
#             v
#           Plan  ->  readers       run, compilation, op_by_op, memory, describe
#
# Before they are numbered, instructions read and write `Value`s, which are names; behind that, numbers of
# registers. The name of a register says what it holds and where, so that a pass needs no context. A
# register is free behind the last instruction that uses it: nothing else says how long an array lives.
# All that a program takes is a register, so that the loop that runs a step has no branch, and unused
# features cost nothing. Where all is on one device, its code becomes one program (`traced_code`).

ALL = -1  # in place of a replica, micro-batch or frame: what is one for all of them


class Group(Protocol):
    """A group of devices, as plans know it."""

    @property
    def ipu(self) -> int:
        """Its number in the device mapping."""


class Op(enum.IntEnum):
    """The operation of an instruction."""

    FEED = 0  # a replica's next micro-batch comes from the feed to the groups that read it
    COUNT = 1  # the number of the micro-batch comes to the groups that read it
    RUN = 2  # a program is started
    SEND = 3  # copies from one IPU to another
    LOAD = 4  # copies from host memory to the devices
    STORE = 5  # copies from the devices to host memory
    GATHER = 6  # whole values in each replica, of which each has a part
    SPLIT = 7  # each replica's part of an array; nothing is copied
    JOIN = 8  # the inverse
    SAME = 9  # another name for a value
    COLLECT = 10  # appends values to a list, which is read first
    WAIT = 11  # the host waits for arrays, or until few enough pieces of a list of work are unfinished


class Value(NamedTuple):
    """A value of a step, and where it lies: the name of a register."""

    what: Any  # a `Binding` or `UpdateValue`; or a tuple, for what only a pass knows
    group: Any
    replica: int = ALL  # ALL: one array on the devices of all replicas
    micro_batch: int = ALL  # 0: each micro-batch has its own
    is_away: bool = False  # in host memory
    copy: int = 0  # tells copies for different readers apart


@dataclass(eq=False)
class Program:
    """A program that RUN starts. `function` may be replaced: by an executable, or by an evaluator."""

    name: str  # for profiles and reports
    group: Any
    jitted: Any  # takes arrays, returns a list of them
    function: Callable[..., Sequence[Any]]
    source: Callable[..., Sequence[Any]]  # what was jitted
    shardings: Any  # of the results; a list has None where the partitioner chooses
    options: Mapping[str, Any]  # XLA's
    donated: tuple[int, ...] = ()  # arguments whose memory it may take
    kind: Any = None  # the ActionKind; None for what is no stage's
    stage: int = 0
    binds: Sequence[Any] = ()  # what the arguments of a stage's or update's program stand for
    results: Sequence[Any] = ()  # what the results stand for
    is_compiled: bool = False


class Instruction(NamedTuple):
    """A part of a step. Reads and writes are `Value`s, or numbers of registers."""

    op: Op
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    group: Any  # where its results lie
    program: Program | None = None  # of RUN
    replica: int = ALL
    micro_batch: int = ALL  # 0: each micro-batch has its own
    size: int | None = None  # of COLLECT, the micro-batches of a chunk; None: it is one
    frees: tuple[int, ...] = ()  # registers that are not used behind it


@dataclass(frozen=True, eq=False)
class Block:
    """Instructions that follow each other: a program, what goes before it and what follows from it."""

    name: Any  # (kind, stage) of a program, or a text
    code: tuple[Instruction, ...]  # over values
    scope: Any = None  # micro-batches whose code has another scope have other registers


@dataclass(frozen=True, eq=False, slots=True)
class Numbered:
    """A block over numbers of registers. Micro-batches that have the same registers share it."""

    block: Block
    frame: Any  # of its micro-batch; ALL
    # Of each instruction, the registers that it reads, writes and frees. A large plan has many of these,
    # and Python's collector of garbage does not look into tuples of numbers.
    registers: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions, over registers."""
        pairs = zip(self.block.code, self.registers, strict=True)
        return tuple(
            instruction._replace(reads=reads, writes=writes, frees=frees)
            for instruction, (reads, writes, frees) in pairs
        )


class Results(NamedTuple):
    """The results of a step: values, and once they are numbered, registers."""

    variables: Mapping[str, Any]  # those that change, by full name
    leaves: Sequence[Any]  # of the optimizer's state
    accumulators: Mapping[str, tuple[Any, ...]]  # by key, one per replica
    collected: Sequence[Sequence[Any]]  # by replica, what is wanted of the last stage: one list, or sums
    enqueued: Sequence[Sequence[Any]]  # by replica and leaf, lists of what stages enqueue
    first: Sequence[Mapping[int, Any]]  # by replica and place, outputs that the optimizer begins with
    carried: Sequence[tuple[Any, ...]]  # in a loop, by replica, what the next iteration takes
    updated: tuple[Any, ...]  # what the weight update enqueues


@dataclass(frozen=True, eq=False)
class Plan:
    """A step."""

    blocks: Sequence[Numbered]
    micro_batches: Sequence[int]  # of each block; ALL
    num_kept: int  # of these, how many leave the state as it is; the others are the weight update
    given: Mapping[int, Value]  # registers that are filled before the step
    results: Results
    names: Sequence[Value]  # what each register holds, of some micro-batch

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """All instructions, each with the number of its micro-batch."""
        by_block = {numbered: numbered.instructions for numbered in dict.fromkeys(self.blocks)}
        for numbered, micro_batch in zip(self.blocks, self.micro_batches, strict=True):
            for instruction in by_block[numbered]:
                yield instruction, micro_batch


# Registers. Those of a micro-batch are its frame, which another micro-batch takes over once it is
# complete. So a plan has as many registers, and as many different instructions, as the micro-batches in
# flight need: for 64 stages and 4,096 micro-batches it is made in 0.5 s, with 23 MiB.

_Frees: TypeAlias = "tuple[tuple[Value, ...], ...]"  # by instruction, what is not used behind it

_END = Block("end of micro-batches", (Instruction(Op.SAME, (), (), None),))


class Laid:
    """Blocks along a schedule.

    Attributes:
      blocks: the blocks; once they are numbered, `Numbered` ones.
      numbers: of each, the number of its micro-batch; ALL.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        """Begins with blocks that are no micro-batch's."""
        self.blocks: list[Any] = list(blocks)
        self.numbers = array.array("i", [ALL] * len(self.blocks))  # there may be half a million

    def add(self, block: Block, number: int = ALL) -> None:
        """Adds a block."""
        self.blocks.append(block)
        self.numbers.append(number)

    def insert(self, place: int, block: Any) -> None:
        """Puts a block that is no micro-batch's between others."""
        self.blocks.insert(place, block)
        self.numbers.insert(place, ALL)


class Registers:
    """The registers of a pipeline. All of its plans share them, so that one can go on where another ends.

    Attributes:
      names: what each register holds.
    """

    def __init__(self) -> None:
        """Begins without any."""
        self.names: list[Value] = []
        self._lock = threading.RLock()  # threads may run steps at the same time
        self._numbers: dict[tuple[Value, Any], int] = {}
        self._numbered: dict[tuple[Block, Any, int], Numbered] = {}
        self._courses: dict[tuple[Block, ...], list[_Frees]] = {}
        self._frees: dict[_Frees, _Frees] = {}  # equal ones are one object, whose id stands for them

    def find(self, value: Value, frame: Any = ALL) -> int:
        """The register of a value, of a micro-batch with this frame."""
        key = value, ALL if value.micro_batch == ALL else frame
        number = self._numbers.get(key)
        if number is None:
            with self._lock:
                number = self._numbers.setdefault(key, len(self.names))
                if number == len(self.names):
                    self.names.append(value)
        return number

    def number(self, laid: Laid, num_kept: int, results: Results) -> Plan:
        """Makes a plan of blocks, numbered in place; `results` has values. For `num_kept` see `Plan`."""
        with self._lock:
            return self._make_plan(laid, num_kept, results)

    def _make_plan(self, laid: Laid, num_kept: int, results: Results) -> Plan:
        blocks, numbers = laid.blocks, laid.numbers
        distinct = self._number_micro_batches(laid)
        shared = dict.fromkeys(
            value for block in distinct for value in values_in(block.code) if value.micro_batch == ALL
        )
        live = set(values_of(results))

        def number_once(begin: int, stop: int) -> None:
            for place in reversed(range(begin, stop)):
                if numbers[place] == ALL:
                    blocks[place] = self._number(blocks[place], ALL, _find_frees(blocks[place], live))

        number_once(num_kept, len(blocks))
        # What micro-batches use stays until all of them are complete.
        end = self._number(_END, ALL, (tuple(value for value in shared if value not in live),))
        live.update(shared)
        number_once(0, num_kept)
        laid.insert(num_kept, end)
        left_behind: Results = _map(self.find, results)
        inputs = self._find_inputs(blocks, left_behind)
        return Plan(blocks, numbers, num_kept + 1, inputs, left_behind, self.names)

    def _number_micro_batches(self, laid: Laid) -> Collection[Block]:
        """Numbers the blocks of micro-batches. Returns the different ones."""
        blocks = laid.blocks
        courses: dict[int, array.array[int]] = {}
        for place, number in enumerate(laid.numbers):
            if number != ALL:
                if number not in courses:
                    courses[number] = array.array("i")
                courses[number].append(place)
        frames: list[tuple[int, int, Any]] = []  # frames in use: end, number and scope
        free: dict[Any, list[int]] = {}
        counts: dict[Any, int] = {}
        distinct: dict[Block, None] = {}
        by_course: dict[tuple[Any, ...], list[Numbered]] = {}
        for places in sorted(courses.values(), key=lambda course_places: course_places[0]):
            while frames and frames[0][0] < places[0]:
                _end, frame, scope = heapq.heappop(frames)
                heapq.heappush(free[scope], frame)
            course = tuple([blocks[place] for place in places])
            scope = course[0].scope
            if free.setdefault(scope, []):
                frame = heapq.heappop(free[scope])
            else:
                frame = counts[scope] = counts.get(scope, -1) + 1
            heapq.heappush(frames, (places[-1], frame, scope))
            numbered_blocks = by_course.get((course, frame))
            if numbered_blocks is None:
                distinct.update(dict.fromkeys(course))
                pairs = zip(course, self._find_course(course), strict=True)
                numbered_blocks = [self._number(block, (scope, frame), frees) for block, frees in pairs]
                by_course[course, frame] = numbered_blocks
            for place, numbered in zip(places, numbered_blocks, strict=True):
                blocks[place] = numbered
        return distinct

    def _find_course(self, course: tuple[Block, ...]) -> list[_Frees]:
        """The values that each block frees, where a micro-batch's blocks have this order."""
        frees = self._courses.get(course)
        if frees is None:
            live, written = set[Value](), set[Value]()
            for instruction in (instruction for block in course for instruction in block.code):
                for value in instruction.reads:
                    if value.micro_batch != ALL and value not in written:
                        raise AssertionError(f"{instruction} reads {value}, which nothing has written.")
                written.update(instruction.writes)
            backwards = [_find_frees(block, live, 0) for block in reversed(course)]
            frees = self._courses[course] = list(reversed(backwards))
        return frees

    def _number(self, block: Block, frame: Any, frees: _Frees) -> Numbered:
        frees = self._frees.setdefault(frees, frees)
        key = block, frame, id(frees)
        result = self._numbered.get(key)
        if result is None:
            numbered = []
            for instruction, values in zip(block.code, frees, strict=True):
                _check_places(instruction)
                reads, writes, freed = (
                    tuple([self.find(value, frame) for value in some])
                    for some in (instruction.reads, instruction.writes, values)
                )
                numbered.append((reads, writes, freed))
            result = self._numbered[key] = Numbered(block, frame, tuple(numbered))
        return result

    def _find_inputs(self, blocks: Sequence[Numbered], results: Results) -> dict[int, Value]:
        """The registers that are read, or left, before they are written."""
        written, inputs = set[int](), dict[int, None]()
        for reads, writes, _frees in (
            registers for numbered in dict.fromkeys(blocks) for registers in numbered.registers
        ):
            inputs.update(dict.fromkeys(register for register in reads if register not in written))
            written.update(writes)
        inputs.update(dict.fromkeys(register for register in values_of(results) if register not in written))
        return {register: self.names[register] for register in inputs}


def values_in(code: Iterable[Instruction]) -> Iterator[Value]:
    """The values that instructions read and write."""
    for instruction in code:
        yield from instruction.reads
        yield from instruction.writes


def _find_frees(block: Block, live: set[Value], micro_batch: int = ALL) -> _Frees:
    """The values not used behind each instruction; `live`: those used behind the block, extended."""
    frees = []
    for instruction in reversed(block.code):
        free = [
            value
            for value in dict.fromkeys((*instruction.reads, *instruction.writes))
            if value.micro_batch == micro_batch and value not in live
        ]
        live.update(free)
        frees.append(tuple(free))
    return tuple(reversed(frees))


def _check_places(instruction: Instruction) -> None:
    """Raises an AssertionError if a program does not find what it reads on its devices."""
    for value in instruction.reads if instruction.op is Op.RUN else ():
        if value.is_away or value.group is not instruction.group:
            raise AssertionError(f"{instruction} reads {value}, which is elsewhere.")


def _map(function: Callable[[Any], Any], part: Any) -> Any:
    """Applies a function to the values in lists, tuples and dicts."""
    if isinstance(part, Value):
        return function(part)
    if isinstance(part, Mapping):
        return {key: _map(function, item) for key, item in part.items()}
    parts = [_map(function, item) for item in part]
    return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)


def values_of(part: Any) -> Iterator[Any]:
    """The values, or numbers of registers, in lists, tuples and dicts."""
    if isinstance(part, (Value, int)):
        yield part
    else:
        for item in part.values() if isinstance(part, Mapping) else part:
            yield from values_of(item)


# Plans as text.


def describe(plan: Plan) -> str:
    """The blocks of a plan, such as "F0.1: load 2, run stage0_forward, send 1 to 1, free 3".

    F, B, I and W are the kinds of programs, followed by the stage and the number of the micro-batch or
    chunk; other numbers are those of arrays, and of devices in the device mapping.
    """
    lines = []
    for numbered, micro_batch in zip(plan.blocks, plan.micro_batches, strict=True):
        name = numbered.block.name
        if isinstance(name, tuple):
            name = f"{name[0].letter}{name[1]}"
        number = "" if micro_batch == ALL else f"{'.' if len(name) == 2 else ' '}{micro_batch}"
        parts = [part for instruction in numbered.instructions for part in _parts(instruction)]
        lines.append(f"{name}{number}: {', '.join(parts) or 'nothing'}")
    return "\n".join(lines)


def _parts(instruction: Instruction) -> list[str]:
    freed = [f"free {len(instruction.frees)}"] if instruction.frees else []
    if instruction.op is Op.SAME and not instruction.reads:
        return freed
    if instruction.op is Op.RUN and instruction.program is not None:
        return [f"run {instruction.program.name}", *freed]
    number = len(instruction.writes) if instruction.writes else len(instruction.reads)
    target = f" to {instruction.group.ipu}" if instruction.op is Op.SEND else ""
    return [f"{instruction.op.name.lower()} {number}{target}", *freed]
