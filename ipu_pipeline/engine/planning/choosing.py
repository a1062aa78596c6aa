"""The choice of a dispatch plan, by estimates of how long a step takes.

Every dispatch costs the host and the device some time, however little it computes. Chunks of micro-batches
have fewer dispatches, but a pipeline of chunks takes longer to fill and to drain, and has more
micro-batches in flight. Which is better is estimated from the programs' operations and the nominal figures
below, so the choice depends on the pipeline and on the kind of device alone, and is the same everywhere.
Foreign functions have no estimate: programs that call one stay as they are.

Devices of their own are simulated. The virtual devices of a CPU share its cores, and XLA's programs use all
cores that are idle: while one stage waits, the others are faster. So there a step takes what its programs
and its dispatches take together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ipu_pipeline.engine.planning.dispatch_plans import DispatchPlan
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.simulator import simulate
from ipu_pipeline.engine.schedules.units import Unit, find_units

__all__ = ["choose_dispatch_plan", "describe_seconds", "possible_chunk_sizes"]

_MAX_CHUNK_SIZE = 16
_LEAST_CHUNKS = 4  # in a step: with fewer, stages would hardly overlap
_MAX_SIMULATED = 64  # micro-batches; more only repeat what these do
# Of the step's time; for less, a plan is not worth compiling. Fusing takes another program per stage.
_LEAST_GAIN, _LEAST_GAIN_OF_FUSING = 0.02, 0.1


class _Speed(NamedTuple):
    """Nominal figures of a kind of device, in seconds."""

    per_operation: float
    per_dispatch: float  # on the device
    host_per_dispatch: float
    shares_cores: bool


# Measured on two cores of a CPU (see benchmarks/against_plain_jax), and rounded; of others, orders of
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
) -> DispatchPlan:
    """The plan by which a step is shortest, as far as can be foretold.

    A step keeps four chunks at least, and a plan is taken only if it saves two parts in a hundred, or ten
    where it fuses.

    Args:
      programs: of the stages, for one micro-batch.
      levels: of the stages.
      make_timetable: the schedule for so many chunks.
      num_micro_batches: of a step; None if it is known at run only.
      platform: the devices' kind, as in `jax.Device.platform`.
      live_bytes: what the stage that holds most holds between forwards and backwards, by the chunks' size.
      max_live_bytes: chunks may not make it hold more.
      is_grouped: whether the schedule is "grouped". Another one was chosen for its order or its memory, and
        is followed action by action.
      saves_memory: whether recomputation or offloading is on, which chunks would counter.
    """
    both = [program for own in programs for program in (own.forward, own.backward) if program is not None]
    uncounted = ", ".join(sorted(frozenset().union(*(program.uncounted for program in both))))
    reasons = {
        "the number of micro-batches is known at run only": num_micro_batches is None,
        "the schedule was chosen for its order or its memory": not is_grouped,
        "recomputation or offloading is to save memory": saves_memory,
        "stages print or call back into Python": any(program.has_effects for program in both),
        f"no cost is known of {uncounted}; engine.measure_dispatch_plan measures": bool(uncounted),
    }
    for reason, holds in reasons.items():
        if holds:
            return DispatchPlan(reason=reason)
    assert num_micro_batches is not None
    speed = _SPEEDS.get(platform, _OTHER_SPEED)
    operations = {}
    for stage, own in enumerate(programs):
        operations[ActionKind.FORWARD, stage] = own.forward.num_operations
        if own.backward is not None:
            operations[ActionKind.BACKWARD, stage] = own.backward.num_operations
    has_backwards = any(kind is ActionKind.BACKWARD for kind, _stage in operations)
    num_simulated = num_micro_batches
    if num_micro_batches > _MAX_SIMULATED:  # of which every chunk size of theirs is a divisor, too
        num_simulated = _MAX_SIMULATED

    def is_known(key: tuple[tuple[ActionKind, ...], int]) -> bool:
        kinds, stage = key
        return all((kind, stage) in operations for kind in kinds)

    def seconds(chunk_size: int, is_fused: bool) -> float:
        def cost(unit: Unit) -> float:
            total = sum(operations.get((action.kind, action.stage), 0.0) for action in unit)
            if not total:
                return 0.0
            return total * chunk_size * speed.per_operation + speed.per_dispatch

        timetable = make_timetable(num_simulated // chunk_size)
        rows = find_units(timetable, is_known if is_fused else lambda _key: False)
        if speed.shares_cores:
            costs = [cost(unit) for row in rows for unit in row]
            return sum(costs) + speed.host_per_dispatch * sum(c > 0 for c in costs)
        try:
            return simulate(rows, levels, cost, speed.host_per_dispatch).length
        except ValueError:  # what would be fused waits for each other
            return math.inf

    # XLA's CPU compiler gives convolutions their fast form outside of loops only, and a chunk is a loop.
    avoids_loops = platform == "cpu" and any(program.has_convolutions for program in both)
    alone = seconds(1, False)
    best, chosen, held_back = alone, (1, False), False
    for chunk_size in possible_chunk_sizes(num_micro_batches):
        if chunk_size > 1 and avoids_loops:
            break
        if chunk_size > 1 and live_bytes(chunk_size) > max_live_bytes:
            held_back = True
            break
        for is_fused in (False, True) if has_backwards else (False,):
            found = seconds(chunk_size, is_fused)
            if found < best - (_LEAST_GAIN_OF_FUSING if is_fused else _LEAST_GAIN) * alone:
                best, chosen = found, (chunk_size, is_fused)
    longest = max(operations.values()) * speed.per_operation
    reason = f"the longest program of one micro-batch computes for about {describe_seconds(longest)}, "
    if chosen == (1, False) and possible_chunk_sizes(num_micro_batches) == [1]:
        reason += (
            f"and {num_micro_batches} micro-batches do not make {_LEAST_CHUNKS} equal chunks of several"
        )
    elif chosen == (1, False):
        reason += "beside which dispatches cost little"
    else:
        reason += f"and a step is foretold to take {best / alone:.0%} of its time one by one"
    if avoids_loops:
        reason += "; convolutions, which are slow in loops on a CPU, are not chunked"
    if held_back:
        reason += f"; larger chunks would hold more than {max_live_bytes:,} bytes on a stage"
    return DispatchPlan(*chosen, reason)


def describe_seconds(seconds: float) -> str:
    """A time in words."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
