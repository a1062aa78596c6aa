"""Execution phases of the engine: the same numbers, and less on the devices at a time."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.emulation import stages as emulated
from ipu_pipeline import engine
from ipu_pipeline.engine import watching
from ipu_pipeline.engine.execution import runner
from ipu_pipeline.engine.plan.plan import Op
from ipu_pipeline.engine.plan.run import Underway
from ipu_pipeline.engine.schedules.timetables import ActionKind
from tests.support import models, watchers

ALL = ["weight_update_variables", "activations", "gradient_accumulation_buffers", "weights"]


def make_stage(index):
    def stage(x, labels):
        with engine.variable_scope(f"stage{index}"):
            x = models.dense("dense", 8, x, jnp.tanh)
            x = x * jax.random.bernoulli(engine.next_rng_key(), 0.8, x.shape).astype("float32")
            total = engine.get_variable("total", (), initializer=0.0, trainable=False)
            engine.assign("total", total + x.mean())
            return x, labels

    return stage


STAGES = [*map(make_stage, range(3)), models.cross_entropy]


def make(execution_phases=None, offload=(), stages=STAGES, mapping=(0, 0, 0, 0), **options):
    options = {"num_micro_batches": 2, **options}
    return engine.Pipeline(
        stages,
        schedule="sequential",
        device_mapping=mapping,
        donate=True,
        execution_phases=execution_phases,
        offload=offload,
        optimizer=optax.sgd(0.1, momentum=0.9),
        **options,
    )


@pytest.mark.thorough
def test_the_numbers_are_the_same():
    """To the last bit; the state comes back to where it lies between steps."""
    found = engine.ExecutionPhases(
        of_levels=(0, 0, 1, 1), shares_last=False, num_ahead=0, keeps_values=False
    )
    results = []
    step = models.mlp_batches(np.random.default_rng(0), 2)
    for pipeline in (make(mapping=(0, 1, 0, 0)), make(found, ALL, mapping=(0, 1, 0, 0))):
        state = pipeline.init(jax.random.key(0), step[0])
        state, outputs = pipeline.step(state, step)
        results.append((outputs.losses, state.variables, state.optimizer_state))
    jax.tree.map(np.testing.assert_array_equal, *results)
    trained = [value for name, value in state.variables.items() if not name.endswith("total")]
    assert {value.sharding.memory_kind for value in trained} == {"pinned_host"}


def test_which_phase_is_where():
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    shared = engine.ExecutionPhases(of_levels=(0, 0, 1, 1))
    assert [shared.find(forward, level) for level in range(4)] == [(forward, p) for p in (0, 0, 1, 1)]
    in_backward = [(backward, 0), (backward, 0), (forward, 1), (forward, 1)]
    assert [shared.find(backward, level) for level in range(4)] == in_backward
    apart = engine.ExecutionPhases(of_levels=(0, 1, 1), shares_last=False)
    in_forward = [(forward, 0), (forward, 1), (backward, 1)]  # the last stage begins the backwards
    assert [apart.find(forward, level) for level in range(3)] == in_forward
    assert [apart.find(backward, level) for level in range(2)] == [(backward, 0), (backward, 1)]


class Work:
    """Stands for an array that is ready when somebody has waited for it."""

    def __init__(self, waited, number):
        self.number, self._waited = number, waited

    def is_deleted(self):
        return self.number < 0

    def block_until_ready(self):
        self._waited.append(self.number)


@pytest.mark.parametrize(("limit", "expected"), [(None, []), (1, [0, 1]), (0, [0, 1, 2])])
def test_who_would_begin_more_waits(limit, expected):
    waited = []
    underway = Underway(limit)
    for number in range(3):
        underway.add([Work(waited, number), Work(waited, -1)])
        underway.wait()
    assert waited == expected


def test_a_phase_begins_when_those_before_have_ended(monkeypatch):
    """With num_ahead 1 while the one before runs; the first backward waits for the first forward."""
    events = []

    class Told(Underway):
        def wait(self):
            events.append("wait")
            super().wait()

    class Started(watchers.Watcher):
        def run(self, launch, function, arguments):
            events.append((launch.kind, launch.stage))
            return super().run(launch, function, arguments)

    monkeypatch.setattr(runner, "Underway", Told)
    found = engine.ExecutionPhases(of_levels=(0, 1), num_ahead=1)
    pipeline = make(found, stages=models.mlp_stages(2), mapping=(0, 0))
    step = models.elements_of(2)
    state = pipeline.init(jax.random.key(0), step[0])
    with watching.watching(Started()):
        pipeline.step(state, step)
    of_each = [("forward", 0), "wait", ("forward", 1), "wait", ("backward", 0), "wait"]
    assert events == [*of_each * 2, ("update", 0), "wait", ("update", 1), "wait"]


@pytest.mark.soak  # it compares what steps took
def test_independent_stages_of_a_phase_run_at_the_same_time():
    """Four stages one after another take 4 times 20 ms for a forward, and 3 times with two in parallel."""
    stage = emulated.emulated_stage(20, 20)

    def last(w, *values):
        return (stage(w, sum(values)) ** 2).mean()

    def left(w, x):
        return x, stage(w, x)

    def right(w, x, made):
        return stage(w, x), made

    def begun(stages, parameters):
        phases = engine.ExecutionPhases(of_levels=tuple(range(len(stages))), num_ahead=0)
        options = {"num_micro_batches": 2, "optimizer": optax.sgd(0.01)}
        pipeline = engine.Pipeline(
            stages, parameters=parameters, schedule="sequential", execution_phases=phases, **options
        )
        return pipeline, pipeline.init(jax.random.key(0), step[0])

    step, own = [np.ones((512, 8), "float32")] * 2, np.ones(8, "float32")
    in_turn = begun([stage, left, right, last], [own] * 4)
    parallel = begun([stage, [stage, stage], last], [own, [own, own], own])
    taken = []
    for pipeline, state in (in_turn, parallel) * 6:
        begin = time.perf_counter()
        jax.block_until_ready(pipeline.step(state, step))
        taken.append(time.perf_counter() - begin)
    ratio = statistics.median(taken[3::2]) / statistics.median(taken[2::2])
    assert 0.7 < ratio < 0.8, taken  # 6 sleeps of 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"of_levels": (1, 2)}, "must ascend from 0 without gaps"),
        ({"of_levels": (0, 2)}, "must ascend from 0 without gaps"),
        ({"of_levels": (0, 1, 0)}, "must ascend from 0 without gaps"),
        ({"of_levels": ()}, "must ascend from 0 without gaps"),
        ({"of_levels": (0, 1), "shares_last": False}, "End with a stage that only returns what it"),
        ({"of_levels": (0,), "shares_last": False}, "End with a stage that only returns what it"),
        ({"of_levels": (0, 1), "num_ahead": -1}, "num_ahead must be an integer from 0, or None; got -1"),
        ({"of_levels": (0, 1), "num_ahead": 0.5}, "num_ahead must be an integer from 0, or None; got 0.5"),
    ],
)
def test_wrong_phases(values, message):
    with pytest.raises(ValueError, match=message):
        engine.ExecutionPhases(**values)


def test_what_does_not_go_with_phases():
    found = engine.ExecutionPhases(of_levels=(0, 1))
    with pytest.raises(ValueError, match=r"one phase for each of the 4 entries of stages; got \[0, 1\]"):
        make(found)
    with pytest.raises(ValueError, match="need the schedule \"sequential\".* got 'grouped'"):
        engine.Pipeline(STAGES[:2], num_micro_batches=2, schedule="grouped", execution_phases=found)


def test_waiting_holds_nothing_that_has_gone_to_host_memory():
    found = engine.ExecutionPhases(of_levels=(0, 0, 1, 1), num_ahead=1, keeps_values=False)
    pipeline = make(found, ALL)
    pipeline.trace(models.mlp_batches(np.random.default_rng(0), 2)[0])
    instructions = [one for one, _number in pipeline.prepare().find_plan(2).instructions()]
    stored = {register for one in instructions if one.op is Op.STORE for register in one.reads}
    waited = {register for one in instructions if one.op is Op.COLLECT for register in one.reads}
    assert stored
    assert not stored & waited
