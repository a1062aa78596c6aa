"""Finds when each program of a step runs, if devices wait only for data. No JAX.

The host starts the programs one after another, in the order of the timetable, and runs ahead of the
devices, as the engine's runner does. A program begins as soon as it has been started, its device has
finished the previous one, and all that it reads has arrived. So it begins at the latest of three times, and
one pass in the order of the timetable finds them all.

Replicas are columns of programs beside each other. The host of each process starts what its devices do,
each action for one replica after the other. After the last action the replicas of a device meet, average
their gradients and update, and a host starts each of these programs once for all of its replicas.

Where devices share cores, `shared_cores` follows the programs in the order of time instead.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ipu_pipeline.engine.schedules.actions import GATHER, HALVES, REDUCE, UPDATE, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.costs import Edge
from ipu_pipeline.engine.schedules.scenarios import Scenario

__all__ = [
    "Host",
    "Link",
    "ProgramTiming",
    "Programs",
    "follow",
    "in_order",
    "last_end",
    "run_freely",
    "wire",
]

_MEET = GATHER + 1  # not a program: all replicas of a device have come this far


@dataclass(eq=False)
class Link:
    """Sends the results of a program to another stage.

    Attributes:
      edge: the stage that sends, and the one that receives.
      time: how long it takes for a chunk; 0: results are there at once, and `arrivals` are the ends of the
        program itself.
      arrivals: when the result of each chunk was there.
      num_skipped: the number of first chunks whose results are not sent.
    """

    edge: Edge
    time: float
    arrivals: list[float]
    num_skipped: int = 0


@dataclass(eq=False)
class ProgramTiming:
    """The program of a stage for one kind of action, or its update, and when it runs.

    Attributes:
      ipu: the device where it runs, by its number among those of all replicas.
      cost: how long it takes alone; 0: it is not a program, and passes results on once inputs are there.
      cores: the number of cores that it keeps busy.
      inputs: for each value that it reads, the arrivals by chunk.
      links: the links over which it sends.
      readers: the programs that read its results.
      process: the process whose host starts it.
      is_started: whether the host takes time to start it; False if it starts together with another one.
      begins: when it began, by chunk.
      ends: when it ended, by chunk.
    """

    ipu: int
    cost: float
    cores: float = 1.0
    inputs: list[list[float]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    readers: list[ProgramTiming] = field(default_factory=list)
    process: int = 0
    is_started: bool = True
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


# Forwards, backwards, their first halves, their second halves, updates, and with several replicas their
# joint programs. Each list has the programs of all stages of replica 0, then those of replica 1, and so on.
# Of a stage whose backwards are done in halves those for whole ones do not run, nor those for halves of
# other stages.
Programs: TypeAlias = "tuple[list[ProgramTiming], ...]"


def wire(scenario: Scenario) -> Programs:
    """Makes the programs of a scenario, connected. None has run."""
    columns = [_wire_replica(scenario, replica) for replica in range(scenario.cluster.num_replicas)]
    programs = tuple([one for own in kind for one in own] for kind in zip(*columns, strict=True))
    if len(columns) > 1 and scenario.training:
        return (*programs, *_join(scenario, programs))
    return programs


def _wire_replica(scenario: Scenario, replica: int) -> Programs:
    """Makes the actions and updates of a replica."""
    costs, levels, size = scenario.costs, scenario.levels, scenario.chunk_size
    stages = range(costs.num_stages)
    ipus = [scenario.ipu_of(replica, ipu) for ipu in scenario.device_mapping]
    processes = [scenario.cluster.process_of(ipu) for ipu in ipus]

    def make(stage: int, cost: float, cores: float = 1.0) -> ProgramTiming:
        return ProgramTiming(ipus[stage], cost, cores, process=processes[stage])

    forwards = [make(i, costs.forward[i] * size, costs.forward_cores[i]) for i in stages]
    backwards: list[ProgramTiming] = []
    firsts: list[ProgramTiming] = []  # of halves
    seconds: list[ProgramTiming] = []
    updates: list[ProgramTiming] = []
    back: list[ProgramTiming] = []  # what sends to the stages before
    if scenario.training:
        halved, times = scenario.halved, costs.of_actions
        backwards, firsts, seconds = (
            [
                make(i, times[kind][i] * size, costs.backward_cores[i])
                if (kind in HALVES) == (i in halved)
                else make(i, 0.0)
                for i in stages
            ]
            for kind in (ActionKind.BACKWARD, *HALVES)
        )
        back = [firsts[i] if i in halved else backwards[i] for i in stages]
        updates = [make(i, scenario.update(i)) for i in stages]
        if scenario.is_fused:
            _fuse(forwards[-1], back[-1])
        pairs = [*zip(forwards, back, strict=True), *((firsts[i], seconds[i]) for i in halved)]
        for before, after in pairs:
            if not (before.cost and after.cost):  # else the order on their device ensures it
                _connect(before, after, Link((0, 0), 0.0, before.ends))

    def send(programs: list[ProgramTiming], edge: Edge) -> None:
        source, target = (programs[stage] for stage in edge)
        time = scenario.transfer(replica, edge)
        _connect(source, target, Link(edge, time, [] if time else source.ends))

    for source in stages:
        for target in range(
            bisect.bisect_left(levels, levels[source] + 1), bisect.bisect_right(levels, levels[source] + 1)
        ):
            send(forwards, (source, target))
            if scenario.training:
                send(back, (target, source))
    # Values may skip stages, over other edges than those between neighbours.
    for source, target in dict.fromkeys([*costs.transfers, *costs.num_sent_bytes]):
        if levels[target] - levels[source] > 1:
            send(forwards, (source, target))
        elif levels[source] - levels[target] > 1 and scenario.training:
            send(back, (source, target))
    return forwards, backwards, firsts, seconds, updates


def _join(scenario: Scenario, programs: Programs) -> Programs:
    """Adds what replicas do together: reduce gradients, gather what they updated, and meet before each."""
    mapping, number = scenario.device_mapping, scenario.costs.num_stages
    updates, places = programs[UPDATE], range(len(programs[UPDATE]))
    halved = scenario.halved
    halves = {mapping.index(ipu): scenario.half_ring(ipu) for ipu in scenario.ipus}

    def make(place: int, num_halves: int) -> ProgramTiming:
        time = num_halves * halves.get(place % number, 0.0)  # once per device, with its first stage
        return ProgramTiming(updates[place].ipu, time, 0.0, process=updates[place].process)

    is_sharded = scenario.cluster.shards_optimizer_state
    reductions = [make(place, 1 if is_sharded else 2) for place in places]
    gatherings = [make(place, 1 if is_sharded else 0) for place in places]
    meetings: list[ProgramTiming] = []

    def meet(
        stage: int, sources: list[ProgramTiming], num_skipped: int, targets: list[ProgramTiming]
    ) -> None:
        meeting = ProgramTiming(targets[0].ipu, 0.0)
        for source in sources:
            _connect(source, meeting, Link((stage, stage), 0.0, [], num_skipped), is_kept=True)
        for target in targets:
            _connect(meeting, target, Link((stage, stage), 0.0, meeting.ends))
        meetings.append(meeting)  # one before the reduction and one before the gathering, by device

    num_chunks = scenario.num_micro_batches // scenario.chunk_size
    for stage in halves:
        row = [place for place in places if mapping[place % number] == mapping[stage]]
        ending = [
            programs[HALVES[-1] if place % number in halved else ActionKind.BACKWARD][place]
            for place in row
        ]
        meet(stage, ending, num_chunks - 1, reductions[stage::number])
        meet(stage, [updates[place] for place in row], 0, gatherings[stage::number])
        for place in row:
            before = reductions[place - place % number + stage]
            _connect(before, updates[place], Link((stage, stage), 0.0, before.ends))
    for kind in (updates, reductions, gatherings):
        started: set[tuple[int, int]] = set()
        for place, program in enumerate(kind):
            program.is_started = (place % number, program.process) not in started
            started.add((place % number, program.process))
    return reductions, gatherings, meetings


def _fuse(forward: ProgramTiming, backward: ProgramTiming) -> None:
    """Makes a forward do what the backward does."""
    together = forward.cost + backward.cost
    if together:
        forward.cores = (
            forward.cost * forward.cores + backward.cost * backward.cores
        ) / together  # on average
    forward.cost, backward.cost = together, 0.0


def _connect(source: ProgramTiming, target: ProgramTiming, link: Link, *, is_kept: bool = False) -> None:
    """Makes a program read another one's results. A link that only passes on ends is not kept."""
    target.inputs.append(link.arrivals)
    source.readers.append(target)
    if link.time or is_kept:
        source.links.append(link)


def in_order(timetable: Timetable, programs: Programs) -> Iterator[tuple[int, int, int]]:
    """What hosts start, in order, as (kind, place among the programs of that kind, chunk).

    The actions come first, for one replica after the other, then what ends the step.
    """
    if len(programs) <= UPDATE + 1:
        updates = ((UPDATE, place, 0) for place, update in enumerate(programs[UPDATE]) if update.cost)
        number = len(timetable.in_flight)
        starts = range(0, len(programs[ActionKind.FORWARD]), number)
        if len(starts) == 1:
            return itertools.chain(timetable.order, updates)
        return ((kind, first + stage, chunk) for kind, stage, chunk in timetable.order for first in starts)
    return _in_order_together(timetable, programs)


def _in_order_together(timetable: Timetable, programs: Programs) -> Iterator[tuple[int, int, int]]:
    number, places = len(timetable.in_flight), range(len(programs[ActionKind.FORWARD]))
    starts = places[::number]
    for kind, stage, chunk in timetable.order:
        for first in starts:
            yield kind, first + stage, chunk
    meetings = programs[_MEET]
    by_stage = [first + stage for stage in range(number) for first in starts]
    yield from ((_MEET, place, 0) for place in range(0, len(meetings), 2))
    yield from ((kind, place, 0) for kind in (REDUCE, UPDATE) for place in by_stage)
    yield from ((_MEET, place, 0) for place in range(1, len(meetings), 2))
    yield from ((GATHER, place, 0) for place in by_stage)


def follow(link: Link, end: float) -> None:
    """Sends a result over a link, after what was sent before."""
    if link.num_skipped:
        link.num_skipped -= 1
        return
    arrivals = link.arrivals
    arrivals.append((arrivals[-1] if arrivals and arrivals[-1] > end else end) + link.time)


class Host:
    """The hosts of all processes: each starts one program after the other."""

    def __init__(self, programs: Programs, cost: float) -> None:
        """Takes the time in which a host starts a program, and the processes."""
        self._cost = cost
        self._now = [0.0] * (1 + max(program.process for program in itertools.chain(*programs)))

    def start(self, program: ProgramTiming) -> float:
        """Starts a program that takes time; returns when the host of its process has done so."""
        if program.is_started:
            self._now[program.process] += self._cost
        return self._now[program.process]


def run_freely(programs: Programs, timetable: Timetable, host: float) -> float:
    """Finds when each program runs if no device takes cores from another.

    Args:
      programs: the programs, fresh from `wire`; their begins, ends and arrivals are entered.
      timetable: the order of their starts.
      host: how long a host takes to start a program.

    Returns:
      The time when all is done.
    """
    num_ipus = 1 + max(program.ipu for program in programs[ActionKind.FORWARD])
    free = [0.0] * num_ipus
    hosts = Host(programs, host)
    table = [
        [
            (own, own.ipu, own.cost, own.inputs, own.begins.append, own.ends.append, own.links)
            for own in programs_of_kind
        ]
        for programs_of_kind in programs
    ]
    for kind, place, chunk in in_order(timetable, programs):
        program, ipu, cost, inputs, add_begin, add_end, links = table[kind][place]
        if cost:
            begin = free[ipu]
            if host:
                started = hosts.start(program)
                if started > begin:
                    begin = started
        else:
            begin = 0.0
        for arrivals in inputs:
            arrival = arrivals[chunk]
            if arrival > begin:
                begin = arrival
        end = begin + cost
        if cost:
            free[ipu] = end
        add_begin(begin)
        add_end(end)
        for link in links:
            follow(link, end)
    return last_end(programs)


def last_end(programs: Programs) -> float:
    """The time when all programs have ended."""
    return max((own.ends[-1] for own in itertools.chain(*programs) if own.ends), default=0.0)
