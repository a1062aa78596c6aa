"""How actions become dispatches: how many micro-batches a program handles, and what is fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.simulator import simulate
from ipu_pipeline.engine.schedules.units import find_units

__all__ = ["ONE_BY_ONE", "DispatchPlan", "check_dispatch_plan", "check_fused"]


@dataclass(frozen=True)
class DispatchPlan:
    """How actions become dispatches; `dataclasses.asdict` and `DispatchPlan(**...)` store and restore it.

    Attributes:
      chunk_size: micro-batches that one program handles, one after another; a divisor of those of a step.
        A stage then has so many times as many of them in flight.
      is_fused: whether a stage's backward and the forward that follows it on its IPU are one program.
      reason: why, for people.
    """

    chunk_size: int = 1
    is_fused: bool = False
    reason: str = "given"

    def __post_init__(self) -> None:
        """Checks the fields."""
        if not isinstance(self.chunk_size, int) or isinstance(self.chunk_size, bool) or self.chunk_size < 1:
            raise ValueError(
                f"DispatchPlan: chunk_size must be an integer of at least 1; got {self.chunk_size!r}."
            )
        if not isinstance(self.is_fused, bool):
            raise ValueError(f"DispatchPlan: is_fused must be True or False; got {self.is_fused!r}.")

    def __str__(self) -> str:
        """In words."""
        chunk = "one micro-batch" if self.chunk_size == 1 else f"{self.chunk_size} micro-batches"
        fused = "a backward and the next forward are one program" if self.is_fused else "nothing is fused"
        return f"{chunk} per program, {fused}: {self.reason}"


ONE_BY_ONE = DispatchPlan(reason="every action is a program of its own")


def check_dispatch_plan(
    plan: DispatchPlan, num_micro_batches: int | None, device_mapping: Sequence[int]
) -> None:
    """Raises if a plan that was given does not fit the pipeline.

    Raises:
      TypeError: it is no plan.
      ValueError: everything is on one device, or the size of its chunks does not divide the number of
        micro-batches.
    """
    if not isinstance(plan, DispatchPlan):
        raise TypeError(f"dispatch_plan must be a DispatchPlan, or None to have it chosen; got {plan!r}.")
    if len(set(device_mapping)) == 1:
        raise ValueError(
            "dispatch_plan: all stages are on one IPU, where everything is one program. Leave it out."
        )
    if plan.chunk_size > 1 and (num_micro_batches is None or num_micro_batches % plan.chunk_size):
        known = "is known at run only" if num_micro_batches is None else f"is {num_micro_batches}"
        raise ValueError(
            f"dispatch_plan: chunk_size must divide the number of micro-batches per weight update, which "
            f"{known}; got {plan.chunk_size}."
        )


def check_fused(programs: Sequence[StagePrograms], timetable: Timetable, levels: Sequence[int]) -> None:
    """Raises if what a plan fuses cannot be run in the order of the schedule.

    Raises:
      ValueError: there are no backwards, or a backward and the forward behind it would wait for each other.
    """
    fusible = {stage for stage, own in enumerate(programs) if own.backward is not None}
    if not fusible:
        raise ValueError("dispatch_plan: is_fused is for pipelines that train over several stages.")
    try:
        simulate(find_units(timetable, lambda key: key[1] in fusible), levels, lambda _unit: 1.0)
    except ValueError as error:
        raise ValueError(
            "dispatch_plan: is_fused does not go with this schedule: a backward and the forward that "
            "follows it on an IPU would wait for each other as one program. Use another schedule, such as "
            '"grouped", or do not fuse.'
        ) from error
