"""Simulated execution phases: timelines worked out by hand, and what cannot be simulated."""

import dataclasses
import json

import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.schedules import predict_step_time
from tests.engine.schedules import test_simulator

LINK = engine.LinkSpeed(0.0, 1.0)  # a byte takes a unit of time


def make(num_ahead, *, training=False, levels=(0, 1), mapping=(0, 0), count=2, costs=None, **sizes):
    keeps_values = sizes.pop("keeps_values", True)
    phases = engine.ExecutionPhases(of_levels=levels, num_ahead=num_ahead, keeps_values=keeps_values)
    memory = engine.HostMemory(phases=phases, link=sizes.pop("link", LINK), **sizes)
    costs = {"forward": 2.0} if costs is None else costs
    return engine.Scenario(
        engine.Costs.of(len(levels), **costs),
        "sequential",
        count,
        mapping,
        training=training,
        host_memory=memory,
    )


def begins(scenario):
    """`F0.1` is stage 0's forward of micro-batch 1, `U2` stage 2's update."""
    return test_simulator.begins(engine.simulate(scenario).free_running)


SIZES = {"num_bytes_to_forward": (1, 1), "num_bytes_from_forward": (3, 3)}


def test_a_phase_is_brought_when_the_one_before_has_left():
    # F0.0: brought 0..1, runs 1..3, leaves 3..6; then F1.0 likewise.
    scenario = make(0, **SIZES)
    assert begins(scenario) == {"F0.0": 1, "F1.0": 7, "F0.1": 13, "F1.1": 19}
    assert engine.simulate(scenario).free_running.step_time == 24


def test_a_phase_is_brought_while_the_one_before_runs():
    # F1.0: brought 1..2, runs 3..5, leaves 6..9 behind what F0.0 left. F0.1: the host waits until 6.
    scenario = make(1, **SIZES)
    assert begins(scenario) == {"F0.0": 1, "F1.0": 3, "F0.1": 7, "F1.1": 10}
    assert engine.simulate(scenario).free_running.step_time == 15


def test_without_a_limit_links_alone_keep_ipus_waiting():
    sizes = {"num_bytes_to_forward": (1, 5)}
    # F1.0: brought 1..6; F0.1: brought 6..7; F1.1: brought 7..12.
    assert begins(make(None, **sizes)) == {"F0.0": 1, "F1.0": 6, "F0.1": 8, "F1.1": 12}
    # F0.1: the host waits for F0.0, which is nothing; F1.1: for F1.0, until 8.
    assert begins(make(1, **sizes)) == {"F0.0": 1, "F1.0": 6, "F0.1": 8, "F1.1": 13}


def test_stages_of_a_phase_do_not_wait_for_what_the_phase_leaves():
    together = make(0, levels=(0, 0), **SIZES)
    # F1.0: brought 1..2, runs 3..5, leaves 6..9; F0.1: 9..10.
    assert begins(together) == {"F0.0": 1, "F1.0": 3, "F0.1": 10, "F1.1": 12}


def test_what_goes_through_host_memory_has_left_before_it_is_brought():
    kept = make(1, **SIZES)
    moved = make(1, **SIZES, keeps_values=False)
    # F1.0: what F0.0 left is there at 6, brought 6..7.
    assert begins(kept)["F1.0"] == 3
    assert begins(moved)["F1.0"] == 7


def test_updates_are_brought_one_by_one():
    sizes = {
        "num_bytes_to_backward": (2, 0),
        "num_bytes_from_backward": (2, 0),
        "num_bytes_to_update": (4, 4),
        "num_bytes_from_update": (4, 4),
    }
    costs = {"forward": [1.0, 1.0], "backward": [1.0, 1.0], "update": 1.0}
    scenario = make(0, training=True, count=1, costs=costs, **sizes)
    # F0.0 0..1, F1.0 and B1.0 1..3, B0.0 brought 3..5, 5..6, leaves 6..8; U0 brought 8..12, 12..13, 13..17.
    assert begins(scenario) == {"F0.0": 0, "F1.0": 1, "B1.0": 2, "B0.0": 5, "U0": 12, "U1": 21}
    assert engine.simulate(scenario).free_running.step_time == 26
    # B0.0 is brought 1..3, when F0.0 has ended, and leaves 4..6; U0 6..10, U1 10..14 while U0 runs.
    ahead = make(1, training=True, count=1, costs=costs, **sizes)
    assert begins(ahead) == {"F0.0": 0, "F1.0": 1, "B1.0": 2, "B0.0": 3, "U0": 10, "U1": 14}
    assert engine.simulate(ahead).free_running.step_time == 19


def test_the_host_starts_programs_behind_its_wait():
    scenario = make(0, **SIZES, costs={"forward": 2.0, "host": 0.5})
    assert begins(scenario) == {"F0.0": 1, "F1.0": 7, "F0.1": 13, "F1.1": 19}
    slow = make(0, **SIZES, costs={"forward": 2.0, "host": 1.5})  # longer than the link
    assert begins(slow) == {"F0.0": 1.5, "F1.0": 8, "F0.1": 14.5, "F1.1": 21}


@pytest.mark.parametrize(
    ("num_ahead", "mapping"), [(0, (0, 0, 0)), (1, (0, 1, 0)), (None, (0, 0, 0)), (None, (0, 1, 0))]
)
def test_the_bubble_has_it_among_transfers(num_ahead, mapping):
    sizes = {"num_bytes_to_forward": (1, 2, 3), "num_bytes_from_backward": (3, 2, 1)}
    costs = {"forward": 1.0, "backward": 2.0, "update": 1.0, "host": 0.1}
    scenario = make(num_ahead, training=True, levels=(0, 1, 2), mapping=mapping, costs=costs, **sizes)
    free = dataclasses.replace(scenario, host_memory=None)
    found, plain = engine.simulate(scenario), engine.simulate(free)
    for timeline, other in ((found.free_running, plain.free_running), (found.lock_step, plain.lock_step)):
        idle = len(timeline.work) * timeline.step_time - sum(timeline.work.values())
        assert timeline.bubble.total == pytest.approx(idle)
        assert timeline.bubble.transfers > other.bubble.transfers
        assert timeline.step_time > other.step_time


def test_links_that_take_no_time_add_nothing_on_one_ipu():
    costs = {"forward": 1.0, "backward": 2.0, "update": 1.0}
    scenario = make(0, training=True, costs=costs, **SIZES, link=engine.LinkSpeed())
    free = dataclasses.replace(scenario, host_memory=None)
    assert predict_step_time(scenario) == predict_step_time(free)


def test_in_lock_step_time_steps_last_longer():
    alone = engine.simulate(make(0, **SIZES)).lock_step  # 4 x (2 + 1 + 3)
    assert alone.step_time == 24
    beside = engine.simulate(make(1, **SIZES)).lock_step  # 4 x max(2, 1 + 3)
    assert beside.step_time == 16


def test_it_goes_through_a_dictionary():
    scenario = make(1, **SIZES, link=engine.LinkSpeed(0.5))
    read = engine.Scenario.from_dict(json.loads(json.dumps(scenario.as_dict())))
    assert read.host_memory == scenario.host_memory
    assert predict_step_time(read) == predict_step_time(scenario)


def test_what_if_keeps_to_phases():
    scenario = make(0, **SIZES, mapping=(0, 1))
    rows = engine.what_if(scenario, counts=[4])
    assert [row.change for row in rows] == ["", "gradient accumulation count"]
    assert rows[1].step_time == 48
    assert engine.advise(scenario).variant is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cores": 2.0}, "host_memory goes with one replica, and with devices that share no cores"),
        ({"cluster": engine.Cluster(2)}, "host_memory goes with one replica"),
        ({"schedule": "grouped"}, 'need the schedule "sequential"'),
    ],
    ids=["cores", "replicas", "schedule"],
)
def test_what_does_not_go_with_it(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make(0, **SIZES), **changes)


def test_wrong_sizes():
    with pytest.raises(ValueError, match="num_bytes_to_forward must have a number for each of the 2"):
        make(0, num_bytes_to_forward=(1, 2, 3))
    with pytest.raises(ValueError, match="num_bytes_to_update must be finite numbers .* got -1"):
        make(0, num_bytes_to_update=(-1, 0))
    with pytest.raises(ValueError, match="one phase for each of the 2 entries of stages"):
        phases = engine.ExecutionPhases(of_levels=(0,))
        dataclasses.replace(make(0, **SIZES), host_memory=engine.HostMemory(phases=phases))
