"""What each IPU holds over time, laid out by hand and along simulated steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.inspect import Flow, IpuMemory, StageMemory
from ipu_pipeline.engine.schedules.scenarios import Costs, Scenario
from ipu_pipeline.engine.schedules.simulator import simulate
from ipu_pipeline.reports.memory_over_time import CATEGORIES, lay_out_memory
from tests.support.memory import pipeline_memory_over_time


class Timed(NamedTuple):
    kind: str
    stage: int
    micro_batch: int | None
    begin: float
    end: float
    ipu: int | None = None
    step: int | None = None


def make_ipu(ipu, temporaries=None, **sizes):
    known = dict.fromkeys(("variable", "optimizer", "accumulator", "activation", "feed", "host"), 0) | sizes
    sizes = {f"num_{name}_bytes": size for name, size in known.items()}
    return IpuMemory(ipu=ipu, num_temporary_bytes=temporaries, **sizes)


IPUS = (make_ipu(0), make_ipu(1))
WITH_TEMPORARIES = (make_ipu(0, temporaries=7), make_ipu(1))
STAGES = (StageMemory(0, 0, 2, 100, 0), StageMemory(1, 1, 1, 0, 0))
FLOWS = (Flow(0, False, 1, (1,), (), 10), Flow(1, True, 0, (0,), (), 10))
# The first stage goes forward twice, then back twice; the last one does both at once.
ACTIONS = (
    Timed("forward", 0, 0, 0, 1),
    Timed("forward", 0, 1, 1, 2),
    Timed("forward", 1, 0, 1, 4),
    Timed("forward", 1, 1, 4, 7),
    Timed("backward", 0, 0, 4, 6),
    Timed("backward", 0, 1, 7, 9),
    Timed("update", 0, None, 9, 10),
)


def test_by_hand():
    ipus = (make_ipu(0, variable=1000, accumulator=500, temporaries=7), make_ipu(1, variable=1))
    first, last = lay_out_memory(STAGES, ipus, FLOWS, ACTIONS)
    assert list(first.times) == [0, 1, 2, 4, 6, 7, 9, 10]
    parts = {name: list(row) for name, row in first.parts.items()}
    assert tuple(parts) == CATEGORIES
    assert parts["variables"] == [1000] * 8
    assert parts["accumulators"] == [500] * 8
    assert parts["optimizer state"] == parts["feed"] == [0] * 8
    assert parts["activations"] == [100, 200, 200, 200, 100, 100, 0, 0]
    # What is sent while it is made; gradients from when they are sent until they have been read.
    assert parts["transfers"] == [10, 10, 0, 10, 0, 10, 0, 0]
    assert parts["temporaries"] == [7, 7, 0, 7, 0, 7, 7, 0]
    assert list(first.total) == [1617, 1717, 1700, 1717, 1600, 1617, 1507, 1500]
    peak = first.peak
    assert (peak.time, peak.num_bytes, peak.kind) == (1, 1717, "forward")
    assert (peak.stage, peak.micro_batch, peak.parts["activations"]) == (0, 1, 200)
    assert (first.planned_bytes, first.knows_temporaries) == (1507, True)
    assert [first.num_bytes_at(time) for time in (-1, 0, 3.9, 4, 99)] == [1617, 1617, 1700, 1717, 1500]
    # The second value waits while the first one is read; gradients are there while they are made.
    assert list(last.times) == [0, 1, 2, 4, 7]
    assert list(last.parts["transfers"]) == [0, 20, 30, 20, 0]
    assert (last.peak.num_bytes, last.peak.time, last.knows_temporaries) == (31, 2, False)


def test_halves_by_hand():
    """The first stage has no program for input gradients, so its second half alone tells of the first."""
    stages = (StageMemory(0, 0, 2, 100, 0, 120), StageMemory(1, 1, 1, 30, 0, 50))
    actions = (
        Timed("forward", 0, 0, 0, 1),
        Timed("forward", 1, 0, 1, 2),
        Timed("input gradients", 1, 0, 2, 4),
        Timed("weight gradients", 0, 0, 5, 7),
        Timed("weight gradients", 1, 0, 6, 9),
    )
    first, last = lay_out_memory(stages, WITH_TEMPORARIES, FLOWS, actions)
    held = {time: first.parts["activations"][place] for place, time in enumerate(first.times)}
    assert held == {0: 100, 1: 100, 4: 100, 5: 120, 7: 0}
    assert list(first.parts["transfers"]) == [10, 0, 10, 0, 0]  # the gradient is held from 5 on
    assert list(first.parts["temporaries"]) == [7, 0, 0, 7, 0]
    assert (first.peak.kind, first.peak.num_bytes) == ("weight gradients", 127)
    held = {time: last.parts["activations"][place] for place, time in enumerate(last.times)}
    assert held == {0: 0, 1: 30, 2: 30, 4: 50, 6: 50, 9: 0}


def test_an_update_of_all_that_an_ipu_has():
    actions = [*ACTIONS[:-1], Timed("update", None, None, 9, 10, ipu=0)]
    first, _last = lay_out_memory(STAGES, WITH_TEMPORARIES, FLOWS, actions)
    assert list(first.parts["temporaries"]) == [7, 7, 0, 7, 0, 7, 7, 0]
    first, _last = lay_out_memory(STAGES, WITH_TEMPORARIES, FLOWS, actions[-1:])
    assert (first.peak.kind, first.peak.stage) == ("update", None)


def test_transfers_take_time():
    sent = (*ACTIONS, Timed("transfer", 0, 0, 1.5, 2.5, ipu=1), Timed("transfer", 1, 0, 5, 5.5, ipu=0))
    first, last = lay_out_memory(STAGES, IPUS, FLOWS, sent)
    assert first.num_bytes_at(2.2) == 200 + 10  # the value that has not arrived
    assert first.num_bytes_at(2.5) == 200
    assert last.num_bytes_at(1.2) == 10  # the gradient that is made; the value is not there yet
    assert last.num_bytes_at(1.5) == 20
    assert first.num_bytes_at(4.5) == 200
    assert first.num_bytes_at(5) == 210


def test_steps_follow_each_other_and_traces_are_cut_off():
    def shift(action, step, by):
        return action._replace(step=step, begin=action.begin + by, end=action.end + by)

    (once, _last) = lay_out_memory(STAGES, IPUS, FLOWS, ACTIONS)
    for steps in [(0, 1), (None, None)]:
        twice = [
            shift(action, step, 10 * n) for n, step in enumerate(steps) for action in reversed(ACTIONS)
        ]
        (both, _last) = lay_out_memory(STAGES, IPUS, FLOWS, twice)
        for time in (0, 1.5, 3, 6.5, 8, 9.5):
            assert both.num_bytes_at(time) == both.num_bytes_at(time + 10) == once.num_bytes_at(time)
    cut = [action for action in ACTIONS if action.end <= 6]
    (first, _last) = lay_out_memory(STAGES, IPUS, FLOWS, cut)
    assert first.num_bytes_at(5.9) == 210
    assert first.num_bytes_at(6) == 0


def test_on_one_ipu_what_stages_hold_is_in_the_program():
    stages = (StageMemory(0, 0, 1, 100, 0), StageMemory(1, 0, 1, 0, 0))
    (only,) = lay_out_memory(stages, (make_ipu(0, temporaries=300),), (), ACTIONS)
    assert set(only.parts["activations"]) == {0}
    assert only.peak.num_bytes == 300


def test_several_stages_on_an_ipu():
    stages = (StageMemory(0, 0, 1, 0, 0), StageMemory(1, 0, 1, 0, 5), StageMemory(2, 1, 1, 0, 0))
    flows = (Flow(0, False, 0, (), (1,), 5), Flow(0, False, 1, (2,), (), 3))
    actions = [Timed("forward", stage, 0, 2 * stage, 2 * stage + 1) for stage in range(3)]
    actions += [Timed("backward", 1, 0, 6, 7), Timed("backward", 0, 0, 8, 9)]
    first, last = lay_out_memory(stages, IPUS, flows, actions)
    assert [first.num_bytes_at(time) for time in (0.5, 1.5, 2.5, 6.5, 7.5)] == [8, 5, 5, 5, 0]
    assert [last.num_bytes_at(time) for time in (0.5, 1.5, 4.5, 5.5)] == [0, 3, 3, 0]
    assert (first.peak.kind, first.peak.stage) == ("forward", 0)
    waiting = lay_out_memory(stages, IPUS, flows, [*actions[1:]])
    assert waiting[0].peak.stage == 1


def test_nothing_has_happened():
    first, last = lay_out_memory(STAGES, (make_ipu(0, variable=4), make_ipu(1)), FLOWS, ())
    assert (list(first.times), first.peak.num_bytes, first.peak.stage) == ([0], 4, None)
    assert last.peak.num_bytes == 0


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Timed("forward", 2, 0, 0, 1), "stage must be from 0 to 1"),
        (Timed("forward", None, 0, 0, 1, 0), "stage must be from 0 to 1"),
        (Timed("update", None, None, 0, 1), "stage must be from 0 to 1"),
        (Timed("forward", 0, 0, 1, 0), "must not end before it begins"),
        (Timed("backward", 0, 0, float("nan"), 1), "must not end before it begins"),
        (Timed("transfer", 0, 0, 0, float("inf"), 1), "must not end before it begins"),
    ],
)
def test_what_is_refused(action, message):
    with pytest.raises(ValueError, match=message):
        lay_out_memory(STAGES, IPUS, FLOWS, [action])


def test_what_is_none_of_a_stages_is_passed_over():
    others = [Timed("infeed wait", None, None, 0, 1), Timed("other", None, None, 5, 4)]
    found = lay_out_memory(STAGES, IPUS, FLOWS, [*ACTIONS, *others])
    assert list(found[0].times) == [0, 1, 2, 4, 6, 7, 9, 10]


def make_stage(index):
    def stage(x):
        with engine.variable_scope(f"stage{index}"):
            x = jnp.tanh(x @ engine.get_variable("kernel", (8, 8)))
        return jnp.mean(x) if index == 3 else x

    return stage


@pytest.mark.parametrize("schedule", ["grouped", "interleaved", "sequential"])
@pytest.mark.parametrize("mapping", [(0, 1, 2, 3), (0, 1, 1, 0)])
def test_the_peak_of_a_simulated_step_is_the_planned_one(schedule, mapping):
    """With time-steps of equal length a stage has as many micro-batches in flight as the plan says."""
    pipeline = engine.Pipeline(
        [make_stage(index) for index in range(4)],
        num_micro_batches=8,
        optimizer=optax.adam(0.1),
        schedule=schedule,
        device_mapping=mapping,
        dispatch_plan=engine.Chunking(),
    )
    x = jax.ShapeDtypeStruct((4, 8), np.float32)
    pipeline.trace(x)
    flows = engine.inspect.find_facts(pipeline).flows
    assert [(flow.stage, flow.is_backward, flow.num_bytes) for flow in flows] == [
        (0, False, 128), (1, False, 128), (1, True, 128), (2, False, 128), (2, True, 128), (3, True, 128)
    ]  # fmt: skip
    costs = Costs.of(4, forward=[1.0] * 4, backward=[1.0] * 3 + [0.0])
    simulation = simulate(Scenario(costs, pipeline.timetable(8), 8, mapping))
    plan = engine.planning.plan_ipu_memory(pipeline)
    for timeline in (simulation.lock_step, simulation.free_running):
        found = pipeline_memory_over_time(pipeline, timeline.intervals())
        for memory, planned in zip(found, plan, strict=True):
            assert set(memory.parts["variables"]) == {planned.num_variable_bytes}
            assert set(memory.parts["optimizer state"]) == {planned.num_optimizer_bytes}
            # What goes from stage to stage on one IPU, 128 bytes each, is in no plan.
            on_way = 128 * sum(mapping[flow.stage] == flow.target == memory.ipu for flow in flows)
            assert max(memory.parts["activations"]) <= planned.num_activation_bytes + on_way
            assert memory.parts["activations"][-1] == memory.parts["transfers"][-1] == 0
            assert memory.planned_bytes == planned.num_device_bytes
        if mapping == (0, 1, 2, 3):
            held = [max(memory.parts["activations"]) for memory in found]
            assert held == [planned.num_activation_bytes for planned in plan]
            assert held[0] > 0
