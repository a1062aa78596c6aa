"""Schedules as arguments: a name, a file, a function or a search, and the checked timetable of each."""

from __future__ import annotations

import collections
import contextlib
import csv
import functools
import inspect
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from ipu_pipeline.engine.schedules.schedule_definitions import (
    SCHEDULES,
    NamedSchedule,
    ScheduleName,
    interleaved,
)
from ipu_pipeline.engine.schedules.timetables import (
    HALVES,
    Action,
    ActionKind,
    Rows,
    ScheduleError,
    ScheduleFunction,
    Timetable,
    check,
    split_backward,
)
from ipu_pipeline.ground.checks import is_int, require

# Schedules in CSV files, in the format of PyTorch's `torch.distributed.pipelining`.
#
# Line r is the row of rank r, without a header. A cell is empty (a time-step of waiting) or has a stage,
# a type and a micro-batch: `0F3`, `B` a backward, `I` its input gradients, `W` its weight gradients. The
# actions of `(0F8;7B0)OVERLAP_F_B` run one after another here. Cells of the types UNSHARD, RESHARD,
# REDUCE_GRAD, SEND_F, RECV_F, SEND_B and RECV_B are left out: the engine plans these by itself.
#
# If all stages take their backwards in the same order, but another than the micro-batches' (as in
# PyTorch's ScheduleLoopedBFS, from the last to the first), micro-batches are numbered in the order of
# their backwards. All forwards that these need are done by then, so times and memory stay the same.

_KINDS = {kind.letter: kind for kind in ActionKind}
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_LEFT_OUT = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)
_NUM_AROUND = 3  # columns that an error shows before and after the one with the fault
_FORMAT = (
    "A cell is empty, or has a stage, a type (F, B, I or W) and a micro-batch, as 0F3, or several such, as "
    "(0F8;7B0)OVERLAP_F_B"
)


class _Cell(NamedTuple):
    rank: int
    column: int
    action: Action


@dataclass(frozen=True, eq=False)
class FileSchedule:
    """A schedule from a file: a function with the arguments of `grouped`, for one pipeline only.

    Example:
      >>> schedules.write_csv(schedules.interleaved(2, 4, device_mapping=[0, 1]), "mine.csv")
      >>> schedule = schedules.load_schedule("mine.csv")
      >>> stages = [layers.Dense(4), layers.Dense(4)]
      >>> pipeline = engine.Pipeline(stages, num_micro_batches=4, schedule=schedule)

    Attributes:
      path: the path of the file.
      rows: its rows.
      device_mapping: the device of each stage.
      num_micro_batches: micro-batches per weight update.
    """

    path: str
    rows: Rows
    device_mapping: tuple[int, ...]
    num_micro_batches: int

    @property
    def __name__(self) -> str:
        """The name of the file."""
        return os.path.basename(self.path)

    def __call__(
        self,
        num_stages: int,
        num_micro_batches: int,
        device_mapping: Sequence[int],
        training: bool = True,
        levels: Sequence[int] | None = None,
    ) -> Rows:
        """Returns the rows; without training only their forwards.

        Raises:
          ScheduleError: the file is for another pipeline.
        """
        if levels is not None and len(set(levels)) < num_stages:
            raise ScheduleError(
                f"Schedule {self.path}: a file has no parallel stages; got levels {list(levels)}. Take a "
                "schedule with a name, or a function."
            )
        if num_stages != len(self.device_mapping) or list(device_mapping) != list(self.device_mapping):
            raise ScheduleError(
                f"Schedule {self.path}: the file has {len(self.rows)} ranks and {len(self.device_mapping)} "
                f"stages, mapped as {list(self.device_mapping)}; the pipeline has {num_stages} stages, "
                f"mapped as {list(device_mapping)}. Give the pipeline the file's stages and mapping, or "
                "another file."
            )
        if num_micro_batches != self.num_micro_batches:
            raise ScheduleError(
                f"Schedule {self.path}: the file is for {self.num_micro_batches} micro-batches per weight "
                f"update; got {num_micro_batches}. Run that many, or take another file."
            )
        if training:
            return self.rows
        return tuple(
            tuple(action for action in row if action is not None and action.kind is ActionKind.FORWARD)
            for row in self.rows
        )


def is_path(schedule: Any) -> bool:
    """Tells whether an argument is a path of a schedule: `os.PathLike`, or a string that ends in ".csv".

    Example:
      >>> schedules.is_path("mine.csv"), schedules.is_path("grouped")
      (True, False)
    """
    is_name = isinstance(schedule, str) and schedule.lower().endswith(".csv")
    return is_name or isinstance(schedule, os.PathLike)


def read_csv(path: str | os.PathLike[str]) -> Rows:
    """Reads a schedule from a file.

    Args:
      path: the path of the file.

    Returns:
      One row per rank. Empty cells are None, except those after the last action of a row.

    Raises:
      ScheduleError: the file cannot be read, or its schedule is no training schedule, is incomplete or out
        of order, or deadlocks.
    """
    return load_schedule(path).rows


def write_csv(rows: Sequence[Sequence[Action | None]], path: str | os.PathLike[str]) -> None:
    """Writes a schedule to a file that PyTorch can read, too. An existing file is replaced.

    Example:
      >>> rows = schedules.interleaved(2, 4, device_mapping=[0, 1])
      >>> schedules.write_csv(rows, "mine.csv")
      >>> schedules.read_csv("mine.csv") == rows
      True

    Args:
      rows: one row per device; None is an empty cell.
      path: the path of the file.

    Raises:
      OSError: the file cannot be written.
    """
    cells = [["" if action is None else _format(action) for action in row] for row in rows]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(cells)


def load_schedule(path: Any) -> FileSchedule:
    """Reads a schedule from a file, for `schedule` arguments. Arguments and errors are those of `read_csv`.

    Example:
      >>> schedules.write_csv(schedules.interleaved(2, 4, device_mapping=[0, 1]), "mine.csv")
      >>> schedule = schedules.load_schedule("mine.csv")
      >>> schedule.num_micro_batches, schedule.device_mapping
      (4, (0, 1))
    """
    name = os.fspath(path)
    cells = _read_cells(name)
    rows: list[list[Action | None]] = []
    action_cells: list[_Cell] = []
    for rank, row in enumerate(cells):
        rows.append([])
        for column, text in enumerate(row):
            actions = _parse(text)
            if actions is None:
                raise _fault(name, cells, rank, column, f"{text!r} is not an action. {_FORMAT}")
            rows[-1] += actions
            action_cells += [_Cell(rank, column, action) for action in actions if action is not None]
        if not any(rows[-1]):
            raise _fault(name, cells, rank, 0, "the rank has no actions. Each line is the row of one rank")
        while rows[-1][-1] is None:
            rows[-1].pop()
    mapping, count = _check_cells(name, cells, action_cells)
    places = _number_backwards(name, cells, action_cells)
    numbered: Rows = tuple(
        tuple(
            action
            if action is None or action.kind is ActionKind.FORWARD
            else action._replace(micro_batch=places[action.micro_batch])
            for action in row
        )
        for row in rows
    )
    try:
        check(numbered, len(mapping), count, mapping, True)
    except ScheduleError as error:
        raise ScheduleError(f"Schedule {name}: {str(error).removeprefix('Schedule: ')}") from None
    return FileSchedule(name, numbered, mapping, count)


def _read_cells(path: str) -> list[list[str]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            cells = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True)]
    except OSError as error:
        raise ScheduleError(
            f"Schedule {path}: the file cannot be read: {error.strerror}. Give the path of a CSV file."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"Schedule {path}: the file is not CSV in UTF-8: {error}.") from None
    while cells and not any(cells[-1]):
        cells.pop()
    if not cells:
        raise ScheduleError(f"Schedule {path}: the file is empty. Line r must be the row of rank r.")
    return cells


def _parse(text: str) -> list[Action | None] | None:
    """The actions of a cell, none for what is left out; None if it is not a cell of a schedule."""
    if not text:
        return [None]
    if _LEFT_OUT.fullmatch(text):
        return []
    overlap = _OVERLAP.fullmatch(text)
    actions: list[Action | None] = []
    for part in overlap[1].split(";") if overlap else [text]:
        match = _ACTION.fullmatch(part.strip())
        if match is None:
            return None
        stage, letter, micro_batch = match.groups()
        actions.append(Action(_KINDS[letter], int(stage), int(micro_batch)))
    return actions


def _format(action: Action) -> str:
    return f"{action.stage}{ActionKind(action.kind).letter}{action.micro_batch}"


def _check_cells(
    path: str, cells: Sequence[Sequence[str]], action_cells: Sequence[_Cell]
) -> tuple[tuple[int, ...], int]:
    """Checks what each rank alone can tell: every action is there once, and after those that it needs.

    Returns:
      The rank of each stage, and the number of micro-batches.
    """
    ranks: dict[int, int] = {}
    num_forwards: dict[int, int] = collections.defaultdict(int)
    scheduled: set[Action] = set()  # with whole backwards as both halves
    for rank, column, action in action_cells:
        fault, parts = None, split_backward(action)
        predecessor = _find_predecessor(parts[0])
        if ranks.setdefault(action.stage, rank) != rank:
            fault = f"stage {action.stage} is on rank {ranks[action.stage]} already. A stage is on one rank"
        elif not scheduled.isdisjoint(parts):
            fault = f"the {action} comes twice. A backward comes whole, or once in each half"
        elif predecessor is not None and predecessor not in scheduled:
            fault = f"the {action} comes before the {predecessor}. It needs that"
        elif action.kind is ActionKind.FORWARD and action.micro_batch != num_forwards[action.stage]:
            fault = (
                f"the {action} comes where micro-batch {num_forwards[action.stage]} should. Every stage "
                "takes its forwards in the order of the micro-batches"
            )
        if fault is not None:
            raise _fault(path, cells, rank, column, fault)
        scheduled.update(parts)
        num_forwards[action.stage] += action.kind is ActionKind.FORWARD
    count = 1 + max(cell.action.micro_batch for cell in action_cells)
    for stage, micro_batch in itertools.product(range(1 + max(ranks)), range(count)):
        for kind in (ActionKind.FORWARD, *HALVES):
            action = Action(kind, stage, micro_batch)
            if action not in scheduled:
                backward = action._replace(kind=ActionKind.BACKWARD)
                if kind in HALVES and scheduled.isdisjoint(split_backward(backward)):
                    action = backward
                rank = ranks.get(stage, len(cells) - 1)
                fault = f"the {action} is missing. Every stage has all micro-batches up to {count - 1}"
                raise _fault(path, cells, rank, len(cells[rank]) - 1, fault)
    return tuple(ranks[stage] for stage in range(len(ranks))), count


def _find_predecessor(action: Action) -> Action | None:
    """The action that must come before a forward or half in the same stage."""
    if action.kind is ActionKind.FORWARD:
        return None
    is_first = action.kind is ActionKind.INPUT_GRADIENTS
    return action._replace(kind=ActionKind.FORWARD if is_first else ActionKind.INPUT_GRADIENTS)


def _number_backwards(
    path: str, cells: Sequence[Sequence[str]], action_cells: Sequence[_Cell]
) -> dict[int, int]:
    """Numbers micro-batches in the order of their backwards, which must be the same in all stages."""
    orders: dict[tuple[int, ActionKind], list[_Cell]] = collections.defaultdict(list)
    for cell in action_cells:
        for part in split_backward(cell.action):
            orders[part.stage, part.kind].append(cell)
    last_stage = max(cell.action.stage for cell in action_cells)
    first = [cell.action.micro_batch for cell in orders[last_stage, ActionKind.INPUT_GRADIENTS]]
    for (_stage, kind), order in orders.items():
        for (rank, column, action), expected in zip(order, first, strict=True):
            if kind is not ActionKind.FORWARD and action.micro_batch != expected:
                raise _fault(
                    path,
                    cells,
                    rank,
                    column,
                    f"the {action} comes where micro-batch {expected} should. All stages must take their "
                    f"backwards, and both halves, in the order in which stage {last_stage} does",
                )
    return {micro_batch: place for place, micro_batch in enumerate(first)}


def _fault(path: str, cells: Sequence[Sequence[str]], rank: int, column: int, fault: str) -> ScheduleError:
    """An error at a cell, with the columns around it of all ranks."""
    columns = range(max(0, column - _NUM_AROUND), column + _NUM_AROUND + 1)
    titles = [str(number) for number in columns]
    grid = [
        [
            f"[{text}]" if (number, place) == (rank, column) else text
            for place, text in ((place, row[place] if place < len(row) else "") for place in columns)
        ]
        for number, row in enumerate(cells)
    ]
    width = max(len(text) for row in [titles, *grid] for text in row)
    head = len(f"rank {len(cells) - 1}")
    lines = [
        " ".join([title.ljust(head), *(text.ljust(width) for text in row)]).rstrip()
        for title, row in [("column", titles), *((f"rank {n}", row) for n, row in enumerate(grid))]
    ]
    return ScheduleError(
        f"Schedule {path}: rank {rank}, column {column} (both from 0): {fault}.\n" + "\n".join(lines)
    )


# Schedules as arguments. Names are this library's, its fronts' and other libraries', in any case, with
# "-", "_", " " or nothing between words, and with or without "Schedule" before them, as PyTorch's classes
# have it.

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
        rule = "PipelineSchedule.searched: bytes_per_ipu must be an integer of at least 1, or None"
        require(self.bytes_per_ipu is None or is_int(self.bytes_per_ipu, 1), rule, self.bytes_per_ipu)

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
        require(_normalize(schedule) in _BY_NAME, f"{argument} must be {expected}", schedule)
        return _BY_NAME[_normalize(schedule)]
    require(callable(schedule), f"{argument} must be {expected}", schedule, TypeError)
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
    checked = check_schedule(schedule, argument)
    if is_path(checked):
        return load_schedule(checked)
    return cast("ScheduleName | ScheduleFunction | SearchedSchedule", checked)


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
    resolved = find_schedule(schedule)
    return _make(resolved, num_stages, num_micro_batches, device_mapping, training, levels, halved)


@functools.lru_cache(maxsize=64)
def _make(
    resolved: ScheduleName | ScheduleFunction | SearchedSchedule,
    num_stages: int,
    num_micro_batches: int,
    device_mapping: tuple[int, ...],
    training: bool,
    levels: tuple[int, ...],
    halved: frozenset[int] | None,
) -> Timetable:
    make_rows: ScheduleFunction = interleaved
    if isinstance(resolved, SearchedSchedule):  # this fixes the programs, so a found order compiles nothing
        halved = frozenset(range(num_stages)) if training else halved
    else:
        make_rows = named_schedules()[resolved] if isinstance(resolved, str) else resolved
    parallel_levels = () if len(set(levels)) == num_stages else (levels,)
    rows = make_rows(num_stages, num_micro_batches, device_mapping, training, *parallel_levels)
    return check(rows, num_stages, num_micro_batches, device_mapping, training, levels, halved)


def _describe(schedule: NamedSchedule) -> str:
    return f"{schedule.name} ({', '.join(schedule.others)})" if schedule.others else schedule.name


def _normalize(name: str) -> str:
    plain = "".join(character for character in name.casefold() if character not in "-_ ")
    return plain.removeprefix("schedule")


_BY_NAME: dict[str, ScheduleName | SearchedSchedule] = {
    _normalize(name): schedule.name for schedule in SCHEDULES for name in (schedule.name, *schedule.others)
}
_BY_NAME["searched"] = SearchedSchedule()
