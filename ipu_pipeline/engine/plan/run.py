"""Runs a plan on the devices, with a watcher if there is one."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices import action_log
from ipu_pipeline.engine.devices.device_groups import join, split
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.placement import copy_to, put
from ipu_pipeline.engine.devices.state_placement import gather_replicas, is_apart
from ipu_pipeline.engine.plan.lowering import Layout
from ipu_pipeline.engine.plan.plan import ALL, Block, Instruction, Numbered, Op, Plan, Value
from ipu_pipeline.engine.programs.stage_programs import ValueKind
from ipu_pipeline.engine.state import Collected
from ipu_pipeline.engine.watching import Launch, LaunchKind, Watcher

# An instruction's function, and the registers that it reads, writes and frees.
Linked: TypeAlias = "tuple[Callable[..., Sequence[Any]], tuple[int, ...], tuple[int, ...], tuple[int, ...]]"


class Underway:
    """Pieces of work that devices may not have done yet, each known by arrays that it makes."""

    def __init__(self, limit: int | None) -> None:
        """Begins without any; of pieces, at most `limit` may be unfinished."""
        self._limit = limit
        self._pieces: collections.deque[Sequence[Any]] = collections.deque()

    def add(self, arrays: Sequence[Any]) -> None:
        """Adds a piece of work."""
        self._pieces.append(arrays)

    def wait(self) -> None:
        """Waits until there are no more pieces than allowed."""
        while self._limit is not None and len(self._pieces) > self._limit:
            arrays = self._pieces.popleft()
            jax.block_until_ready([array for array in arrays if not array.is_deleted()])


class Numbers:
    """Counts micro-batches as they come from the feed."""

    def __init__(self, first: int, num_accumulated: int) -> None:
        """Begins with the number of the first one, and of those accumulated before."""
        self.micro_batch, self.accumulated = first, num_accumulated

    def take(self, size: int) -> tuple[int, int]:
        """Takes a micro-batch or chunk. Returns the two numbers of its first one."""
        numbers = self.micro_batch, self.accumulated
        self.micro_batch += size
        self.accumulated += size
        return numbers


class Gathered(NamedTuple):
    """Values that a stage enqueued, stacked in chunks."""

    value: Any
    size: int | None


class Cursor:
    """The place of a step that is being started. Keeping it costs nothing."""

    def __init__(self, plan: Plan, step: int, first: int, size: int) -> None:
        """Begins before the step: its number, the first micro-batch's, and micro-batches per program."""
        self.plan, self.step = plan, step
        self._first, self._size = first, size
        self._blocks: Iterator[Any] = iter(())
        self._end = 0

    def over(self, blocks: Sequence[Any], begin: int, end: int) -> Iterator[Any]:
        """The blocks from one place of the plan to another, one after the other."""
        self._end, self._blocks = end, iter(blocks[begin:end])
        return self._blocks

    @property
    def place(self) -> int:
        """The place of the block that it came to last."""
        return self._end - operator.length_hint(self._blocks) - 1  # an iterator knows how much is left

    @property
    def number(self) -> int:
        """The number of the micro-batch or chunk of that block; 0 for what is no micro-batch's."""
        return max(0, self.plan.micro_batches[self.place])

    @property
    def micro_batch(self) -> int:
        """The number of the first micro-batch of that block; 0 for a weight update."""
        number = self.plan.micro_batches[self.place]
        return 0 if number == ALL else self._first + number * self._size

    @property
    def count(self) -> int:
        """The number of micro-batches that block handles."""
        return 0 if self.plan.micro_batches[self.place] == ALL else self._size

    def describe(self, places: Sequence[str]) -> str:
        """Says "stage 2 (encode), forward of micro-batch 5 of step 17"; "" if there is none."""
        for place in range(min(self.place, len(self.plan.blocks) - 1), -1, -1):
            name, number = self.plan.blocks[place].block.name, self.plan.micro_batches[place]
            if isinstance(name, tuple):
                kind, stage = name
                first = self._first + number * self._size
                last = first + self._size - 1
                words = f"micro-batch {first}" if last == first else f"micro-batches {first} to {last}"
                return f"{places[stage]}, {kind.words} of {words} of step {self.step}"
        return ""


def run(blocks: Iterator[Sequence[Linked]], registers: list[Any]) -> None:
    """Follows instructions. Devices run behind: nothing is waited for."""
    for block in blocks:
        for function, reads, writes, frees in block:
            results = function(*[registers[register] for register in reads])
            for register, value in zip(writes, results):  # noqa: B905  # a keyword takes a fiftieth of the loop
                registers[register] = value
            for register in frees:
                registers[register] = None


class Linker:
    """Finds the functions of instructions.

    Attributes:
      cursor: where the step is; only looked at where there are other processes.
      version: how often programs have got other functions.
    """

    def __init__(
        self, layout: Layout, collect: Callable[[Sequence[Any], int | None], Collected] | None = None
    ) -> None:
        """Takes where the step runs, and what makes an entry of collected values, if there are any."""
        self._layout, self._collect = layout, collect
        self._of_device = {
            group.devices[0]: group for placement in layout.homes for group in placement.groups
        }
        self._linked: dict[Numbered, list[Linked]] = {}
        self._functions: dict[Block, list[Callable[..., Sequence[Any]]]] = {}
        self._has_peers = layout.whole.has_peers
        self._received = set[Value]()  # what other processes send
        self.cursor: Cursor | None = None
        self.version = 0

    def link(self, plan: Plan) -> list[list[Linked]]:
        """The blocks of a plan, with the function of each instruction."""
        linked, functions = self._linked, self._functions  # another thread may let them be forgotten
        new = [numbered for numbered in dict.fromkeys(plan.blocks) if numbered not in linked]
        for instruction in (
            instruction for numbered in new for instruction in numbered.block.code if self._has_peers
        ):
            if instruction.op is Op.SEND and instruction.group.is_here:
                pairs = zip(instruction.reads, instruction.writes, strict=True)
                self._received |= {target for value, target in pairs if not value.group.is_here}
        for numbered in new:
            linked[numbered] = self._link(numbered, functions)
        return [linked[numbered] for numbered in plan.blocks]

    def forget(self) -> None:
        """Forgets functions, since programs have others."""
        self._linked, self._functions = {}, {}
        self.version += 1

    def _link(
        self, numbered: Numbered, functions: dict[Block, list[Callable[..., Sequence[Any]]]]
    ) -> list[Linked]:
        block = numbered.block
        if block not in functions:
            functions[block] = [
                self._with_log(self._find(instruction, f"{block.scope} {block.name} {number}"), instruction)
                for number, instruction in enumerate(block.code)
            ]
        pairs = zip(functions[block], numbered.registers, strict=True)
        return [(function, *registers) for function, registers in pairs]

    def _with_log(
        self, function: Callable[..., Sequence[Any]], instruction: Instruction
    ) -> Callable[..., Sequence[Any]]:
        """Makes a program log what this process has started, where others may wait for it."""
        program, placement = instruction.program, self._layout.whole
        if program is None or not self._has_peers or not program.group.is_here:
            return function
        group = program.group
        is_join, is_update = not program.binds, program.kind is None
        if is_join and not group.is_joined:
            return function
        came = [place for place, value in enumerate(instruction.reads) if value in self._received]
        stage = placement.groups.index(group) if is_join else program.stage

        def start(*arguments: Any) -> Sequence[Any]:
            with peers.waiting("the weight update") if is_join else contextlib.nullcontext():
                results = function(*arguments)
            cursor, log = self.cursor, action_log.current()
            if log is not None and cursor is not None:
                if is_join:
                    action = action_log.Started("all-reduce", stage, cursor.step)
                elif is_update:
                    action = action_log.Started("weight update", stage, cursor.step)
                else:
                    words = program.kind.words
                    action = action_log.Started(words, stage, cursor.step, cursor.micro_batch, cursor.count)
                log.note(action, results, results if is_join else [arguments[place] for place in came])
            return results

        return start

    def _find(self, instruction: Instruction, edge: str) -> Callable[..., Sequence[Any]]:
        """The function of an instruction over values; `edge` tells its transfers from others."""
        if instruction.op is Op.RUN:
            assert instruction.program is not None
            return instruction.program.function
        if instruction.op is Op.FEED:
            return _take
        if instruction.op is Op.COUNT:
            return self._counting(instruction)
        if instruction.op is Op.SAME:
            return _same
        if instruction.op is Op.WAIT:
            return _wait
        if instruction.op is Op.COLLECT:
            return self._collecting(instruction)
        if instruction.op is Op.SEND:
            return self._sending(instruction, edge)
        group = instruction.group
        if instruction.op is Op.GATHER:
            return lambda *values: gather_replicas(values, group)
        if instruction.op is Op.SPLIT:
            return self._split
        if instruction.op is Op.JOIN:
            number = group.num_replicas
            return lambda *parts: [
                join(parts[first : first + number], group) for first in range(0, len(parts), number)
            ]
        is_away = instruction.op is Op.STORE
        partitions = self._partitions(instruction)
        return lambda *values: _relocate(values, group, is_away, partitions)

    def _partitions(self, instruction: Instruction) -> list[Any] | None:
        """The partitions of copies on the devices of an IPU."""
        is_divided = instruction.group.is_divided
        return list(map(self._layout.partition, instruction.writes)) if is_divided else None

    def _sending(self, instruction: Instruction, edge: str) -> Callable[..., Sequence[Any]]:
        group, partitions = instruction.group, self._partitions(instruction)
        is_of_micro_batch = instruction.micro_batch != ALL
        if is_of_micro_batch and self._has_peers:
            return lambda *values: copy_to(values, group, self._tag(edge))
        is_whole = not (group.is_divided or any(value.is_away for value in instruction.reads))
        if not self._has_peers and (is_of_micro_batch or is_whole):
            copy = group.copy or functools.partial(copy_to, group=group)
            return lambda *values: copy(values)
        if self._has_peers:
            return lambda *values: put(values, group, tag=self._tag(edge), partitions=partitions)
        return lambda *values: put(values, group, partitions=partitions)

    def _tag(self, edge: str) -> Tag | None:
        assert self.cursor is not None
        return self._layout.whole.tag(edge, self.cursor.number)

    def _split(self, *values: Any) -> list[Any]:
        return [
            part
            for value in values
            for part in split(
                value, [self._of_device[device] for device in value.sharding.mesh.devices[:, 0]]
            )
        ]

    def _counting(self, instruction: Instruction) -> Callable[..., Sequence[Any]]:
        constants = self._layout.homes[instruction.replica].constants
        slots = [(value.what.key is ValueKind.ACCUMULATED, value.group) for value in instruction.writes]

        def count(numbers: Numbers) -> list[Any]:
            counts = numbers.take(instruction.size or 1)
            return [constants.scalar(counts[is_accumulated], group) for is_accumulated, group in slots]

        return count

    def _collecting(self, instruction: Instruction) -> Callable[..., Sequence[Any]]:
        size = instruction.size
        if instruction.reads[0].what == ("underway",):
            return lambda pieces, *values: pieces.add(values) or ()
        if instruction.reads[0].what == ("collected",):
            collect = self._collect
            assert collect is not None
            return lambda entries, *values: entries.append(collect(values, size)) or ()
        return lambda entries, value: entries.append(Gathered(value, size)) or ()


def _take(take: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    return take()


def _same(*values: Any) -> Sequence[Any]:
    return values


def _wait(*values: Any) -> Sequence[Any]:
    for value in values:
        if isinstance(value, Underway):
            value.wait()
        else:
            jax.block_until_ready(_arrays(value))
    return ()


def _arrays(value: Any) -> Any:
    """The arrays of a register, which may have a list of what was collected."""
    if not isinstance(value, list):
        return value
    return [(entry.outputs, entry.loss) if isinstance(entry, Collected) else entry.value for entry in value]


def _relocate(values: Sequence[Any], group: Any, is_away: bool, partitions: Any) -> Sequence[Any]:
    """Brings values from host memory, or to it; what replicas share out stays so."""
    if any(map(is_apart, values)):
        kind = (group.host if is_away else group.replicated).memory_kind
        return [jax.device_put(value, value.sharding.with_memory_kind(kind)) for value in values]
    return put(values, group, is_away, partitions=partitions)


# Telling a watcher of programs and sends; see `engine.watching`.


def watched(
    plan: Plan, linked: Sequence[list[Linked]], watcher: Watcher, runner: Any, cursor: Cursor
) -> list[list[Linked]]:
    """Returns the same blocks, with functions that tell the watcher."""
    watched_blocks = _WatchedBlocks(watcher, runner, cursor)
    pairs = zip(plan.blocks, linked, strict=True)
    by_block = {numbered: watched_blocks.wrap(numbered, functions) for numbered, functions in pairs}
    return [by_block[numbered] for numbered in plan.blocks]


class _WatchedBlocks:
    def __init__(self, watcher: Watcher, runner: Any, cursor: Cursor) -> None:
        self._watcher, self._runner, self._cursor = watcher, runner, cursor
        self._last: dict[int, Launch] = {}  # by replica, the program that sends belong to
        self._linked: dict[Numbered, list[Linked]] = {}

    def wrap(self, numbered: Numbered, linked: Sequence[Linked]) -> list[Linked]:
        """Makes the functions of a block tell the watcher."""
        if numbered not in self._linked:
            self._linked[numbered] = [
                (self._wrap(instruction, entry[0]), *entry[1:])
                for instruction, entry in zip(numbered.instructions, linked, strict=True)
            ]
        return self._linked[numbered]

    def _wrap(self, instruction: Instruction, function: Callable[..., Any]) -> Callable[..., Any]:
        if instruction.op is Op.RUN:
            assert instruction.program is not None
            if instruction.program.binds and instruction.program.group.is_here:
                return functools.partial(self._start, instruction, function)
            return functools.partial(self._forget, instruction, function)
        if instruction.op is Op.SEND and instruction.micro_batch != ALL:
            return functools.partial(self._send, instruction, function)
        return functools.partial(self._feed, function) if instruction.op is Op.FEED else function

    def _start(self, instruction: Instruction, function: Callable[..., Any], *arguments: Any) -> Any:
        program, cursor = instruction.program, self._cursor
        assert program is not None
        is_update = program.kind is None
        launch = Launch(
            self._runner,
            LaunchKind.UPDATE if is_update else program.kind.words,
            program.stage,
            cursor.step,
            cursor.micro_batch,
            cursor.count,
            program.group.first_devices,
            program.name,
            program.function is not program.jitted,
        )
        if instruction.replica == ALL:  # sends that follow belong to a program of all replicas
            self._last.clear()
        else:
            self._last[instruction.replica] = launch
        return self._watcher.run(launch, function, list(arguments))

    def _forget(self, instruction: Instruction, function: Callable[..., Any], *arguments: Any) -> Any:
        """Starts a program of another process, or one between stages, which has no sends."""
        if instruction.program is not None and instruction.program.binds:
            self._last.pop(instruction.replica, None)
        return function(*arguments)

    def _send(self, instruction: Instruction, function: Callable[..., Any], *values: Any) -> Any:
        copies = function(*values)
        if instruction.replica in self._last:
            self._watcher.moved(self._last[instruction.replica], instruction.group.first_devices, copies)
        return copies

    def _feed(self, function: Callable[..., Any], take: Any) -> Any:
        cursor = self._cursor
        with self._watcher.waiting(cursor.step, cursor.micro_batch, cursor.count):
            return function(take)
