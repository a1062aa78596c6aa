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

# Runs a plan on the devices: values are arrays.
#
# An instruction is a function of what it reads, so the loop asks for nothing: it calls, keeps, and lets go.

# its function, and the registers that it reads, writes and frees
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
        """Begins: the number of the first one, and of those that have been accumulated before."""
        self.micro_batch, self.accumulated = first, num_accumulated

    def take(self, size: int) -> tuple[int, int]:
        """Takes a micro-batch or chunk. Returns the two numbers of its first one."""
        taken = self.micro_batch, self.accumulated
        self.micro_batch += size
        self.accumulated += size
        return taken


class Gathered(NamedTuple):
    """Values that a stage enqueued, stacked in chunks."""

    value: Any
    size: int | None


class Cursor:
    """Where a step is that is being started, for whoever asks. It costs nothing."""

    def __init__(self, plan: Plan, step: int, first: int, size: int) -> None:
        """Begins before the step: its number, that of the first micro-batch, and how many go together."""
        self.plan, self.step = plan, step
        self._first, self._size = first, size
        self._left: Iterator[Any] = iter(())
        self._end = 0

    def over(self, blocks: Sequence[Any], begin: int, end: int) -> Iterator[Any]:
        """The blocks from one place of the plan to another, one after the other."""
        self._end, self._left = end, iter(blocks[begin:end])
        return self._left

    @property
    def place(self) -> int:
        """The place of the block that it came to last."""
        return self._end - operator.length_hint(self._left) - 1  # an iterator knows how much is left

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
        """How many micro-batches that block handles."""
        return 0 if self.plan.micro_batches[self.place] == ALL else self._size

    def describe(self, places: Sequence[str]) -> str:
        """Such as "stage 2 (encode), forward of micro-batch 5 of step 17"; "" if there is none."""
        for place in range(min(self.place, len(self.plan.blocks) - 1), -1, -1):
            name, number = self.plan.blocks[place].block.name, self.plan.micro_batches[place]
            if isinstance(name, tuple):
                kind, stage = name
                first = self._first + number * self._size
                last = first + self._size - 1
                which = f"micro-batch {first}" if last == first else f"micro-batches {first} to {last}"
                return f"{places[stage]}, {kind.words} of {which} of step {self.step}"
        return ""


def run(blocks: Iterator[Sequence[Linked]], registers: list[Any]) -> None:
    """Follows instructions. Devices run behind: nothing is waited for."""
    for block in blocks:
        for function, reads, writes, frees in block:
            made = function(*[registers[register] for register in reads])
            for register, value in zip(writes, made):  # noqa: B905  # a keyword takes a fiftieth of the loop
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
        self._known: dict[Numbered, list[Linked]] = {}
        self._functions: dict[Block, list[Callable[..., Sequence[Any]]]] = {}
        self._has_peers = layout.whole.has_peers
        self._received = set[Value]()  # what other processes send
        self.cursor: Cursor | None = None
        self.version = 0

    def link(self, plan: Plan) -> list[list[Linked]]:
        """The blocks of a plan, with the function of each instruction."""
        known, functions = self._known, self._functions  # another thread may let them be forgotten
        new = [numbered for numbered in dict.fromkeys(plan.blocks) if numbered not in known]
        for one in (one for numbered in new for one in numbered.block.code if self._has_peers):
            if one.op is Op.SEND and one.group.is_here:
                pairs = zip(one.reads, one.writes, strict=True)
                self._received |= {there for value, there in pairs if not value.group.is_here}
        for numbered in new:
            known[numbered] = self._link(numbered, functions)
        return [known[numbered] for numbered in plan.blocks]

    def forget(self) -> None:
        """Forgets functions, since programs have others."""
        self._known, self._functions = {}, {}
        self.version += 1

    def _link(
        self, numbered: Numbered, functions: dict[Block, list[Callable[..., Sequence[Any]]]]
    ) -> list[Linked]:
        block = numbered.block
        if block not in functions:
            functions[block] = [
                self._told(self._find(one, f"{block.scope} {block.name} {number}"), one)
                for number, one in enumerate(block.code)
            ]
        pairs = zip(functions[block], numbered.registers, strict=True)
        return [(function, *registers) for function, registers in pairs]

    def _told(
        self, function: Callable[..., Sequence[Any]], one: Instruction
    ) -> Callable[..., Sequence[Any]]:
        """A program, which other processes may wait for: what this one has started is logged."""
        program, placement = one.program, self._layout.whole
        if program is None or not self._has_peers or not program.group.is_here:
            return function
        group = program.group
        is_join, is_update = not program.binds, program.kind is None
        if is_join and not group.is_joined:
            return function
        came = [place for place, value in enumerate(one.reads) if value in self._received]
        stage = placement.groups.index(group) if is_join else program.stage

        def start(*arguments: Any) -> Sequence[Any]:
            with peers.waiting("the weight update") if is_join else contextlib.nullcontext():
                made = function(*arguments)
            cursor, log = self.cursor, action_log.current()
            if log is not None and cursor is not None:
                if is_join:
                    action = action_log.Started("all-reduce", stage, cursor.step)
                elif is_update:
                    action = action_log.Started("weight update", stage, cursor.step)
                else:
                    words = program.kind.words
                    action = action_log.Started(words, stage, cursor.step, cursor.micro_batch, cursor.count)
                log.note(action, made, made if is_join else [arguments[place] for place in came])
            return made

        return start

    def _find(self, one: Instruction, edge: str) -> Callable[..., Sequence[Any]]:
        """The function of an instruction over values; `edge` tells its transfers from others."""
        if one.op is Op.RUN:
            assert one.program is not None
            return one.program.function
        if one.op is Op.FEED:
            return _take
        if one.op is Op.COUNT:
            return self._counting(one)
        if one.op is Op.SAME:
            return _same
        if one.op is Op.WAIT:
            return _wait
        if one.op is Op.COLLECT:
            return self._collecting(one)
        if one.op is Op.SEND:
            return self._sending(one, edge)
        group = one.group
        if one.op is Op.GATHER:
            return lambda *values: gather_replicas(values, group)
        if one.op is Op.SPLIT:
            return self._split
        if one.op is Op.JOIN:
            number = group.num_replicas
            return lambda *parts: [
                join(parts[first : first + number], group) for first in range(0, len(parts), number)
            ]
        is_away = one.op is Op.STORE
        partitions = self._partitions(one)
        return lambda *values: _relocate(values, group, is_away, partitions)

    def _partitions(self, one: Instruction) -> list[Any] | None:
        """How copies lie on the devices of an IPU."""
        return list(map(self._layout.partition, one.writes)) if one.group.is_divided else None

    def _sending(self, one: Instruction, edge: str) -> Callable[..., Sequence[Any]]:
        group, partitions = one.group, self._partitions(one)
        if one.micro_batch != ALL:
            if self._has_peers:
                return lambda *values: copy_to(values, group, self._tag(edge))
            if group.copy is not None:
                copy = group.copy
                return lambda *values: copy(values)
            return lambda *values: copy_to(values, group)
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

    def _counting(self, one: Instruction) -> Callable[..., Sequence[Any]]:
        constants = self._layout.homes[one.replica].constants
        slots = [(value.what.key is ValueKind.ACCUMULATED, value.group) for value in one.writes]

        def count(numbers: Numbers) -> list[Any]:
            taken = numbers.take(one.size or 1)
            return [constants.scalar(taken[is_accumulated], group) for is_accumulated, group in slots]

        return count

    def _collecting(self, one: Instruction) -> Callable[..., Sequence[Any]]:
        size = one.size
        if one.reads[0].what == ("underway",):
            return lambda pieces, *values: pieces.add(values) or ()
        if one.reads[0].what == ("collected",):
            collect = self._collect
            assert collect is not None
            return lambda found, *values: found.append(collect(values, size)) or ()
        return lambda found, value: found.append(Gathered(value, size)) or ()


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
    return [(one.outputs, one.loss) if isinstance(one, Collected) else one.value for one in value]


def _relocate(values: Sequence[Any], group: Any, is_away: bool, partitions: Any) -> Sequence[Any]:
    """Brings values from host memory, or to it; what replicas share out stays so."""
    if any(map(is_apart, values)):
        kind = (group.host if is_away else group.replicated).memory_kind
        return [jax.device_put(value, value.sharding.with_memory_kind(kind)) for value in values]
    return put(values, group, is_away, partitions=partitions)


# Tells a watcher of a plan's programs and sends; see `engine.watching`.


def watched(
    plan: Plan, linked: Sequence[list[Linked]], watcher: Watcher, runner: Any, cursor: Cursor
) -> list[list[Linked]]:
    """The same blocks, of which the watcher hears."""
    telling = _Telling(watcher, runner, cursor)
    known = {
        numbered: telling.wrap(numbered, own) for numbered, own in zip(plan.blocks, linked, strict=True)
    }
    return [known[numbered] for numbered in plan.blocks]


class _Telling:
    def __init__(self, watcher: Watcher, runner: Any, cursor: Cursor) -> None:
        self._watcher, self._runner, self._cursor = watcher, runner, cursor
        self._last: dict[int, Launch] = {}  # by replica, the program that sends belong to
        self._known: dict[Numbered, list[Linked]] = {}

    def wrap(self, numbered: Numbered, linked: Sequence[Linked]) -> list[Linked]:
        """A block whose functions tell the watcher."""
        if numbered not in self._known:
            self._known[numbered] = [
                (self._wrap(one, own[0]), *own[1:])
                for one, own in zip(numbered.instructions, linked, strict=True)
            ]
        return self._known[numbered]

    def _wrap(self, one: Instruction, function: Callable[..., Any]) -> Callable[..., Any]:
        if one.op is Op.RUN:
            assert one.program is not None
            if one.program.binds and one.program.group.is_here:
                return functools.partial(self._start, one, function)
            return functools.partial(self._forget, one, function)
        if one.op is Op.SEND and one.micro_batch != ALL:
            return functools.partial(self._send, one, function)
        return functools.partial(self._feed, function) if one.op is Op.FEED else function

    def _start(self, one: Instruction, function: Callable[..., Any], *arguments: Any) -> Any:
        program, cursor = one.program, self._cursor
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
        if one.replica == ALL:  # sends that follow belong to a program of all replicas
            self._last.clear()
        else:
            self._last[one.replica] = launch
        return self._watcher.run(launch, function, list(arguments))

    def _forget(self, one: Instruction, function: Callable[..., Any], *arguments: Any) -> Any:
        """Starts a program of another process, or one between stages, which has no sends."""
        if one.program is not None and one.program.binds:
            self._last.pop(one.replica, None)
        return function(*arguments)

    def _send(self, one: Instruction, function: Callable[..., Any], *values: Any) -> Any:
        copies = function(*values)
        if one.replica in self._last:
            self._watcher.moved(self._last[one.replica], one.group.first_devices, copies)
        return copies

    def _feed(self, function: Callable[..., Any], take: Any) -> Any:
        cursor = self._cursor
        with self._watcher.waiting(cursor.step, cursor.micro_batch, cursor.count):
            return function(take)
