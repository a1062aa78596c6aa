"""The parts of a schedule: actions, rows of actions, and the grid that shows them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["Action", "ActionKind", "Row", "Rows", "ScheduleError", "ScheduleFunction", "format_rows"]


class ActionKind(enum.IntEnum):
    """The kinds of actions. Separate input and weight gradients, and updates, come later."""

    FORWARD = 0
    BACKWARD = 1


class Action(NamedTuple):
    """One stage handling one micro-batch in one direction."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        direction = "forward" if self.kind is ActionKind.FORWARD else "backward"
        return f"{direction} of stage {self.stage}, micro-batch {self.micro_batch}"


Row: TypeAlias = "tuple[Action | None, ...]"
Rows: TypeAlias = "tuple[Row, ...]"
ScheduleFunction: TypeAlias = "Callable[..., Sequence[Sequence[Action | None]]]"


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order or deadlocked."""


def format_rows(rows: Rows, marked: tuple[int, int] | None = None) -> str:
    """Formats a schedule as a grid: an IPU per line, a slot per column.

    `F0.3` is the forward of stage 0 for micro-batch 3, `B` a backward, `.` a time-step of waiting.

    Args:
      rows: one row per IPU.
      marked: the (IPU, position) of a slot to put in brackets.

    Returns:
      The lines, joined.
    """
    cells = [
        [
            "." if action is None else f"{'FB'[action.kind]}{action.stage}.{action.micro_batch}"
            for action in row
        ]
        for row in rows
    ]
    if marked is not None:
        cells[marked[0]][marked[1]] = f"[{cells[marked[0]][marked[1]]}]"
    width = max((len(cell) for row in cells for cell in row), default=1)
    return "\n".join(
        f"IPU {ipu}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for ipu, row in enumerate(cells)
    )
