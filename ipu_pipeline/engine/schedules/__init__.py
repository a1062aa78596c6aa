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
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.schedules.lock_step import grouped, interleaved, sequential
from ipu_pipeline.engine.schedules.looped import looped
from ipu_pipeline.engine.schedules.named import named_schedules
from ipu_pipeline.engine.schedules.scenarios import Costs, Memory, Scenario
from ipu_pipeline.engine.schedules.simulator import Simulation, predict_step_time, simulate
from ipu_pipeline.engine.schedules.staircases import find_ramps, find_slots, format_staircase
from ipu_pipeline.engine.schedules.timelines import Bubble, Interval, Peak, Sending, Timeline
from ipu_pipeline.engine.schedules.timetables import MAX_ACTIONS, timetable
from ipu_pipeline.engine.schedules.variants import Layer, Variant, what_if
from ipu_pipeline.engine.schedules.zero_bubble import zero_bubble

__all__ = [
    "MAX_ACTIONS",
    "Action",
    "ActionKind",
    "Advice",
    "Bubble",
    "Cluster",
    "Costs",
    "HostMemory",
    "Interval",
    "Layer",
    "LinkSpeed",
    "Memory",
    "Peak",
    "Row",
    "Rows",
    "Scenario",
    "ScheduleError",
    "ScheduleFunction",
    "Sending",
    "Simulation",
    "Timeline",
    "Timetable",
    "Variant",
    "advise",
    "check",
    "find_ramps",
    "find_slots",
    "format_rows",
    "format_staircase",
    "grouped",
    "interleaved",
    "looped",
    "named_schedules",
    "predict_step_time",
    "sequential",
    "simulate",
    "timetable",
    "what_if",
    "zero_bubble",
]
