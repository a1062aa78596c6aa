"""Schedules, the checker that proves them, and simulations of how long they take. No JAX."""

from ipu_pipeline.engine.schedules.actions import (
    Action,
    ActionKind,
    Row,
    Rows,
    ScheduleError,
    ScheduleFunction,
    format_rows,
)
from ipu_pipeline.engine.schedules.advice import Advice, advise
from ipu_pipeline.engine.schedules.checking import Timetable, check
from ipu_pipeline.engine.schedules.clusters import Cluster, LinkSpeed
from ipu_pipeline.engine.schedules.costs import Costs, Memory
from ipu_pipeline.engine.schedules.files import FileSchedule, is_path, load_schedule, read_csv, write_csv
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.schedules.named import (
    MAX_ACTIONS,
    Schedule,
    SearchedSchedule,
    check_schedule,
    find_schedule,
    named_schedules,
    schedule_name,
    timetable,
)
from ipu_pipeline.engine.schedules.rows import (
    SCHEDULES,
    NamedSchedule,
    ScheduleName,
    all_forwards,
    dual_pipe_v,
    grouped,
    interleaved,
    looped,
    looped_zero_bubble,
    sequential,
    v_half,
    v_min,
    zero_bubble,
    zero_bubble_h2,
    zero_bubble_v,
)
from ipu_pipeline.engine.schedules.scenarios import Layer, Scenario
from ipu_pipeline.engine.schedules.searching import Searched, search
from ipu_pipeline.engine.schedules.simulator import Simulation, predict_step_time, simulate
from ipu_pipeline.engine.schedules.staircases import find_ramps, find_slots, format_staircase
from ipu_pipeline.engine.schedules.timelines import Bubble, Interval, Peak, Sending, Timeline
from ipu_pipeline.engine.schedules.variants import Variant, make_even, what_if

__all__ = [
    "MAX_ACTIONS",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Advice",
    "Bubble",
    "Cluster",
    "Costs",
    "FileSchedule",
    "HostMemory",
    "Interval",
    "Layer",
    "LinkSpeed",
    "Memory",
    "NamedSchedule",
    "Peak",
    "Row",
    "Rows",
    "Scenario",
    "Schedule",
    "ScheduleError",
    "ScheduleFunction",
    "ScheduleName",
    "Searched",
    "SearchedSchedule",
    "Sending",
    "Simulation",
    "Timeline",
    "Timetable",
    "Variant",
    "advise",
    "all_forwards",
    "check",
    "check_schedule",
    "dual_pipe_v",
    "find_ramps",
    "find_schedule",
    "find_slots",
    "format_rows",
    "format_staircase",
    "grouped",
    "interleaved",
    "is_path",
    "load_schedule",
    "looped",
    "looped_zero_bubble",
    "make_even",
    "named_schedules",
    "predict_step_time",
    "read_csv",
    "schedule_name",
    "search",
    "sequential",
    "simulate",
    "timetable",
    "v_half",
    "v_min",
    "what_if",
    "write_csv",
    "zero_bubble",
    "zero_bubble_h2",
    "zero_bubble_v",
]
