"""Units of a timetable: actions of a stage that are done as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ipu_pipeline.engine.schedules.actions import Action, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable

__all__ = ["Unit", "UnitKey", "find_units", "key_of"]

Unit: TypeAlias = "tuple[Action, ...]"  # of one stage, done as one
UnitKey: TypeAlias = "tuple[tuple[ActionKind, ...], int]"


def key_of(unit: Unit) -> UnitKey:
    """The kinds of a unit's actions, and its stage."""
    return tuple(action.kind for action in unit), unit[0].stage


def find_units(timetable: Timetable, is_known: Callable[[UnitKey], bool]) -> list[list[Unit]]:
    """The actions of each IPU, in order, with a stage's backward and the forward behind it as one.

    Args:
      timetable: the schedule.
      is_known: whether there is a program for a backward and forward of a stage, by `key_of`.
    """
    rows: list[list[Unit]] = []
    for row in timetable.rows:
        units: list[Unit] = []
        for action in row:
            if action is None:
                continue
            unit: Unit = (action,)
            if units and len(units[-1]) == 1 and _may_fuse(units[-1][0], action):
                both: Unit = (units[-1][0], action)
                if is_known(key_of(both)):
                    units.pop()
                    unit = both
            units.append(unit)
        rows.append(units)
    return rows


def _may_fuse(first: Action, second: Action) -> bool:
    kinds = (first.kind, second.kind)
    return first.stage == second.stage and kinds == (ActionKind.BACKWARD, ActionKind.FORWARD)
