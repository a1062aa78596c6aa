"""Accumulators wider or narrower than their variables: the optimizer runs in the wider dtype."""

import jax
import jax.numpy as jnp
import optax
import pytest

from ipu_pipeline import engine
from tests.support import beside, models

COUNT = 2


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))


def make(**options):
    def layer(name, x):
        return jnp.tanh(x @ models.weight(name, x, size=10))

    def last(x, labels):
        return models.cross_entropy(layer("last", x).astype("float32"), labels)

    return engine.Pipeline(
        [lambda x, labels: (layer("first", x), labels), last],
        num_micro_batches=COUNT,
        optimizer=clipped(),
        **options,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "accumulator_dtype", "wide", "reduction"),
    [
        ("float16", "float32", "float32", "sum"),
        ("bfloat16", "float16", "float32", "running_mean"),
        ("float32", "bfloat16", "float32", "sum"),
        ("bfloat16", "bfloat16", "bfloat16", "mean"),
    ],
)
def test_equals_reference(dtype, accumulator_dtype, wide, reduction, rng):
    pipeline = make(accumulator_dtype=accumulator_dtype, reduction=reduction)
    step = models.mlp_batches(rng, COUNT, dtype=dtype)
    state = pipeline.init(jax.random.key(5), step[0])
    accumulators = dict.fromkeys(state.variables, accumulator_dtype)
    expected, _outputs = beside.step_plainly(
        pipeline, beside.copied(state), step, accumulator_dtypes=accumulators
    )
    state, _outputs = pipeline.step(state, step)
    assert {array.dtype for array in state.variables.values()} == {jnp.dtype(dtype)}
    moments = state.optimizer_state[1][0]
    assert {leaf.dtype for leaf in jax.tree.leaves((moments.mu, moments.nu))} == {jnp.dtype(wide)}
    # Where the narrow values round, one program rounds a little otherwise than another one.
    narrow = "bfloat16" if "bfloat16" in (dtype, accumulator_dtype) else dtype
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[narrow]
    found, wanted = (models.as_float32((own.variables, own.optimizer_state)) for own in (state, expected))
    models.assert_trees_close(found, wanted, tolerance)
