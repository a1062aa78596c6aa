"""Timelines worked out by hand, and compared with a simulation that goes forward in small ticks."""

import dataclasses
import itertools
import json
import random

import pytest

from ipu_pipeline.engine.schedules import (
    ActionKind,
    Costs,
    Memory,
    Scenario,
    Timetable,
    named_schedules,
    predict_step_time,
    simulate,
)

F, B, INPUTS, W = ActionKind
AROUND, IN_V = ("looped", "looped_zero_bubble"), ("zero_bubble_v", "v_half", "v_min", "dual_pipe_v")
NAMES = [name for name in named_schedules() if name not in (*AROUND, *IN_V)]  # with any device mapping
WHOLE = ("grouped", "interleaved", "sequential")  # whose backwards are whole


FIELDS = {field.name for field in dataclasses.fields(Scenario)}


def scenario(num_stages, num_micro_batches, schedule="grouped", **given):
    """A scenario of its own fields and of what `Costs.of` takes."""
    fields = {name: given.pop(name) for name in FIELDS & given.keys()}
    return Scenario(Costs.of(num_stages, **given), schedule, num_micro_batches, **fields)


def begins(timeline, num_ipus=None):
    """`F0.1` is stage 0's forward of micro-batch 1, `U2` stage 2's update.

    With the number of IPUs of a replica, `U2/1` is that of replica 1; `R` reduces, and `G` gathers.
    """
    found = {}
    for kind, stage, micro_batch, ipu, begin, end in timeline.intervals():
        assert end >= begin
        name = f"{kind[0].upper()}{stage}" + ("" if micro_batch is None else f".{micro_batch}")
        if micro_batch is None and num_ipus:
            name += f"/{ipu // num_ipus}"
        assert name not in found
        found[name] = begin
    return found


ON_ONE_CORE = {"training": False, "cores": 1}


# By hand.


def test_backwards_wait_for_the_stage_behind():
    # IPU 0:  F0.0 F0.1  .    .   B0.0 B0.0  .  B0.1 B0.1
    # IPU 1:   .   F1.0 B1.0 B1.0 F1.1 B1.1 B1.1
    found = simulate(scenario(2, 2, forward=1, backward=2)).free_running
    expected = {"F0.0": 0, "F0.1": 1, "F1.0": 1, "B1.0": 2, "F1.1": 4, "B0.0": 4, "B1.1": 5, "B0.1": 7}
    assert begins(found) == expected
    assert found.step_time == 9
    assert found.work == {0: 6, 1: 6}
    assert found.utilisation == 12 / 18
    assert found.utilisation_of_ipus == {0: 6 / 9, 1: 6 / 9}


def test_lock_step_waits_for_the_slowest_of_a_time_step():
    # IPU 0:  F0 F1 .  .  B0 B1
    # IPU 1:  .  F0 B0 F1 B1 .   for 1 + 3 + 2 + 3 + 2 + 2
    found = simulate(scenario(2, 2, forward=[1, 3], backward=2)).lock_step
    expected = {"F0.0": 0, "F0.1": 1, "F1.0": 1, "B1.0": 4, "F1.1": 6, "B0.0": 9, "B1.1": 9, "B0.1": 11}
    assert begins(found) == expected
    assert found.step_time == 13
    assert found.bubble.by_cause() == {
        "ramp_up": 1 + 5 / 2,  # IPU 1 in time-step 1; what IPU 0 waits in 3 and 4 is half of each
        "ramp_down": 5 / 2 + 2,
        "imbalance": 2,
        "transfers": 0,
        "host": 0,
        "shared_cores": 0,
    }
    assert found.bubble.total == 2 * 13 - (1 + 3 + 2 + 2) * 2


def test_the_host_starts_one_program_at_a_time_in_the_order_of_the_timetable():
    found = simulate(scenario(2, 2, forward=1, host=3, training=False))
    expected = {"F0.0": 3, "F0.1": 6, "F1.0": 9, "F1.1": 12}
    assert begins(found.free_running) == expected
    assert found.free_running.step_time == 13
    assert found.free_running.bubble.host == 2 * (13 - 3)
    # Time-step 2 has two programs.
    assert begins(found.lock_step) == {"F0.0": 3, "F0.1": 9, "F1.0": 9, "F1.1": 12}
    assert found.lock_step.bubble.host == 2 * (3 + 5 + 2)


def test_transfers_overlap_with_computation_and_a_link_carries_one_at_a_time():
    found = simulate(scenario(2, 3, forward=1, transfer=2, training=False))
    assert begins(found.free_running) == {"F0.0": 0, "F0.1": 1, "F0.2": 2, "F1.0": 3, "F1.1": 5, "F1.2": 7}
    sent = [tuple(one) for one in found.free_running.transfers()]
    assert sent == [(0, 1, 0, 1, 3), (0, 1, 1, 3, 5), (0, 1, 2, 5, 7)]
    assert found.free_running.step_time == 8
    assert found.free_running.bubble.transfers == 2 * (8 - 4)
    # In lock-step what is sent is sent between time-steps.
    assert begins(found.lock_step) == {"F0.0": 0, "F0.1": 3, "F1.0": 3, "F0.2": 6, "F1.1": 6, "F1.2": 9}
    assert found.lock_step.bubble.transfers == 2 * 6
    assert [one.begin for one in found.lock_step.transfers()] == [1, 4, 7]


def test_updates_follow_what_their_ipu_does():
    found = simulate(scenario(2, 1, forward=1, backward=2, update=[5, 1]))
    expected = {"F0.0": 0, "F1.0": 1, "B1.0": 2, "B0.0": 4, "U1": 4, "U0": 6}
    assert begins(found.free_running) == expected
    assert found.free_running.step_time == 11
    lock_step = found.lock_step
    assert begins(lock_step) == {**expected, "U1": 6}
    assert lock_step.bubble.imbalance == 4
    assert lock_step.bubble.total == 2 * 11 - 12


def test_chunks_are_programs_for_several_micro_batches():
    found = simulate(scenario(2, 4, forward=1, host=0.5, training=False, chunk_size=2))
    expected = {"F0.0": 0.5, "F0.1": 1.5, "F0.2": 2.5, "F0.3": 3.5}
    expected |= {"F1.0": 2.5, "F1.1": 3.5, "F1.2": 4.5, "F1.3": 5.5}
    assert begins(found.free_running) == expected
    fused = simulate(scenario(1, 2, forward=1, backward=2, chunk_size=2)).free_running
    assert begins(fused) == {"F0.0": 0, "B0.0": 1, "F0.1": 3, "B0.1": 4}


def test_a_value_may_skip_a_stage():
    found = simulate(scenario(3, 1, forward=1, transfer={(0, 2): 7}, training=False)).free_running
    assert begins(found) == {"F0.0": 0, "F1.0": 1, "F2.0": 8}


def test_what_takes_no_time_is_no_program():
    """A stage without a backward: the host starts nothing for it, and its IPU does not wait."""
    found = simulate(scenario(2, 2, "sequential", forward=1, backward=[0, 2], host=1)).free_running
    assert begins(found)["F0.1"] == 3  # the third program; not after the backward before, at 5
    assert found.step_time == 8
    assert predict_step_time(scenario(2, 3, forward=0, backward=0)) == 0


def test_two_programs_on_one_core_take_twice_as_long():
    # One core:   0..1 F0.0; 1..3 F0.1 and F1.0 side by side; 3..4 F1.1
    found = simulate(scenario(2, 2, forward=1, **ON_ONE_CORE)).free_running
    assert begins(found) == {"F0.0": 0, "F0.1": 1, "F1.0": 1, "F1.1": 3}
    assert found.step_time == 4
    assert found.bubble.shared_cores == 2 * (4 - 3)
    assert found.utilisation == 0.5
    # On two cores, a forward that keeps both busy alone: the same.
    wide = scenario(2, 2, forward=1, forward_cores=2, training=False, cores=2)
    assert begins(simulate(wide).free_running) == begins(found)
    assert begins(simulate(wide).lock_step) == begins(found)


def test_what_ends_gives_its_share_of_the_cores_to_others():
    # One core: F1.0 (3) and F0.1 (1) share it from 1 to 3, then F1.0 has 2 left.
    found = simulate(scenario(2, 2, forward=[1, 3], **ON_ONE_CORE))
    assert begins(found.free_running) == {"F0.0": 0, "F0.1": 1, "F1.0": 1, "F1.1": 5}
    assert found.free_running.step_time == 8
    ends = {one.begin: one.end for one in found.lock_step.intervals() if one.stage == 0}
    assert ends == {0: 1, 1: 3}
    assert found.lock_step.step_time == 8


def test_a_transfer_keeps_a_core_busy():
    # One core: F0.0 (1); its transfer (2) beside F0.1 (1) from 1 to 3; then it has 1 left, and that of F0.1
    # waits for it, as they take the same way.
    found = simulate(scenario(2, 2, forward=[1, 1], transfer=2, **ON_ONE_CORE)).free_running
    assert begins(found) == {"F0.0": 0, "F0.1": 1, "F1.0": 4, "F1.1": 7}
    assert [(one.begin, one.end) for one in found.transfers()] == [(1, 4), (4, 7)]
    assert found.step_time == 8
    alone = simulate(scenario(2, 2, forward=[1, 1], transfer=2, training=False, cores=2)).free_running
    assert alone.step_time == 6


def test_memory_over_time():
    memory = Memory((100, 1000), (10, 7))
    found = simulate(scenario(2, 3, forward=1, backward=2, memory=memory))
    # Grouped, free: IPU 0 does F0 F1 F2 at 0, 1, 2, then its backwards at 4, 7 and 10.
    times, sizes = found.free_running.memory[0]
    assert times.tolist() == [0, 1, 2, 6, 9, 12]
    assert sizes.tolist() == [110, 120, 130, 120, 110, 100]
    assert found.free_running.peaks == ((0, 130, 2), (1, 1007, 1))
    assert found.free_running.num_bytes_at(0, 0.5) == 110
    assert found.free_running.num_bytes_at(0, 8.9) == 120
    assert found.lock_step.peaks[0].num_bytes == 130
    assert simulate(scenario(2, 3, forward=1)).free_running.peaks == ()


# Known formulas.


@pytest.mark.parametrize(
    ("num_stages", "count", "training"),
    [(1, 3, True), (2, 1, True), (4, 16, True), (7, 3, True), (1, 1, False), (4, 3, False), (7, 16, False)],
)
def test_the_bubble_of_a_balanced_pipeline(num_stages, count, training):
    """(N-1)/(M+N-1), and (N-1)/N with Sequential; one half of it ramp-up in lock-step.

    Forwards alone wait for data only, in whatever order the schedule has them.
    """
    for schedule in WHOLE:
        given = {"forward": 2.0, "backward": 2.0 if training else 0.0}
        found = simulate(scenario(num_stages, count, schedule, training=training, **given))
        expected = (num_stages - 1) / (count + num_stages - 1)
        for timeline in (found.free_running, found.lock_step):
            if schedule == "sequential" and (training or timeline is found.lock_step):
                expected = (num_stages - 1) / num_stages
            whole = num_stages * timeline.step_time
            bubble = timeline.bubble
            assert bubble.total / whole == pytest.approx(expected, abs=1e-12)
            assert timeline.utilisation == pytest.approx(1 - expected)
            assert bubble.ramp_up + bubble.ramp_down == pytest.approx(bubble.total)
        assert found.lock_step.bubble.ramp_up == pytest.approx(found.lock_step.bubble.ramp_down)


@pytest.mark.parametrize(("num_stages", "count"), [(1, 3), (2, 16), (4, 1), (4, 3), (7, 16)])
def test_the_bubble_of_zero_bubble(num_stages, count):
    """(p-1)(F + B - 2W), with F = I = W, and as many micro-batches as stages."""
    found = simulate(scenario(num_stages, count, "zero_bubble", forward=1, backward=2))
    idle = max(num_stages - 1, 2 * num_stages - 1 - count)
    for timeline in (found.free_running, found.lock_step):
        assert timeline.step_time == 3 * count + idle
        assert timeline.bubble.total == pytest.approx(num_stages * idle)
        bubble = timeline.bubble
        assert bubble.ramp_up + bubble.ramp_down == pytest.approx(bubble.total)


@pytest.mark.parametrize(("num_ipus", "num_turns", "count"), [(2, 2, 4), (4, 2, 13), (2, 3, 13), (4, 3, 8)])
def test_the_bubble_of_looped(num_ipus, num_turns, count):
    """(p-1)(F+B)/v; and Interleaved's (p-1)(F+B) with whole stages."""
    mapping = tuple(stage % num_ipus for stage in range(num_ipus * num_turns))
    costs = {"forward": 1 / num_turns, "backward": 2 / num_turns}
    found = simulate(scenario(len(mapping), count, "looped", device_mapping=mapping, **costs))
    idle = 3 * (num_ipus - 1) / num_turns
    assert found.free_running.step_time == pytest.approx(3 * count + idle)
    assert found.free_running.bubble.total == pytest.approx(num_ipus * idle)


def test_memory_between_halves():
    given = Memory((0,), (10,), (4,))
    found = simulate(scenario(1, 2, "zero_bubble", forward=1, backward=2, memory=given))
    times, sizes = found.lock_step.memory[0]
    # F0 I0 W0 F1 I1 W1
    assert dict(zip(times.tolist(), sizes.tolist(), strict=True)) == {0: 10, 2: 4, 3: 10, 5: 4, 6: 0}


@pytest.mark.parametrize("schedule", ["grouped", "interleaved"])
def test_free_running_needs_no_equal_directions(schedule):
    found = simulate(scenario(4, 16, schedule, forward=1, backward=2))
    assert found.free_running.step_time == (16 + 3) * 3
    causes = found.free_running.bubble.by_cause()
    assert [cause for cause, idle in causes.items() if idle] == ["ramp_up", "ramp_down"]
    # Grouped has forwards beside forwards, and Interleaved forwards beside backwards.
    in_lock_step = {"grouped": (16 + 3) * 3, "interleaved": 72}
    assert found.lock_step.step_time == in_lock_step[schedule]


def test_a_slow_stage_is_imbalance():
    found = simulate(scenario(4, 100, forward=[1, 1, 2, 1], backward=0.0, training=False))
    timeline = found.free_running
    # Even work would be 1.25 each: (100 + 3) * 1.25; it takes 1 + 1 + 100 * 2 + 1.
    assert timeline.step_time == 203
    assert timeline.bubble.imbalance == pytest.approx(4 * (203 - 103 * 1.25))
    assert found.limiting_ipu == 2


# At random.


def tick(case, unit):
    """A slow and obvious simulation in whole ticks of `unit`, which all costs are multiples of.

    Programs are served a tick at a time. With cores, which all programs together need no more of than one
    each, the ticks are as fine as that needs.
    """
    costs, table, cluster = case.costs, case.timetable(), case.cluster
    last, replicas = costs.num_stages - 1, range(case.cluster.num_replicas)
    is_joined = case.training and len(replicas) > 1
    order = [(*action, replica) for action in table.order for replica in replicas]
    firsts = [case.device_mapping.index(ipu) for ipu in case.ipus]
    closing = {
        "reduce": firsts if is_joined else [],
        "update": [stage for stage in range(last + 1) if case.training and costs.update[stage]],
        "gather": firsts if is_joined and cluster.shards_optimizer_state else [],
    }
    order += [(kind, stage, 0, r) for kind, stages in closing.items() for stage in stages for r in replicas]

    def ring(ipu):
        """Round by round, what each device sends in a reduce-scatter."""
        num_bytes = sum(
            own for stage, own in enumerate(costs.num_gradient_bytes) if case.device_mapping[stage] == ipu
        )
        row = {cluster.process_of(r * case.num_ipus + ipu) for r in replicas}
        speed = cluster.within if len(row) == 1 else cluster.between
        rounds = [speed.latency + num_bytes / len(replicas) / speed.bandwidth for _round in replicas[1:]]
        return sum(rounds) if num_bytes else 0

    def length(action):
        kind, stage, _chunk, _replica = action
        if kind == "update":
            return costs.update[stage] / (len(replicas) if cluster.shards_optimizer_state else 1)
        if kind in ("reduce", "gather"):
            return ring(case.device_mapping[stage]) * (1 if cluster.shards_optimizer_state else 2)
        first = INPUTS if stage in table.halved else B
        if case.is_fused and stage == last and kind in (F, first):
            return (costs.forward[stage] + costs.of_actions[first][stage]) * (kind == F)
        return costs.of_actions[kind][stage]

    def needs(action):
        kind, stage, chunk, replica = action
        there = [one for one, ipu in enumerate(case.device_mapping) if ipu == case.device_mapping[stage]]
        if kind == "reduce":
            final = case.num_micro_batches - 1
            ends_of = {one: W if one in table.halved else B for one in there}
            return [(ends_of[one], one, final, r) for one in there for r in replicas]
        if kind == "update":
            return [("reduce", there[0], 0, replica)] if is_joined else []
        if kind == "gather":
            return [("update", one, 0, r) for one in there if costs.update[one] for r in replicas] + [
                ("reduce", there[0], 0, r) for r in replicas
            ]
        if kind == W:
            return [(INPUTS, stage, chunk, replica)]
        step = 1 if kind == F else -1
        found = [
            (kind, other, chunk, replica)
            for other in range(last + 1)
            if case.levels[other] + step == case.levels[stage]
        ]
        return found if kind == F else [*found, (F, stage, chunk, replica)]

    def ipu_of(action):
        return action[3] * case.num_ipus + case.device_mapping[action[1]]

    started, numbers, known = {}, {}, set()
    for action in order:
        process = cluster.process_of(ipu_of(action))
        together = (process, *action[:3]) if isinstance(action[0], str) else (process, action)
        numbers[process] = numbers.get(process, 0) + (length(action) > 0 and together not in known)
        known.add(together)
        started[action] = numbers[process] * costs.host
    queues = {ipu: [a for a in order if ipu_of(a) == ipu and length(a)] for ipu in case.ipus_of_replicas}
    passing = [action for action in order if not length(action)]
    ends, begun, running = {}, {}, {}
    sending = {}  # (kind, sending stage, receiving stage, replica) -> the actions, and what is left of each
    arrivals = {}  # (action, stage that reads) -> time

    def arrived(action, reader, now):
        if action not in ends:
            return False
        if isinstance(action[0], str) or action[1] == reader[1] or isinstance(reader[0], str):
            return ends[action] <= now
        return (action, reader[1]) in arrivals and arrivals[action, reader[1]] <= now

    def finish(action, now):
        ends[action] = now
        kind, stage, chunk, replica = action
        if isinstance(kind, str) or kind == W:
            return
        for other in range(last + 1):
            if case.levels[other] - case.levels[stage] == (1 if kind == F else -1):
                time = costs.transfers.get((stage, other), 0)
                ipus = {ipu_of(action), ipu_of((kind, other, chunk, replica))}
                sent = costs.num_sent_bytes.get((stage, other), 0)
                if sent and len(ipus) == 2:
                    is_near = len({cluster.process_of(ipu) for ipu in ipus}) == 1
                    speed = cluster.within if is_near else cluster.between
                    time += speed.latency + sent / speed.bandwidth
                if time:
                    sending.setdefault((kind, stage, other, replica), []).append([action, time])
                else:
                    arrivals[action, other] = now

    now = 0
    while len(ends) < len(order):
        again = True
        while again:
            again = False
            for action in [a for a in passing if all(arrived(n, a, now) for n in needs(a))]:
                passing.remove(action)
                begun[action] = now
                finish(action, now)
                again = True
        for ipu, queue in queues.items():
            if ipu not in running and queue:
                action = queue[0]
                is_ready = all(arrived(other, action, now) for other in needs(action))
                if is_ready and started[action] <= now:
                    running[ipu] = [queue.pop(0), length(action)]
                    begun[action] = now
        served = unit
        if case.cores is not None:  # each program and each transfer needs one
            served *= min(1, case.cores / max(1, len(running) + len(sending)))
        now += unit
        for link, queue in list(sending.items()):
            queue[0][1] -= served
            if queue[0][1] <= 1e-9:
                arrivals[queue.pop(0)[0], link[2]] = now
                if not queue:
                    del sending[link]
        for ipu, (action, left) in list(running.items()):
            running[ipu][1] = left - served
            if left - served <= 1e-9:
                del running[ipu]
                finish(action, now)
        assert now < 1e5
    return begun, max(ends.values())


def draw(seed):
    rng = random.Random(seed)  # noqa: S311  # no secret depends on it
    num_stages = rng.randint(1, 4)
    training = rng.random() < 0.7
    levels = tuple(range(num_stages))
    if num_stages == 4 and rng.random() < 0.5:
        levels = (0, 1, 1, 2)
    own, around = tuple(range(num_stages)), tuple(stage % 2 for stage in range(num_stages))
    back = (0, 1, 1, 0) if num_stages == 4 else own
    mapping = rng.choice([own, around, back, tuple(rng.randrange(2) for _ in range(num_stages))])
    if len(set(levels)) < num_stages:
        mapping = tuple(range(num_stages))

    def some(low, high):
        return [rng.randint(low, high) for _stage in range(num_stages)]

    transfer = rng.choice([0, [rng.randint(0, 4) for _edge in range(num_stages - 1)]])
    backward = some(rng.choice([0, 1]), 5)
    costs = Costs.of(
        num_stages,
        forward=some(rng.choice([0, 1]), 5),
        backward=backward,
        weight_gradients=[rng.randint(0, time) for time in backward],
        update=rng.choice([0, some(0, 3)]),
        transfer=transfer,
        host=rng.choice([0, 1, 2]),
        is_fused=rng.random() < 0.5,
    )
    names = {(0, 1, 0, 1): [*AROUND, *NAMES], (0, 1, 1, 0): IN_V}.get(mapping, NAMES)
    return Scenario(
        costs,
        rng.choice(names),
        rng.randint(1, 5),
        device_mapping=mapping,
        levels=levels,
        training=training,
    )


def assert_consistent(timeline, case):
    """Intervals of an IPU do not overlap, and idle time and its causes add up."""
    by_ipu = {}
    for one in timeline.intervals():
        if one.end > one.begin:
            by_ipu.setdefault(one.ipu, []).append(one)
    for own in by_ipu.values():
        for one, after in itertools.pairwise(own):
            assert one.end <= after.begin + 1e-9
    whole = len(case.ipus_of_replicas) * timeline.step_time
    assert timeline.bubble.total == pytest.approx(whole - sum(timeline.work.values()), abs=1e-6)
    for cause, idle in timeline.bubble.by_cause().items():
        assert idle >= -1e-9, cause


LETTERS = {**{kind: kind.letter for kind in ActionKind}, "update": "U", "reduce": "R", "gather": "G"}


def compare_with_ticks(case):
    found = simulate(case)
    expected, step_time = tick(case, 1)
    timeline = found.free_running
    assert timeline.step_time == pytest.approx(step_time)
    num_replicas, last = case.cluster.num_replicas, case.costs.num_stages - 1
    actual = begins(timeline, case.num_ipus)
    for (kind, stage, chunk, replica), begin in expected.items():
        if kind in (B, INPUTS) and stage == last and case.is_fused:
            begin -= case.costs.of_actions[kind][last]
        of = f"/{replica}" if isinstance(kind, str) else f".{chunk * num_replicas + replica}"
        name = f"{LETTERS[kind]}{stage}{of}"
        is_program = name in actual or not isinstance(kind, str)  # without gradients there is no reduction
        if is_program:
            assert actual.pop(name) == pytest.approx(begin), name
    assert not actual
    for one in (timeline, found.lock_step):
        assert_consistent(one, case)
    assert predict_step_time(case) == timeline.step_time


def assert_same_with_cores(case, cores):
    """With so many cores programs run as if they shared none."""
    shared, alone = simulate(dataclasses.replace(case, cores=cores)), simulate(case)
    for one, other in ((shared.free_running, alone.free_running), (shared.lock_step, alone.lock_step)):
        assert begins(one, case.num_ipus) == pytest.approx(begins(other, case.num_ipus))
        assert one.bubble.by_cause() == pytest.approx(other.bubble.by_cause(), abs=1e-9)


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_random_scenarios_against_ticks(first):
    for seed in range(first, first + 6):
        compare_with_ticks(draw(seed))


def test_with_cores_enough_programs_run_as_if_they_shared_none():
    for seed in range(10):
        case = draw(1000 + seed)
        num_links = 4 * case.costs.num_stages  # between neighbours, there and back; of two, where these are
        assert_same_with_cores(case, float(case.costs.num_stages + num_links))


def test_random_scenarios_that_share_cores_against_small_ticks():
    for seed in range(6):
        case = dataclasses.replace(draw(2000 + seed), num_micro_batches=2, cores=1.0 + seed % 2)
        found = simulate(case)
        # An end is missed by less than a tick, and moves what follows by as much.
        _expected, step_time = tick(case, 1 / 96)
        assert found.free_running.step_time == pytest.approx(step_time, rel=0.02, abs=0.1)
        for one in (found.free_running, found.lock_step):
            assert_consistent(one, case)


# Timetables, dictionaries, arguments.


def test_a_timetable_brings_its_mapping():
    case = scenario(4, 3, "interleaved", forward=1, backward=2, device_mapping=(0, 1, 1, 0))
    table = case.timetable()
    assert isinstance(table, Timetable)
    other = dataclasses.replace(case, schedule=table, device_mapping=())
    assert other.device_mapping == (0, 1, 1, 0)
    assert begins(simulate(other).free_running) == begins(simulate(case).free_running)
    with pytest.raises(ValueError, match="the timetable must have 32 actions"):
        simulate(dataclasses.replace(other, num_micro_batches=4))
    with pytest.raises(ValueError, match="must have the 3 stages of the costs; it has 4"):
        Scenario(Costs.of(3, forward=1), table, 3)


def test_a_scenario_goes_through_a_dictionary():
    costs = {"forward": [1, 2, 3], "backward": 2, "update": 1, "transfer": [0.5, 0], "host": 0.1}
    fields = {"device_mapping": (0, 1, 0), "chunk_size": 2, "cores": 2, "memory": Memory((1, 2), (3, 4, 5))}
    case = scenario(3, 8, "interleaved", forward_cores=1.5, micro_batch_size=32, **costs, **fields)
    assert Scenario.from_dict(json.loads(json.dumps(case.as_dict()))) == case
    assert Scenario.from_dict({"costs": {"forward": [1, 2]}}) == Scenario(Costs.of(2, forward=[1, 2]))
    with pytest.raises(ValueError, match=r"KeyError: 'costs'"):
        Scenario.from_dict({})
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'speed'"):
        Scenario.from_dict({"costs": {"forward": [1]}, "speed": 1})
    with pytest.raises(ValueError, match="only a schedule with a name can be written"):
        dataclasses.replace(case, schedule=case.timetable()).as_dict()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"forward": [1, 2]}, r"forward must be one number or 3; got 2: \[1, 2\]"),
        ({"transfer": [1, 2, 3]}, "transfer must be one number or 2; got 3"),
        ({"backward": -1}, r"backward must be finite and at least 0; got -1"),
        ({"update": float("nan")}, "update must be finite"),
        ({"transfer": {(0, 3): 1.0}}, r"between two of the 3 stages, counted from 0; got \(0, 3\)"),
        ({"transfer": {(1, 1): 1.0}}, r"between two of the 3 stages"),
        (
            {"backward": 2, "weight_gradients": 3},
            r"weight_gradients are a part of backward.*\(3.0, 3.0, 3.0\)",
        ),
        ({"forward_cores": 0}, "forward_cores must be greater than 0"),
        ({"num_micro_batches": 0}, "num_micro_batches must be an integer of at least 1; got 0"),
        ({"chunk_size": 3}, "chunk_size must divide num_micro_batches, which is 4; got 3"),
        ({"device_mapping": (0, 1)}, "device_mapping must have a number from 0 for each of the 3"),
        ({"schedule": "fastest"}, "schedule must be one of grouped .*interleaved .*sequential.*'fastest'"),
        ({"levels": (0, 2, 3)}, "levels must ascend from 0 without a gap"),
        ({"levels": (0, 1, 1)}, "the last level must have one stage"),
        ({"cores": 0}, "cores must be greater than 0, or None; got 0"),
        ({"memory": Memory((1,), (1, 1, 1))}, "num_constant_bytes for each of 3 devices"),
    ],
    ids=str,
)
def test_what_cannot_be_simulated_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        scenario(**{"num_stages": 3, "num_micro_batches": 4, "forward": 1, **given})


def test_fields_of_costs_and_memory_have_a_number_per_stage():
    with pytest.raises(ValueError, match="backward must have a number for each of the 2 stages.*got 1"):
        Costs((1.0, 1.0), (1.0,), (0.0, 0.0))
    with pytest.raises(TypeError, match="must be numbers; got '1'"):
        Costs(("1",), (0.0,), (0.0,))
    with pytest.raises(ValueError, match="num_between_bytes must have a number for each of the 2.*got 1"):
        Memory((1, 1), (2, 2), (1,))
    with pytest.raises(ValueError, match="Memory: num_held_bytes must be finite and at least 0; got -2"):
        Memory((1, 1), (2, -2))


@pytest.mark.thorough
def test_two_hundred_thousand_actions():
    case = scenario(64, 2048, forward=1.0, backward=2.0, host=1e-6, transfer=1e-3)
    found = simulate(case)
    assert len(found.free_running.begins) == 2**18
    assert found.free_running.step_time == pytest.approx((2048 + 63) * 3, rel=2e-3)
    assert found.lock_step.step_time == pytest.approx((2048 + 63) * 3, rel=2e-3)
