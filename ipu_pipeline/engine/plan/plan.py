"""A step as data: blocks of instructions over numbered registers.

    schedule, traced stages, layout
            |  lowering                 the code of one micro-batch, and of the weight update
            v
    instructions over named values
            |  passes                   sends, offloading, replicas, sharding, phases
            v
    making                              blocks along the schedule
            |  registers                numbers, and when each register is free
            v
          Plan  ->  readers             run, compile, watch, op by op, memory, times, describe

Before they are numbered, instructions read and write `Value`s, which are names; behind that, numbers of
registers. A register is free behind the last instruction that uses it: nothing else says how long an array
lives. Where all is on one device, its code becomes one program (`readers.in_trace`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["ALL", "Block", "Group", "Instruction", "Numbered", "Op", "Plan", "Program", "Results", "Value"]

ALL = -1  # in place of a replica, micro-batch or frame: what is one for all of them


class Group(Protocol):
    """What a plan knows of a group of devices."""

    @property
    def ipu(self) -> int:
        """Its number in the device mapping."""


class Op(enum.IntEnum):
    """What an instruction does."""

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
            one._replace(reads=reads, writes=writes, frees=frees) for one, (reads, writes, frees) in pairs
        )


class Results(NamedTuple):
    """What a step leaves: values, and once they are numbered, registers."""

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
        known = {numbered: numbered.instructions for numbered in dict.fromkeys(self.blocks)}
        for numbered, micro_batch in zip(self.blocks, self.micro_batches, strict=True):
            for one in known[numbered]:
                yield one, micro_batch
