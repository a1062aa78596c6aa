"""The formulas of the schedules with halves or V-shaped mappings, against a walk of their rows."""

import pytest

from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.schedules.actions import ScheduleError
from ipu_pipeline.engine.schedules.checking import check
from tests.support.walking import Times, walk

NUM_IPUS = [1, 2, 3, 4, 5, 6, 8, 9]


def counts(num_ipus):
    """Numbers of micro-batches around those at which formulas change."""
    p = num_ipus
    return sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p + 1, 33} - {0})


CASES = [(p, m) for p in NUM_IPUS for m in counts(p)]


def one(num_ipus):
    return list(range(num_ipus))


def v_shape(num_ipus):
    return [*range(num_ipus), *reversed(range(num_ipus))]


def follow(function, mapping, num_micro_batches, **times):
    rows = function(len(mapping), num_micro_batches, mapping)
    check(rows, len(mapping), num_micro_batches, mapping, True)
    return walk(rows, Times(**times))


@pytest.mark.parametrize(("p", "m"), CASES)
def test_zero_bubble_h2(p, m):
    found = follow(schedules.zero_bubble_h2, one(p), m)
    assert found.wait_across == max(0, 2 * p - 1 - m)
    if m >= 2 * p - 1:
        assert found.wait == p - 1
    assert max(found.held) == min(m, 2 * p - 1)


@pytest.mark.parametrize("p", NUM_IPUS)
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(2, 2, 1), (3, 3, 2), (2, 3, 1), (3, 2, 2)])
def test_zero_bubble_h2_with_unequal_times(p, forward, inputs, weights):
    found = follow(schedules.zero_bubble_h2, one(p), 3 * p, forward=forward, inputs=inputs, weights=weights)
    assert found.wait_across == (p - 1) * (forward + inputs - 2 * weights)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [case for case in CASES if case[0] > 1])
def test_looped_zero_bubble(p, v, m):
    found = follow(schedules.looped_zero_bubble, one(p) * v, m)
    group = max(p, -(-m // max(1, m // p)))
    assert max(found.held) <= (v - 1) * group + 2 * (p - 1) + 1
    if m >= p:
        assert found.wait_across == max(0, 2 * p - 1 - m)


@pytest.mark.parametrize(("p", "m"), CASES)
def test_zero_bubble_v(p, m):
    found = follow(schedules.zero_bubble_v, v_shape(p), m)
    assert found.wait_across == max(0, 2 * (2 * p - 1 - m))
    assert max(found.held) == min(2 * m, 2 * p)


@pytest.mark.parametrize(("p", "m"), CASES)
def test_v_half(p, m):
    found = follow(schedules.v_half, v_shape(p), m)
    assert max(found.held) == min(2 * m, 2 * ((p + 2) // 2))
    if m >= p:
        expected = 3 * p - 4 if p % 2 else max(3 * p - 6, 1)
        assert found.wait == found.wait_across == max(0, expected)


@pytest.mark.parametrize(("p", "m"), CASES)
def test_v_min(p, m):
    found = follow(schedules.v_min, v_shape(p), m)
    assert max(found.held) == min(2 * m, 2 * ((p + 4) // 3))
    if m >= p:
        assert found.wait == found.wait_across == max(0, 4 * p - (5 if p % 3 else 3))


@pytest.mark.parametrize(("p", "m"), [case for case in CASES if case[1] >= 2 * case[0]])
def test_dual_pipe_v(p, m):
    found = follow(schedules.dual_pipe_v, v_shape(p), m)
    assert found.wait == found.wait_across == p - 1
    assert max(found.held) <= 2 * p + 1


@pytest.mark.parametrize(("p", "m"), CASES)
def test_all_forwards(p, m):
    found = follow(schedules.all_forwards, one(p), m)
    assert found.wait == 3 * (p - 1)
    assert found.held == [m] * p


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), [case for case in CASES if case[1] >= case[0] > 1])
def test_all_forwards_of_several_stages_on_an_ipu(p, v, m):
    found = follow(schedules.all_forwards, one(p) * v, m)
    assert found.wait == 3 * (p - 1)
    assert found.held == [v * m] * p


SEVERAL = ["zero_bubble_v", "v_half", "v_min", "dual_pipe_v", "looped_zero_bubble"]


@pytest.mark.parametrize("name", SEVERAL)
def test_mappings_that_do_not_fit(name):
    member = schedules.named_schedules()[name]
    with pytest.raises(ScheduleError, match=r"needs a device_mapping that .*; got \[0, 1, 2, 3\]"):
        member(4, 4, [0, 1, 2, 3])


@pytest.mark.parametrize("name", SEVERAL)
def test_no_parallel_stages(name):
    mapping = [0, 1, 0, 1] if name == "looped_zero_bubble" else [0, 1, 1, 0]
    with pytest.raises(ScheduleError, match=r"has no parallel stages; got levels \[0, 1, 1, 2\]"):
        schedules.named_schedules()[name](4, 4, mapping, True, [0, 1, 1, 2])


@pytest.mark.parametrize("name", [*schedules.named_schedules()])
def test_without_training_there_are_only_forwards(name):
    mapping = (0, 1, 1, 0) if name in SEVERAL[:4] else (0, 1, 0, 1)
    table = schedules.timetable(name, 4, 5, mapping, False)
    assert {action.kind.letter for action in table.order} == {"F"}


@pytest.mark.parametrize("name", ["zero_bubble_h2", "all_forwards"])
@pytest.mark.parametrize("mapping", [(0, 1, 2, 3), (0, 1, 1, 0), (0, 0, 1, 1), (0, 0, 0, 0)])
def test_schedules_of_any_mapping_and_parallel_stages(name, mapping):
    table = schedules.timetable(name, 4, 5, mapping, True, (0, 1, 1, 2))
    assert len(table.order) == 4 * 5 * (3 if table.halved else 2)
