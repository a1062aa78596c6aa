"""How long each program of a pipeline takes alone, and how long a step of nothing but these would."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ipu_pipeline import engine
from ipu_pipeline.engine.devices.placement import copy_to
from ipu_pipeline.engine.execution.runner import PlanRunner
from ipu_pipeline.engine.plan.plan import Op
from ipu_pipeline.engine.schedules import ActionKind, Costs, LinkSpeed, Scenario, predict_step_time
from ipu_pipeline.engine.schedules.timetables import HALVES

__all__ = ["ProgramTimer", "Times", "ideal_seconds", "make_scenario", "time_programs"]


@dataclass(frozen=True)
class Times:
    """Seconds, each a median.

    Attributes:
      programs: of a dispatch (a micro-batch, or a chunk), by kind and stage; a stage that does both
        directions in one program, or the forward and half of the backward, has it as its forward.
      transfers: of what such a program sends on, from its end until all of it has arrived.
      updates: of the weight update, by IPU.
      cores: how many cores each of the programs keeps busy, see `Costs.forward_cores`.
      host: how long the host takes to start one, at the median.
    """

    programs: Mapping[tuple[ActionKind, int], float]
    transfers: Mapping[tuple[ActionKind, int], float]
    updates: Mapping[int, float]
    cores: Mapping[tuple[ActionKind, int], float] = field(default_factory=dict)
    host: float = 0.0


class ProgramTimer:
    """Times what a pipeline's step starts, one program at a time, again and again."""

    def __init__(self, pipeline: engine.Pipeline, state: Any, micro_batches: Any) -> None:
        """Runs two steps, and keeps what the programs are given.

        Args:
          pipeline: over several IPUs.
          state: from `init` or a step; it stays as it is.
          micro_batches: of a step; or what `place_micro_batches` returned.

        Raises:
          ValueError: all stages are on one IPU, and one program; or there are several replicas.
        """
        executor = pipeline.prepare()
        if not isinstance(executor, PlanRunner) or executor.num_replicas > 1:
            raise ValueError(
                "time_programs: it times programs of stages, of one replica; all stages on one IPU are one "
                f"program. device_mapping is {list(pipeline.device_mapping)}, num_replicas "
                f"{pipeline.num_replicas}."
            )
        running = _copies(jax.tree.leaves(pipeline.place(state)))
        state = jax.tree.unflatten(jax.tree.structure(state), running)
        micro_batches = micro_batches if hasattr(micro_batches, "taker") else list(micro_batches)
        state, _outputs = pipeline.step(state, micro_batches)  # compiles

        programs = [program for program in executor.maker.programs if program.binds]
        known = [program.function for program in programs]
        given: dict[Any, list[Any]] = {}

        def note(program: Any, function: Callable[..., Any], *arguments: Any) -> Any:
            given.setdefault(program, _copies(arguments))
            return function(*arguments)

        try:
            for program, function in zip(programs, known, strict=True):
                program.function = functools.partial(note, program, function)
            executor.linker.forget()
            jax.block_until_ready(pipeline.step(state, micro_batches)[0])
        finally:
            for program, function in zip(programs, known, strict=True):
                program.function = function
            executor.linker.forget()
        runs = {(own.kind, own.stage): own for own in programs if own in given and own.kind is not None}
        self._programs = {key: (own.function, given[own]) for key, own in runs.items()}
        self._transfers = {}
        for key, code in executor.maker.code.items():
            sends = [one for one in code if one.op is Op.SEND]
            if sends:
                own = next(one for one in code if one.program is runs[key])
                self._transfers[key] = self._sends(own, sends, given[runs[key]])
        self._updates = [
            (pipeline.device_mapping[own.stage], own.function, given[own])
            for own in programs
            if own.kind is None and own in given
        ]
        self._taken: dict[Any, list[float]] = {}
        self._started: dict[Any, list[float]] = {}
        self._busy: dict[Any, list[float]] = {}

    @staticmethod
    def _sends(
        run: Any, sends: Sequence[Any], arguments: Sequence[Any]
    ) -> tuple[Callable[..., Any], list[Any]]:
        results = dict(zip(run.writes, run.program.function(*_copies(arguments)), strict=True))

        def send(*arrays: Any) -> list[Any]:
            left = iter(arrays)
            return [copy_to([next(left) for _ in one.reads], one.group) for one in sends]

        return send, [results[value] for one in sends for value in one.reads]

    def run(self, num_calls: int = 4) -> Times:
        """Times everything once more; returns the medians of all runs so far.

        Args:
          num_calls: how often a program is started in a row, as a step does: then the host is ahead of the
            device, and what it takes for a call is not counted. The device has nothing else to do.
        """
        programs = {key: self._run(key, *known, num_calls) for key, known in self._programs.items()}
        transfers = {key: self._run(("send", *key), *known, 1) for key, known in self._transfers.items()}
        updates: dict[int, float] = {}
        for number, (ipu, function, arguments) in enumerate(self._updates):
            updates[ipu] = updates.get(ipu, 0.0) + self._run(number, function, arguments, num_calls)
        cores = {key: statistics.median(self._busy[key]) for key in self._programs}
        host = statistics.median(statistics.median(self._started[key]) for key in self._programs)
        return Times(programs, transfers, updates, cores, host)

    def _run(self, key: Any, function: Callable[..., Any], arguments: list[Any], num_calls: int) -> float:
        calls = [_copies(arguments) for _ in range(num_calls)]  # a program may destroy what it is given
        begin, busy = time.perf_counter(), time.process_time()
        results = [function(*call) for call in calls]
        started = time.perf_counter()
        jax.block_until_ready(results)
        taken = time.perf_counter() - begin
        self._busy.setdefault(key, []).append((time.process_time() - busy) / taken)
        self._started.setdefault(key, []).append((started - begin) / num_calls)
        self._taken.setdefault(key, []).append(taken / num_calls)
        return statistics.median(self._taken[key])


def time_programs(pipeline: engine.Pipeline, state: Any, micro_batches: Any, num_rounds: int = 5) -> Times:
    """How long each program of a pipeline takes alone.

    Args:
      pipeline: over several IPUs.
      state: from `init` or a step; it stays as it is.
      micro_batches: of a step; or what `place_micro_batches` returned.
      num_rounds: how often everything is timed.
    """
    timer = ProgramTimer(pipeline, state, micro_batches)
    for _ in range(num_rounds):
        times = timer.run()
    return times


def ideal_seconds(pipeline: engine.Pipeline, times: Times, num_micro_batches: int | None = None) -> float:
    """What a step takes by its schedule if there are only the programs: no host, no transfers.

    Args:
      pipeline: over several IPUs.
      times: of its programs.
      num_micro_batches: of a step, where the pipeline has no fixed number.
    """
    only = Times(times.programs, {}, times.updates)
    return predict_step_time(make_scenario(pipeline, only, num_micro_batches))


def make_scenario(
    pipeline: engine.Pipeline,
    times: Times,
    num_micro_batches: int | None = None,
    cores: float | None = None,
    link: LinkSpeed | None = None,
) -> Scenario:
    """A step of a pipeline, to be simulated; what a program handles is a micro-batch there.

    Args:
      pipeline: over several IPUs.
      times: of its programs.
      num_micro_batches: of a step, where the pipeline has no fixed number.
      cores: how many cores the IPUs share; None: they share none.
      link: between IPUs and host memory, in seconds and bytes per second, for a pipeline in phases; None:
        what they bring takes no time.
    """
    count = pipeline.options.num_micro_batches if num_micro_batches is None else num_micro_batches
    plan = pipeline.dispatch_plan
    assert count is not None
    assert plan is not None
    ipus, num_chunks = pipeline.device_mapping, count // plan.chunk_size
    timetable = pipeline.timetable(num_chunks)
    stages = range(len(ipus))

    def by_stage(kind: ActionKind, known: Mapping[tuple[ActionKind, int], float], default: float) -> Any:
        return [known.get((kind, stage), default) or default for stage in stages]

    transfers = {}
    for (kind, stage), seconds in times.transfers.items():
        is_last = stage == stages[-1]
        target = stage - 1 if is_last or kind is not ActionKind.FORWARD else stage + 1
        transfers[stage, target] = seconds
    host_memory = None if link is None else engine.planning.plan_host_memory(pipeline, link)
    # In phases each stage has an update of its own.
    shares = [
        float(list(ipus).index(ipu) == stage) if host_memory is None else 1 / list(ipus).count(ipu)
        for stage, ipu in enumerate(ipus)
    ]
    backward, firsts, weights = (
        by_stage(kind, times.programs, 0.0) for kind in (ActionKind.BACKWARD, *HALVES)
    )
    costs = Costs.of(
        len(ipus),
        forward=by_stage(ActionKind.FORWARD, times.programs, 0.0),
        backward=list(map(sum, zip(backward, firsts, weights, strict=True))),
        weight_gradients=weights,
        update=[times.updates.get(ipu, 0.0) * share for ipu, share in zip(ipus, shares, strict=True)],
        transfer=transfers,
        host=times.host,
        forward_cores=by_stage(ActionKind.FORWARD, times.cores, 1.0),
        backward_cores=by_stage(ActionKind.BACKWARD, times.cores, 1.0),
    )
    training = len(timetable.order) > num_chunks * len(ipus)
    levels = tuple(pipeline.traced.levels)
    return Scenario(
        costs,
        timetable,
        num_chunks,
        tuple(ipus),
        levels,
        training,
        cores=cores,
        host_memory=host_memory,
    )


def _copies(arrays: Sequence[Any]) -> list[Any]:
    """Arrays of the same values at the same places, in memory of their own, ready."""
    is_array = [isinstance(array, jax.Array) for array in arrays]
    found = [array for array, known in zip(arrays, is_array, strict=True) if known]
    copies = iter(
        jax.block_until_ready(jax.device_put(found, [array.sharding for array in found], may_alias=False))
    )
    return [next(copies) if known else array for array, known in zip(arrays, is_array, strict=True)]
