"""Variables that several stages share, on one IPU or on several."""

import jax
import jax.numpy as jnp
import numpy as np
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
        loss=lambda loss: loss,
        schedule=schedule,
        reduction=reduction,
        device_mapping=mapping,
        **{"num_micro_batches": 5, "optimizer": optax.adam(0.01), **options},
    )


@pytest.mark.parametrize("mapping", [(0, 1, 2), (1, 0, 1)])
def test_the_stage_that_shares_a_variable_has_an_accumulator_of_its_own(mapping, rng):
    """On its own IPU; `test_stage_parameters` compares tied embeddings with plain JAX."""
    pipeline = make(mapping=mapping, optimizer=optax.sgd(1.0), num_micro_batches=2)
    pipeline.trace(make_steps(rng, 1, num_steps=1)[0][0])
    memory = pipeline.plan_ipu_memory()
    kernel, bias, table = 4 * 8 * 8, 4 * 8, 4 * 10 * 8
    wanted = [table, kernel + bias, kernel + table] if mapping[0] == 0 else [kernel + bias, kernel + table]
    assert [one.num_accumulator_bytes for one in memory] == wanted


def test_what_crosses_once_per_update_and_not_per_micro_batch(rng):
    """The table is no value between stages: per micro-batch only activations and labels cross."""
    pipeline = make()
    (step,) = make_steps(rng, 2, num_steps=1)
    pipeline.trace(step[0])
    for stage in pipeline.traced.stages:
        assert all(aval.shape != (10, 8) for aval in stage.output_avals)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mapping", "reduction", "schedule"),
    [
        ((0, 1, 2), "sum", "grouped"),
        ((0, 1, 0), "running_mean", "zero_bubble"),
    ],
)
def test_gradient_maps_see_the_whole_gradient(mapping, reduction, schedule, rng):
    def clip(gradient, variable):
        return jnp.clip(gradient, -0.05, 0.05) + 0.01 * variable

    pipeline = make(
        schedule,
        mapping,
        reduction,
        gradient_map=lambda: clip,
        optimizer=optax.sgd(1.0),
        num_micro_batches=2,
    )
    (step,) = make_steps(rng, 2, num_steps=1)
    state = pipeline.init(jax.random.key(0), step[0])
    before = models.on_one_device(state)
    state, _outputs = pipeline.step(state, step)
    mapped = []
    for index, micro_batch in enumerate(step):
        _loss, grads, *_others = reference.gradients(
            pipeline.traced, before, micro_batch, index, (), list(before.variables)
        )
        mapped.append({name: clip(grads[name], value) for name, value in before.variables.items()})
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *mapped)
    rate = np.float32(1 / 2 if reduction == "running_mean" else 1)
    expected = jax.tree.map(lambda value, change: value - rate * change, before.variables, total)
    models.assert_trees_close(state.variables, expected)


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

        options = {"trained": None, "num_micro_batches": 2} | options
        return make(mapping=mapping, stages=([left, right], join), gradient_map=lambda: double, **options)

    def double(gradient, variable):
        return 2 * gradient

    batches = models.mlp_batches(rng, 2)
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


def test_a_later_stage_reads_what_was_assigned_for_its_micro_batch(rng):
    pipeline = engine.Pipeline(
        [counting, middle, reading],
        num_micro_batches=3,
        loss=lambda loss, count: loss,
        optimizer=optax.sgd(0.1),
    )
    _state, outputs = beside.train(pipeline, [models.mlp_batches(rng, 3)])
    assert [float(count) for _loss, count in outputs.outputs] == [1, 2, 3]


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
