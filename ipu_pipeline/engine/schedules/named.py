"""The schedules that have names, and what an argument that takes a schedule may be.

Names are those of this library, of its fronts' enumerations, and of other libraries, in upper or lower
case, with "-", "_", " " or nothing between words, and with or without "Schedule" before them, as the names
of PyTorch's classes have it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from ipu_pipeline.engine.schedules.actions import ScheduleFunction
from ipu_pipeline.engine.schedules.all_forwards import all_forwards
from ipu_pipeline.engine.schedules.building_blocks import v_half, v_min
from ipu_pipeline.engine.schedules.dual_pipe_v import dual_pipe_v
from ipu_pipeline.engine.schedules.files import is_path, load_schedule
from ipu_pipeline.engine.schedules.lock_step import grouped, interleaved, sequential
from ipu_pipeline.engine.schedules.looped import looped
from ipu_pipeline.engine.schedules.looped_zero_bubble import looped_zero_bubble
from ipu_pipeline.engine.schedules.zero_bubble import zero_bubble
from ipu_pipeline.engine.schedules.zero_bubble_h2 import zero_bubble_h2
from ipu_pipeline.engine.schedules.zero_bubble_v import zero_bubble_v
from ipu_pipeline.ground.checks import is_int

__all__ = [
    "SCHEDULES",
    "NamedSchedule",
    "Schedule",
    "ScheduleName",
    "SearchedSchedule",
    "check_schedule",
    "find_schedule",
    "named_schedules",
    "schedule_name",
]

# The names in `SCHEDULES`, and of a search. Type checkers know no others, nor the path of a file as a text.
ScheduleName: TypeAlias = Literal[
    "grouped",
    "eager_1f1b",
    "interleaved",
    "1f1b",
    "one_forward_one_backward",
    "non_interleaved",
    "pipedream_flush",
    "dapple",
    "sequential",
    "all_forwards",
    "gpipe",
    "afab",
    "f_then_b",
    "fill_drain",
    "looped_bfs",
    "breadth_first",
    "looped",
    "interleaved_1f1b",
    "megatron_interleaved",
    "virtual_pipeline",
    "vpp",
    "zero_bubble",
    "zb_h1",
    "zb1p",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zb_h2",
    "zb2p",
    "looped_zero_bubble",
    "interleaved_zero_bubble",
    "zero_bubble_v",
    "zbv",
    "v_zb",
    "zbv_zero_bubble",
    "v_half",
    "v_min",
    "dual_pipe_v",
    "searched",
]


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
        """Checks the field.

        Raises:
          ValueError: it is not a number of bytes.
        """
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


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule that has a name.

    Example:
      >>> [schedule.member for schedule in schedules.SCHEDULES[:3]]
      ['Grouped', 'Interleaved', 'Sequential']

    Attributes:
      function: makes its rows, from the arguments of `grouped`.
      member: its name in the fronts' enumerations.
      others: its names in other libraries.
      purpose: when to use it, in one line.
    """

    function: Callable[..., Any]
    member: str
    others: tuple[str, ...]
    purpose: str

    @property
    def name(self) -> ScheduleName:
        """The name in this library."""
        return cast("ScheduleName", self.function.__name__)


SCHEDULES = (
    NamedSchedule(
        grouped,
        "Grouped",
        ("eager_1f1b",),
        "The default, as on Graphcore's IPUs: forwards run together, then backwards.",
    ),
    NamedSchedule(
        interleaved,
        "Interleaved",
        ("1f1b", "one_forward_one_backward", "non_interleaved", "pipedream_flush", "dapple"),
        "1F1B: the bubble of Grouped with half of its activation memory.",
    ),
    NamedSchedule(sequential, "Sequential", (), "To find a fault, or to save memory: nothing overlaps."),
    NamedSchedule(
        all_forwards,
        "AllForwards",
        ("gpipe", "afab", "f_then_b", "fill_drain", "looped_bfs", "breadth_first"),
        "GPipe, for comparisons and few micro-batches: all forwards come first.",
    ),
    NamedSchedule(
        looped,
        "Looped",
        ("interleaved_1f1b", "megatron_interleaved", "virtual_pipeline", "vpp"),
        "Megatron's interleaved: a smaller bubble, for more transfers and memory.",
    ),
    NamedSchedule(
        zero_bubble,
        "ZeroBubble",
        ("zb_h1", "zb1p", "zero_bubble_h1"),
        "Split backward: a third of Interleaved's bubble, in the same memory.",
    ),
    NamedSchedule(
        zero_bubble_h2,
        "ZeroBubbleH2",
        ("zb_h2", "zb2p"),
        "Split backward: almost no bubble, for twice Interleaved's memory.",
    ),
    NamedSchedule(
        looped_zero_bubble,
        "LoopedZeroBubble",
        ("interleaved_zero_bubble",),
        "Looped with a split backward: almost no bubble, for more memory.",
    ),
    NamedSchedule(
        zero_bubble_v,
        "ZeroBubbleV",
        ("zbv", "v_zb", "zbv_zero_bubble"),
        "Split backward: almost no bubble, in Interleaved's memory.",
    ),
    NamedSchedule(
        v_half,
        "VHalf",
        (),
        "Half of ZeroBubbleV's memory, for a small bubble.",
    ),
    NamedSchedule(v_min, "VMin", (), "A third of ZeroBubbleV's memory, for a larger bubble."),
    NamedSchedule(
        dual_pipe_v,
        "DualPipeV",
        (),
        "For slow transfers: forwards alternate with backwards of other micro-batches.",
    ),
)


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
        if _normalize(schedule) == _normalize(str(SearchedSchedule())):
            return SearchedSchedule()
        for known in SCHEDULES:
            if _normalize(schedule) in map(_normalize, (known.name, *known.others)):
                return known.name
        raise ValueError(f"{argument} must be {expected}; got {schedule!r}.")
    if not callable(schedule):
        raise TypeError(f"{argument} must be {expected}; got {schedule!r}.")
    try:
        signature = inspect.signature(schedule)
    except ValueError:
        return cast("ScheduleFunction", schedule)  # it does not say what it takes
    plain = 1, 1, (0,), True
    if not _binds(signature, *plain) and not _binds(signature, *plain, (0,)):
        raise TypeError(
            f"{argument} must take (num_stages, num_micro_batches, device_mapping, training), and levels "
            f"if there are parallel stages; {schedule!r} takes {signature}."
        )
    return cast("ScheduleFunction", schedule)


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


def _binds(signature: inspect.Signature, *arguments: Any) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _describe(known: NamedSchedule) -> str:
    return f"{known.name} ({', '.join(known.others)})" if known.others else known.name


def _normalize(name: str) -> str:
    plain = "".join(character for character in name.casefold() if character not in "-_ ")
    return plain.removeprefix("schedule")
