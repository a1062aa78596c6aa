"""IPUs that wait for data only: when each program of a step runs. No JAX.

The host starts the programs one after another, in the order of the timetable, and runs ahead of the IPUs,
as the engine's executor does. A program begins as soon as it has been started, its IPU is done with the one
before, and all that it reads has arrived. So it begins at the latest of three times, and one pass in the
order of the timetable finds them all.

Where IPUs share cores, `shared_cores` follows the programs in the order of time instead.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.scenarios import Edge, Scenario

__all__ = ["UPDATE", "Link", "Program", "Programs", "follow", "in_order", "last_end", "run_freely", "wire"]

UPDATE = 2  # the place of updates among a scenario's programs, behind the kinds of actions


@dataclass(eq=False)
class Link:
    """What sends the results of a program to another stage.

    Attributes:
      edge: the stage that sends, and the one that receives.
      time: how long it takes for a chunk; 0: results are there at once, and `arrivals` are the ends of the
        program itself.
      arrivals: when the result of each chunk was there.
    """

    edge: Edge
    time: float
    arrivals: list[float]


@dataclass(eq=False)
class Program:
    """What a stage does in one direction, or its update.

    Attributes:
      ipu: where.
      cost: how long it takes alone; 0: it is no program, and passes on when its inputs are there.
      cores: how many it keeps busy.
      inputs: for each thing that it reads the arrivals, by chunk.
      links: what it sends.
      readers: the programs that read what it makes.
      begins: when it began, by chunk.
      ends: when it ended.
    """

    ipu: int
    cost: float
    cores: float = 1.0
    inputs: list[list[float]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    readers: list[Program] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


# By stage: forwards, backwards, updates.
Programs: TypeAlias = "tuple[list[Program], list[Program], list[Program]]"


def wire(scenario: Scenario) -> Programs:
    """The programs of a scenario, connected; none has run."""
    costs, ipus, levels = scenario.costs, scenario.device_mapping, scenario.levels
    size = scenario.chunk_size
    stages = range(costs.num_stages)
    forwards = [Program(ipus[i], costs.forward[i] * size, costs.forward_cores[i]) for i in stages]
    backwards, updates = [], []
    if scenario.training:
        backwards = [Program(ipus[i], costs.backward[i] * size, costs.backward_cores[i]) for i in stages]
        updates = [Program(ipus[i], costs.update[i]) for i in stages]
        if scenario.is_fused:
            _fuse(forwards[-1], backwards[-1])
        for forward, backward in zip(forwards, backwards, strict=True):
            if not (forward.cost and backward.cost):  # else the order on their IPU sees to it
                _connect(forward, backward, Link((0, 0), 0.0, forward.ends))
    for source in stages:
        for target in range(
            bisect.bisect_left(levels, levels[source] + 1), bisect.bisect_right(levels, levels[source] + 1)
        ):
            _send(forwards, (source, target), costs.transfers.get((source, target), 0.0) * size)
            if scenario.training:
                _send(backwards, (target, source), costs.transfers.get((target, source), 0.0) * size)
    # Values may skip stages: what is sent over other edges than those between neighbours.
    for (source, target), time in costs.transfers.items():
        if levels[target] - levels[source] > 1:
            _send(forwards, (source, target), time * size)
        elif levels[source] - levels[target] > 1 and scenario.training:
            _send(backwards, (source, target), time * size)
    return forwards, backwards, updates


def _fuse(forward: Program, backward: Program) -> None:
    """Makes a forward do what the backward does."""
    together = forward.cost + backward.cost
    if together:
        forward.cores = (
            forward.cost * forward.cores + backward.cost * backward.cores
        ) / together  # on the average
    forward.cost, backward.cost = together, 0.0


def _send(programs: list[Program], edge: Edge, time: float) -> None:
    source, target = (programs[stage] for stage in edge)
    _connect(source, target, Link(edge, time, [] if time else source.ends))


def _connect(source: Program, target: Program, link: Link) -> None:
    target.inputs.append(link.arrivals)
    source.readers.append(target)
    if link.time:
        source.links.append(link)


def in_order(timetable: Timetable, programs: Programs) -> Iterator[tuple[int, int, int]]:
    """What the host starts as (kind, stage, chunk), in that order: the actions, then the updates."""
    updates = ((UPDATE, stage, 0) for stage, update in enumerate(programs[UPDATE]) if update.cost)
    return itertools.chain(timetable.order, updates)


def follow(link: Link, end: float) -> None:
    """Sends a result over a link that takes time, after what was sent before."""
    arrivals = link.arrivals
    arrivals.append((arrivals[-1] if arrivals and arrivals[-1] > end else end) + link.time)


def run_freely(programs: Programs, timetable: Timetable, host: float) -> float:
    """Finds when each program runs if no IPU takes cores from another.

    Args:
      programs: fresh from `wire`; their begins, ends and arrivals are entered.
      timetable: the order.
      host: how long the host takes to start one.

    Returns:
      When all is done.
    """
    num_ipus = 1 + max(program.ipu for program in programs[ActionKind.FORWARD])
    free = [0.0] * num_ipus
    table = [
        [
            (own.ipu, own.cost, own.inputs, own.begins.append, own.ends.append, own.links)
            for own in programs_of_kind
        ]
        for programs_of_kind in programs
    ]
    started = 0.0
    for kind, stage, chunk in in_order(timetable, programs):
        ipu, cost, inputs, add_begin, add_end, links = table[kind][stage]
        if cost:
            begin = free[ipu]
            if host:
                started += host
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
    """When all programs have ended."""
    return max((own.ends[-1] for own in itertools.chain(*programs) if own.ends), default=0.0)
