"""Finds when each program of a step runs in execution phases, if devices wait only for data. No JAX.

Each device has a link from host memory and one to it, and each carries one transfer at a time. The host
asks for what a program needs right before it starts the program, as the engine's runner does. Where another
phase begins, it waits until all but `num_ahead` of the phases before have ended and what they leave has
arrived in host memory. Weight updates follow the last phase, and the host waits for each in the same way.

A program begins when it has been started, its device is free, and all that it reads has arrived. What a
stage leaves in host memory must have arrived there before anything of the stage is brought again. Where all
of a micro-batch goes through host memory, this holds for what any stage leaves.
"""

from __future__ import annotations

import collections
import itertools

from ipu_pipeline.engine.schedules.actions import UPDATE, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.free_running import Programs, ProgramTiming, follow, last_end, run_freely
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.schedules.scenarios import Scenario

__all__ = ["run_step"]


def run_step(scenario: Scenario, timetable: Timetable, programs: Programs, host: float) -> float:
    """Finds when each program runs if devices share no cores; in phases, if the scenario has them.

    Args:
      scenario: what is simulated.
      timetable: the order of the starts.
      programs: the programs, fresh from `wire`; their begins, ends and arrivals are entered.
      host: how long a host takes to start a program.

    Returns:
      The time when all is done.
    """
    if scenario.host_memory is None:
        return run_freely(programs, timetable, host)
    run = _Run(scenario.host_memory, scenario.levels, host)
    updates = ((UPDATE, stage, 0) for stage in range(len(programs[UPDATE])))
    for kind, stage, chunk in itertools.chain(timetable.order, updates):
        run.follow(programs[kind][stage], kind, stage, chunk)
    return max(last_end(programs), run.left)


class _Run:
    """The run of a step.

    Attributes:
      left: when all that programs left has arrived in host memory.
    """

    def __init__(self, memory: HostMemory, levels: tuple[int, ...], host: float) -> None:
        self.left = 0.0
        self._memory, self._levels, self._host = memory, levels, host
        self._now = 0.0  # the host's time
        self._phase: object = None
        self._end = 0.0  # the end of the phase, with what it leaves
        self._before: collections.deque[float] = collections.deque()  # ends of phases that may not be over
        self._free: dict[int, float] = {}  # device -> when it is free
        self._link_to: dict[int, float] = {}  # device -> when its link is free
        self._link_from: dict[int, float] = {}
        self._in_host: dict[int, float] = {}  # stage -> when all that it left is there

    def follow(self, program: ProgramTiming, kind: int, stage: int, chunk: int) -> None:
        """Runs a program, after those started before."""
        arrivals = [own[chunk] for own in program.inputs]
        to_ipu, from_ipu = self._memory.time_to(kind, stage), self._memory.time_from(kind, stage)
        if not program.cost and (kind != UPDATE or not (to_ipu or from_ipu)):
            begin = end = max(arrivals, default=0.0)  # it is not a program
        else:
            self._enter(kind, stage, chunk)
            ipu = program.ipu
            brought = self._now
            if to_ipu:
                there = self._in_host.get(stage, 0.0) if self._memory.phases.keeps_values else self.left
                brought = max(brought, self._link_to.get(ipu, 0.0), there) + to_ipu
                self._link_to[ipu] = brought
            self._now += self._host
            begin = max(self._now, self._free.get(ipu, 0.0), brought, *arrivals)
            end = self._free[ipu] = begin + program.cost
            self._end = max(self._end, end)
            if from_ipu:
                arrives = max(end, self._link_from.get(ipu, 0.0)) + from_ipu
                self._link_from[ipu] = self._in_host[stage] = arrives
                self.left = max(self.left, arrives)
                self._end = max(self._end, arrives)
        program.begins.append(begin)
        program.ends.append(end)
        for link in program.links:
            follow(link, end)

    def _enter(self, kind: int, stage: int, chunk: int) -> None:
        """Makes the host wait if another phase or update begins."""
        if kind == UPDATE:
            phase: object = stage
        else:
            phase = chunk, *self._memory.phases.find(ActionKind(kind), self._levels[stage])
        if phase == self._phase:
            return
        ahead, before = self._memory.phases.num_ahead, self._phase
        if before is not None:
            self._before.append(self._end)
        while ahead is not None and len(self._before) > ahead:
            self._now = max(self._now, self._before.popleft())
        if kind == UPDATE and isinstance(before, tuple):
            self._before.clear()  # updates are counted separately
        self._phase, self._end = phase, 0.0
