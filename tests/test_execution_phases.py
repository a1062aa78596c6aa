"""Execution phases of the engine: the same numbers, and less on the devices at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import watching
from tests import models
from tests.test_offloading import memory_kinds

ALL = ["weight_update_variables", "activations", "gradient_accumulation_buffers", "weights"]


def make_stage(index, width=16):
    def stage(x, labels):
        with engine.variable_scope(f"stage{index}"):
            x = models.dense("first", width, x, jnp.tanh)
            x = x * jax.random.bernoulli(engine.next_rng_key(), 0.8, x.shape).astype("float32")
            total = engine.get_variable("total", (), initializer=0.0, trainable=False)
            engine.assign("total", total + x.mean())
            return models.dense("second", width, x, jnp.tanh), labels

    return stage


def to_loss(x, labels):
    return models.cross_entropy(x, labels)


STAGES = [*map(make_stage, range(3)), to_loss]


def make(phases=None, offload=(), stages=STAGES, mapping=(0, 0, 0, 0), **options):
    options = {"num_micro_batches": 3, "loss": lambda loss: loss, "optimizer": optax.adam(0.01)} | options
    return engine.Pipeline(
        stages,
        schedule="sequential",
        device_mapping=mapping,
        donate=True,
        execution_phases=phases,
        offload=offload,
        **options,
    )


def run(pipeline, num_steps=2, num_replicas=1):
    rng = np.random.default_rng(0)
    steps = [models.mlp_batches(rng, 3 * num_replicas) for _ in range(num_steps)]
    state = pipeline.init(jax.random.key(0), steps[0][0])
    losses = []
    for step in steps:
        state, outputs = pipeline.step(state, step)
        losses.append(outputs.losses)
    return state, jax.tree.map(np.asarray, (losses, state.variables, state.optimizer_state))


@functools.cache
def without_phases(mapping, num_replicas=1):
    return run(make(mapping=mapping, num_replicas=num_replicas), num_replicas=num_replicas)[1]


@pytest.mark.parametrize("mapping", [(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 2, 2)])
@pytest.mark.parametrize("of_levels", [(0, 1, 2, 2), (0, 0, 1, 1), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("shares_last", [True, False])
@pytest.mark.parametrize(("num_ahead", "keeps_values"), [(None, True), (1, True), (0, True), (0, False)])
@pytest.mark.each_value
def test_the_numbers_are_the_same(mapping, of_levels, shares_last, num_ahead, keeps_values):
    if not shares_last and of_levels[-1] != of_levels[-2]:
        pytest.skip("the last phase is one program")
    phases = engine.ExecutionPhases(
        of_levels=of_levels, shares_last=shares_last, num_ahead=num_ahead, keeps_values=keeps_values
    )
    pipeline = make(phases, () if num_ahead is None else ALL, mapping=mapping)
    state, found = run(pipeline)
    jax.tree.map(np.testing.assert_array_equal, found, without_phases(mapping))
    trained = [value for name, value in state.variables.items() if not name.endswith("total")]
    assert memory_kinds(trained) == {"device" if num_ahead is None else "pinned_host"}
