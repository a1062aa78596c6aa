"""Every schedule, number of stages and of micro-batches equals the reference; which equals plain JAX."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import reference
from tests.support import beside, models

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
}
NUM_UPDATES = 3


def make(num_stages, num_micro_batches, reduction, optimizer, schedule="grouped", **options):
    return engine.Pipeline(
        models.mlp_stages(num_stages),
        num_micro_batches=num_micro_batches,
        loss=lambda loss: loss,
        optimizer=OPTIMIZERS[optimizer](),
        schedule=schedule,
        reduction=reduction,
        **options,
    )


def batches(num_micro_batches):
    rng = np.random.default_rng(num_micro_batches)
    return [models.mlp_batches(rng, num_micro_batches) for _ in range(NUM_UPDATES)]


@functools.cache
def expected(num_micro_batches, reduction, optimizer):
    """Losses and states of the unsplit model after each update. Schedules and splits share it."""
    steps = batches(num_micro_batches)
    pipeline = make(1, num_micro_batches, reduction, optimizer)
    state = pipeline.init(jax.random.key(7), steps[0][0])
    results = []
    for step in steps:
        state, outputs = reference.step(
            pipeline.traced, state, step, optimizer=OPTIMIZERS[optimizer](), reduction=reduction
        )
        results.append((outputs.losses, state))
    return results


@pytest.mark.parametrize(
    ("num_micro_batches", "reduction", "optimizer"),
    [(1, "sum", "momentum"), (5, "mean", "adam"), (16, "running_mean", "sgd")],
)
@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    # One stage is one program, whatever the schedule.
    [("grouped", 1), *itertools.product(["grouped", "interleaved", "sequential"], [2, 3, 4])],
)
@pytest.mark.each_value
def test_equals_reference(schedule, num_stages, num_micro_batches, reduction, optimizer):
    pipeline = make(num_stages, num_micro_batches, reduction, optimizer, schedule)
    steps = batches(num_micro_batches)
    state = pipeline.init(jax.random.key(7), steps[0][0])
    for step, (losses, reference_state) in zip(
        steps, expected(num_micro_batches, reduction, optimizer), strict=True
    ):
        state, outputs = pipeline.step(state, step)
        models.assert_trees_close(outputs.losses, losses)
        models.assert_trees_close(state.variables, reference_state.variables)
        models.assert_trees_close(state.optimizer_state, reference_state.optimizer_state)
    assert state.update_count == state.execution_count == NUM_UPDATES


def plain_loss(variables, x, labels):
    """The same model without this library."""
    for index in range(len(models.SIZES)):
        x = x @ variables[f"dense{index}/kernel"] + variables[f"dense{index}/bias"]
        x = x if index == len(models.SIZES) - 1 else jax.nn.relu(x)
    return models.cross_entropy(x, labels)


@pytest.mark.parametrize("schedule", ["grouped", "interleaved", "sequential"])
def test_gradients_equal_a_plain_loop_and_the_whole_batch(schedule, rng):
    pipeline = make(4, 6, "mean", "sgd", schedule)
    step = models.mlp_batches(rng, 6)
    state = pipeline.init(jax.random.key(0), step[0])
    elements = iter([[pipeline.prepare().place_element(mb)] for mb in step])
    accumulated = pipeline.accumulate(state, lambda wanted: next(elements), []).stepped.columns[0]
    variables = models.on_one_device(state.variables)
    grads = [jax.grad(plain_loss)(variables, *micro_batch) for micro_batch in step]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *grads)
    models.assert_trees_close(accumulated.accumulators, total)
    whole = jax.grad(plain_loss)(variables, *(np.concatenate(part) for part in zip(*step, strict=True)))
    mean = {name: value / 6 for name, value in models.on_one_device(accumulated.accumulators).items()}
    models.assert_trees_close(mean, whole)


def test_gradients_on_one_device_equal_a_plain_loop(rng):
    # optax.trace without decay keeps the gradients that the update was given.
    pipeline = engine.Pipeline(
        models.mlp_stages(3),
        num_micro_batches=6,
        loss=lambda loss: loss,
        optimizer=optax.trace(decay=0.0),
        device_mapping=[0, 0, 0],
    )
    step = models.mlp_batches(rng, 6)
    state = pipeline.init(jax.random.key(0), step[0])
    variables = models.on_one_device(state.variables)
    state, _outputs = pipeline.step(state, step)
    grads = [jax.grad(plain_loss)(variables, *micro_batch) for micro_batch in step]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *grads)
    models.assert_trees_close(state.optimizer_state.trace, total)


@pytest.mark.parametrize(
    ("schedule", "mapping"),
    [("grouped", (0, 1, 0, 1)), ("interleaved", (2, 1, 0, 3)), ("sequential", (0, 0, 0, 0))],
)
def test_device_mappings(schedule, mapping):
    pipeline = make(4, 5, "sum", "adam", schedule, device_mapping=mapping)
    steps = batches(5)
    state = pipeline.init(jax.random.key(7), steps[0][0])
    for step, (losses, reference_state) in zip(steps, expected(5, "sum", "adam"), strict=True):
        state, outputs = pipeline.step(state, step)
        models.assert_trees_close(outputs.losses, losses)
        models.assert_trees_close(state.variables, reference_state.variables)
    for name, array in state.variables.items():
        assert array.devices() == {jax.devices()[mapping[int(name[len("dense")])]]}


@pytest.mark.parametrize("mapping", [[0, 1], [0, 0]])
def test_counts_beyond_32_bits(mapping, rng):
    def first(x, labels):
        noise = jax.random.normal(engine.next_rng_key(), x.shape)
        return models.dense("first", 10, x + noise, jax.nn.relu), labels

    def last(x, labels):
        return models.cross_entropy(models.dense("last", 10, x, lambda x: x), labels)

    options = {"loss": lambda loss: loss, "optimizer": optax.sgd(0.1)}
    pipeline = engine.Pipeline([first, last], num_micro_batches=3, device_mapping=mapping, **options)
    steps = [models.mlp_batches(rng, 3) for _ in range(3)]
    counts = {"update_count": 2**31 - 2, "execution_count": 2**32 - 2}
    state, _outputs = beside.train(
        pipeline, steps, change=lambda state: dataclasses.replace(state, **counts)
    )
    assert (state.update_count, state.execution_count) == (2**31 + 1, 2**32 + 1)
    # Keys begin again.
    again = dataclasses.replace(beside.copied(state), execution_count=1, optimizer_state=None)
    wanted = beside.step_plainly(pipeline, again, steps[0])[1]
    models.assert_trees_close(pipeline.step(state, steps[0])[1].losses, wanted.losses)
