"""Gives the values of a step numbers, and finds when each register is free.

A micro-batch's registers are its frame, which another micro-batch takes over once it is complete. So a plan
has as many registers, and as many different instructions, as the micro-batches in flight need.
"""

from __future__ import annotations

import array
import heapq
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ipu_pipeline.engine.plan.plan import ALL, Block, Instruction, Numbered, Op, Plan, Results, Value

__all__ = ["Laid", "Registers", "values_of"]

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
        used = self._number_micro_batches(laid)
        shared = dict.fromkeys(
            value for block in used for value in _used(block) if value.micro_batch == ALL
        )
        left = set(values_of(results))

        def number_once(begin: int, stop: int) -> None:
            for place in reversed(range(begin, stop)):
                if numbers[place] == ALL:
                    blocks[place] = self._number(blocks[place], ALL, _find_frees(blocks[place], left))

        number_once(num_kept, len(blocks))
        # What micro-batches use stays until all of them are complete.
        end = self._number(_END, ALL, (tuple(value for value in shared if value not in left),))
        left.update(shared)
        number_once(0, num_kept)
        laid.insert(num_kept, end)
        left_behind: Results = _map(self.find, results)
        given = self._find_given(blocks, left_behind)
        return Plan(blocks, numbers, num_kept + 1, given, left_behind, self.names)

    def _number_micro_batches(self, laid: Laid) -> Collection[Block]:
        """Numbers the blocks of micro-batches. Returns the different ones."""
        blocks = laid.blocks
        courses: dict[int, array.array[int]] = {}
        for place, number in enumerate(laid.numbers):
            if number != ALL:
                if number not in courses:
                    courses[number] = array.array("i")
                courses[number].append(place)
        taken: list[tuple[int, int, Any]] = []  # frames in use: end, number and scope
        free: dict[Any, list[int]] = {}
        counts: dict[Any, int] = {}
        used: dict[Block, None] = {}
        known: dict[tuple[Any, ...], list[Numbered]] = {}
        for places in sorted(courses.values(), key=lambda own: own[0]):
            while taken and taken[0][0] < places[0]:
                _end, frame, scope = heapq.heappop(taken)
                heapq.heappush(free[scope], frame)
            course = tuple([blocks[place] for place in places])
            scope = course[0].scope
            if free.setdefault(scope, []):
                frame = heapq.heappop(free[scope])
            else:
                frame = counts[scope] = counts.get(scope, -1) + 1
            heapq.heappush(taken, (places[-1], frame, scope))
            own = known.get((course, frame))
            if own is None:
                used.update(dict.fromkeys(course))
                pairs = zip(course, self._find_course(course), strict=True)
                own = [self._number(block, (scope, frame), frees) for block, frees in pairs]
                known[course, frame] = own
            for place, numbered in zip(places, own, strict=True):
                blocks[place] = numbered
        return used

    def _find_course(self, course: tuple[Block, ...]) -> list[_Frees]:
        """What each block frees, where a micro-batch's blocks have this order."""
        found = self._courses.get(course)
        if found is None:
            left, written = set[Value](), set[Value]()
            for one in (one for block in course for one in block.code):
                for value in one.reads:
                    if value.micro_batch != ALL and value not in written:
                        raise AssertionError(f"{one} reads {value}, which nothing has written.")
                written.update(one.writes)
            backwards = [_find_frees(block, left, 0) for block in reversed(course)]
            found = self._courses[course] = list(reversed(backwards))
        return found

    def _number(self, block: Block, frame: Any, frees: _Frees) -> Numbered:
        frees = self._frees.setdefault(frees, frees)
        key = block, frame, id(frees)
        found = self._numbered.get(key)
        if found is None:
            numbered = []
            for one, values in zip(block.code, frees, strict=True):
                _check_places(one)
                reads, writes, own = (
                    tuple([self.find(value, frame) for value in some])
                    for some in (one.reads, one.writes, values)
                )
                numbered.append((reads, writes, own))
            found = self._numbered[key] = Numbered(block, frame, tuple(numbered))
        return found

    def _find_given(self, blocks: Sequence[Numbered], results: Results) -> dict[int, Value]:
        """The registers that are read, or left, before they are written."""
        written, given = set[int](), dict[int, None]()
        for reads, writes, _frees in (own for one in dict.fromkeys(blocks) for own in one.registers):
            given.update(dict.fromkeys(register for register in reads if register not in written))
            written.update(writes)
        given.update(dict.fromkeys(register for register in values_of(results) if register not in written))
        return {register: self.names[register] for register in given}


def _used(block: Block) -> Iterator[Value]:
    for one in block.code:
        yield from one.reads
        yield from one.writes


def _find_frees(block: Block, left: set[Value], micro_batch: int = ALL) -> _Frees:
    """What is not used behind each instruction; `left` has what is used behind the block, and gets more."""
    frees = []
    for one in reversed(block.code):
        free = [
            value
            for value in dict.fromkeys((*one.reads, *one.writes))
            if value.micro_batch == micro_batch and value not in left
        ]
        left.update(free)
        frees.append(tuple(free))
    return tuple(reversed(frees))


def _check_places(one: Instruction) -> None:
    """Raises an AssertionError if a program does not find what it reads on its devices."""
    for value in one.reads if one.op is Op.RUN else ():
        if value.is_away or value.group is not one.group:
            raise AssertionError(f"{one} reads {value}, which is elsewhere.")


def _map(function: Callable[[Any], Any], part: Any) -> Any:
    """Applies a function to the values in lists, tuples and dicts."""
    if isinstance(part, Value):
        return function(part)
    if isinstance(part, Mapping):
        return {key: _map(function, own) for key, own in part.items()}
    parts = [_map(function, own) for own in part]
    return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)


def values_of(part: Any) -> Iterator[Any]:
    """The values, or numbers of registers, in lists, tuples and dicts."""
    if isinstance(part, (Value, int)):
        yield part
    else:
        for own in part.values() if isinstance(part, Mapping) else part:
            yield from values_of(own)
