"""Timelines worked out by hand."""

import pytest

from ipu_pipeline.engine.schedules.actions import Action, ActionKind
from ipu_pipeline.engine.schedules.simulator import simulate
from ipu_pipeline.engine.schedules.timetables import timetable

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
COSTS = {F: 1.0, B: 2.0}


def parse(text):
    """Actions of a row: `F0.1` is stage 0's forward of micro-batch 1."""

    def action(word):
        stage, micro_batch = word[1:].split(".")
        return Action(F if word[0] == "F" else B, int(stage), int(micro_batch))

    return [action(word) for word in text.split()]


def cost(action):
    return COSTS[action.kind]


def begins(timeline):
    return dict(zip(timeline.order, timeline.begins, strict=True))


def test_forwards_follow_each_other():
    # IPU 0:  F0.0 F0.1 F0.2
    # IPU 1:       F1.0 F1.1 F1.2
    timeline = simulate([parse("F0.0 F0.1 F0.2"), parse("F1.0 F1.1 F1.2")], (0, 1), cost)
    assert begins(timeline) == dict(
        zip(parse("F0.0 F0.1 F0.2 F1.0 F1.1 F1.2"), (0, 1, 2, 1, 2, 3), strict=True)
    )
    assert timeline.length == 4


def test_backwards_wait_for_the_stage_behind():
    # IPU 0:  F0.0 F0.1  .    .   B0.0 B0.0  .  B0.1 B0.1
    # IPU 1:   .   F1.0 B1.0 B1.0 F1.1 B1.1 B1.1
    timeline = simulate([parse("F0.0 F0.1 B0.0 B0.1"), parse("F1.0 B1.0 F1.1 B1.1")], (0, 1), cost)
    expected = {"F0.0": 0, "F0.1": 1, "F1.0": 1, "B1.0": 2, "F1.1": 4, "B0.0": 4, "B1.1": 5, "B0.1": 7}
    assert begins(timeline) == {parse(text)[0]: time for text, time in expected.items()}
    assert timeline.length == 9


def test_the_host_starts_one_at_a_time():
    rows = [parse("F0.0 F0.1"), parse("F1.0 F1.1")]
    timeline = simulate(rows, (0, 1), lambda action: 1.0, host_cost=3.0)
    assert timeline.begins == (3, 6, 9, 12)
    assert timeline.length == 13
    assert list(timeline.order) == parse("F0.0 F0.1 F1.0 F1.1")


def test_parallel_stages_are_waited_for():
    # Stages 1 and 2 are on one level; stage 3 takes from both.
    rows = [parse("F0.0"), parse("F1.0"), parse("F2.0"), parse("F3.0")]
    slow = {0: 1.0, 1: 5.0, 2: 2.0, 3: 1.0}
    timeline = simulate(rows, (0, 1, 1, 2), lambda action: slow[action.stage])
    assert begins(timeline)[parse("F3.0")[0]] == 6
    assert timeline.length == 7


def test_nothing_is_started_before_what_it_depends_on():
    table = timetable("grouped", 4, 6, (0, 1, 0, 1), True)
    rows = [[action for action in row if action is not None] for row in table.rows]
    timeline = simulate(rows, range(4), cost, 0.1)
    place = {action: number for number, action in enumerate(timeline.order)}
    assert len(place) == 4 * 6 * 2
    for (kind, stage, micro_batch), number in place.items():
        if kind is B:
            assert place[Action(F, stage, micro_batch)] < number
            assert stage == 3 or place[Action(B, stage + 1, micro_batch)] < number
        elif stage:
            assert place[Action(F, stage - 1, micro_batch)] < number


def test_no_actions():
    assert simulate([], (), cost).length == 0


def test_actions_that_wait_for_each_other():
    # Stage 1's backward of micro-batch 0 comes after one of stage 0 that needs it.
    rows = [parse("F0.0 B0.0 F0.1 B0.1"), parse("F1.0 F1.1 B1.0 B1.1")]
    with pytest.raises(ValueError, match="actions wait for each other"):
        simulate(rows, (0, 1), cost)
    with pytest.raises(ValueError, match="actions wait for each other"):
        simulate([parse("F1.0 F0.0")], (0, 1), cost)
