"""What would be: each row is the simulation of the scenario that it names."""

import dataclasses

import pytest

from ipu_pipeline.engine.schedules import (
    Action,
    ActionKind,
    Costs,
    Layer,
    Memory,
    Scenario,
    advice,
    advise,
    predict_step_time,
    simulate,
    what_if,
)
from tests.engine.schedules import test_simulator


def scenario(schedule="grouped", count=16, **given):
    return test_simulator.scenario(4, count, schedule, **given)


def test_rows():
    case = scenario(forward=[1, 1, 2, 1], backward=2, micro_batch_size=8)
    rows = what_if(case)
    expected = []
    for name in ("grouped", "interleaved", "sequential", "all_forwards", "zero_bubble", "zero_bubble_h2"):
        changed = ["schedule"] if name != "grouped" else []
        expected.append((" and ".join(changed), name, 16, ""))
        both = " and ".join([*changed, "gradient accumulation count"])
        expected += [(both, name, count, "") for count in (8, 32, 64)]
    for source, target in ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)):
        split = f"10% of a mean stage from stage {source} to {target}"
        expected.append(("split", "grouped", 16, split))
    assert [(row.change, row.schedule, row.num_micro_batches, row.split) for row in rows] == expected
    own = simulate(case).free_running
    for row in rows:
        timeline = simulate(row.scenario).free_running
        assert row.step_time == timeline.step_time
        assert row.samples_per_second == timeline.samples_per_second
        assert row.utilisation == pytest.approx(timeline.utilisation)
        assert row.gain == pytest.approx(timeline.samples_per_second / own.samples_per_second - 1)
        assert row.num_peak_bytes is None
        assert row.scenario.num_micro_batches == row.num_micro_batches
        assert row.scenario.schedule == row.schedule
    # 10% of a mean stage are 0.325: a quarter of it from the forward, as that is of stage 1.
    (row,) = [row for row in rows if row.split == "10% of a mean stage from stage 1 to 2"]
    assert row.scenario.costs.forward == pytest.approx((1, 1 - 0.325 / 3, 2 + 0.325 / 3, 1))
    assert row.scenario.costs.backward == pytest.approx((2, 2 - 0.65 / 3, 2 + 0.65 / 3, 2))


def test_layers_move_with_what_they_hold():
    memory = Memory((10,) * 4, (1, 2, 3, 0))
    case = scenario(count=8, forward=[1, 1, 3, 1], backward=[2, 2, 6, 2], memory=memory)
    layers = [
        [Layer("a", 1, 2)],
        [Layer("b", 1, 2)],
        [Layer("c", 1, 2, 4, 1), Layer("d", 0.5, 1), Layer("e", 1.5, 3, 5, 2)],
        [Layer("f", 0.5, 1, 1), Layer("g", 0.5, 1)],
    ]
    rows = {row.split: row for row in what_if(case, layers, counts=[]) if row.change == "split"}
    best = "b from stage 1 to 0, and c and d from stage 2 to 1"
    assert list(rows) == ["c from stage 2 to 1", "e from stage 2 to 3", "f from stage 3 to 2", best]
    moved = rows["e from stage 2 to 3"].scenario
    assert moved.costs.forward == (1, 1, 1.5, 2.5)
    assert moved.costs.backward == (2, 2, 3, 5)
    assert moved.memory == Memory((10, 10, 5, 15), (1, 2, 1, 2))
    # Grouped holds 7, 5, 3 and 1 micro-batches.
    assert rows["e from stage 2 to 3"].num_peak_bytes == max(10 + 7, 10 + 5 * 2, 5 + 3, 15 + 2)
    assert rows["c from stage 2 to 1"].num_peak_bytes == 14 + 5 * 3
    advice = advise(case, layers)
    assert advice.limiting_stage == 2
    assert advice.variant.split == best
    assert advice.sentence.startswith(
        "Stage 2 is the bottleneck: its device has 2 times the mean work. Moving b from stage 1 to 0, "
        "and c and d from stage 2 to 1 would give "
    )


def test_stages_on_one_ipu_exchange_nothing():
    rows = what_if(scenario(forward=1, backward=2, device_mapping=(0, 0, 1, 1)), counts=[])
    ways = [row.split.removeprefix("10% of a mean stage from ") for row in rows if row.change == "split"]
    assert ways == ["stage 1 to 2", "stage 2 to 1"]


def test_larger_programs_where_the_host_is_slow():
    case = scenario(forward=0.1, backward=0.2, host=1.0)
    rows = [row for row in what_if(case) if row.change == "micro-batches per program"]
    assert [row.chunk_size for row in rows] == [2, 4]
    advice = advise(case)
    assert advice.variant.chunk_size == 4
    assert "4 micro-batches per program (dispatch_plan) would give" in advice.sentence


@pytest.mark.parametrize("schedule", ["function", "timetable"])
def test_schedules_without_a_name(schedule):
    """A timetable has one count only, and a function may raise for others."""

    def mine(num_stages, num_micro_batches, _device_mapping, _training):
        numbers = range(min(num_micro_batches, 16))
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        return [[Action(kind, stage, k) for kind in kinds for k in numbers] for stage in range(num_stages)]

    case = scenario(mine, forward=1, backward=2)
    table = case.timetable()
    assert (table.in_flight, table.num_time_steps) == ((16,) * 4, 2 * (16 + 4 - 1))
    if schedule == "timetable":
        case = scenario(table, forward=1, backward=2)
    rows = what_if(case)
    own = [row.num_micro_batches for row in rows if row.schedule in ("mine", "timetable")]
    assert own[:2] == ([16, 8] if schedule == "function" else [16, 16])
    assert {row.num_micro_batches for row in rows if row.schedule == "grouped"} == {8, 16, 32, 64}


def test_what_has_too_many_actions_is_left_out(monkeypatch):
    monkeypatch.setattr(advice, "MAX_ACTIONS", 200)
    assert {row.num_micro_batches for row in what_if(scenario(forward=1, backward=2))} == {8, 16}
    monkeypatch.setattr(advice, "_MAX_SLOTS", 8 * 16)
    rows = what_if(scenario(forward=1, backward=2))
    assert "sequential" not in {row.schedule for row in rows}


def test_looped_is_simulated_where_stages_go_around_the_ipus():
    case = scenario(forward=1, backward=2, device_mapping=(0, 1, 0, 1))
    assert "looped" in {row.schedule for row in what_if(case)}


def test_the_schedule_is_advised_before_the_count():
    advice = advise(scenario("sequential", forward=1, backward=2))
    assert advice.variant.schedule == "zero_bubble"
    assert advice.variant.num_micro_batches == 16
    assert advice.gain == pytest.approx(192 / 51 - 1)
    assert advice.sentence == (
        "The schedule zero_bubble instead of sequential would give 276% more samples per second "
        "(a step takes 192 now, and 51 then)."
    )
    advice = advise(scenario("zero_bubble", forward=1, backward=2))
    assert advice.sentence.startswith(
        "A gradient accumulation count of 64 instead of 16 would give 5% more"
    )
    assert advice.sentence.endswith("It changes training: each weight update then takes 64 micro-batches.")


def test_of_changes_that_gain_alike_the_one_of_one_thing_is_advised():
    case = scenario("interleaved", forward=1, backward=2)
    present, *rows = what_if(case)
    of_64 = [row for row in rows if row.num_micro_batches == 64]
    both = next(row for row in of_64 if row.change.startswith("schedule and"))
    count = next(row for row in of_64 if row.change == "gradient accumulation count")
    for lead, expected in ((0.004, "gradient accumulation count"), (0.006, both.change)):
        better = dataclasses.replace(both, gain=count.gain + lead)
        assert advise(case, variants=[present, count, better]).variant.change == expected


def test_nothing_to_advise():
    advice = advise(Scenario(Costs.of(1, forward=1, backward=2), "grouped", 4))
    assert (advice.gain, advice.variant) == (0, None)
    assert advice.sentence == (
        "No simulated change gains 2%: devices compute for 100% of a step, and stage 0 takes longest."
    )
    free = scenario(forward=0)
    assert predict_step_time(free) == 0
    assert advise(free).gain == 0


def test_layers_are_checked():
    case = scenario(forward=1, backward=2)
    with pytest.raises(ValueError, match="layers must have a list for each of the 4 stages; got 1"):
        what_if(case, [[]])
    layers = [[Layer("a", 0.1), Layer("b", 5)], [], [], []]
    with pytest.raises(ValueError, match=r"the forward of stage 0 takes 1\.0, that of its layer 'b' 5"):
        what_if(case, layers)


# Stages of 4, 1, 1 and 1 equal blocks.
BLOCKS = [[Layer(f"block_{n}", 1, 2) for n in own] for own in (range(4), [4], [5], [6])]


def test_the_best_split_moves_whole_layers_over_several_stages():
    case = scenario(forward=[4, 1, 1, 1], backward=[8, 2, 2, 2], layers=BLOCKS)
    advice = advise(case)
    best = "block_2 and block_3 from stage 0 to 1, and block_4 from stage 1 to 2"
    rows = {row.split: row for row in what_if(case) if row.split}
    assert rows[f"{best}, and block_5 from stage 2 to 3" if best not in rows else best].gain > 0.6
    assert advice.variant.change == "split"
    moved = advice.variant.scenario
    assert sorted(moved.costs.forward) == [1, 2, 2, 2]
    assert [layer.name for own in moved.layers for layer in own] == [f"block_{n}" for n in range(7)]
    assert [sum(layer.forward for layer in own) for own in moved.layers] == list(moved.costs.forward)
    expected = scenario(forward=moved.costs.forward, backward=moved.costs.backward)
    assert advice.variant.step_time == predict_step_time(expected)
    assert advise(Scenario.from_dict(case.as_dict())) == advice


def test_the_headline_does_not_contradict_an_even_split():
    """It said "No simulated change gains 2%" above the table's "+38.2%, all stages equal"."""
    own = {"device_mapping": (0, 1), "layers": [[Layer("a", 3, 6)], [Layer("b", 1, 2)]]}
    case = Scenario(Costs.of(2, forward=[3, 1], backward=[6, 2]), "interleaved", 4, **own)
    advice = advise(case, variants=what_if(case, counts=[])[:2])
    assert advice.variant is None
    assert advice.even.gain == pytest.approx(0.2)
    told = f"Stages that take equally long would give {advice.even.gain:.0%} more samples per second, but "
    assert f" {told}stage 0 has no second layer that could move." in advice.sentence
    unknown = dataclasses.replace(case, layers=())
    sentence = advise(unknown, variants=what_if(unknown)[:2]).sentence
    assert "the layers of stage 0 are not known" in sentence


def test_what_shared_cores_do_not_show_is_said_beside_the_gain():
    case = scenario(count=8, forward=[4, 1, 1, 1], backward=[8, 2, 2, 2], layers=BLOCKS)
    alone = advise(case)
    beside = advise(case, shared_cores=1)
    assert beside.variant == alone.variant
    assert beside.sentence.removeprefix(alone.sentence) == (
        " Here the devices share 1 core, on which it takes 168 now, and 168 then, if nothing else runs "
        "there: this machine cannot show the gain on separate devices."
    )
    assert advise(case, shared_cores=4).sentence == alone.sentence  # as nothing is shared with four
    assert advise(dataclasses.replace(case, cores=1)).sentence == (
        "No simulated change gains 2% on the 1 core that the devices share. On devices with their own "
        f"cores: s{alone.sentence[1:]}"
    )
    shared = advise(dataclasses.replace(case, cores=3))
    assert "On devices with their own cores it takes" in shared.sentence


def test_layers_take_part_of_the_update_along():
    case = Scenario(
        Costs.of(2, forward=[2, 1], backward=[4, 2], update=[3, 1]),
        layers=[[Layer("a", 1, 2, update=1), Layer("b", 1, 2, update=2)], [Layer("c", 1, 2, update=1)]],
    )
    (row,) = [row for row in what_if(case, counts=[]) if row.split == "b from stage 0 to 1"]
    assert row.scenario.costs.update == (1, 3)
    assert [len(own) for own in row.scenario.layers] == [1, 2]
