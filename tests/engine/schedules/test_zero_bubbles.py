"""The formulas of schedules, against a walk of their rows."""

import pytest

from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.schedules.timetables import ScheduleError, check
from tests.support.walking import Times, walk

# (p, m): IPUs, and numbers of micro-batches around those at which formulas change.
CASES = [
    (p, m)
    for p in (1, 2, 3, 4, 5)
    for m in sorted({1, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p} - {0})
]
IN_V = ["zero_bubble_v", "v_half", "v_min", "dual_pipe_v"]


def follow(name, mapping, num_micro_batches, **times):
    rows = schedules.named_schedules()[name](len(mapping), num_micro_batches, mapping)
    check(rows, len(mapping), num_micro_batches, mapping, True)
    return walk(rows, Times(**times))


def row(p):
    return list(range(p))


def around(p):
    return row(p) * 3


def v_shape(p):
    return [*range(p), *reversed(range(p))]


def looped(p, m, found):
    assert found.wait == 3 * (p - 1) + max(0, p - m) * 2 * 3
    group = -(-m // max(1, m // p))  # p, if that divides m
    assert all(found.held[r] <= 2 * (p - r - 1) + 2 * max(group, p) + 1 for r in range(p))
    if m % p == 0 and m > 3 * p:
        assert found.held == [2 * (p - r - 1) + 2 * p + 1 for r in range(p)]


def zero_bubble_h2(p, m, found):
    assert found.wait_across == max(0, 2 * p - 1 - m)
    assert found.wait == p - 1 or m < 2 * p - 1
    assert max(found.held) == min(m, 2 * p - 1)


def looped_zero_bubble(p, m, found):
    group = max(p, -(-m // max(1, m // p)))
    assert max(found.held) <= 2 * group + 2 * (p - 1) + 1
    assert found.wait_across == max(0, 2 * p - 1 - m) or m < p or p == 1


def zero_bubble_v(p, m, found):
    assert found.wait_across == max(0, 2 * (2 * p - 1 - m))
    assert max(found.held) == min(2 * m, 2 * p)


def v_half(p, m, found):
    assert max(found.held) == min(2 * m, 2 * ((p + 2) // 2))
    if m >= p:
        expected = 3 * p - 4 if p % 2 else max(3 * p - 6, 1)
        assert found.wait == found.wait_across == max(0, expected)


def v_min(p, m, found):
    assert max(found.held) == min(2 * m, 2 * ((p + 4) // 3))
    if m >= p:
        assert found.wait == found.wait_across == max(0, 4 * p - (5 if p % 3 else 3))


def dual_pipe_v(p, m, found):
    if m >= 2 * p:
        assert found.wait == found.wait_across == p - 1
        assert max(found.held) <= 2 * p + 1


def all_forwards(p, m, found):
    assert found.wait == 3 * (p - 1)
    assert found.held == [m] * p


def all_forwards_of_three_stages_on_an_ipu(p, m, found):
    if m >= p > 1:
        assert found.wait == 3 * (p - 1)
        assert found.held == [3 * m] * p


@pytest.mark.parametrize(
    ("name", "mapping", "formulas"),
    [
        ("looped", around, looped),
        ("zero_bubble_h2", row, zero_bubble_h2),
        ("looped_zero_bubble", around, looped_zero_bubble),
        ("zero_bubble_v", v_shape, zero_bubble_v),
        ("v_half", v_shape, v_half),
        ("v_min", v_shape, v_min),
        ("dual_pipe_v", v_shape, dual_pipe_v),
        ("all_forwards", row, all_forwards),
        ("all_forwards", around, all_forwards_of_three_stages_on_an_ipu),
    ],
)
def test_formulas(name, mapping, formulas):
    for p, m in CASES:
        if p == 1 and mapping is around:
            continue
        formulas(p, m, follow(name, mapping(p), m))


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(2, 2, 1), (2, 3, 1), (3, 2, 2)])
def test_zero_bubble_h2_with_unequal_times(forward, inputs, weights):
    for p in (1, 2, 5):
        found = follow("zero_bubble_h2", row(p), 3 * p, forward=forward, inputs=inputs, weights=weights)
        assert found.wait_across == (p - 1) * (forward + inputs - 2 * weights)


@pytest.mark.parametrize("name", [*IN_V, "looped_zero_bubble"])
def test_mappings_and_parallel_stages_that_do_not_fit(name):
    function = schedules.named_schedules()[name]
    with pytest.raises(ScheduleError, match=r"needs a device_mapping that .*; got \[0, 1, 2, 3\]"):
        function(4, 4, [0, 1, 2, 3])
    mapping = [0, 1, 0, 1] if name == "looped_zero_bubble" else [0, 1, 1, 0]
    with pytest.raises(ScheduleError, match=r"has no parallel stages; got levels \[0, 1, 1, 2\]"):
        function(4, 4, mapping, True, [0, 1, 1, 2])


@pytest.mark.parametrize("name", [*schedules.named_schedules()])
def test_without_training_there_are_only_forwards(name):
    mapping = (0, 1, 1, 0) if name in IN_V else (0, 1, 0, 1)
    table = schedules.timetable(name, 4, 5, mapping, False)
    assert {action.kind.letter for action in table.order} == {"F"}


@pytest.mark.parametrize("name", ["zero_bubble_h2", "all_forwards"])
def test_schedules_of_any_mapping_and_parallel_stages(name):
    for mapping in [(0, 1, 2, 3), (0, 1, 1, 0), (0, 0, 1, 1), (0, 0, 0, 0)]:
        table = schedules.timetable(name, 4, 5, mapping, True, (0, 1, 1, 2))
        assert len(table.order) == 4 * 5 * (3 if table.halved else 2)
