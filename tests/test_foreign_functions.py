"""Stages that call a foreign function of XLA's CPU client, compiled here with the headers of jaxlib."""

import time

import jax
import numpy as np
import optax
import pytest

from benchmarks.foreign_functions import stages as foreign
from ipu_pipeline import engine
from ipu_pipeline.engine import reference
from tests import models
from tests.test_executables import no_cache  # noqa: F401  # a fixture

pytestmark = pytest.mark.skipif(foreign.find_compiler() is None, reason="there is no g++")

NUM_STAGES, COUNT = 4, 8


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    foreign.register(tmp_path_factory.mktemp("library"))


def make(forward_ms, backward_ms, num_further=40, **options):
    functions, parameters, micro_batch = foreign.make_stages(
        NUM_STAGES, forward_ms, backward_ms, num_further
    )
    pipeline = engine.Pipeline(
        [engine.Stage(function, own) for function, own in zip(functions, parameters, strict=True)],
        num_micro_batches=COUNT,
        loss=lambda loss: loss,
        optimizer=optax.adam(0.01),
        **options,
    )
    rng = np.random.default_rng(0)
    return pipeline, [rng.normal(size=micro_batch.shape).astype("float32") for _ in range(COUNT)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_further": 40},  # equal stages are then one executable
        {"dispatch_plan": engine.DispatchPlan(2)},
        {"dispatch_plan": engine.DispatchPlan(1, True), "recompute": "auto"},
        {"device_mapping": [0] * NUM_STAGES},
    ],
    ids=str,
)
def test_equals_a_plain_loop(options, no_cache):  # noqa: F811
    pipeline, step = make(0.5, 1.0, **{"num_further": 2, **options})
    state = pipeline.init(jax.random.key(0), step[0])
    plain = models.on_one_device(state)
    for _update in range(2):
        state, outputs = pipeline.step(state, step)
        plain, expected = reference.step(pipeline.traced, plain, step, optimizer=optax.adam(0.01))
        models.assert_trees_close(outputs.losses, expected.losses)
        models.assert_trees_close(state.variables, plain.variables)
        models.assert_trees_close(state.optimizer_state, plain.optimizer_state)


def test_by_default_stages_overlap_and_are_not_chunked(no_cache):  # noqa: F811
    """In chunks of two a step takes 1.27 of the ideal, and without overlap 2.9."""
    pipeline, step = make(10.0, 20.0)
    state = pipeline.init(jax.random.key(0), step[0])
    assert pipeline.dispatch_plan.chunk_size == 1
    assert "no cost is known of ffi_call" in pipeline.dispatch_plan.reason
    taken = []
    for _update in range(4):
        begin = time.perf_counter()
        state, outputs = pipeline.step(state, step)
        jax.block_until_ready((state, outputs.collected))
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 1.2 * (COUNT + NUM_STAGES - 1) * 0.03
