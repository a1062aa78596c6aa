"""What was measured over time, against the targets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.history import Measured
from figures.parts import MARGIN
from figures.svg import Figure

__all__ = ["draw_against_targets"]

_STYLES = [
    ".older { fill: #b9d7ea; stroke: #7aa6c2 }",
    ".newest { fill: #1f6f9f; stroke: #222 }",
    ".missed { fill: #d55e00; stroke: #222 }",
]
_LABELS, _WIDTH, _ROW = 560, 360, 20
_LEAST, _MOST = 1 / 8, 4.0  # of the axis; what is beyond stands at its end


def draw_against_targets(rows: Sequence[Measured], least_runs: int = 3) -> Figure:
    """Each case with a target that was measured several times: a mark for each run, by how near it was.

    Args:
      rows: all, the oldest first.
      least_runs: how often a case must have been measured.
    """
    cases: dict[tuple[str, str], list[Measured]] = {}
    for row in rows:
        if row.bound and float(row.target) > 0 and float(row.figure) > 0:
            cases.setdefault((row.question, row.case), []).append(row)
    cases = {case: found for case, found in sorted(cases.items()) if len(found) >= least_runs}
    left, upper = MARGIN + _LABELS, MARGIN + 44
    bottom = upper + _ROW * len(cases)
    figure = Figure(
        "Benchmarks over time, against their targets", left + _WIDTH + 40, bottom + 64, *_STYLES
    )

    def x(ratio: float) -> int:
        share = math.log(ratio / _LEAST) / math.log(_MOST / _LEAST)
        return left + round(_WIDTH * min(1.0, max(0.0, share)))

    figure.text(
        MARGIN,
        MARGIN + 8,
        "How near a figure is to its bound: left of 1, the target is met",
        "start strong",
    )
    for ratio in (_LEAST, 0.25, 0.5, 1.0, 2.0, _MOST):
        figure.line("dashed" if ratio == 1 else "thin", (x(ratio), upper - 6), (x(ratio), bottom))
        figure.text(x(ratio), upper - 12, f"{ratio:g}", "small")
    for number, ((question, case), found) in enumerate(cases.items()):
        y = upper + _ROW * number
        label = f"{question}: {case}"
        figure.text(MARGIN, y + 14, label if len(label) < 92 else label[:90] + "...", "start small")
        for row in found:
            ratio = float(row.figure) / float(row.target)
            ratio = ratio if row.bound == "at most" else 1 / ratio
            is_last = row is found[-1]
            style = "older" if not is_last else "newest" if ratio <= 1 else "missed"
            size = 10 if is_last else 8
            figure.rect(style, x(ratio) - size // 2, y + 10 - size // 2, size, size)
    for place, (style, text) in enumerate(
        [
            ("older", "an older run"),
            ("newest", "the newest, within the target"),
            ("missed", "the newest, beyond it"),
        ]
    ):
        figure.rect(style, MARGIN + 240 * place, bottom + 24, 10, 10)
        figure.text(MARGIN + 240 * place + 18, bottom + 33, text, "start small")
    return figure
