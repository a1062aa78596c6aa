"""docs/schedules.md: its table and its figures are those of the code, and its own schedule what it says."""

import pathlib
import re
import sys

import pytest

from ipu_pipeline.engine import schedules

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "schedules.md").read_text()
sys.path.insert(0, str(ROOT / "scripts"))
import draw_figures  # noqa: E402  # scripts are no package
from figures import steps  # noqa: E402


def test_each_schedule_has_a_row_a_figure_and_others_names():
    drawn = {name for _title, names in draw_figures.STEPS.values() for name in names}
    assert drawn == set(schedules.named_schedules())
    assert set(re.findall(r"\(figures/(\w+)\.svg\)", PAGE)) == set(draw_figures.STEPS)
    for own in schedules.SCHEDULES:
        (row,) = re.findall(rf"^\| {own.member} \|.*$", PAGE, re.MULTILINE)
        assert f"| {own.purpose} |" in row
        assert all(f'"{name}"' in PAGE for name in own.others), own.name


@pytest.mark.parametrize("name", schedules.named_schedules())
def test_the_table_is_right_for_the_steps_in_the_figures(name):
    """Three devices and six micro-batches; the units are the forward of all stages of a device."""
    p, m, forward, backward, half = steps.NUM_DEVICES, steps.NUM_MICRO_BATCHES, 1, 2, 1
    mapping, timeline = steps.simulate_step(name)
    v = len(mapping) // p
    staggered = (p - 1) / v  # at the ends of a single step
    bubble = {
        "sequential": m * (p - 1) * (forward + backward),
        "looped": (p - 1) * (forward + backward) / v,
        "zero_bubble": (p - 1) * (forward + half - half),
        **dict.fromkeys(("zero_bubble_h2", "looped_zero_bubble", "zero_bubble_v"), staggered),
        "v_half": (3 * p - 4) / v,  # of the 6m time-steps of a forward of one stage
        "v_min": (4 * p - 3) / v,
        "dual_pipe_v": (p - 1) / v,
    }.get(name, (p - 1) * (forward + backward))
    assert timeline.bubble.total / p == bubble
    in_flight = {
        "grouped": [2 * (p - r) - 1 for r in range(p)],
        "interleaved": [p - r for r in range(p)],
        "sequential": [1] * p,
        "all_forwards": [m] * p,
        "looped": [2 * (p - r - 1) + (v - 1) * p + 1 for r in range(p)],
        "zero_bubble": [p] * p,
        "zero_bubble_h2": [2 * p - 1] * p,
        "looped_zero_bubble": [2 * (p - 1) + (v - 1) * p + 1] * p,
        "zero_bubble_v": [2 * p] * p,
        "v_half": [2 * ((p + 2) // 2)] * p,
        "v_min": [2 * ((p + 4) // 3)] * p,
        "dual_pipe_v": [2 * p + 1] * p,
    }[name]
    held, most = [0] * p, [0] * p
    for one in timeline.intervals():  # a device does one after another
        held[one.ipu] += one.kind == "forward"
        most[one.ipu] = max(most[one.ipu], held[one.ipu])
        held[one.ipu] -= one.kind in ("weight gradients", "backward")
    assert max(most) == max(in_flight)
    assert all(found <= expected for found, expected in zip(most, in_flight, strict=True)), most


def test_the_schedule_from_scratch_lies_between_two_of_ours():
    """Without more forwards it is 1F1B, and with as many as there may be Grouped."""
    (code,) = re.findall(r"^def ahead.*?    return rows\n", PAGE, re.DOTALL | re.MULTILINE)
    names = {"Action": schedules.Action, "ActionKind": schedules.ActionKind}
    exec(code, names)  # noqa: S102  # the page's own
    for num_stages, num_micro_batches in ((1, 3), (2, 1), (3, 2), (3, 9), (5, 12)):
        mapping = range(num_stages)
        for extra, ours in ((0, schedules.interleaved), (num_stages, schedules.grouped)):
            rows = ours(num_stages, num_micro_batches, mapping)
            assert names["ahead"](extra, num_stages, num_micro_batches, mapping, True) == [
                [action for action in row if action is not None] for row in rows
            ]
