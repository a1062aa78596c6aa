"""What stages hold between forward and backward: the plan, compiled programs and the executor's buffers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.execution.blocks.runner import BlockRunner
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.reports.live_bytes import LiveBytes
from tests import models

WIDTH, SIZE, LAYERS, NUM_MICRO_BATCHES = 24, 16, 3, 8
ACTIVATION = WIDTH * SIZE * 4  # bytes
MODES = [None, "auto", "recompute_then_backpropagate", "recompute_and_backpropagate_interleaved"]


def make_stages(num_stages):
    def make(index):
        def stage(x, labels):
            for layer in range(LAYERS):
                x = models.dense(f"stage{index}/layer{layer}", WIDTH, x, lambda a: jnp.tanh(jnp.sin(a)))
                if layer < LAYERS - 1:
                    x = engine.recomputation_checkpoint(x)
            return models.cross_entropy(x, labels) if index == num_stages - 1 else (x, labels)

        return stage

    return [make(index) for index in range(num_stages)]


def make_step(num_micro_batches=NUM_MICRO_BATCHES):
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(SIZE, WIDTH)).astype("float32"), rng.integers(0, WIDTH, SIZE).astype("int32"))
        for _ in range(num_micro_batches)
    ]


def make(num_stages, schedule, mode, **options):
    pipeline = engine.Pipeline(
        make_stages(num_stages),
        num_micro_batches=NUM_MICRO_BATCHES,
        loss=lambda loss: loss,
        optimizer=optax.sgd(0.1),
        schedule=schedule,
        recompute=mode,
        **options,
    )
    pipeline.trace(make_step(1)[0])
    return pipeline


def in_flight(schedule, stage, num_stages):
    """By the formula of the design."""
    depth = num_stages - stage
    number = {"grouped": 2 * depth - 1, "interleaved": depth, "sequential": 1}[schedule]
    return min(number, NUM_MICRO_BATCHES)


def held(mode):
    """Bytes per micro-batch that a mode promises: the stage's input, and what is marked."""
    return {
        "recompute_then_backpropagate": ACTIVATION,
        "recompute_and_backpropagate_interleaved": LAYERS * ACTIVATION,
        "auto": LAYERS * ACTIVATION,
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    list(itertools.product(["grouped", "interleaved", "sequential"], [2, 4])),
)
@pytest.mark.each_value
def test_live_bytes_are_those_of_the_formula(schedule, num_stages, mode):
    pipeline = make(num_stages, schedule, mode, dispatch_plan=engine.DispatchPlan())
    step = make_step()
    state = pipeline.init(jax.random.key(0), step[0])
    live_bytes = LiveBytes(pipeline.prepare())
    pipeline.step(state, step)
    plan = pipeline.plan_memory()
    for stage in range(num_stages - 1):
        expected = in_flight(schedule, stage, num_stages)
        assert plan[stage].in_flight == expected
        if mode is not None:
            assert plan[stage].num_held_bytes == held(mode)
        assert live_bytes.peaks[stage] == pytest.approx(plan[stage].num_live_bytes, rel=0.05)
        assert live_bytes.peaks[stage] == pytest.approx(expected * plan[stage].num_held_bytes, rel=0.05)
    assert plan[-1].num_live_bytes == 0


@pytest.mark.parametrize("mode", MODES)
def test_compiled_forwards_return_what_the_plan_says(mode):
    pipeline = make(3, "grouped", mode, dispatch_plan=engine.DispatchPlan())
    step = make_step()
    state = pipeline.init(jax.random.key(0), step[0])
    executor = pipeline.prepare()
    plan = pipeline.plan_memory()
    for stage in range(2):
        template = executor.plan.templates[(ActionKind.FORWARD,), stage]
        names = dict(template.variables)
        x = jax.device_put(step[0][0], template.row.replicated)
        arguments = [
            state.variables[names[place]] if place in names else x
            for place in range(template.num_arguments)
        ]
        analysis = template.function.lower(*arguments).compile().memory_analysis()
        # Besides, the stage's output; without recomputation that is a residual too.
        outputs = ACTIVATION if mode is not None else 0
        held_bytes = analysis.output_size_in_bytes - outputs
        assert held_bytes == pytest.approx(plan[stage].num_residual_bytes, abs=0.05 * ACTIVATION + 64)


def temp_bytes(mode, num_layers, num_stages):
    """Temporary memory of everything as one program."""

    def layers(index):
        def stage(x, labels):
            for layer in range(num_layers):
                x = models.dense(f"stage{index}/layer{layer}", 64, x, lambda a: jnp.tanh(jnp.sin(a)))
                if layer < num_layers - 1:
                    x = engine.recomputation_checkpoint(x)
            return models.cross_entropy(x, labels) if index == num_stages - 1 else (x, labels)

        return stage

    rng = np.random.default_rng(0)
    micro_batch = (rng.normal(size=(512, 64)).astype("float32"), np.zeros(512, "int32"))
    pipeline = engine.Pipeline(
        [layers(index) for index in range(num_stages)],
        num_micro_batches=2,
        loss=lambda loss: loss,
        optimizer=optax.sgd(0.1),
        device_mapping=[0] * num_stages,
        recompute=mode,
    )
    state = pipeline.init(jax.random.key(0), micro_batch)
    found = []
    original = BlockRunner._jit

    def jit(self, *arguments):
        function = original(self, *arguments)

        def call(*values):
            found.append(function.lower(*values).compile().memory_analysis().temp_size_in_bytes)
            return function(*values)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockRunner, "_jit", jit)
        pipeline.step(state, [micro_batch] * 2)
    return found[0]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "mode"),
    [
        (3, 4, "recompute_then_backpropagate"),
        (6, 2, "recompute_and_backpropagate_interleaved"),
        (8, 1, "auto"),  # checkpoints work in the last stage too
    ],
)
def test_recomputation_on_one_ipu_needs_less_memory(num_layers, num_stages, mode):
    assert temp_bytes(mode, num_layers, num_stages) < 0.75 * temp_bytes(None, num_layers, num_stages)


def test_the_plan_of_one_ipu_and_of_shared_ones():
    plan = make(2, "grouped", "recompute_then_backpropagate", device_mapping=[0, 0]).plan_memory()
    assert [stage.num_live_bytes for stage in plan] == [ACTIVATION, 0]
    plan = make(4, "interleaved", "auto", device_mapping=[0, 1, 0, 1]).plan_memory()
    assert [stage.ipu for stage in plan] == [0, 1, 0, 1]
    assert plan[0].in_flight >= 4  # an IPU with two stages is slower, so that more are on their way


def test_forwards_only_hold_nothing():
    pipeline = engine.Pipeline(make_stages(3), num_micro_batches=4)
    pipeline.trace(make_step(1)[0])
    assert [stage.num_live_bytes for stage in pipeline.plan_memory()] == [0, 0, 0]


def test_a_count_is_needed():
    pipeline = engine.Pipeline(make_stages(2), num_micro_batches=None)
    pipeline.trace(make_step(1)[0])
    with pytest.raises(ValueError, match="num_micro_batches must be given"):
        pipeline.plan_memory()
    assert len(pipeline.plan_memory(3)) == 2


def test_jax_checkpoint_bounds_what_is_kept():
    def make_stage(index):
        def stage(x, labels):
            for layer in range(LAYERS):
                name = f"stage{index}/layer{layer}"
                block = jax.checkpoint(lambda x, name=name: models.dense(name, WIDTH, x, jnp.tanh))
                x = block(jnp.tanh(jnp.sin(x)) if layer == 0 else x)
            return models.cross_entropy(x, labels) if index == 1 else (x, labels)

        return stage

    pipeline = engine.Pipeline(
        [make_stage(0), make_stage(1)],
        num_micro_batches=NUM_MICRO_BATCHES,
        loss=lambda loss: loss,
        optimizer=optax.sgd(0.1),
    )
    pipeline.trace(make_step(1)[0])
    # What each block takes; nothing from within them.
    assert pipeline.plan_memory()[0].num_residual_bytes == LAYERS * ACTIVATION
