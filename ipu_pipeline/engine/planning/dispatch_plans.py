"""Dispatch plans: how many micro-batches a program handles, chosen by how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ipu_pipeline.engine.option_types import Chunking
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms
from ipu_pipeline.engine.schedules.scenarios import Costs, Scenario
from ipu_pipeline.engine.schedules.simulator import predict_step_time
from ipu_pipeline.engine.schedules.timetables import Timetable
from ipu_pipeline.ground.host import count_cores
from ipu_pipeline.ground.tables import describe_bytes


def check_dispatch_plan(plan: Chunking, num_micro_batches: int | None, is_one_program: bool) -> None:
    """Raises if a given plan does not fit the pipeline."""
    if not isinstance(plan, Chunking):
        raise TypeError(f"dispatch_plan must be a Chunking, or None to have it chosen; got {plan!r}.")
    if is_one_program:
        raise ValueError(
            "dispatch_plan: all stages are on one device, where everything is one program. Leave it out."
        )
    if plan.chunk_size > 1 and (num_micro_batches is None or num_micro_batches % plan.chunk_size):
        clause = "is only known at run time" if num_micro_batches is None else f"is {num_micro_batches}"
        raise ValueError(
            f"dispatch_plan: chunk_size must divide the number of micro-batches per weight update, which "
            f"{clause}; got {plan.chunk_size}."
        )


# The choice of a plan.
#
# Every dispatch costs the host and the device some time. Chunks of micro-batches have fewer dispatches,
# but take longer to fill and to drain the pipeline, and have more micro-batches in flight. All sizes are
# compared by simulated steps, first with the programs' operations and the nominal figures below, which
# take no device. Operations say little of sorts, softmaxes and loops over short programs. So where steps
# may be run on zeros, the size that seems best is timed; the estimate is corrected by that, and if
# another size then seems better, or compiles quickly, steps of both are timed in turns.
# A backward and the next forward of a stage as one program gained nothing: 0.99 to 1.02 of a step.

HOST_SECONDS = 20e-6  # in which a host starts a program
_MAX_CHUNK_SIZE = 16
_LEAST_CHUNKS = 4  # in a step that is only estimated; with fewer, stages would hardly overlap
_LEAST_MICRO_BATCHES = 8  # with fewer, loops in programs take longer to compile than they ever save
_MAX_SIMULATED = 64  # micro-batches; more only repeat what these do
_LEAST_GAIN = 0.03  # of the step's time; for less, chunks are not worth what they hold
_MEASURED_GAIN = 0.01  # the same for timed steps
_NEAR = 0.1  # of a step's estimated time: it may as well be shorter
_QUICK = 1.0  # seconds; programs that compile in less are compiled to be compared
_LONG_STEP = 0.3  # seconds; with longer ones nothing depends on dispatches


class Speed(NamedTuple):
    """Nominal figures of a kind of device, in seconds."""

    per_operation: float
    per_dispatch: float  # on the device
    per_transfer: float  # to another device
    per_byte: float  # of it
    shares_cores: bool


# Measured on two cores of a CPU (see benchmarks/against_plain_jax), and rounded. The others are orders of
# magnitude.
_SPEEDS = {"cpu": Speed(5e-12, 60e-6, 5e-6, 1e-10, shares_cores=True)}
_OTHER_SPEED = Speed(1e-13, 10e-6, 10e-6, 1e-10, shares_cores=False)


def nominal_speed(platform: str) -> Speed:
    """The nominal figures of a kind of device, as in `jax.Device.platform`."""
    return _SPEEDS.get(platform, _OTHER_SPEED)


def count_seconds(program: StageProgram | None, speed: Speed) -> float:
    """The time of a program by its operations, with its dispatch; 0 if there is none."""
    if program is None or not program.num_operations:
        return 0.0
    return program.num_operations * speed.per_operation + speed.per_dispatch


def possible_chunk_sizes(num_micro_batches: int, least_chunks: int = _LEAST_CHUNKS) -> list[int]:
    """The sizes to choose from: powers of two that divide the number of micro-batches."""
    largest = max(1, min(_MAX_CHUNK_SIZE, num_micro_batches // least_chunks))
    sizes = [2**power for power in range(_MAX_CHUNK_SIZE.bit_length()) if 2**power <= largest]
    return [size for size in sizes if num_micro_batches % size == 0]


@dataclass(frozen=True)
class ChunkedStep:
    """The step that a plan is chosen for.

    Attributes:
      programs: the programs of the stages, for one micro-batch.
      levels: the levels of the stages.
      make_timetable: returns the timetable for a number of chunks.
      num_micro_batches: micro-batches of a step; None if known only at run time.
      live_bytes: returns what the stage that holds most holds between forwards and backwards, from the
        chunks' size.
      max_live_bytes: chunks may not make that stage hold more.
      is_grouped: whether the schedule is "grouped". Another one was chosen for its order or its memory, and
        is followed action by action.
      saves_memory: whether recomputation or offloading is on, which chunks would counter.
      num_replicas: the number of copies of the pipeline.
    """

    programs: Sequence[StagePrograms]
    levels: Sequence[int]
    make_timetable: Callable[[int], Timetable]
    num_micro_batches: int | None
    live_bytes: Callable[[int], int]
    max_live_bytes: int
    is_grouped: bool
    saves_memory: bool
    num_replicas: int = 1

    def predict(self, costs: Costs, chunk_size: int, cores: float | None) -> float:
        """The time of a step, or of the first 64 micro-batches of a longer one."""
        # At most this number of micro-batches is simulated; every possible chunk size divides it, too.
        assert self.num_micro_batches is not None
        number = min(self.num_micro_batches, _MAX_SIMULATED)
        timetable = self.make_timetable(number // chunk_size)
        training = len(timetable.order) > number // chunk_size * len(self.programs)
        return predict_step_time(
            Scenario(
                costs,
                timetable,
                number,
                levels=tuple(self.levels),
                training=training,
                chunk_size=chunk_size,
                cores=cores,
            )
        )


class Rehearsal(Protocol):
    """Times whole steps on zeros."""

    compile_seconds: float
    """The seconds that the programs of the last plan took to compile."""

    def time(self, chunk_sizes: Sequence[int]) -> Mapping[int, float]:
        """The medians of the seconds that a step takes with plans that take turns, by size."""


def choose_dispatch_plan(step: ChunkedStep, platform: str, rehearsal: Rehearsal | None = None) -> Chunking:
    """Chooses the plan with which a step is shortest."""
    all_programs = [program for stage in step.programs for program in (stage.forward, *stage.backwards)]
    uncounted = ", ".join(sorted(frozenset().union(*(program.uncounted for program in all_programs))))
    reasons = {
        "the number of micro-batches is only known at run time": step.num_micro_batches is None,
        "the schedule was chosen for its order or its memory": not step.is_grouped,
        "recomputation or offloading saves memory, which chunks would need": step.saves_memory,
        "stages print or call back into Python": any(program.reaches_python for program in all_programs),
        f"{uncounted} has no known cost, and is not measured here": bool(uncounted) and rehearsal is None,
    }
    for reason, holds in reasons.items():
        if holds:
            return Chunking(reason=reason)
    assert step.num_micro_batches is not None
    if step.num_micro_batches < _LEAST_MICRO_BATCHES:
        return Chunking(reason=f"a step has fewer than {_LEAST_MICRO_BATCHES} micro-batches")
    return _Choice(step, nominal_speed(platform), rehearsal).choose(is_counted=not uncounted)


def choose_chunk_size(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The size with which a step is shortest; a larger one only if it saves 3% of a step one by one."""
    return _choose_least({size: seconds(size) for size in sizes}, _LEAST_GAIN)


def _choose_least(seconds: Mapping[int, float], gain: float) -> int:
    """The size with the least seconds; a larger one only if it saves that part of the smallest one's."""
    chosen = first = min(seconds)
    for size in sorted(seconds):
        if seconds[size] < seconds[chosen] - gain * seconds[first]:
            chosen = size
    return chosen


class _Choice:
    """The choice among sizes of chunks, by estimated steps and timed ones."""

    def __init__(self, step: ChunkedStep, speed: Speed, rehearsal: Rehearsal | None) -> None:
        assert step.num_micro_batches is not None
        self._step, self._speed, self._rehearsal = step, speed, rehearsal
        self._cores = count_cores() / step.num_replicas if speed.shares_cores else None
        # Fewer chunks than devices that compute at the same time leave some of them idle.
        fewest = 1 if speed.shares_cores and rehearsal is not None else _LEAST_CHUNKS
        self._sizes, self._limit_reason = [1], ""
        for size in possible_chunk_sizes(step.num_micro_batches, fewest)[1:]:
            if step.live_bytes(size) > step.max_live_bytes:
                most = describe_bytes(step.max_live_bytes)
                self._limit_reason = f"; larger chunks would hold more than {most} on a stage"
                break
            self._sizes.append(size)

    def choose(self, *, is_counted: bool) -> Chunking:
        """Chooses a plan; `is_counted` says whether operations are known."""
        estimated = self._estimate(1.0)
        first = _choose_least(estimated, _LEAST_GAIN) if is_counted else 1
        is_clear = is_counted and min(estimated, key=estimated.__getitem__) == 1
        if len(self._sizes) == 1 or self._rehearsal is None or is_clear:
            return self._tell(first, estimated, {})
        measured = dict(self._rehearsal.time([first]))
        corrected = self._estimate(self._fit(first, measured[first]))
        alternatives = {size: seconds for size, seconds in corrected.items() if size != first}
        second = min(alternatives, key=alternatives.__getitem__)
        if measured[first] > _LONG_STEP:
            return self._tell(_choose_least(corrected, _LEAST_GAIN), corrected, measured)
        is_better = alternatives[second] < (1 - _LEAST_GAIN) * corrected[first]
        is_quick = self._rehearsal.compile_seconds < _QUICK
        if is_better or is_quick:
            measured = dict(self._rehearsal.time([first, second]))
        if is_quick and (beside := self._find_beside(measured, corrected)):
            measured = dict(self._rehearsal.time([*measured, beside]))
        return self._tell(_choose_least(measured, _MEASURED_GAIN), corrected, measured)

    def _find_beside(self, measured: Mapping[int, float], corrected: Mapping[int, float]) -> int | None:
        """A size next to the best one that has not been timed and may be as good; None if there is none."""
        best = min(measured, key=measured.__getitem__)
        most = (1 + _NEAR) * corrected[best]
        beside = [size for size in (best // 2, best * 2) if size in corrected and size not in measured]
        near = [size for size in beside if corrected[size] < most]
        return min(near, key=corrected.__getitem__, default=None)

    def _estimate(self, factor: float) -> dict[int, float]:
        """The seconds of a step by size, if operations take `factor` times what they nominally do."""
        return {size: self._predict(size, factor) for size in self._sizes}

    def _predict(self, size: int, factor: float) -> float:
        def cost(program: StageProgram | None) -> float:
            if program is None:
                return 0.0
            computed = max(program.num_operations, 1.0) * self._speed.per_operation * factor
            return computed + self._speed.per_dispatch / size

        programs = self._step.programs
        costs = Costs.of(
            len(programs),
            forward=[cost(stage.forward) for stage in programs],
            backward=[cost(stage.backward) for stage in programs],
            host=HOST_SECONDS,
        )
        assert self._step.num_micro_batches is not None
        share = max(1.0, self._step.num_micro_batches / _MAX_SIMULATED)
        return share * self._step.predict(costs, size, self._cores)

    def _fit(self, size: int, seconds: float) -> float:
        """The factor with which a step of this size is estimated to take what it does, by secants."""
        points = [(0.0, self._predict(size, 0.0)), (1.0, self._predict(size, 1.0))]
        for _round in range(4):
            (before, low), (factor, high) = points[-2:]
            if factor == before or high == low or abs(high - seconds) < 1e-3 * seconds:
                break
            factor = max(0.0, before + (seconds - low) * (factor - before) / (high - low))
            points.append((factor, self._predict(size, factor)))
        return points[-1][0]

    def _tell(self, chosen: int, estimated: Mapping[int, float], measured: Mapping[int, float]) -> Chunking:
        """Makes the plan, whose reason compares its step with the best alternative's."""
        if len(estimated) == 1:
            alone = f"{self._step.num_micro_batches} micro-batches cannot be divided into equal chunks"
            return Chunking(reason=self._limit_reason.removeprefix("; ") or alone)
        compared = measured if len(measured) > 1 else estimated
        alternatives = {size: seconds for size, seconds in compared.items() if size != chosen}
        alternative = min(alternatives, key=alternatives.__getitem__)
        timed = measured.get(chosen)
        verb = "is estimated to take" if timed is None else "takes"
        about = "about " if timed is not None and alternative not in measured else ""
        reason = (
            f"a step {verb} {describe_seconds(estimated[chosen] if timed is None else timed)}, "
            f"with {alternative} per program {about}{describe_seconds(alternatives[alternative])}"
        )
        if chosen > 1:
            live, alone = (describe_bytes(self._step.live_bytes(size)) for size in (chosen, 1))
            reason += f"; a stage holds at most {live} of activations, with 1 per program {alone}"
        return Chunking(chosen, reason + self._limit_reason)


def describe_seconds(seconds: float) -> str:
    """Describes a time."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
