"""What an argument that takes a schedule may be, and the checked timetable that is made of it.

Names are those of this library, of its fronts' enumerations, and of other libraries, in upper or lower
case, with "-", "_", " " or nothing between words, and with or without "Schedule" before them, as the names
of PyTorch's classes have it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from ipu_pipeline.engine.schedules.actions import ScheduleFunction
from ipu_pipeline.engine.schedules.checking import Timetable, check
from ipu_pipeline.engine.schedules.files import is_path, load_schedule
from ipu_pipeline.engine.schedules.rows import SCHEDULES, NamedSchedule, ScheduleName, interleaved
from ipu_pipeline.ground.checks import is_int

__all__ = [
    "MAX_ACTIONS",
    "Schedule",
    "SearchedSchedule",
    "check_schedule",
    "find_schedule",
    "named_schedules",
    "schedule_name",
    "timetable",
]

MAX_ACTIONS = 2**22  # all of them are written down and checked beforehand: half a minute, a gigabyte


@dataclass(frozen=True)
class SearchedSchedule:
    """Requests a search for an order of actions with a short step; pass it as `schedule`.

    A pipeline measures its stages on its devices before its first step, and searches (see `search`). A
    `Scenario` already has the costs. The backward of every stage is split into input and weight gradients.
    It needs one process, several devices, and no parallel stages.

    Example:
      >>> costs = engine.Costs.of(2, forward=[1.0, 2.0], backward=[2.0, 4.0])
      >>> scenario = engine.Scenario(costs, engine.SearchedSchedule(), num_micro_batches=4)
      >>> engine.simulate(scenario).free_running.step_time
      25.0

    Attributes:
      bytes_per_ipu: the most bytes that a device may hold: variables, optimizer state, accumulators,
        micro-batches and the largest program, as in `plan_ipu_memory`. None: no limit.
    """

    bytes_per_ipu: int | None = None

    def __post_init__(self) -> None:
        """Checks the field."""
        if self.bytes_per_ipu is not None and not is_int(self.bytes_per_ipu, 1):
            raise ValueError(
                "PipelineSchedule.searched: bytes_per_ipu must be an integer of at least 1, or None; got "
                f"{self.bytes_per_ipu!r}."
            )

    def __str__(self) -> str:
        """The name that reports have for it."""
        return "searched"


# What `schedule=` takes everywhere: a name, a file, a function of one's own, or a search.
Schedule: TypeAlias = ScheduleName | os.PathLike[str] | ScheduleFunction | SearchedSchedule


def named_schedules() -> dict[ScheduleName, ScheduleFunction]:
    """The schedules that have names; each function has the arguments of `grouped`.

    Example:
      >>> "zero_bubble" in schedules.named_schedules()
      True
    """
    return {schedule.name: schedule.function for schedule in SCHEDULES}


def check_schedule(schedule: Any, argument: str = "schedule") -> Schedule:
    """Checks a schedule as far as possible without reading a file.

    Example:
      >>> schedules.check_schedule("interleaved")
      'interleaved'

    Args:
      schedule: a name; the path of a file (`os.PathLike`, or a string that ends in ".csv"); a function
        with the arguments of `grouped`; or a `SearchedSchedule`, which has the name "searched", too.
      argument: what an error calls it.

    Returns:
      The name in this library; or the path, the function or the search, as it is given.

    Raises:
      ValueError: there is no such name.
      TypeError: it is something else, or a function that does not take these arguments.
    """
    if is_path(schedule):
        return cast("os.PathLike[str]", schedule)
    if isinstance(schedule, SearchedSchedule):
        return schedule
    expected = (
        f"one of {', '.join(map(_describe, SCHEDULES))}, searched, a function of (num_stages, "
        'num_micro_batches, device_mapping, training), or the path of a file ("....csv")'
    )
    if isinstance(schedule, str):
        if _normalize(schedule) not in _BY_NAME:
            raise ValueError(f"{argument} must be {expected}; got {schedule!r}.")
        return _BY_NAME[_normalize(schedule)]
    if not callable(schedule):
        raise TypeError(f"{argument} must be {expected}; got {schedule!r}.")
    try:
        signature = inspect.signature(schedule)
    except ValueError:
        return cast("ScheduleFunction", schedule)  # it does not say what it takes
    for arguments in ((1, 1, (0,), True), (1, 1, (0,), True, (0,))):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return cast("ScheduleFunction", schedule)
    raise TypeError(
        f"{argument} must take (num_stages, num_micro_batches, device_mapping, training), and levels if "
        f"there are parallel stages; {schedule!r} takes {signature}."
    )


def find_schedule(
    schedule: Any, argument: str = "schedule"
) -> ScheduleName | ScheduleFunction | SearchedSchedule:
    """Finds a schedule: as `check_schedule`, and a file is read.

    Example:
      >>> schedules.find_schedule("one_forward_one_backward")
      'interleaved'

    Returns:
      The name in this library, a function with the arguments of `grouped`, or the search.

    Raises:
      ScheduleError: a file cannot be read, or has no schedule that can run.
      ValueError: there is no such name.
      TypeError: it is something else, or a function that does not take these arguments.
    """
    found = check_schedule(schedule, argument)
    if is_path(found):
        return load_schedule(found)
    return cast("ScheduleName | ScheduleFunction | SearchedSchedule", found)


def schedule_name(schedule: Any) -> str:
    """The name of a schedule in reports: its own, or that of the user's function.

    Example:
      >>> def my_schedule(num_stages, num_micro_batches, device_mapping, training=True):
      ...     return schedules.grouped(num_stages, num_micro_batches, device_mapping, training)
      >>> schedules.schedule_name(my_schedule)
      'my_schedule'
    """
    if isinstance(schedule, (str, SearchedSchedule)):
        return str(schedule)
    name: str = getattr(schedule, "__name__", type(schedule).__name__)
    return name


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
    make_rows: ScheduleFunction = interleaved
    if isinstance(found, SearchedSchedule):
        halved = frozenset(range(num_stages)) if training else halved
    else:
        make_rows = named_schedules()[found] if isinstance(found, str) else found
    own = () if len(set(levels)) == num_stages else (levels,)
    rows = make_rows(num_stages, num_micro_batches, device_mapping, training, *own)
    return check(rows, num_stages, num_micro_batches, device_mapping, training, levels, halved)


def _describe(known: NamedSchedule) -> str:
    return f"{known.name} ({', '.join(known.others)})" if known.others else known.name


def _normalize(name: str) -> str:
    plain = "".join(character for character in name.casefold() if character not in "-_ ")
    return plain.removeprefix("schedule")


_BY_NAME: dict[str, ScheduleName | SearchedSchedule] = {
    _normalize(name): known.name for known in SCHEDULES for name in (known.name, *known.others)
}
_BY_NAME["searched"] = SearchedSchedule()
