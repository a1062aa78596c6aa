"""Makes checked timetables from a schedule's name or a user's function."""

from __future__ import annotations

import functools

from ipu_pipeline.engine.schedules.actions import ScheduleFunction
from ipu_pipeline.engine.schedules.checking import Timetable, check
from ipu_pipeline.engine.schedules.lock_step import interleaved
from ipu_pipeline.engine.schedules.named import (
    Schedule,
    ScheduleName,
    SearchedSchedule,
    find_schedule,
    named_schedules,
)

__all__ = ["MAX_ACTIONS", "timetable"]

MAX_ACTIONS = 2**22  # all of them are written down and checked beforehand: half a minute, a gigabyte


def timetable(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    device_mapping: tuple[int, ...],
    training: bool,
    levels: tuple[int, ...] | None = None,
    halved: frozenset[int] | None = None,
) -> Timetable:
    """Makes the checked timetable of a schedule.

    Example:
      >>> timetable = schedules.timetable("grouped", 4, 8, (0, 1, 2, 3), training=True)
      >>> timetable.num_time_steps
      22

    Args:
      schedule: a name, see `find_schedule`, or a function with the arguments of `grouped` that returns
        one sequence of actions (None: wait one time-step) per device. It gets `levels` only if there are
        parallel stages. A `SearchedSchedule` is not searched here, as costs are not known: it stands for
        "interleaved" with a split backward.
      num_stages: the number of stages.
      num_micro_batches: micro-batches per weight update.
      device_mapping: the device of each stage, from 0.
      training: whether there are backwards.
      levels: as in `grouped`.
      halved: as in `check`.

    Returns:
      The timetable; the same object for the same arguments.

    Raises:
      ScheduleError: `check` finds a fault.
      ValueError: no schedule has that name, or there are too many actions.
    """
    num_actions = num_stages * num_micro_batches * (2 if training else 1)
    if num_actions > MAX_ACTIONS:
        raise ValueError(
            f"{num_micro_batches} micro-batches per weight update on {num_stages} stages are "
            f"{num_actions} actions; a schedule over several devices has up to {MAX_ACTIONS}. Update more "
            "often, or put all stages on one device."
        )
    if levels is None:
        levels = tuple(range(num_stages))
    found = find_schedule(schedule)
    return _make(found, num_stages, num_micro_batches, device_mapping, training, levels, halved)


@functools.lru_cache(maxsize=64)
def _make(
    found: ScheduleName | ScheduleFunction | SearchedSchedule,
    num_stages: int,
    num_micro_batches: int,
    device_mapping: tuple[int, ...],
    training: bool,
    levels: tuple[int, ...],
    halved: frozenset[int] | None,
) -> Timetable:
    if isinstance(found, SearchedSchedule):
        make_rows: ScheduleFunction = interleaved
        halved = frozenset(range(num_stages)) if training else halved
    else:
        make_rows = named_schedules()[found] if isinstance(found, str) else found
    if len(set(levels)) == num_stages:
        rows = make_rows(num_stages, num_micro_batches, device_mapping, training)
    else:
        rows = make_rows(num_stages, num_micro_batches, device_mapping, training, levels)
    return check(rows, num_stages, num_micro_batches, device_mapping, training, levels, halved)
