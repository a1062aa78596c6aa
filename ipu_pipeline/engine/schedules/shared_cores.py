"""Finds when each program of a step runs if devices share cores, as a CPU's virtual devices do. No JAX.

A program that runs alone keeps some cores busy (`Costs.forward_cores`), and a transfer, which is a copy in
the host's memory there, keeps one. While they would keep more busy than there are, all are slowed down by
the same factor: the cores there are over the cores that they would keep busy.
That is egalitarian processor sharing (Kleinrock, "Time-shared Systems: A theoretical treatment", 1967),
with programs that may be wider than a core. As all running programs are served at the same rate, the
service since the beginning of a program that never ends is a clock for all of them: each ends when that
clock shows what it showed at the program's begin, plus its cost.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TypeAlias

from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.free_running import (
    Host,
    Link,
    Programs,
    ProgramTiming,
    follow,
    in_order,
    last_end,
)

__all__ = ["CORES_OF_TRANSFER", "run_sharing", "share"]

CORES_OF_TRANSFER = 1.0  # that a copy keeps busy

Entry: TypeAlias = (
    "tuple[ProgramTiming, int, float]"  # a program, its chunk, and the time when the host has started it
)


def share(costs: list[float], demands: list[float], cores: float) -> list[float]:
    """Finds when programs end that begin together at 0.

    Args:
      costs: how long each takes alone.
      demands: the number of cores that each keeps busy then.
      cores: the number of cores.
    """
    ends = [0.0] * len(costs)
    now = served = 0.0
    left = sum(demands)
    for number in sorted(range(len(costs)), key=costs.__getitem__):
        now += (costs[number] - served) * max(1.0, left / cores)
        served = costs[number]
        left -= demands[number]
        ends[number] = now
    return ends


def run_sharing(programs: Programs, timetable: Timetable, host: float, cores: float) -> float:
    """Finds when each program runs if devices share `cores`; otherwise like `run_freely`."""
    _Run(programs, timetable, host).run(cores)
    return last_end(programs)


@dataclass
class _Sendings:
    """What goes over a link: one chunk after another.

    Attributes:
      link: the link.
      source: the program that sends.
      number: its number among what runs.
      num_waiting: chunks that are being sent, or wait for it.
    """

    link: Link
    source: ProgramTiming
    number: int
    num_waiting: int = 0


class _Run:
    def __init__(self, programs: Programs, timetable: Timetable, host: float) -> None:
        num_ipus = 1 + max(program.ipu for program in programs[ActionKind.FORWARD])
        self._queues: list[list[Entry]] = [[] for _ipu in range(num_ipus)]
        self._positions = [0] * num_ipus
        self._is_busy = [False] * num_ipus
        self._now = 0.0
        self._served = 0.0
        self._demand = 0.0
        # The service clock when it ends, and the number of what runs: devices come first, then transfers.
        self._running: list[tuple[float, int]] = []
        self._sendings: list[_Sendings] = []
        self._by_link: dict[Link, _Sendings] = {}
        self._timers: list[tuple[float, int]] = []  # when to look at a device again
        self._free: list[ProgramTiming] = []  # programs without cost and inputs, once per chunk
        hosts = Host(programs, host)
        for kind, place, chunk in in_order(timetable, programs):
            program = programs[kind][place]
            if program.cost:
                self._queues[program.ipu].append((program, chunk, hosts.start(program)))
            elif not program.inputs:
                self._free.append(program)

    def run(self, cores: float) -> None:
        for program in self._free:
            program.begins.append(0.0)
            self._end(program)
        for ipu in range(len(self._queues)):
            self._begin(ipu)
        running, timers = self._running, self._timers
        while running or timers:
            rate = cores / self._demand if self._demand > cores else 1.0
            done = self._now + (running[0][0] - self._served) / rate if running else float("inf")
            if timers and timers[0][0] <= done:
                time, ipu = heapq.heappop(timers)
                self._served += (time - self._now) * rate
                self._now = time
                self._begin(ipu)
                continue
            self._served, number = heapq.heappop(running)
            self._now = done
            if number >= len(self._queues):
                self._arrive(number)
                continue
            program = self._queues[number][self._positions[number]][0]
            self._demand = self._demand - program.cores if running else 0.0
            self._positions[number] += 1
            self._is_busy[number] = False
            self._end(program)
            self._begin(number)

    def _begin(self, ipu: int) -> None:
        """Begins the next program of a device if all is there; if only time is missing, sets a timer."""
        queue, position = self._queues[ipu], self._positions[ipu]
        if self._is_busy[ipu] or position == len(queue):
            return
        program, chunk, ready = queue[position]
        for arrivals in program.inputs:
            if len(arrivals) <= chunk:
                return  # the program that makes it looks here again
            ready = max(ready, arrivals[chunk])
        if ready > self._now:
            heapq.heappush(self._timers, (ready, ipu))
            return
        self._is_busy[ipu] = True
        self._demand += program.cores
        program.begins.append(self._now)
        heapq.heappush(self._running, (self._served + program.cost, ipu))

    def _end(self, program: ProgramTiming) -> None:
        program.ends.append(self._now)
        self._hand_on(program)

    def _hand_on(self, program: ProgramTiming) -> None:
        for link in program.links:
            if link.time:
                self._send(link, program)
            else:
                follow(link, program.ends[-1])
        self._look_at_readers(program)

    def _send(self, link: Link, source: ProgramTiming) -> None:
        """Sends a result after what was sent before."""
        own = self._by_link.get(link)
        if own is None:
            own = self._by_link[link] = _Sendings(link, source, len(self._queues) + len(self._sendings))
            self._sendings.append(own)
        own.num_waiting += 1
        if own.num_waiting == 1:
            self._begin_sending(own)

    def _begin_sending(self, own: _Sendings) -> None:
        self._demand += CORES_OF_TRANSFER
        heapq.heappush(self._running, (self._served + own.link.time, own.number))

    def _arrive(self, number: int) -> None:
        own = self._sendings[number - len(self._queues)]
        self._demand = self._demand - CORES_OF_TRANSFER if self._running else 0.0
        own.link.arrivals.append(self._now)
        own.num_waiting -= 1
        if own.num_waiting:
            self._begin_sending(own)
        self._look_at_readers(own.source)

    def _look_at_readers(self, program: ProgramTiming) -> None:
        for reader in program.readers:
            if reader.cost:
                self._begin(reader.ipu)
            else:
                self._pass_through(reader)

    def _pass_through(self, reader: ProgramTiming) -> None:
        """Finishes what is not a program as soon as its inputs are there."""
        while all(len(arrivals) > len(reader.ends) for arrivals in reader.inputs):
            chunk = len(reader.ends)
            time = max(arrivals[chunk] for arrivals in reader.inputs)
            reader.begins.append(time)
            reader.ends.append(time)
            self._hand_on(reader)
