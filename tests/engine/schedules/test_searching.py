import dataclasses
import itertools
import random

import pytest

from ipu_pipeline.engine.schedules.order_problems import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    OrderProblem,
    as_order,
    as_rows,
    find_bound,
    find_heads,
    find_peaks,
    find_preemptive,
    find_step_time,
    find_tails,
    fits,
)
from ipu_pipeline.engine.schedules.order_search import Rule, dispatch, search
from ipu_pipeline.engine.schedules.schedule_arguments import named_schedules
from ipu_pipeline.engine.schedules.schedule_definitions import grouped, interleaved, sequential, zero_bubble
from ipu_pipeline.engine.schedules.timetables import ActionKind, ScheduleError, check
from tests.support.judging import find_smallest_time

KINDS = (FORWARD, INPUTS, WEIGHTS)


def pose(number, forward, inputs, weights, mapping=(), down=(), up=(), **fields):
    """A problem in which what is not given takes no time and no bytes, and each stage has its own IPU."""
    count = len(forward)
    mapping = mapping or tuple(range(count))
    given = {
        "updates": (0,) * count,
        "is_fused": True,
        "num_held_bytes": (0,) * count,
        "num_between_bytes": (0,) * count,
        "num_constant_bytes": (0,) * (max(mapping) + 1),
        "num_bytes_per_ipu": None,
        **fields,
    }
    return OrderProblem(
        num_micro_batches=number,
        forward=forward,
        input_gradients=inputs,
        weight_gradients=weights,
        device_mapping=mapping,
        forward_transfers=down or (0,) * (count - 1),
        backward_transfers=up or (0,) * (count - 1),
        **given,
    )


def make_problem(seed, num_stages, num_micro_batches, share=None, device_mapping=(), **fields):
    """Unequal stages with integer times and bytes.

    `share`: the limit is so much of what the activations take with Interleaved, but enough for one
    micro-batch.
    """
    chance = random.Random(seed)  # noqa: S311  # no secret depends on it

    def draw(number, least=1):
        return tuple(chance.randint(least, 9) for _place in range(number))

    inputs = draw(num_stages)
    if chance.random() < 0.5:
        inputs = (0, *inputs[1:])  # nothing before needs a gradient
    held = tuple(10 * size for size in draw(num_stages))
    if fields.get("is_fused", True):
        held = (*held[:-1], 0)
    problem = pose(
        num_micro_batches,
        draw(num_stages),
        inputs,
        draw(num_stages, 0),
        tuple(device_mapping),
        draw(num_stages - 1, 0),
        draw(num_stages - 1, 0),
        num_held_bytes=held,
        num_between_bytes=tuple(chance.randint(0, size) for size in held),
        **fields,
    )
    if share is None:
        return problem
    rows = interleaved(num_stages, num_micro_batches, problem.device_mapping)
    limit = max(round(share * max(find_peaks(problem, as_order(rows)))), *problem.num_least_bytes)
    return dataclasses.replace(problem, num_bytes_per_ipu=limit)


def find_all_orders(problem, ipu):
    """All orders of an IPU's actions in which halves come after what they need."""
    count, own = problem.num_micro_batches, problem.stages_of[ipu]

    def follow(row, done):
        if len(row) == 3 * count * len(own):
            yield tuple(row)
            return
        for stage, kind in itertools.product(own, KINDS):
            number = done.get((kind, stage), 0)
            before = {INPUTS: FORWARD, WEIGHTS: INPUTS}.get(kind)
            if number < count and (before is None or done.get((before, stage), 0) > number):
                yield from follow([*row, (kind, stage)], {**done, (kind, stage): number + 1})

    for row in follow([], {}):
        # Where one program does both, its input gradients are done with the forward.
        last = problem.num_stages - 1
        pairs = itertools.pairwise((*row, None))
        if not problem.is_fused or all(b == (INPUTS, last) for a, b in pairs if a == (FORWARD, last)):
            yield row


def find_smallest(problem):
    """The smallest step time of all orders that fit."""
    rows = [list(find_all_orders(problem, ipu)) for ipu in range(problem.num_ipus)]
    return min(find_step_time(problem, order) for order in itertools.product(*rows) if fits(problem, order))


def hold(problem, rows):
    """The most bytes that IPUs hold, action by action."""
    peaks = []
    for ipu, row in enumerate(rows):
        now = peak = problem.num_constant_bytes[ipu]
        for kind, stage, _micro_batch in row:
            held, between = problem.num_held_bytes[stage], problem.num_between_bytes[stage]
            now += {FORWARD: held, INPUTS: between - held, WEIGHTS: -between}[kind]
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


SMALL = [
    (seed, num_stages, num_micro_batches, share)
    for seed, (num_stages, num_micro_batches, share) in enumerate(
        [(2, 1, None), (2, 4, 0.5), (2, 8, None), (3, 3, 0.4), (3, 5, None), (3, 8, 0.7), (4, 4, None)]
    )
]


def test_the_step_time_is_followed_by_hand():
    # F takes 2 and 1, I 1 and 1, W 1 and 2, and a transfer 1 in either direction.
    problem = pose(2, (2, 1), (1, 1), (1, 2), (), (1,), (1,), is_fused=False)
    order = as_order(zero_bubble(2, 2, (0, 1)))
    # IPU 0: F 0-2, F 2-4; IPU 1: F 3-4, I 4-5, F 5-6, I 6-7, W 7-9, W 9-11; IPU 0: I 6-7, W 7-8, I 8-9, W.
    assert as_rows(order)[1] == tuple(a for a in zero_bubble(2, 2, (0, 1))[1] if a is not None)
    assert find_step_time(problem, order) == 11


def test_a_link_sends_one_result_at_a_time():
    problem = pose(3, (1, 1), (0, 1), (1, 0), (), (5,), (0,))
    # Forwards of stage 1 begin at 6, 11 and 16, and the last one's halves end at 18; then W of stage 0.
    assert find_step_time(problem, as_order(interleaved(2, 3, (0, 1)))) == 19


def ones(num_micro_batches, num_stages, *arguments, **fields):
    """A problem whose halves take a unit of time each."""
    return pose(num_micro_batches, *[(1,) * num_stages] * 3, *arguments, **fields)


def test_updates_come_last():
    # The last stage ends at 4, the first one at 5.
    assert find_step_time(ones(1, 2, updates=(2, 7)), as_order(interleaved(2, 1, (0, 1)))) == 11


def test_ipus_that_wait_for_each_other_never_end():
    rows = ((FORWARD, 0), (INPUTS, 0), (WEIGHTS, 0)), ((INPUTS, 1), (FORWARD, 1), (WEIGHTS, 1))
    assert find_step_time(ones(1, 2, is_fused=False), rows) == float("inf")


def test_the_least_bytes_are_enough_and_needed():
    # Stages 0 and 2 are on one IPU: 10 and 30 are held when both have gone forward, then 10 and 25.
    sizes = {"num_held_bytes": (10, 20, 30), "num_between_bytes": (15, 5, 35)}
    problem = ones(3, 3, (0, 1, 0), is_fused=False, **sizes)
    assert problem.num_least_bytes == (45, 20)
    order = as_order(sequential(3, 3, (0, 1, 0)))
    assert find_peaks(problem, order) == (45, 20)


def test_jacksons_schedule_is_that_of_carliers_example():
    # Heads, times and tails of Carlier's paper: the preemptive schedule takes 49.
    jobs = [(10, 5, 7), (13, 6, 26), (11, 7, 24), (20, 4, 21), (30, 3, 8), (0, 6, 17), (30, 2, 0)]
    assert find_preemptive(jobs) == 49


@pytest.mark.parametrize("share", [None, 0.4, 0.7])
def test_bounds_are_at_most_what_the_best_of_all_orders_takes(share):
    for seed in range(4):
        problem = make_problem(seed, 2, 2, share, is_fused=seed % 2 == 0)
        smallest = find_smallest(problem)
        assert find_bound(problem)[0] <= smallest
        found = search(problem)
        assert (found.step_time, found.gap) == (smallest, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("share", [None, 0.4, 0.6, 1])
@pytest.mark.parametrize(("size", "mapping"), [((3, 1), (0, 1, 0)), ((2, 2), (0, 0)), ((3, 2), (0, 1, 0))])
def test_the_best_of_all_orders_is_found(size, mapping, share):
    problem = make_problem(sum(size), *size, share, mapping)
    found = search(problem)
    assert (found.step_time, found.gap) == (find_smallest(problem), 0)


@pytest.mark.parametrize(("seed", "num_stages", "num_micro_batches", "share"), SMALL)
def test_small_problems_reach_the_bound(seed, num_stages, num_micro_batches, share):
    problem = make_problem(seed, num_stages, num_micro_batches, share)
    found = search(problem)
    assert found.gap == 0
    table = check(found.rows, num_stages, num_micro_batches, problem.device_mapping, training=True)
    assert len(table.halved) == num_stages
    assert find_step_time(problem, as_order(found.rows)) == found.step_time
    assert found.num_peak_bytes == hold(problem, found.rows)
    assert max(found.num_peak_bytes) <= (problem.num_bytes_per_ipu or float("inf"))
    heads, tails = find_heads(problem), find_tails(problem)
    for kind, stage, number in itertools.product(KINDS, range(num_stages), range(num_micro_batches)):
        path = heads[kind][stage][number] + problem.times[kind][stage] + tails[kind][stage][number]
        assert path <= found.step_time


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_cp_sat_finds_little_better(seed):
    pytest.importorskip("ortools", reason="OR-Tools is not installed (extra dev)")
    chance = random.Random(seed)  # noqa: S311  # no secret depends on it
    size = chance.randint(2, 4), chance.randint(1, 5)
    mapping = chance.choice(((), (0, 1, 0, 1)[: size[0]], (0, 1, 1, 0)[: size[0]]))
    share = chance.choice((None, 0.4, 0.7, 1))
    problem = make_problem(seed, *size, share, mapping, is_fused=chance.random() < 0.7)
    smallest, found = find_smallest_time(problem), search(problem)
    assert smallest is not None
    assert found.bound <= smallest <= found.step_time <= 1.01 * smallest


@pytest.mark.parametrize(
    ("seed", "num_stages", "num_micro_batches", "mapping", "share"),
    [
        (6, 5, 8, (), None),
        (3, 4, 10, (), 1),
        (3, 4, 10, (0, 1, 0, 1), None),
        pytest.param(3, 4, 10, (0, 1, 1, 0), 0.8, marks=pytest.mark.thorough),
    ],
)
def test_none_with_a_name_that_fits_is_better(seed, num_stages, num_micro_batches, mapping, share):
    problem = make_problem(seed, num_stages, num_micro_batches, share, mapping)
    found = search(problem)
    num_fitting = 0
    for function in named_schedules().values():
        try:
            order = as_order(function(num_stages, num_micro_batches, problem.device_mapping))
        except ScheduleError:
            continue
        if fits(problem, order):
            num_fitting += 1
            assert found.step_time <= find_step_time(problem, order)
    assert num_fitting
    assert fits(problem, as_order(found.rows))
    check(found.rows, num_stages, num_micro_batches, problem.device_mapping, training=True)


def test_a_schedule_with_a_name_is_called_so_if_it_is_the_best():
    # Grouped and Interleaved wait only for the first micro-batch to come and the last one to go.
    problem = pose(4, (1, 1), (1, 1), (0, 0))
    found = search(problem)
    assert (found.name, found.step_time, found.gap) == ("grouped", 10, 0)


def test_weight_gradients_fill_what_interleaved_waits():
    problem = ones(8, 4, is_fused=False)
    found = search(problem)
    assert found.step_time < find_step_time(problem, as_order(interleaved(4, 8, range(4))))
    assert found.step_time <= find_step_time(problem, as_order(zero_bubble(4, 8, range(4))))


def test_a_search_finds_the_same_again():
    problem = make_problem(5, 5, 8, 0.6)
    assert search(problem) == search(problem)


@pytest.mark.parametrize(
    ("mapping", "is_fused"),
    [((0, 1, 0, 1, 0, 1), True), ((0, 1, 2, 2, 1, 0), False), ((0, 0, 0, 1, 1, 1), True)],
)
def test_dispatching_ends_with_as_few_bytes_as_possible(mapping, is_fused):
    for seed in range(8):
        problem = make_problem(seed, 6, 4, 0, mapping, is_fused=is_fused)
        chance = random.Random(seed)  # noqa: S311  # no secret depends on it
        base = [[[chance.random() for _n in range(4)] for _s in range(6)] for _kind in ActionKind]
        step_time, order = dispatch(problem, Rule(base, (0,) * 6, (0,) * 6, (seed % 3 / 2,) * 3, (4,) * 6))
        check(as_rows(order), 6, 4, mapping, training=True)
        assert fits(problem, order)
        assert find_step_time(problem, order) == step_time


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "share", "most"),
    # Where memory is short, the bound knows little of how the actions of many IPUs hinder each other.
    [(0, 0.5, 0.1), (1, 1, 0.1), (2, 2, 0.03), (0, None, 0.03)],
)
def test_large_problems_are_close_to_the_bound(seed, share, most):
    problem = make_problem(seed, 8, 64, share)
    found = search(problem)
    assert found.gap <= most
    assert fits(problem, as_order(found.rows))
    order = as_order(grouped(8, 64, range(8)))
    assert not fits(problem, order) or found.step_time <= find_step_time(problem, order)
