"""Variables that several stages share, on one IPU or on several."""

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


def make_step(rng, num_micro_batches=2):
    return [tuple(rng.integers(0, 10, (2, 4)).astype("int32")) for _ in range(num_micro_batches)]


def make(mapping=(0, 1, 2), stages=(embed, middle, project), num_micro_batches=2, **options):
    options = {"optimizer": optax.adam(0.01), **options}
    return engine.Pipeline(stages, num_micro_batches=num_micro_batches, device_mapping=mapping, **options)


@pytest.mark.parametrize("mapping", [(0, 1, 2), (1, 0, 1)])
def test_the_stage_that_shares_a_variable_has_an_accumulator_of_its_own(mapping, rng):
    """On its own IPU; `test_stage_parameters` compares tied embeddings with plain JAX."""
    pipeline = make(mapping, optimizer=optax.sgd(1.0))
    pipeline.trace(make_step(rng)[0])
    memory = engine.planning.plan_ipu_memory(pipeline)
    kernel, bias, table = 4 * 8 * 8, 4 * 8, 4 * 10 * 8
    wanted = [table, kernel + bias, kernel + table] if mapping[0] == 0 else [kernel + bias, kernel + table]
    assert [one.num_accumulator_bytes for one in memory] == wanted


def test_what_crosses_once_per_update_and_not_per_micro_batch(rng):
    """The table is no value between stages: per micro-batch only activations and labels cross."""
    pipeline = make()
    pipeline.trace(make_step(rng)[0])
    for stage in pipeline.traced.stages:
        assert all(aval.shape != (10, 8) for aval in stage.output_avals)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mapping", "options"),
    [((0, 1, 2), {}), ((0, 1, 0), {"reduction": "running_mean", "schedule": "zero_bubble"})],
)
def test_gradient_maps_see_the_whole_gradient(mapping, options, rng):
    def clip(gradient, variable):
        return jnp.clip(gradient, -0.05, 0.05) + 0.01 * variable

    pipeline = make(mapping, gradient_map=lambda: clip, optimizer=optax.sgd(1.0), **options)
    step = make_step(rng)
    state = pipeline.init(jax.random.key(0), step[0])
    before = models.on_one_device(state)
    state, _outputs = pipeline.step(state, step)
    mapped = []
    for index, micro_batch in enumerate(step):
        _loss, grads, *_others = reference.gradients(
            pipeline.traced, before, micro_batch, index, (), list(before.variables)
        )
        mapped.append({name: clip(grads[name], value) for name, value in before.variables.items()})
    expected = jax.tree.map(lambda value, *own: value - sum(own) / len(own), before.variables, *mapped)
    models.assert_trees_close(state.variables, expected)


def test_gradient_maps_and_parallel_stages(rng):
    """A map of sums would need what parallel stages add up while neither waits for the other."""

    def kernel(reuse=False):
        with engine.variable_scope("both", reuse=reuse):
            return engine.get_variable("kernel", (12, 12))

    def left(x, labels):
        return x @ kernel(), labels

    def right(x, labels):
        return (jnp.tanh(x @ kernel(reuse=True)),)

    def join(a, labels, b):
        return models.cross_entropy(models.dense("last", 10, a + b), labels)

    def make_parallel(mapping, trained=None):
        doubled = {"gradient_map": lambda: lambda gradient, _variable: 2 * gradient}
        return make(mapping, ([left, right], join), trained=trained, **doubled)

    batches = models.mlp_batches(rng, 2)
    expected = "both/kernel is shared by stage 0 .left. and stage 1 .right., which are parallel"
    with pytest.raises(ValueError, match=expected):
        make_parallel([[1, 0], 2]).trace(batches[0])
    for mapping, trained in [([[0, 0], 0], None), ([[1, 0], 2], ["last/kernel"])]:
        pipeline = make_parallel(mapping, trained)
        state = pipeline.init(jax.random.key(0), batches[0])
        expected = beside.step_plainly(pipeline, beside.copied(state), batches, trained=trained)[1]
        models.assert_trees_close(pipeline.step(state, batches)[1].losses, expected.losses)


def counting(x, labels):
    count = engine.get_variable("count", (), initializer=0.0, trainable=False)
    engine.assign("count", count + 1)
    return models.dense("first", 8, x, jnp.tanh), labels


def reading(x, labels):
    with scopes.absolute_scope("", reuse=True):
        count = engine.get_variable("count", ())
    logits = models.dense("second", 10, x * count, jnp.tanh)
    return models.cross_entropy(logits, labels), count


def test_a_later_stage_reads_what_was_assigned_for_its_micro_batch(rng):
    stages, options = (counting, middle, reading), {"loss": lambda loss, count: loss}
    pipeline = make(stages=stages, num_micro_batches=3, optimizer=optax.sgd(0.1), **options)
    _state, outputs = beside.train(pipeline, [models.mlp_batches(rng, 3)])
    assert [float(count) for _loss, count in outputs.outputs] == [1, 2, 3]


def test_an_earlier_stage_cannot_read_what_a_later_one_assigns(rng):
    def first(x, labels):
        count = engine.get_variable("count", (), initializer=0.0, trainable=False)
        return models.dense("first", 8, x * count, jnp.tanh), labels

    def last(x, labels):
        with scopes.absolute_scope("", reuse=True):
            engine.assign("count", engine.get_variable("count", ()) + 1)
        return models.cross_entropy(models.dense("last", 10, x), labels)

    with pytest.raises(ValueError, match="Variable count is used by stage 0(.|\n)*pass it on"):
        make((0, 1), (first, last)).trace(models.mlp_batches(rng, 1)[0])
