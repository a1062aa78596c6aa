"""The schedules that have names."""

from __future__ import annotations

from ipu_pipeline.engine.schedules.actions import ScheduleFunction
from ipu_pipeline.engine.schedules.lock_step import grouped, interleaved, sequential
from ipu_pipeline.engine.schedules.looped import looped
from ipu_pipeline.engine.schedules.zero_bubble import zero_bubble

__all__ = ["named_schedules"]


def named_schedules() -> dict[str, ScheduleFunction]:
    """The schedules that have names; each function has the arguments of `grouped`."""
    functions = (grouped, interleaved, sequential, looped, zero_bubble)
    return {function.__name__: function for function in functions}
