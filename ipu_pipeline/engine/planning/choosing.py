"""Chooses a dispatch plan, by estimates of how long a step takes.

Every dispatch costs the host and the device some time, however little it computes. Chunks of micro-batches
have fewer dispatches, but a pipeline of chunks takes longer to fill and to drain, and has more
micro-batches in flight. Which is better is estimated from the programs' operations and the nominal figures
below, so the choice depends on the pipeline and on the kind of device alone, and is the same everywhere.
Foreign functions have no estimate: programs that call one stay as they are.

Physical devices are simulated. The virtual devices of a CPU share its cores, and XLA's programs use all
cores that are idle: while one stage waits, the others are faster. So there a step takes the sum of its
programs' and dispatches' times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ipu_pipeline.engine.planning.chunking import Chunking
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.costs import Costs
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.simulator import predict_step_time

__all__ = ["choose_dispatch_plan", "describe_seconds", "possible_chunk_sizes"]

_MAX_CHUNK_SIZE = 16
_LEAST_CHUNKS = 4  # in a step; with fewer, stages would hardly overlap
_MAX_SIMULATED = 64  # micro-batches; more only repeat what these do
_LEAST_GAIN = 0.02  # of the step's time; for less, chunks are not worth what they hold


class _Speed(NamedTuple):
    """Nominal figures of a kind of device, in seconds."""

    per_operation: float
    per_dispatch: float  # on the device
    host_per_dispatch: float
    shares_cores: bool


# Measured on two cores of a CPU (see benchmarks/against_plain_jax), and rounded. The others are orders of
# magnitude.
_SPEEDS = {"cpu": _Speed(5e-12, 60e-6, 20e-6, shares_cores=True)}
_OTHER_SPEED = _Speed(1e-13, 10e-6, 20e-6, shares_cores=False)


def possible_chunk_sizes(num_micro_batches: int) -> list[int]:
    """The sizes to choose from: powers of two that divide the number of micro-batches."""
    largest = min(_MAX_CHUNK_SIZE, num_micro_batches // _LEAST_CHUNKS)
    sizes = [2**power for power in range(_MAX_CHUNK_SIZE.bit_length()) if 2**power <= max(1, largest)]
    return [size for size in sizes if num_micro_batches % size == 0]


def choose_dispatch_plan(
    programs: Sequence[StagePrograms],
    levels: Sequence[int],
    make_timetable: Callable[[int], Timetable],
    num_micro_batches: int | None,
    platform: str,
    live_bytes: Callable[[int], int],
    max_live_bytes: int,
    *,
    is_grouped: bool,
    saves_memory: bool,
) -> Chunking:
    """Chooses the plan with which a step is estimated to be shortest.

    A step keeps at least four chunks, and larger chunks are taken only if they save 2% of its time.

    Args:
      programs: the programs of the stages, for one micro-batch.
      levels: the levels of the stages.
      make_timetable: returns the timetable for a number of chunks.
      num_micro_batches: micro-batches of a step; None if known only at run time.
      platform: the devices' kind, as in `jax.Device.platform`.
      live_bytes: returns what the stage that holds most holds between forwards and backwards, from the
        chunks' size.
      max_live_bytes: chunks may not make that stage hold more.
      is_grouped: whether the schedule is "grouped". Another one was chosen for its order or its memory, and
        is followed action by action.
      saves_memory: whether recomputation or offloading is on, which chunks would counter.
    """
    everything = [program for own in programs for program in (own.forward, *own.backwards)]
    uncounted = ", ".join(sorted(frozenset().union(*(program.uncounted for program in everything))))
    reasons = {
        "the number of micro-batches is known at run only": num_micro_batches is None,
        "the schedule was chosen for its order or its memory": not is_grouped,
        "recomputation or offloading is to save memory": saves_memory,
        "stages print or call back into Python": any(program.has_effects for program in everything),
        f"no cost is known of {uncounted}; engine.measure_dispatch_plan measures": bool(uncounted),
    }
    for reason, holds in reasons.items():
        if holds:
            return Chunking(reason=reason)
    assert num_micro_batches is not None
    speed = _SPEEDS.get(platform, _OTHER_SPEED)
    operations = {}
    for stage, own in enumerate(programs):
        operations[ActionKind.FORWARD, stage] = own.forward.num_operations
        if own.backward is not None:
            operations[ActionKind.BACKWARD, stage] = own.backward.num_operations
    # At most this number of micro-batches is simulated; every possible chunk size divides it, too.
    num_simulated = min(num_micro_batches, _MAX_SIMULATED)

    def seconds(chunk_size: int) -> float:
        def cost(kind: ActionKind, stage: int) -> float:
            total = operations.get((kind, stage), 0.0)
            return total * chunk_size * speed.per_operation + speed.per_dispatch if total else 0.0

        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        forward, backward = (tuple(cost(kind, i) for i in range(len(programs))) for kind in kinds)
        num_chunks = num_simulated // chunk_size
        if speed.shares_cores:
            costs = [own for own in (*forward, *backward) if own]
            return num_chunks * (sum(costs) + speed.host_per_dispatch * len(costs))
        of_chunks = Costs.of(
            len(programs), forward=forward, backward=backward, host=speed.host_per_dispatch
        )
        timetable = make_timetable(num_chunks)
        training = len(timetable.order) > num_chunks * len(programs)
        return predict_step_time(
            Scenario(of_chunks, timetable, num_chunks, levels=tuple(levels), training=training)
        )

    best = alone = seconds(1)
    chosen, held_back = 1, False
    for chunk_size in possible_chunk_sizes(num_micro_batches)[1:]:
        if live_bytes(chunk_size) > max_live_bytes:
            held_back = True
            break
        found = seconds(chunk_size)
        if found < best - _LEAST_GAIN * alone:
            best, chosen = found, chunk_size
    longest = max(operations.values()) * speed.per_operation
    reason = f"the longest program of one micro-batch computes for about {describe_seconds(longest)}, "
    if possible_chunk_sizes(num_micro_batches) == [1]:
        reason += (
            f"and {num_micro_batches} micro-batches do not make {_LEAST_CHUNKS} equal chunks of several"
        )
    elif chosen == 1:
        reason += "beside which dispatches cost little"
    else:
        reason += f"and a step is estimated to take {best / alone:.0%} of its time one by one"
    if held_back:
        reason += f"; larger chunks would hold more than {max_live_bytes:,} bytes on a stage"
    return Chunking(chosen, reason)


def describe_seconds(seconds: float) -> str:
    """Describes a time."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
