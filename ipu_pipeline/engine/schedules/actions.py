"""The parts of a schedule: actions, rows of actions, and grids that show them."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, TypeAlias

__all__ = [
    "GATHER",
    "HALVES",
    "REDUCE",
    "UPDATE",
    "Action",
    "ActionKind",
    "Row",
    "Rows",
    "ScheduleError",
    "ScheduleFunction",
    "format_rows",
    "number_actions",
    "split_backward",
]


class ActionKind(enum.IntEnum):
    """The kinds of actions.

    A backward may be split in two: input gradients, for which the previous stages wait, and weight
    gradients, for which only the weight update waits.

    Example:
      >>> list(engine.ActionKind)
      [<ActionKind.FORWARD: 0>, <ActionKind.BACKWARD: 1>,
       <ActionKind.INPUT_GRADIENTS: 2>, <ActionKind.WEIGHT_GRADIENTS: 3>]
    """

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENTS = 2
    WEIGHT_GRADIENTS = 3

    @property
    def letter(self) -> str:
        """The letter in grids: F, B, I or W."""
        return "FBIW"[self]

    @property
    def words(self) -> str:
        """The name, in words."""
        return self.name.lower().replace("_", " ")


HALVES = (ActionKind.INPUT_GRADIENTS, ActionKind.WEIGHT_GRADIENTS)  # of a backward, in their order

# What ends a step, numbered behind the kinds of actions.
UPDATE = len(ActionKind)
REDUCE = UPDATE + 1  # a device's gradients are reduced over replicas: an all-reduce, or a reduce-scatter
GATHER = UPDATE + 2  # replicas that share the optimizer's state gather what they have updated


class Action(NamedTuple):
    """One stage's forward, backward, input gradients or weight gradients for one micro-batch.

    Example:
      >>> engine.Action(engine.ActionKind.FORWARD, stage=1, micro_batch=2)
      Action(kind=<ActionKind.FORWARD: 0>, stage=1, micro_batch=2)
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{ActionKind(self.kind).words} of stage {self.stage}, micro-batch {self.micro_batch}"


def split_backward(action: Action) -> tuple[Action, ...]:
    """Returns a whole backward as both halves, another action as it is."""
    if action.kind is not ActionKind.BACKWARD:
        return (action,)
    return tuple(action._replace(kind=kind) for kind in HALVES)


Row: TypeAlias = "tuple[Action | None, ...]"
Rows: TypeAlias = "tuple[Row, ...]"
ScheduleFunction: TypeAlias = Callable[..., Sequence[Sequence[Action | None]]]


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order or deadlocked."""


def number_actions(steps: Iterable[tuple[int, int]], num_micro_batches: int | None = None) -> Row:
    """Makes a row of kinds and stages: each takes its micro-batches in order, at most so many."""
    following: dict[tuple[int, int], Iterator[Action]] = {}
    row: list[Action] = []
    for step in steps:
        if step not in following:
            kind, stage = step
            numbers = itertools.islice(itertools.count(), num_micro_batches)
            following[step] = map(Action, repeat(ActionKind(kind)), repeat(stage), numbers)
        row += itertools.islice(following[step], 1)
    return tuple(row)


def format_rows(rows: Rows, marked: tuple[int, int] | None = None) -> str:
    """Formats a schedule as a grid: a device per line, a slot per column.

    `F0.3` is the forward of stage 0 for micro-batch 3, `B` a backward, `I` input gradients, `W` weight
    gradients, and `.` a time-step of waiting.

    Example:
      >>> rows = schedules.grouped(2, 2, device_mapping=[0, 1], training=False)
      >>> print(schedules.format_rows(rows))
      device 0: F0.0 F0.1
      device 1: .    F1.0 F1.1

    Args:
      rows: one row per device.
      marked: the (device, position) of a slot to put in brackets.

    Returns:
      The lines, joined.
    """
    cells = [
        [
            "." if action is None else f"{action.kind.letter}{action.stage}.{action.micro_batch}"
            for action in row
        ]
        for row in rows
    ]
    if marked is not None:
        cells[marked[0]][marked[1]] = f"[{cells[marked[0]][marked[1]]}]"
    width = max((len(cell) for row in cells for cell in row), default=1)
    return "\n".join(
        f"device {ipu}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for ipu, row in enumerate(cells)
    )
