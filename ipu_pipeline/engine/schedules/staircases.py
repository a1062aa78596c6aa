"""A timetable as text: a device per line, a time-step per column, and the phases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ipu_pipeline.engine.schedules.actions import Action
from ipu_pipeline.engine.schedules.checking import Timetable

__all__ = ["Ramp", "find_ramps", "find_slots", "format_staircase"]

_GAP = "..."


class Ramp(NamedTuple):
    """A part of a timetable.

    Attributes:
      name: "ramp-up", "main" or "ramp-down".
      first: its first time-step, from 1.
      last: its last time-step; less than `first` if it has none.
    """

    name: str
    first: int
    last: int


def find_ramps(timetable: Timetable, device_mapping: Sequence[int]) -> tuple[Ramp, Ramp, Ramp]:
    """Finds the phases of a timetable: ramp-up, main and ramp-down.

    Ramp-up ends when the last device begins its first action. Ramp-down begins after the first device has
    finished its last action. With only a few forwards there may be no main phase between them.

    Example:
      >>> timetable = schedules.timetable("grouped", 2, 4, (0, 1), training=True)
      >>> ramp_up, steady, ramp_down = schedules.find_ramps(timetable, [0, 1])

    Args:
      timetable: the timetable of a schedule.
      device_mapping: the device of each stage.
    """
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for action, time_step in zip(timetable.order, timetable.time_steps, strict=True):
        ipu = device_mapping[action.stage]
        firsts.setdefault(ipu, time_step)
        lasts[ipu] = time_step
    begin = max(firsts.values())
    end = max(min(lasts.values()), begin - 1)
    return (
        Ramp("ramp-up", 1, begin - 1),
        Ramp("main", begin, end),
        Ramp("ramp-down", end + 1, timetable.num_time_steps),
    )


def find_slots(
    timetable: Timetable, device_mapping: Sequence[int], time_steps: Sequence[int]
) -> list[list[Action | None]]:
    """Returns the actions of each device in some time-steps; None if it waits.

    Example:
      >>> timetable = schedules.timetable("grouped", 2, 2, (0, 1), training=True)
      >>> [[str(action) for action in slots] for slots in schedules.find_slots(timetable, [0, 1], [1, 2])]
      [['forward of stage 0, micro-batch 0', 'forward of stage 0, micro-batch 1'],
       ['None', 'forward of stage 1, micro-batch 0']]
    """
    columns = {time_step: column for column, time_step in enumerate(time_steps)}
    slots: list[list[Action | None]] = [[None] * len(columns) for _row in timetable.rows]
    for action, time_step in zip(timetable.order, timetable.time_steps, strict=True):
        column = columns.get(time_step)
        if column is not None:
            slots[device_mapping[action.stage]][column] = action
    return slots


def format_staircase(timetable: Timetable, device_mapping: Sequence[int], width: int | None = None) -> str:
    """Formats a timetable as lines of text.

    `F3` is the forward of micro-batch 3, `B3` its backward, `I3` its input gradients and `W3` its weight
    gradients. If a device has several stages, `F2.3` is the forward of stage 2. A dot is a time-step of
    waiting, and a bar separates the phases. If the lines are too long, time-steps in the middle are left
    out, and the last line says so.

    Example:
      >>> timetable = schedules.timetable("grouped", 2, 3, (0, 1), training=True)
      >>> print(schedules.format_staircase(timetable, [0, 1]))
      time-step 1  | 2  3  4  5  6  7  | 8
      device 0  F0 | F1 .  F2 B0 .  B1 | B2
      device 1  .  | F0 B0 F1 B1 F2 B2 | .
      phases: ramp-up 1, main 2..7, ramp-down 8

    Args:
      timetable: the timetable of a schedule.
      device_mapping: the device of each stage.
      width: the most characters per line; None: no limit. The first and the last time-step are always
        shown.
    """
    has_stages = len(set(device_mapping)) < len(device_mapping)
    phases = find_ramps(timetable, device_mapping)
    total = timetable.num_time_steps
    most = max(action.micro_batch for action in timetable.order)
    longest = f"F{len(device_mapping) - 1}.{most}" if has_stages else f"F{most}"
    cell = max(len(longest), len(str(total)))
    head = max(len("time-step"), len(f"device {len(timetable.rows) - 1}"))
    shown = list(range(1, total + 1))
    if width is not None:
        # Two bars, a space before each cell, and the gap with its space.
        room = width - head - 4
        if total * (cell + 1) > room:
            number = max(2, (room - len(_GAP) - 1) // (cell + 1))
            shown = [*shown[: (number + 1) // 2], *shown[total - number // 2 :]]
    slots = find_slots(timetable, device_mapping, shown)

    def name(action: Action | None) -> str:
        if action is None:
            return "."
        stage = f"{action.stage}." if has_stages else ""
        return f"{action.kind.letter}{stage}{action.micro_batch}"

    def line(title: str, cells: Sequence[str], gap: str) -> str:
        parts = [title.ljust(head)]
        for column, text in enumerate(cells):
            if column and shown[column] != shown[column - 1] + 1:
                parts.append(gap)
            if any(phase.first == shown[column] > 1 and phase.last >= phase.first for phase in phases):
                parts.append("|")
            parts.append(text.ljust(cell))
        return " ".join(parts).rstrip()

    lines = [line("time-step", [str(time_step) for time_step in shown], _GAP)]
    for ipu, row in enumerate(slots):
        lines.append(line(f"device {ipu}", [name(action) for action in row], _GAP))
    spans = [
        f"{phase.name} {phase.first}" + (f"..{phase.last}" if phase.last > phase.first else "")
        for phase in phases
        if phase.last >= phase.first
    ]
    lines.append(f"phases: {', '.join(spans)}")
    left_out = [(a, b) for a, b in itertools.pairwise(shown) if b != a + 1]
    if left_out:
        ((before, after),) = left_out
        lines.append(
            f"Time-steps {before + 1}..{after - 1} do not fit in {width} characters, and are left out."
        )
    return "\n".join(lines)
