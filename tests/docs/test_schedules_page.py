"""docs/schedules.md: its staircases are those of the rows, and Megatron's schedule is what it says."""

import pathlib
import re

from ipu_pipeline.engine import schedules

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
DOWN_AND_UP = {"zero_bubble_v", "v_half", "v_min", "dual_pipe_v"}


def draw(name):
    """Four micro-batches on three IPUs, or on two with two stages each."""
    mapping = (0, 1, 2)
    if name.startswith("looped"):
        mapping = (0, 1, 0, 1)
    elif name in DOWN_AND_UP:
        mapping = (0, 1, 1, 0)
    table = schedules.timetable(name, len(mapping), 4, mapping, True)
    lines = schedules.format_staircase(table, mapping).splitlines()[1:-1]
    return "\n".join(line.replace(" |", "").rstrip() for line in lines)


def test_each_schedule_has_its_purpose_its_staircase_and_others_names():
    for own in schedules.SCHEDULES:
        assert f"### {own.member}\n\n{own.purpose}" in PAGE
        assert f"```text\n{draw(own.name)}\n```" in PAGE, own.name
        assert all(f'"{name}"' in PAGE for name in own.others), own.name


def test_the_example_is_megatron_s_schedule():
    (code,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def megatron" in code
    ]
    names = {}
    exec(code, names)  # noqa: S102  # the page's own
    for num_ipus, num_micro_batches in ((2, 4), (3, 6), (4, 12)):
        mapping = [*range(num_ipus)] * 2
        assert names["megatron"](len(mapping), num_micro_batches, mapping, True) == [
            list(row) for row in schedules.looped(len(mapping), num_micro_batches, mapping)
        ]


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
