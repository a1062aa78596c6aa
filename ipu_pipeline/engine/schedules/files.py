"""Schedules in CSV files, in the format of PyTorch's `torch.distributed.pipelining`.

There is no header. Line r is the row of rank r, which is device r, from 0. An empty cell is a
time-step of waiting; others have a stage, a type and a micro-batch: `0F3` is the forward of stage 0 for
micro-batch 3, `B` a backward, `I` its input gradients and `W` its weight gradients. `(0F8;7B0)OVERLAP_F_B`
is several actions, which run one after another here. Cells of the types UNSHARD, RESHARD, REDUCE_GRAD,
SEND_F, RECV_F, SEND_B and RECV_B are left out: the engine plans these by itself.

If all stages take their backwards in the same order, but another than the micro-batches' (as in PyTorch's
ScheduleLoopedBFS, from the last to the first), micro-batches are numbered in the order of their backwards.
All forwards that these need are done by then, so times and memory stay the same.
"""

from __future__ import annotations

import collections
import csv
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ipu_pipeline.engine.schedules.actions import (
    HALVES,
    Action,
    ActionKind,
    Rows,
    ScheduleError,
    split_backward,
)
from ipu_pipeline.engine.schedules.checking import check

__all__ = ["FileSchedule", "is_path", "load_schedule", "read_csv", "write_csv"]

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
    found: list[_Cell] = []
    for rank, row in enumerate(cells):
        rows.append([])
        for column, text in enumerate(row):
            actions = _parse(text)
            if actions is None:
                raise _fault(name, cells, rank, column, f"{text!r} is not an action. {_FORMAT}")
            rows[-1] += actions
            found += [_Cell(rank, column, action) for action in actions if action is not None]
        if not any(rows[-1]):
            raise _fault(name, cells, rank, 0, "the rank has no actions. Each line is the row of one rank")
        while rows[-1][-1] is None:
            rows[-1].pop()
    mapping, count = _check_cells(name, cells, found)
    places = _number_backwards(name, cells, found)
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
    path: str, cells: Sequence[Sequence[str]], found: Sequence[_Cell]
) -> tuple[tuple[int, ...], int]:
    """Checks what each rank alone can tell: every action is there once, and after those that it needs.

    Returns:
      The rank of each stage, and the number of micro-batches.
    """
    ranks: dict[int, int] = {}
    num_forwards: dict[int, int] = collections.defaultdict(int)
    done: set[Action] = set()  # with whole backwards as both halves
    for rank, column, action in found:
        fault, parts = None, split_backward(action)
        needed = _find_needed(parts[0])
        if ranks.setdefault(action.stage, rank) != rank:
            fault = f"stage {action.stage} is on rank {ranks[action.stage]} already. A stage is on one rank"
        elif not done.isdisjoint(parts):
            fault = f"the {action} comes twice. A backward comes whole, or once in each half"
        elif needed is not None and needed not in done:
            fault = f"the {action} comes before the {needed}. It needs that"
        elif action.kind is ActionKind.FORWARD and action.micro_batch != num_forwards[action.stage]:
            fault = (
                f"the {action} comes where micro-batch {num_forwards[action.stage]} should. Every stage "
                "takes its forwards in the order of the micro-batches"
            )
        if fault is not None:
            raise _fault(path, cells, rank, column, fault)
        done.update(parts)
        num_forwards[action.stage] += action.kind is ActionKind.FORWARD
    count = 1 + max(cell.action.micro_batch for cell in found)
    for stage, micro_batch in itertools.product(range(1 + max(ranks)), range(count)):
        for kind in (ActionKind.FORWARD, *HALVES):
            action = Action(kind, stage, micro_batch)
            if action not in done:
                whole = action._replace(kind=ActionKind.BACKWARD)
                if kind in HALVES and done.isdisjoint(split_backward(whole)):
                    action = whole
                rank = ranks.get(stage, len(cells) - 1)
                fault = f"the {action} is missing. Every stage has all micro-batches up to {count - 1}"
                raise _fault(path, cells, rank, len(cells[rank]) - 1, fault)
    return tuple(ranks[stage] for stage in range(len(ranks))), count


def _find_needed(action: Action) -> Action | None:
    """What must come before a forward or half in the same stage."""
    if action.kind is ActionKind.FORWARD:
        return None
    is_first = action.kind is ActionKind.INPUT_GRADIENTS
    return action._replace(kind=ActionKind.FORWARD if is_first else ActionKind.INPUT_GRADIENTS)


def _number_backwards(path: str, cells: Sequence[Sequence[str]], found: Sequence[_Cell]) -> dict[int, int]:
    """Numbers micro-batches in the order of their backwards, which must be the same in all stages."""
    orders: dict[tuple[int, ActionKind], list[_Cell]] = collections.defaultdict(list)
    for cell in found:
        for part in split_backward(cell.action):
            orders[part.stage, part.kind].append(cell)
    last_stage = max(cell.action.stage for cell in found)
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
    shown = range(max(0, column - _NUM_AROUND), column + _NUM_AROUND + 1)
    titles = [str(number) for number in shown]
    grid = [
        [
            f"[{text}]" if (number, place) == (rank, column) else text
            for place, text in ((place, row[place] if place < len(row) else "") for place in shown)
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
