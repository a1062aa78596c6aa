"""What was measured over time, against the targets."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Sequence

from benchmarks.history import Measured
from figures.parts import MARGIN
from figures.svg import Figure

__all__ = ["draw_against_targets"]

_LABELS, _DAY, _ROW = 400, 56, 26
_MOST = 4  # times a target, or its inverse: what is beyond stands at the edge of its row


def draw_against_targets(rows: Sequence[Measured], least_runs: int = 3) -> Figure:
    """Draws a line over time for each case that has a target and was measured on several days.

    Args:
      rows: all, the oldest first.
      least_runs: how often a case must have been measured.
    """
    cases: dict[tuple[str, str], list[Measured]] = {}
    for row in rows:
        if row.bound and float(row.target) > 0 and float(row.figure) > 0:
            cases.setdefault((row.question, row.case), []).append(row)
    cases = {
        case: found
        for case, found in sorted(cases.items())
        if len(found) >= least_runs and len({row.date for row in found}) > 1
    }
    dates = [datetime.date.fromisoformat(row.date) for found in cases.values() for row in found]
    first, num_days = min(dates), (max(dates) - min(dates)).days + 1
    left, upper = MARGIN + _LABELS, MARGIN + 44
    right, bottom = left + _DAY * num_days, upper + _ROW * len(cases)
    figure = Figure("Benchmarks over time, against their targets", right + 80, bottom + 48)
    heading = "Figure over target by date: below the line of its row, a case meets its target"
    figure.text(MARGIN, MARGIN + 8, heading, "start strong")
    for day in range(num_days):
        x = left + _DAY * day
        figure.line("thin", (x, upper), (x, bottom))
        date = first + datetime.timedelta(day)
        figure.text(x + _DAY // 2, upper - 10, f"{date.day} {date:%b}", "small")
    figure.text(right + 40, upper - 10, "newest", "small strong")
    for number, ((question, case), found) in enumerate(cases.items()):
        middle = upper + _ROW * number + _ROW // 2
        label = f"{question}: {case}"
        figure.text(MARGIN, middle + 4, label if len(label) < 80 else label[:78] + "...", "start small")
        figure.line("thin", (left, middle), (right, middle))
        marks = []
        for date, group in itertools.groupby(found, key=lambda row: row.date):
            of_day = list(group)
            x = left + _DAY * (datetime.date.fromisoformat(date) - first).days
            for place, row in enumerate(of_day, 1):
                ratio = float(row.figure) / float(row.target)
                ratio = ratio if row.bound == "at most" else 1 / ratio
                share = max(-1.0, min(1.0, math.log(ratio, _MOST)))
                mark = x + _DAY * place // (len(of_day) + 1), middle - round((_ROW // 2 - 3) * share)
                marks.append((mark, ratio))
        figure.line("line thin", *(mark for mark, _ratio in marks))
        for (x, y), ratio in marks:
            figure.rect("dark_forward" if ratio <= 1 else "dark_backward", x - 3, y - 3, 7, 7)
        figure.text(right + 40, middle + 4, f"{marks[-1][1]:.2f}", "small")
    for place, (style, text) in enumerate([("forward", "target met"), ("backward", "target missed")]):
        figure.rect(f"dark_{style}", MARGIN + 120 * place, bottom + 20, 7, 7)
        figure.text(MARGIN + 120 * place + 14, bottom + 27, text, "start small")
    return figure
