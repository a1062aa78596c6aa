"""Learning curves, from what programs log as JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

from figures.parts import MARGIN
from figures.svg import Figure

__all__ = ["draw_losses"]

_STYLES = [
    ".training { fill: none; stroke: #8cccf0; stroke-width: 3 }",
    ".held_out { fill: none; stroke: #c4500c; stroke-width: 2 }",
]
_WIDTH, _HEIGHT = 560, 280


def draw_losses(log: Path, title: str) -> Figure:
    """The losses that examples/gpt.py logs, against the step.

    Args:
      log: JSON lines with `step`, `loss` (its mean since the line before) and `validation_loss`.
      title: of the figure.
    """
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [entry[name] for entry in entries for name in ("loss", "validation_loss")]
    lowest, highest = math.floor(2 * min(losses)), math.ceil(2 * max(losses))  # of the axis, in halves
    last = entries[-1]["step"]
    left, upper = MARGIN + 40, MARGIN + 32
    bottom = upper + _HEIGHT
    figure = Figure(title, left + _WIDTH + 150, bottom + 56, *_STYLES)
    figure.text(MARGIN, MARGIN + 8, "Cross entropy per character, in nats", "start strong")

    def x(step: float) -> int:
        return left + round(step * _WIDTH / last)

    def y(loss: float) -> int:
        return bottom - round((2 * loss - lowest) * _HEIGHT / (highest - lowest))

    for half in range(lowest, highest + 1):
        figure.line("thin", (left, y(half / 2)), (left + _WIDTH, y(half / 2)))
        figure.text(left - 20, y(half / 2) + 4, f"{half / 2:.1f}", "small")
    for quarter in range(5):
        step = last * quarter // 4
        figure.text(x(step), bottom + 20, str(step), "small")
    figure.text(left + _WIDTH // 2, bottom + 42, "step (weight updates)")
    for style, name in (("training", "loss"), ("held_out", "validation_loss")):
        figure.line(style, *((x(entry["step"]), y(entry[name])) for entry in entries))
    final = y(entries[-1]["validation_loss"])
    for number, (style, text) in enumerate([("training", "training"), ("held_out", "held out")]):
        line = final - 40 - 20 * (1 - number)
        figure.line(style, (left + _WIDTH + 14, line), (left + _WIDTH + 38, line))
        figure.text(left + _WIDTH + 44, line + 4, text, "start small")
    figure.text(
        left + _WIDTH + 8, final + 4, f"{entries[-1]['validation_loss']:.2f} held out", "start small"
    )
    return figure
