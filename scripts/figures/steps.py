"""A step under each named schedule, to one scale: a backward takes twice as long as a forward."""

from __future__ import annotations

from collections.abc import Sequence

from figures.parts import MARGIN
from figures.svg import Figure
from ipu_pipeline import engine
from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.schedules import ActionKind

__all__ = ["draw_steps", "simulate_step"]

NUM_DEVICES, NUM_MICRO_BATCHES = 3, 6
_FORWARD = 30  # pixels of the forward of all stages of a device
_LEFT, _ROW, _TITLE, _PANEL_GAP, _LEGEND = MARGIN + 64, 22, 22, 16, 24
_LONGEST = 24  # forwards; what comes later is cut off
_WORDS = {kind.name.lower(): kind.words for kind in ActionKind}


def simulate_step(name: str) -> tuple[tuple[int, ...], schedules.Timeline]:
    """Simulates a step of the same work on each device.

    Returns:
      The device of each stage, and the timeline. The forward of all stages of a device takes 1.
    """
    down = tuple(range(NUM_DEVICES))
    mapping = down
    if "looped" in name:
        mapping = down * 2
    elif name in ("zero_bubble_v", "v_half", "v_min", "dual_pipe_v"):
        mapping = down + down[::-1]
    forward = NUM_DEVICES / len(mapping)
    costs = engine.Costs.of(len(mapping), forward=forward, backward=2 * forward, is_fused=False)
    scenario = engine.Scenario(costs, name, NUM_MICRO_BATCHES, mapping)
    return mapping, engine.simulate(scenario).free_running


def draw_steps(title: str, names: Sequence[str]) -> Figure:
    """Draws a panel for each schedule, and a legend below."""
    panel = _TITLE + NUM_DEVICES * _ROW + _PANEL_GAP
    top = MARGIN // 2
    longest = min(_LONGEST, max(simulate_step(name)[1].step_time for name in names))
    width = _LEFT + round(longest * _FORWARD) + MARGIN
    figure = Figure(title, max(width, 760), top + panel * len(names) + _LEGEND)
    styles: set[str] = set()
    for place, name in enumerate(names):
        styles |= _draw_panel(figure, top + place * panel, name)
    x, y = MARGIN, top + panel * len(names)
    has_two = any(style.startswith("dark_") for style in styles)
    for kind, words in _WORDS.items():
        if kind in styles:
            figure.rect(kind, x, y, 18, 14)
            if has_two:
                figure.rect(f"dark_{kind}", x + 18, y, 18, 14)
            figure.text(x + 24 + 18 * has_two, y + 11, words, "start small")
            x += 110 + 36 * has_two
    if has_two:
        figure.text(x, y + 11, "darker: the second stage", "start small")
    return figure


def _draw_panel(figure: Figure, y: int, name: str) -> set[str]:
    """Draws one step, and returns the styles of its actions."""
    member = next(known.member for known in schedules.SCHEDULES if known.name == name)
    mapping, timeline = simulate_step(name)
    idle = timeline.bubble.total / NUM_DEVICES
    figure.text(MARGIN, y + 14, member, "start strong")
    figure.text(_LEFT + 72, y + 14, f"step {timeline.step_time:g}, bubble {idle:g}", "start small")
    for device in range(NUM_DEVICES):
        row = y + _TITLE + device * _ROW
        figure.text(MARGIN, row + 15, f"device {device}", "start small")
        end = min(timeline.step_time, _LONGEST)
        figure.rect("idle", _LEFT, row, round(end * _FORWARD), _ROW)
    styles = set()
    for one in timeline.intervals():
        kind = one.kind.replace(" ", "_")
        if kind not in _WORDS or one.end > _LONGEST:
            continue
        style = f"dark_{kind}" if one.stage != mapping.index(one.ipu) else kind
        styles.add(style)
        x, row = _LEFT + round(one.begin * _FORWARD), y + _TITLE + one.ipu * _ROW
        width = round((one.end - one.begin) * _FORWARD)
        figure.box(style, x, row, width, _ROW, str(one.micro_batch))
    if timeline.step_time > _LONGEST:
        row = y + _TITLE + NUM_DEVICES * _ROW // 2
        figure.text(_LEFT + _LONGEST * _FORWARD + 2, row + 4, "...", "start strong")
    return styles
