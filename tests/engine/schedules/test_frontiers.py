import dataclasses
import functools
import itertools

import pytest

from ipu_pipeline.engine.schedules import (
    QUICK,
    Costs,
    Memory,
    Scenario,
    SearchedSchedule,
    find_frontier,
    predict_step_time,
)

SCENARIO = Scenario(
    Costs.of(3, forward=(1, 2, 1), backward=(2, 3, 2)),
    num_micro_batches=6,
    memory=Memory((1000, 0, 0), (90, 60, 60), (60, 60, 60)),
)


@functools.cache
def find_all():
    return find_frontier(SCENARIO)


def test_points_are_worth_their_memory_and_can_be_had():
    points = find_all()
    assert len(points) >= 3
    limits = [point.num_bytes_per_ipu for point in points]
    times = [point.searched.step_time for point in points]
    assert limits == sorted(limits)
    assert all(after < before for before, after in itertools.pairwise(times))
    for point in points:
        assert max(point.searched.num_peak_bytes) <= point.num_bytes_per_ipu
        assert point.searched.bound <= point.searched.step_time
        again = dataclasses.replace(SCENARIO, schedule=SearchedSchedule(point.num_bytes_per_ipu))
        assert predict_step_time(again) <= point.searched.step_time * (1 + 1e-9)
    # Interleaved holds three micro-batches on IPU 0, for which it has 3 * 90 bytes.
    assert points[0].share == pytest.approx((limits[0] - 1000) / 270)


def test_without_memory_micro_batches_count():
    points = find_frontier(dataclasses.replace(SCENARIO, memory=None))
    assert [point.num_bytes_per_ipu for point in points][:3] == [1, 2, 3]
    assert points[0].share == pytest.approx(1 / 3)
    assert points[0].searched.name == "sequential"


def test_a_quick_search_is_never_better():
    quick = find_frontier(SCENARIO, QUICK)
    best = {point.num_bytes_per_ipu: point.searched.step_time for point in find_all()}
    for point in quick:
        at_least = min(time for limit, time in best.items() if limit <= point.num_bytes_per_ipu)
        assert point.searched.step_time >= at_least * (1 - 1e-9)
