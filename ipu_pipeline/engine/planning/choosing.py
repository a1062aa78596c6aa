"""Chooses a dispatch plan, by how long a step takes with it.

Every dispatch costs the host and the device some time, however little it computes. Chunks of micro-batches
have fewer dispatches, but a pipeline of chunks takes longer to fill and to drain, and has more
micro-batches in flight.

Which is better is first estimated from the programs' operations and the nominal figures below, which takes
no device. Where that finds chunks, or something whose operations cannot be counted, and programs may be run
on zeros, the programs are measured: those for one micro-batch, and those of the chunks that are then the
best. These are taken only if they are measured to be faster, too.

Physical devices are simulated. The virtual devices of a CPU share its cores, and XLA's programs use all
cores that are idle: while one stage waits, the others are faster. So there a step is estimated to take the
sum of its programs' and dispatches' times; measured programs are simulated on the cores that they keep
busy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipu_pipeline.engine.planning.chunking import Chunking
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.costs import Costs
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.simulator import predict_step_time

__all__ = [
    "HOST_SECONDS",
    "ChunkedStep",
    "MeasuredCosts",
    "Speed",
    "choose_chunk_size",
    "choose_dispatch_plan",
    "count_seconds",
    "describe_seconds",
    "nominal_speed",
    "possible_chunk_sizes",
]

HOST_SECONDS = 20e-6  # in which a host starts a program
_MAX_CHUNK_SIZE = 16
_LEAST_CHUNKS = 4  # in a step; with fewer, stages would hardly overlap
_MAX_SIMULATED = 64  # micro-batches; more only repeat what these do
_LEAST_GAIN = 0.02  # of the step's time; for less, chunks are not worth what they hold


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
    """What a program takes by its operations, with its dispatch; nothing if there is none."""
    if program is None or not program.num_operations:
        return 0.0
    return program.num_operations * speed.per_operation + speed.per_dispatch


def possible_chunk_sizes(num_micro_batches: int) -> list[int]:
    """The sizes to choose from: powers of two that divide the number of micro-batches."""
    largest = min(_MAX_CHUNK_SIZE, num_micro_batches // _LEAST_CHUNKS)
    sizes = [2**power for power in range(_MAX_CHUNK_SIZE.bit_length()) if 2**power <= max(1, largest)]
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
    """

    programs: Sequence[StagePrograms]
    levels: Sequence[int]
    make_timetable: Callable[[int], Timetable]
    num_micro_batches: int | None
    live_bytes: Callable[[int], int]
    max_live_bytes: int
    is_grouped: bool
    saves_memory: bool

    def predict(self, costs: Costs, chunk_size: int, cores: float | None) -> float:
        """The time of a step, or of the first 64 micro-batches of a longer one.

        Args:
          costs: what a micro-batch of such chunks takes.
          chunk_size: the micro-batches of a chunk.
          cores: see `Scenario`.
        """
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


class MeasuredCosts(NamedTuple):
    """What is measured of a pipeline for the choice.

    Attributes:
      of_chunks: measures what a micro-batch takes, from the number that a program handles.
      overhead: what the shortest program takes, in seconds.
      cores: the number of cores that the devices share; None if each has its own.
    """

    of_chunks: Callable[[int], Costs]
    overhead: float
    cores: float | None


def choose_dispatch_plan(
    step: ChunkedStep, platform: str, measure: Callable[[], MeasuredCosts] | None = None
) -> Chunking:
    """Chooses the plan with which a step is shortest.

    A step keeps at least four chunks, and larger chunks are taken only if they save 2% of its time.

    Args:
      step: what it is chosen for.
      platform: the devices' kind, as in `jax.Device.platform`.
      measure: returns what measures the programs; None where they cannot be run.
    """
    everything = [program for own in step.programs for program in (own.forward, *own.backwards)]
    uncounted = ", ".join(sorted(frozenset().union(*(program.uncounted for program in everything))))
    reasons = {
        "the number of micro-batches is known at run only": step.num_micro_batches is None,
        "the schedule was chosen for its order or its memory": not step.is_grouped,
        "recomputation or offloading is to save memory": step.saves_memory,
        "stages print or call back into Python": any(program.reaches_python for program in everything),
        f"{uncounted} has no known cost, and is not measured here": bool(uncounted) and measure is None,
    }
    for reason, holds in reasons.items():
        if holds:
            return Chunking(reason=reason)
    assert step.num_micro_batches is not None
    if not uncounted:
        counted = _choose_by_counts(step, nominal_speed(platform))
        if measure is None or counted.chunk_size == 1:
            return counted
    if possible_chunk_sizes(step.num_micro_batches) == [1]:
        return Chunking(reason=_describe_too_few(step.num_micro_batches))
    assert measure is not None
    return _choose_by_measuring(step, measure())


def _describe_too_few(number: int) -> str:
    return f"{number} micro-batches do not make {_LEAST_CHUNKS} equal chunks of several"


class _Choice(NamedTuple):
    """The best size of chunks, and the time of a step with it and one by one."""

    chunk_size: int
    seconds: float
    alone: float
    held_back: str  # words about what memory does not allow; or empty


def choose_chunk_size(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The size with which a step is shortest; a larger one only if it saves 2% of a step one by one.

    Args:
      sizes: in ascending order, from 1.
      seconds: the time of a step, from the size.
    """
    best = alone = seconds(sizes[0])
    chosen = sizes[0]
    for size in sizes[1:]:
        found = seconds(size)
        if found < best - _LEAST_GAIN * alone:
            best, chosen = found, size
    return chosen


def _choose(step: ChunkedStep, seconds: Callable[[int], float]) -> _Choice:
    assert step.num_micro_batches is not None
    sizes, held_back = [1], ""
    for chunk_size in possible_chunk_sizes(step.num_micro_batches)[1:]:
        if step.live_bytes(chunk_size) > step.max_live_bytes:
            held_back = f"; larger chunks would hold more than {step.max_live_bytes:,} bytes on a stage"
            break
        sizes.append(chunk_size)
    known = {size: seconds(size) for size in sizes}
    chosen = choose_chunk_size(sizes, known.__getitem__)
    return _Choice(chosen, known[chosen], known[1], held_back)


def _choose_by_counts(step: ChunkedStep, speed: Speed) -> Chunking:
    operations = {}
    for stage, own in enumerate(step.programs):
        operations[ActionKind.FORWARD, stage] = own.forward.num_operations
        if own.backward is not None:
            operations[ActionKind.BACKWARD, stage] = own.backward.num_operations

    def seconds(chunk_size: int) -> float:
        def cost(kind: ActionKind, stage: int) -> float:
            total = operations.get((kind, stage), 0.0)
            return total * speed.per_operation + speed.per_dispatch / chunk_size if total else 0.0

        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        forward, backward = (tuple(cost(kind, i) for i in range(len(step.programs))) for kind in kinds)
        if speed.shares_cores:
            assert step.num_micro_batches is not None
            own = [cost for cost in (*forward, *backward) if cost]
            return step.num_micro_batches * (sum(own) + HOST_SECONDS / chunk_size * len(own))
        costs = Costs.of(len(step.programs), forward=forward, backward=backward, host=HOST_SECONDS)
        return step.predict(costs, chunk_size, None)

    found = _choose(step, seconds)
    longest = describe_seconds(max(operations.values()) * speed.per_operation)
    reason = f"the longest program of one micro-batch computes for about {longest}, "
    assert step.num_micro_batches is not None
    if possible_chunk_sizes(step.num_micro_batches) == [1]:
        reason += f"and {_describe_too_few(step.num_micro_batches)}"
    elif found.chunk_size == 1:
        reason += "beside which dispatches cost little"
    else:
        reason += (
            f"and a step is estimated to take {found.seconds / found.alone:.0%} of its time one by one"
        )
    return Chunking(found.chunk_size, reason + found.held_back)


def _choose_by_measuring(step: ChunkedStep, measured: MeasuredCosts) -> Chunking:
    alone = measured.of_chunks(1)

    def spread(taken: Sequence[float], chunk_size: int) -> tuple[float, ...]:
        """The times of a micro-batch in chunks, whose overhead comes once."""
        return tuple(
            max(own - measured.overhead, 0.0) + min(own, measured.overhead) / chunk_size for own in taken
        )

    def seconds(chunk_size: int) -> float:
        costs = dataclasses.replace(
            alone,
            forward=spread(alone.forward, chunk_size),
            backward=spread(alone.backward, chunk_size),
            weight_gradients=(),
        )
        return step.predict(costs, chunk_size, measured.cores)

    found = _choose(step, seconds)
    longest = describe_seconds(max(*alone.forward, *alone.backward))
    reason = f"measured: the longest program of one micro-batch takes {longest}, "
    if found.chunk_size == 1:
        return Chunking(reason=f"{reason}beside which dispatches cost little{found.held_back}")
    taken = step.predict(measured.of_chunks(found.chunk_size), found.chunk_size, measured.cores)
    share = f"and a step with {found.chunk_size} micro-batches per program {taken / found.alone:.0%}"
    reason = f"{reason}{share} of its time one by one"
    is_faster = taken < (1 - _LEAST_GAIN) * found.alone
    return Chunking(found.chunk_size if is_faster else 1, reason + found.held_back)


def describe_seconds(seconds: float) -> str:
    """Describes a time."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
