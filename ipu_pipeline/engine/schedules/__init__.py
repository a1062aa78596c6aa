"""Who does what when, and the checker that proves it; no JAX."""

from ipu_pipeline.engine.schedules.actions import (
    Action,
    ActionKind,
    Row,
    Rows,
    ScheduleError,
    ScheduleFunction,
    format_rows,
)
from ipu_pipeline.engine.schedules.checking import Timetable, check
from ipu_pipeline.engine.schedules.lock_step import grouped, interleaved, named_schedules, sequential
from ipu_pipeline.engine.schedules.timetables import timetable

__all__ = [
    "Action",
    "ActionKind",
    "Row",
    "Rows",
    "ScheduleError",
    "ScheduleFunction",
    "Timetable",
    "check",
    "format_rows",
    "grouped",
    "interleaved",
    "named_schedules",
    "sequential",
    "timetable",
]
