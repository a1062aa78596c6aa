"""Replicas, processes and links in the simulator: timelines worked out by hand, and ticks at random."""

import dataclasses
import json
import math
import random

import pytest

from ipu_pipeline.engine.schedules import (
    ActionKind,
    Cluster,
    Costs,
    LinkSpeed,
    Memory,
    Scenario,
    advise,
    predict_step_time,
    simulate,
    what_if,
)
from tests.engine.schedules import test_simulator
from tests.engine.schedules.test_simulator import assert_same_with_cores, begins, compare_with_ticks, draw

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def scenario(num_replicas, num_processes=1, *, count=1, num_stages=2, sharded=False, **given):
    """As in `test_simulator`; links between processes are those within, if not given."""
    within = given.pop("within", LinkSpeed())
    links = {"within": within, "between": given.pop("between", within)}
    num_ipus = max(given.get("device_mapping", range(num_stages))) + 1
    cluster = Cluster.of(num_replicas, num_ipus, num_processes, shards_optimizer_state=sharded, **links)
    return test_simulator.scenario(num_stages, count, cluster=cluster, **given)


# By hand.


def test_replicas_do_the_same_beside_each_other_and_take_elements_in_turn():
    one = begins(simulate(scenario(1, forward=1, backward=2, count=3)).free_running)
    two = simulate(scenario(2, forward=1, backward=2, count=3))
    for timeline in (two.free_running, two.lock_step):
        found = begins(timeline, 2)
        assert sorted(found) == sorted(
            f"{kind}{stage}.{n}" for kind in "FB" for stage in (0, 1) for n in range(6)
        )
        assert timeline.work == dict.fromkeys(range(4), 9)
        assert timeline.num_samples == 6
        ipus = {(one.stage, one.micro_batch % 2): one.ipu for one in timeline.intervals()}
        assert ipus == {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}
    found = begins(two.free_running)
    assert {name: begin for name, begin in found.items() if int(name[3:]) % 2 == 0} == {
        f"{name[:3]}{2 * int(name[3:])}": begin for name, begin in one.items()
    }
    assert all(found[name] == found[f"{name[:3]}{int(name[3:]) ^ 1}"] for name in found)


def test_replicas_average_gradients_before_they_update():
    # 2 rounds, in each of which a third of 30 bytes takes 1 + 10 / 5: 12 in all. Stage 1 has none.
    ring = {"num_gradient_bytes": [30, 0], "within": LinkSpeed(1, 5)}
    found = simulate(scenario(3, forward=1, backward=2, update=[3, 4], **ring))
    expected = {"F0.0": 0, "F1.0": 1, "B1.0": 2, "B0.0": 4, "R0/0": 6, "U1/0": 4, "U0/0": 18}
    actual = begins(found.free_running, 2)
    assert {name: actual[name] for name in expected} == expected
    assert found.free_running.step_time == 21
    assert found.free_running.bubble.transfers == 6 * 12
    actual = begins(found.lock_step, 2)
    assert {name: actual[name] for name in expected} == expected | {"U1/0": 18}
    assert found.lock_step.step_time == 22
    assert found.lock_step.bubble.transfers == 6 * 12
    assert "G0/0" not in actual


def test_replicas_that_share_the_state_update_their_part_between_the_halves():
    ring = {"num_gradient_bytes": [30, 0], "within": LinkSpeed(1, 5)}
    found = simulate(scenario(3, forward=1, backward=2, update=[3, 6], sharded=True, **ring))
    actual = begins(found.free_running, 2)
    assert (actual["R0/2"], actual["U0/2"], actual["G0/2"]) == (6, 12, 13)
    assert found.free_running.step_time == 19
    assert found.free_running.work == {ipu: 3 + (1, 2)[ipu % 2] for ipu in range(6)}
    actual = begins(found.lock_step, 2)
    assert (actual["R0/2"], actual["U0/2"], actual["U1/2"], actual["G0/2"]) == (6, 12, 12, 14)
    assert found.lock_step.step_time == 20


def test_the_slowest_link_of_the_ring_counts():
    """Four devices in two processes: the replicas of a stage are in different ones."""
    ring = {"num_gradient_bytes": 8, "within": LinkSpeed(0, 8), "between": LinkSpeed(0, 2)}
    assert predict_step_time(scenario(2, 2, forward=1, backward=2, **ring)) == 6 + 4
    assert predict_step_time(scenario(2, 1, forward=1, backward=2, **ring)) == 6 + 1
    # The other way round each process has a stage, of both replicas.
    case = scenario(2, 2, forward=1, backward=2, **ring)
    other = dataclasses.replace(case.cluster, processes=(0, 1, 0, 1))
    assert predict_step_time(dataclasses.replace(case, cluster=other)) == 6 + 1


def test_what_is_sent_between_processes_takes_their_links():
    sent = {"num_sent_bytes": 4, "within": LinkSpeed(0, 8), "between": LinkSpeed(3, 4)}
    # Four stages, and two processes of two: 0.5, 4 and 0.5, after what it takes in any case.
    case = scenario(1, 2, num_stages=4, forward=1, transfer=0.25, training=False, **sent)
    assert begins(simulate(case).free_running) == {"F0.0": 0, "F1.0": 1.75, "F2.0": 7, "F3.0": 8.75}
    assert simulate(case).lock_step.step_time == predict_step_time(case) == 9.75
    # Stages of one IPU send nothing, and a chunk has the latency once.
    fields = {"training": False, "device_mapping": (0, 0, 1), "chunk_size": 2}
    case = scenario(1, 2, num_stages=3, forward=1, count=2, **fields, **sent)
    assert begins(simulate(case).free_running)["F2.0"] == 4 + 3 + 2
    assert begins(simulate(case).lock_step)["F2.0"] == 4 + 3 + 2


def test_each_host_starts_what_its_devices_do():
    def found(num_processes):
        case = scenario(2, num_processes, forward=1, host=3, training=False)
        simulation = simulate(case)
        return begins(simulation.free_running), simulation.lock_step.step_time

    # One host: of each action first that of replica 0.
    assert found(1) == ({"F0.0": 3, "F0.1": 6, "F1.0": 9, "F1.1": 12}, 13)
    assert found(2) == ({"F0.0": 3, "F0.1": 3, "F1.0": 6, "F1.1": 6}, 7)
    assert found(4) == ({"F0.0": 3, "F0.1": 3, "F1.0": 4, "F1.1": 4}, 5)


def test_a_host_starts_an_update_once_for_all_replicas_that_it_has():
    # Four devices of one host have four programs in a step, and the row a reduction and an update.
    case = scenario(4, num_stages=1, forward=1, backward=1, update=1, host=4, num_gradient_bytes=4)
    case = dataclasses.replace(case, cluster=dataclasses.replace(case.cluster, within=LinkSpeed(1)))
    actual = begins(simulate(case).free_running, 1)
    assert [actual[f"R0/{replica}"] for replica in range(4)] == [20] * 4
    assert [actual[f"U0/{replica}"] for replica in range(4)] == [26] * 4
    actual = begins(simulate(case).lock_step, 1)  # backwards are programs, too
    assert (actual["R0/3"], actual["U0/3"]) == (36, 42)


def test_memory_of_all_replicas():
    case = scenario(2, forward=1, backward=2, count=3, memory=Memory((100, 1000), (10, 7)))
    found = simulate(case)
    assert [peak.num_bytes for peak in found.free_running.peaks] == [130, 1007] * 2
    assert found.free_running.num_bytes_at(2, 0.5) == 110
    assert what_if(case, counts=[])[0].num_peak_bytes == 1007


# Known formulas.


@pytest.mark.parametrize(("num_replicas", "sharded"), [(1, False), (2, True), (5, False), (5, True)])
def test_an_all_reduce_is_twice_the_bytes_but_for_one_share(num_replicas, sharded):
    ring = {"num_gradient_bytes": 1000, "within": LinkSpeed(0, 10)}
    case = scenario(num_replicas, num_stages=1, forward=1, backward=1, sharded=sharded, **ring)
    expected = 2 * (num_replicas - 1) / num_replicas * 1000 / 10
    assert predict_step_time(case) == pytest.approx(2 + expected)
    assert simulate(case).free_running.bubble.transfers == pytest.approx(num_replicas * expected)


# At random.


def draw_cluster(seed):
    rng = random.Random(-seed)  # noqa: S311  # no secret depends on it
    case = draw(seed)
    num_replicas = rng.randint(1, 3)
    num_devices = num_replicas * case.num_ipus
    num_processes = rng.randint(1, min(3, num_devices))
    processes = [*range(num_processes)]
    processes += [rng.randrange(num_processes) for _device in range(num_devices - num_processes)]
    rng.shuffle(processes)
    cluster = Cluster(
        num_replicas,
        tuple(processes),
        LinkSpeed(rng.randint(0, 2)),
        LinkSpeed(rng.randint(0, 3), rng.choice([1, 2, math.inf])),
        num_replicas > 1 and case.training and rng.random() < 0.5,
    )
    sharing = num_replicas if cluster.shards_optimizer_state else 1
    num_stages = case.costs.num_stages
    edges = [(stage, stage + 1) for stage in range(num_stages - 1) if rng.random() < 0.7]
    costs = dataclasses.replace(
        case.costs,
        update=tuple(update * sharing for update in case.costs.update),
        num_sent_bytes={edge: 2 * rng.randint(0, 2) for edge in edges + [edge[::-1] for edge in edges]},
        num_gradient_bytes=tuple(rng.choice([0, 2 * num_replicas]) for _stage in range(num_stages)),
    )
    return dataclasses.replace(case, costs=costs, cluster=cluster)


@pytest.mark.parametrize("first", range(0, 12, 3))
def test_random_clusters_against_ticks(first):
    for seed in range(first, first + 3):
        compare_with_ticks(draw_cluster(seed))


def test_with_cores_enough_clusters_run_as_if_they_shared_none():
    for seed in range(6):
        case = draw_cluster(100 + seed)
        cores = 5.0 * case.costs.num_stages * case.cluster.num_replicas  # with those of transfers
        assert_same_with_cores(case, cores)


def test_replicas_share_the_cores():
    case = scenario(2, forward=1, num_stages=1, count=2, training=False, cores=1)
    found = simulate(case)
    assert found.free_running.step_time == found.lock_step.step_time == 4
    assert found.free_running.bubble.shared_cores == found.lock_step.bubble.shared_cores == 2 * 2


# What would be better.


def test_what_if_the_state_were_shared_and_there_were_more_processes():
    costs = {"forward": 0.1, "backward": 0.2, "update": 8, "host": 1, "num_gradient_bytes": 64}
    case = scenario(4, 2, count=8, within=LinkSpeed(0, 64), **costs)
    rows = {row.cluster: row for row in what_if(case, counts=[]) if row.change == "cluster"}
    assert list(rows) == ["1 process", "4 processes", "8 processes", "optimizer state shared by replicas"]
    for row in rows.values():
        assert row.step_time == predict_step_time(row.scenario)
    assert rows["8 processes"].scenario.cluster.processes == tuple(range(8))
    assert rows["8 processes"].gain > rows["4 processes"].gain > 0 > rows["1 process"].gain
    assert rows["optimizer state shared by replicas"].scenario.cluster.shards_optimizer_state
    advice = advise(case, variants=[next(iter(what_if(case, counts=[]))), *rows.values()])
    assert advice.sentence.startswith("8 processes instead of 2 would give ")
    slow = dataclasses.replace(case, costs=dataclasses.replace(case.costs, host=0.0))
    rows = [row for row in what_if(slow, counts=[]) if row.change == "cluster"]
    assert [row.cluster for row in rows] == ["optimizer state shared by replicas"]
    advice = advise(slow)
    assert advice.sentence.startswith("Sharing the optimizer state between the replicas would give ")
    assert [row for row in what_if(scenario(1, forward=1, host=1)) if row.cluster == "optimizer"] == []


def test_processes_that_have_not_equally_many_devices_in_a_row_stay():
    case = scenario(2, 2, forward=0.1, host=1)
    other = dataclasses.replace(case.cluster, processes=(0, 1, 0, 1))
    rows = what_if(dataclasses.replace(case, cluster=other), counts=[])
    assert not [row for row in rows if "process" in row.cluster]


# Dictionaries, arguments.


def test_a_cluster_goes_through_a_dictionary():
    case = scenario(
        2, 2, forward=1, num_sent_bytes=3, num_gradient_bytes=[1, 2], sharded=True, between=LinkSpeed(1, 2)
    )
    written = json.loads(json.dumps(case.as_dict(), allow_nan=False))
    assert Scenario.from_dict(written) == case
    del written["cluster"]
    assert Scenario.from_dict(written).cluster == Cluster()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinkSpeed(-1), "LinkSpeed: latency must be finite and at least 0; got -1"),
        (lambda: LinkSpeed(0, 0), "LinkSpeed: bandwidth must be greater than 0 .* got 0"),
        (lambda: LinkSpeed(0, math.nan), "LinkSpeed: bandwidth must be greater than 0 .* got nan"),
        (lambda: Cluster(0), "Cluster: num_replicas must be an integer of at least 1; got 0"),
        (lambda: Cluster.of(2, 2, 3), "Cluster: num_processes must divide the number of devices, 4; got 3"),
        (lambda: Cluster.of(2, 2, 0), "Cluster: num_processes must be an integer of at least 1; got 0"),
        (lambda: Cluster(1, (0, -1)), "Cluster: processes must be integers from 0, one per device; got -1"),
        (lambda: Cluster(1, (0, 2)), "counted from 0 without a gap; process 1 has no device"),
        (lambda: Cluster(1, shards_optimizer_state=True), "shards_optimizer_state needs several replicas"),
        (
            lambda: Scenario(Costs.of(2, forward=1), cluster=Cluster.of(2, 3, 2)),
            r"the process of each of 4 devices \(2 replicas of 2 devices\); got 6",
        ),
        (lambda: Costs.of(2, forward=1, num_sent_bytes=-1), "num_sent_bytes must be finite and at least 0"),
        (lambda: Costs.of(2, forward=1, num_sent_bytes={(0, 2): 1}), "num_sent_bytes are between two of"),
        (
            lambda: Costs.of(2, forward=1, num_gradient_bytes=[1]),
            "num_gradient_bytes must be one number or 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_figures_of_links_are_numbers():
    with pytest.raises(TypeError, match="LinkSpeed: bandwidth must be a number; got '1'"):
        LinkSpeed(0, "1")
