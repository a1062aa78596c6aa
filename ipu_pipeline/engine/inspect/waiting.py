"""Estimates how long devices wait for each other, before anything is compiled.

A step is simulated as if every action took as long as its operations suggest, on a device of its own; it
is also counted in time-steps of the schedule. With N stages, each on its own device, and G micro-batches,
the latter gives (N-1)/(G+N-1) for Grouped and Interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.inspect.facts import StageDetails
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.costs import Costs
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.simulator import predict_step_time

__all__ = ["Bubble", "estimate_bubble"]

_MAX_SIMULATED = 2**15  # actions; with more, those in the middle are taken to be equally long


@dataclass(frozen=True)
class Bubble:
    """The share of a step in which devices wait for each other.

    Attributes:
      share: the share, simulated from the stages' operations, if each device has its own cores; None if
        there are no operations.
      lock_step_share: the share of the schedule's time-steps, as if all forwards and backwards took equally
        long.
      longest_ipu: the busiest device.
      longest_share: its share of all operations; None if there are no operations.
    """

    share: float | None
    lock_step_share: float
    longest_ipu: int
    longest_share: float | None


def estimate_bubble(
    stages: Sequence[StageDetails],
    make_timetable: Callable[[int], Timetable],
    count: int,
    repeats: bool,
) -> Bubble | None:
    """Estimates how much of a step devices wait; None if all stages are on one device.

    The step has `count` micro-batches, or chunks of them. If the schedule `repeats` itself in a long step,
    the length is found from a shorter one.
    """
    ipus = sorted({stage.ipu for stage in stages})
    if len(ipus) == 1:
        return None
    timetable = make_timetable(count)
    num_slots = len(ipus) * timetable.num_time_steps
    of_ipu = {ipu: sum(stage.num_flop for stage in stages if stage.ipu == ipu) for ipu in ipus}
    total = sum(of_ipu.values())
    length = _estimate_length(stages, make_timetable, count, repeats) if total else None
    longest = max(ipus, key=lambda ipu: of_ipu[ipu])
    return Bubble(
        share=None if not length else max(0.0, 1 - count * total / (len(ipus) * length)),
        lock_step_share=1 - len(timetable.order) / num_slots,
        longest_ipu=longest,
        longest_share=of_ipu[longest] / total if total else None,
    )


def _estimate_length(
    stages: Sequence[StageDetails], make_timetable: Callable[[int], Timetable], count: int, repeats: bool
) -> float | None:
    """Estimates how long a step takes, in operations; None if it is too long to be simulated."""

    def simulated(number: int) -> float:
        timetable = make_timetable(number)
        # Backwards may all take nothing: if only the last stage is trained, its forward has them.
        trains = any(action.kind is not ActionKind.FORWARD for action in timetable.order)
        return predict_step_time(Scenario(costs, timetable, number, ipus, levels, training=trains))

    backward = [stage.num_backward_flop for stage in stages]
    costs = Costs.of(
        len(stages),
        forward=[stage.num_forward_flop for stage in stages],
        backward=backward,
        weight_gradients=[
            min(stage.weight_operations, whole) if stage.is_halved else whole / 2
            for stage, whole in zip(stages, backward, strict=True)
        ],
    )
    ipus, levels = tuple(stage.ipu for stage in stages), tuple(stage.level for stage in stages)
    enough = max(4 * len(stages), _MAX_SIMULATED // (2 * len(stages)))
    if count <= enough:
        return simulated(count)
    if not repeats:
        return None
    half = enough // 2
    each = (simulated(enough) - simulated(half)) / (enough - half)
    return simulated(enough) + (count - enough) * each
