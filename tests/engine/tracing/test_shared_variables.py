"""Variables that several stages share, on one IPU or on several."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import reference
from ipu_pipeline.engine.tracing import scopes
from tests.support import beside, models


def table(reuse):
    with engine.variable_scope("embedding", reuse=reuse):
        return engine.get_variable("table", (10, 8))


def embed(ids, labels):
    return table(False)[ids], labels


def middle(x, labels):
    return models.dense("middle", 8, x, jnp.tanh), labels


def project(x, labels):
    with engine.variable_scope("middle", reuse=True):
        x = x @ engine.get_variable("kernel", (8, 8))
    return models.cross_entropy(x @ table(True).T, labels)


def make_steps(rng, num_micro_batches=5, num_steps=3):
    def integers():
        return rng.integers(0, 10, 4).astype("int32")

    return [[(integers(), integers()) for _ in range(num_micro_batches)] for _ in range(num_steps)]


def make(
    schedule="grouped", mapping=(0, 1, 2), reduction="sum", stages=(embed, middle, project), **options
):
    return engine.Pipeline(
        stages,
        num_micro_batches=5,
        loss=lambda loss: loss,
        optimizer=optax.adam(0.01),
        schedule=schedule,
        reduction=reduction,
        device_mapping=mapping,
        **options,
    )


def test_tied_embeddings_equal_plain_jax(rng):
    def loss(variables, ids, labels):
        x = variables["embedding/table"][ids]
        x = jnp.tanh(x @ variables["middle/kernel"] + variables["middle/bias"])
        return models.cross_entropy(x @ variables["middle/kernel"] @ variables["embedding/table"].T, labels)

    pipeline = make()
    (step,) = make_steps(rng, num_steps=1)
    state = pipeline.init(jax.random.key(0), step[0])
    variables = models.on_one_device(state.variables)
    elements = iter([[pipeline.prepare().place_element(micro_batch)] for micro_batch in step])
    accumulated = pipeline.accumulate(state, lambda wanted: next(elements), []).stepped.columns[0]
    grads = [jax.grad(loss)(variables, *micro_batch) for micro_batch in step]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *grads)
    accumulators = models.on_one_device(accumulated.accumulators)
    # The stage that shares a variable has an accumulator of its own, on its own IPU.
    own = {key: value for key, value in accumulators.items() if key in total}
    for key, value in accumulators.items():
        if key not in total:
            own[key.removesuffix(" of stage 2")] += value
    assert accumulated.accumulators["embedding/table of stage 2"].devices() == {jax.devices()[2]}
    looped = make(mapping=(1, 0, 1)).init(jax.random.key(0), step[0])
    assert looped.variables["embedding/table"].devices() == {jax.devices()[1]}
    models.assert_trees_close(own, total)


def test_what_crosses_once_per_update_and_not_per_micro_batch(rng):
    # The table is no value between stages: per micro-batch only activations and labels cross.
    pipeline = make()
    (step,) = make_steps(rng, num_steps=1)
    pipeline.trace(step[0])
    for stage in pipeline.traced.stages:
        assert all(aval.shape != (10, 8) for aval in stage.output_avals)


def test_one_accumulator_on_one_ipu(rng):
    (step,) = make_steps(rng, num_steps=1)
    keys = {}
    for mapping, reduction in [((0, 1, 0), "mean"), ((0, 1, 0), "running_mean"), ((0, 1, 2), "mean")]:
        pipeline = make(mapping=mapping, reduction=reduction)
        pipeline.trace(step[0])
        keys[mapping, reduction] = set(pipeline.prepare().placement.accumulator_plan.extra)
    assert keys[(0, 1, 0), "mean"] == {"middle/kernel of stage 2"}
    both = {"middle/kernel of stage 2", "embedding/table of stage 2"}
    assert keys[(0, 1, 0), "running_mean"] == keys[(0, 1, 2), "mean"] == both


@pytest.mark.parametrize("mapping", [(0, 1, 2), (0, 1, 0), (0, 0, 0)])
@pytest.mark.parametrize("reduction", ["sum", "running_mean"])
@pytest.mark.parametrize("schedule", ["grouped", "zero_bubble"])
@pytest.mark.each_value
def test_gradient_maps_see_the_whole_gradient(mapping, reduction, schedule, rng):
    def clip(gradient, variable):
        return jnp.clip(gradient, -0.05, 0.05) + 0.01 * variable

    pipeline = make(schedule, mapping, reduction, gradient_map=lambda: clip)
    steps = make_steps(rng)
    state = pipeline.init(jax.random.key(0), steps[0][0])
    expected = models.on_one_device(state)
    trained = list(expected.variables)
    for step in steps:
        state, outputs = pipeline.step(state, step)
        losses, mapped = [], []
        for index, micro_batch in enumerate(step):
            loss, grads, _outputs, _variables = reference.gradients(
                pipeline.traced, expected, micro_batch, index, (), trained
            )
            losses.append(loss)
            mapped.append({name: clip(grads[name], expected.variables[name]) for name in trained})
        total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *mapped)
        if reduction == "running_mean":
            total = jax.tree.map(lambda leaf: leaf / 5, total)
        with jax.numpy_dtype_promotion("standard"):
            changes, new_state = optax.adam(0.01).update(
                total, expected.optimizer_state, expected.variables
            )
        expected = dataclasses.replace(
            expected, variables=optax.apply_updates(expected.variables, changes), optimizer_state=new_state
        )
        models.assert_trees_close(outputs.losses, losses)
        models.assert_trees_close(state.variables, expected.variables)


def test_gradient_maps_and_parallel_stages(rng):
    """A map of sums would need what parallel stages add up while neither waits for the other."""

    def make_parallel(mapping, **options):
        def left(x, labels):
            with engine.variable_scope("both"):
                return x @ engine.get_variable("kernel", (12, 12)), labels

        def right(x, labels):
            with engine.variable_scope("both", reuse=True):
                return (jnp.tanh(x @ engine.get_variable("kernel", (12, 12))),)

        def join(a, labels, b):
            return models.cross_entropy(models.dense("last", 10, a + b), labels)

        options = {"trained": None} | options
        return make(mapping=mapping, stages=([left, right], join), gradient_map=lambda: double, **options)

    def double(gradient, variable):
        return 2 * gradient

    batches = models.mlp_batches(rng, 5)
    expected = "both/kernel is shared by stage 0 .left. and stage 1 .right., which are parallel"
    with pytest.raises(ValueError, match=expected):
        make_parallel([[1, 0], 2]).trace(batches[0])
    for mapping, trained in [([[0, 0], 0], None), ([[1, 0], 2], ["last/kernel"])]:
        pipeline = make_parallel(mapping, trained=trained)
        state = pipeline.init(jax.random.key(0), batches[0])
        expected = models.on_one_device(state)
        _state, outputs = pipeline.step(state, batches)
        _state, expected = reference.step(
            pipeline.traced, expected, batches, optimizer=optax.adam(0.01), trained=trained
        )
        models.assert_trees_close(outputs.losses, expected.losses)


def counting(x, labels):
    count = engine.get_variable("count", (), initializer=0.0, trainable=False)
    engine.assign("count", count + 1)
    return models.dense("first", 8, x, jnp.tanh), labels


def reading(x, labels):
    with _reusing():
        count = engine.get_variable("count", ())
    logits = models.dense("second", 10, x * count, jnp.tanh)
    return models.cross_entropy(logits, labels), count


def _reusing():
    return scopes.absolute_scope("", reuse=True)


@pytest.mark.parametrize("schedule", ["grouped", "sequential"])
def test_a_later_stage_reads_what_was_assigned_for_its_micro_batch(schedule, rng):
    pipeline = engine.Pipeline(
        [counting, middle, reading],
        num_micro_batches=5,
        loss=lambda loss, count: loss,
        optimizer=optax.sgd(0.1),
        schedule=schedule,
    )
    _state, outputs = beside.train(pipeline, [models.mlp_batches(rng, 5)])
    assert [float(count) for _loss, count in outputs.outputs] == [1, 2, 3, 4, 5]


def test_an_earlier_stage_cannot_read_what_a_later_one_assigns(rng):
    def first(x, labels):
        count = engine.get_variable("count", (), initializer=0.0, trainable=False)
        return models.dense("first", 8, x * count, jnp.tanh), labels

    def last(x, labels):
        with _reusing():
            engine.assign("count", engine.get_variable("count", ()) + 1)
        return models.cross_entropy(models.dense("last", 10, x), labels)

    pipeline = engine.Pipeline(
        [first, last], num_micro_batches=2, loss=lambda loss: loss, optimizer=optax.sgd(0.1)
    )
    with pytest.raises(ValueError, match="Variable count is used by stage 0") as error:
        pipeline.trace(models.mlp_batches(rng, 1)[0])
    assert "pass it on" in str(error.value)
