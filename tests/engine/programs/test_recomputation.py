"""Recomputation: results stay, effects come once, the front's switch and modes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.pipelining_ops import RecomputationMode
from tests.support import beside, front, models

MODES = ["auto", "recompute_then_backpropagate", "recompute_and_backpropagate_interleaved"]
WIDTH = 16


def first_stage(x, labels):
    """With dropout, checkpoints, a value that crosses a checkpoint, and jax.checkpoint."""
    first = models.dense("first", WIDTH, x, jnp.tanh)
    x = first * jax.random.bernoulli(engine.next_rng_key(), 0.8, first.shape).astype("float32")
    x, *_rest = engine.recomputation_checkpoint((x, {"unused": labels}))
    x = models.dense("second", WIDTH, x, jnp.tanh) + first  # first is used on both sides
    x = engine.recomputation_checkpoint(x)
    return jax.checkpoint(lambda x: models.dense("third", WIDTH, x, jnp.tanh))(x), labels


def last_stage(x, labels):
    return models.cross_entropy(models.dense("last", 10, x), labels)


def make(mode, stages=(first_stage, models.cross_entropy), **options):
    loss = {"optimizer": optax.sgd(0.1)}
    return engine.Pipeline(stages, num_micro_batches=2, recompute=mode, **loss, **options)


@pytest.mark.parametrize(("mode", "num_marks"), list(zip(MODES, [2, 0, 2], strict=True)))
def test_what_is_kept(mode, num_marks, rng):
    pipeline = make(mode)
    pipeline.trace(models.mlp_batches(rng, 1)[0])
    assert [aval.shape for aval in pipeline.programs[0].residuals] == [(4, WIDTH)] * num_marks


def test_checkpoints_where_they_cannot_work(rng):
    def in_scan(x, labels):
        def body(carry, _element):
            return engine.recomputation_checkpoint(jnp.tanh(carry)), None

        return jax.lax.scan(body, x, length=2)[0], labels

    with pytest.raises(ValueError, match=r"stage 0 \(in_scan\): .* inside the body of scan"):
        make(None, [in_scan, last_stage]).trace(models.mlp_batches(rng, 1)[0])
    with pytest.raises(RuntimeError, match="recomputation_checkpoint was called outside of a program"):
        engine.recomputation_checkpoint(1.0)
    checkpoint = ipu.pipelining_ops.recomputation_checkpoint
    with pytest.raises(RuntimeError, match=r"only pipelines recompute"):
        front.compile_program(lambda: ipu.loops.repeat(2, lambda x: checkpoint(x), [1.0]))


# The front.


def first(rate, x, labels):
    with ipu.variable_scope("first"):
        x = ipu.pipelining_ops.recomputation_checkpoint(ipu.layers.Dense(16, activation=jnp.tanh)(x))
        return rate, ipu.layers.Dense(16, activation=jnp.tanh)(x), labels


def build(mode=None, **options):
    stages = [first, lambda rate, x, labels: (rate, last_stage(x, labels))]
    return front.Model(computational_stages=stages, recomputation_mode=mode, **options)


@pytest.mark.parametrize("mode", [pytest.param(None, marks=pytest.mark.thorough), RecomputationMode.Auto])
def test_allow_recompute_decides_at_run(mode):
    """Another configuration compiles the program again."""
    model = build(mode)
    losses, kept = [], []
    for allow_recompute in (False, True):
        front.ipu_config(2, allow_recompute=allow_recompute).configure_ipu_system()
        told = pytest.warns(UserWarning, match="since IPUConfig.allow_recompute is not set")
        is_told = mode is not None and not allow_recompute
        with front.session_of(model, seed=3) as session, told if is_told else contextlib.nullcontext():
            losses.append(model.run(session))
        kept.append(len(model.program.calls[0].pipeline.programs[0].residuals))
    models.assert_trees_close(losses[0], losses[1])
    assert kept[1] == 1 < kept[0]


def test_modes_that_have_no_effect_warn():
    with pytest.warns(UserWarning, match="recomputation_mode will have no effect .* inference"):
        build(RecomputationMode.Auto, optimizer_function=None, outfeed_loss=False)
    with pytest.warns(UserWarning, match=r"recomputation_checkpoint in stage 0 \(first\) has no effect"):
        build(RecomputationMode.RecomputeThenBackpropagate)
    with pytest.raises(
        TypeError,
        match="not a member of the RecomputationMode enumeration .*RecomputationMode.Auto, .*; got 'Auto'",
    ):
        build("Auto")


@pytest.mark.parametrize(
    ("mode", "mapping"),
    [
        pytest.param(None, (0, 0), marks=pytest.mark.thorough),
        ("auto", (0, 1)),
        pytest.param(MODES[1], (0, 1), marks=pytest.mark.thorough),
        pytest.param(MODES[2], (0, 0), marks=pytest.mark.thorough),
    ],
)
def test_effects_with_results_come_once(mode, mapping, rng):
    calls = []

    def scale(value):
        calls.append("scale")
        return np.float32(1.5)

    def stage(x, labels):
        x = models.dense("first", WIDTH, x, jnp.tanh)
        mean = jax.lax.stop_gradient(x.mean())
        factor = jax.experimental.io_callback(scale, jax.ShapeDtypeStruct((), "float32"), mean)
        x = jnp.sin(x) * factor

        def body(carry, element):
            jax.debug.callback(lambda value: calls.append("body"), carry.mean())
            return jnp.tanh(carry + element), None

        x, _none = jax.lax.scan(body, x, jnp.arange(2, dtype="float32"))
        jax.debug.callback(lambda value: calls.append("behind"), factor)
        return models.dense("second", WIDTH, x, jnp.tanh), labels

    pipeline = make(mode, [stage, last_stage], device_mapping=mapping)
    step = models.mlp_batches(rng, 2)
    state = pipeline.init(jax.random.key(0), step[0])
    expected, _outputs = beside.step_plainly(pipeline, beside.copied(state), step)
    jax.effects_barrier()
    calls.clear()
    state, _outputs = pipeline.step(state, step)
    jax.block_until_ready(state)
    jax.effects_barrier()
    models.assert_trees_close(state.variables, expected.variables)
    assert {name: calls.count(name) for name in set(calls)} == {"scale": 2, "body": 4, "behind": 2}
