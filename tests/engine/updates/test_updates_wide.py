"""Accumulators wider or narrower than their variables: the optimizer runs in the wider dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine, scopes
from ipu_pipeline.engine import reference
from ipu_pipeline.engine.loop import Loop
from ipu_pipeline.engine.loops.bodies import trace_body
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.specs import initial_value
from ipu_pipeline.optimizers import GradientAccumulationOptimizerV2
from tests.support import models

COUNT = 2


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))


def loss_of(x, labels, dtype):
    for index in range(2):
        with scopes.ipu_shard(index), engine.variable_scope(f"dense{index}"):
            x = jnp.tanh(x @ engine.get_variable("kernel", (x.shape[-1], 10), dtype))
    return models.cross_entropy(x.astype("float32"), labels)


def run(dtype, accumulator_dtype, reduction, elements):
    """The state after each update, by a loop over two IPUs and by the reference; and the accumulators."""

    def body(carried, element):
        optimizer = GradientAccumulationOptimizerV2(
            clipped(), COUNT, dtype=accumulator_dtype, reduction_method=reduction
        )
        optimizer.minimize(loss_of(*element, dtype))
        return carried

    loop = Loop(trace_body(body, [], elements[0], frames.ProgramNames(), "the body"))
    loop.prepare(jax.devices())
    key = jax.random.key(5)
    variables = {name: initial_value(spec, key) for name, spec in loop.variables.items()}
    start = PipelineState(variables, None, np.int32(0), np.int32(0), key)
    expected = jax.tree.map(jnp.copy, start)
    state = loop.place_run(start, {}, 0)
    for number, element in enumerate(elements):
        state = models.run_loop(loop, state, [element], number)
        if (number + 1) % COUNT == 0:
            expected, _outputs = reference.step(
                loop.body.pipeline,
                expected,
                [list(other) for other in elements[number + 1 - COUNT : number + 1]],
                optimizer=clipped(),
                reduction=reduction.lower(),
                accumulator_dtypes=dict.fromkeys(variables, accumulator_dtype),
            )
            yield state.pipeline, expected, state.accumulators


@pytest.mark.parametrize(
    ("dtype", "accumulator_dtype", "wide", "reduction"),
    [
        pytest.param("float16", "float32", "float32", "SUM", marks=pytest.mark.thorough),
        pytest.param("bfloat16", "float16", "float32", "RUNNING_MEAN", marks=pytest.mark.thorough),
        pytest.param("float32", "bfloat16", "float32", "SUM", marks=pytest.mark.thorough),
        pytest.param("bfloat16", "bfloat16", "bfloat16", "MEAN", marks=pytest.mark.thorough),
    ],
)
def test_equals_reference(dtype, accumulator_dtype, wide, reduction, rng):
    elements = models.mlp_batches(rng, COUNT, dtype=dtype)
    for state, expected, accumulators in run(dtype, accumulator_dtype, reduction, elements):
        assert {array.dtype for array in accumulators.values()} == {jnp.dtype(accumulator_dtype)}
        assert {array.dtype for array in state.variables.values()} == {jnp.dtype(dtype)}
        moments = state.optimizer_state[1][0]
        assert {leaf.dtype for leaf in jax.tree.leaves((moments.mu, moments.nu))} == {jnp.dtype(wide)}
        # Where the narrow values round, one program rounds a little otherwise than another one.
        tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[
            "bfloat16" if "bfloat16" in (dtype, accumulator_dtype) else dtype
        ]
        models.assert_trees_close(
            models.as_float32(state.variables), models.as_float32(expected.variables), tolerance
        )
        models.assert_trees_close(
            models.as_float32(state.optimizer_state), models.as_float32(expected.optimizer_state), tolerance
        )
