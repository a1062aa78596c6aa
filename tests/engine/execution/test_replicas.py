"""Replicas of a pipeline: equal to a plain loop over the micro-batches of all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine, layers
from ipu_pipeline.engine.execution.replicas import Dealt
from tests.support import beside, models

COUNT, UPDATES = 4, 3


def check(pipeline, steps, bound=1e-5):
    return beside.train(pipeline, steps, seed=3, bound=bound)


def make(stages, num_replicas, **options):
    given = {
        "num_micro_batches": COUNT,
        "loss": lambda *outputs: outputs[0],
        "optimizer": optax.adam(0.01),
        "num_replicas": num_replicas,
    }
    return engine.Pipeline(stages, **{**given, **options})


def make_steps(num_replicas, count=COUNT):
    rng = np.random.default_rng(num_replicas)
    return [models.mlp_batches(rng, count * num_replicas) for _update in range(UPDATES)]


def noisy_stages():
    """A stage with random numbers and a normalization, and one with the loss that counts micro-batches."""

    def first(x, labels):
        x = models.dense("first", 16, x)
        x = x * jax.random.uniform(engine.next_rng_key(), x.shape)
        return layers.BatchNormalization(momentum=0.8, name="norm")(x, training=True), labels

    def second(x, labels):
        seen = engine.get_variable(
            "seen", (), jnp.int32, initializer=jax.nn.initializers.zeros, trainable=False
        )
        engine.assign("seen", seen + 1)
        return models.cross_entropy(models.dense("second", 10, x), labels)

    return [first, second]


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 4), (2, 3), (1, 2)])
def test_all_replicas_have_the_same_variables(num_stages, num_replicas):
    pipeline = make(models.mlp_stages(num_stages), num_replicas, reduction="mean")
    state, outputs = check(pipeline, make_steps(num_replicas))
    assert np.shape(outputs.losses[0]) == (num_replicas,)
    for variable in state.variables.values():
        assert len(variable.devices()) == num_replicas
        values = [np.asarray(shard.data) for shard in variable.addressable_shards]
        for value in values[1:]:
            np.testing.assert_array_equal(value, values[0])


def test_another_random_key():
    """Those of the replicas are remembered for one key only."""
    pipeline, steps = make(noisy_stages(), 2), make_steps(2)[:1]
    for seed in (3, 4):
        beside.train(pipeline, steps, seed=seed)


def test_means_in_sixteen_bits():
    """The sum of two of these gradients is infinite in float16."""

    def stage(x):
        weight = engine.get_variable("w", (), "float16", jax.nn.initializers.zeros)
        return (weight * x).astype("float32")

    pipeline = make([stage], 2, num_micro_batches=1, optimizer=optax.sgd(1.0))
    step = [np.float16(40000)] * 2
    state, _outputs = pipeline.step(pipeline.init(jax.random.key(0), step[0]), step)
    assert state.variables["w"] == -40000


def test_micro_batches_placed_once():
    pipeline = make(models.mlp_stages(2), 2, dispatch_plan=engine.Chunking(2))
    (step, *_rest) = make_steps(2)
    state = pipeline.init(jax.random.key(3), step[0])
    placed = pipeline.place_micro_batches(step)
    first, _outputs = pipeline.step(state, step)
    second, _outputs = pipeline.step(state, placed)
    models.assert_trees_close(second.variables, first.variables, 0.0)


def test_data_that_ends_within_a_round_is_dealt_out_anew():
    pipeline = make(models.mlp_stages(2), 2)
    (step, *_rest) = make_steps(2)
    state = pipeline.init(jax.random.key(3), step[0])
    expected, _outputs = pipeline.step(state, step)
    with pytest.raises(engine.OutOfRangeError, match="after 3 of the 8 micro-batches"):
        pipeline.step(state, step[:3])
    again, _outputs = pipeline.step(state, step)
    models.assert_trees_close(again.variables, expected.variables, 0.0)
    runner = pipeline.prepare()
    (turn,) = {runner.place_element(element).replica for element in map(jax.tree.leaves, step[:1])}
    assert turn == 0  # the guess is right again
    assert isinstance(runner.place_element(jax.tree.leaves(step[0])), Dealt)


@pytest.mark.parametrize("offload", [(), ["weights", "weight_update_variables"]])
def test_another_number_later(offload):
    pipeline = make(models.mlp_stages(2), 1, offload=offload)
    steps = make_steps(2)
    state = pipeline.init(jax.random.key(3), steps[0][0])
    state, _outputs = pipeline.step(state, steps[0][:COUNT])
    pipeline.set_replicas(2)
    expected = beside.copied(state)
    state, _outputs = pipeline.step(state, steps[1])
    expected, _wanted = beside.step_plainly(pipeline, expected, steps[1])
    models.assert_trees_close(state.variables, expected.variables)
    pipeline.set_replicas(1)
    state, _outputs = pipeline.step(state, steps[2][:COUNT])
    expected, _wanted = beside.step_plainly(pipeline, expected, steps[2][:COUNT])
    models.assert_trees_close(state.variables, expected.variables)


@pytest.mark.parametrize("number", [0, 1.5, True, "2"])
def test_numbers_that_are_refused(number):
    with pytest.raises(ValueError, match="num_replicas must be an integer of at least 1"):
        make(models.mlp_stages(2), number)


def test_too_few_devices():
    pipeline = make(models.mlp_stages(4), 3)
    with pytest.raises(ValueError, match="needs 12 devices, .* of 3 replicas, but there are 8"):
        pipeline.init(jax.random.key(3), make_steps(1)[0][0])


def test_not_with_serialized_micro_batches():
    with pytest.raises(ValueError, match="num_replicas must be 1 with num_serialized above 1"):
        make(models.mlp_stages(2), 2, num_serialized=2, schedule="sequential", device_mapping=[0, 0])


def together_stages():
    """Stages that normalize by the batches of all replicas, and draw numbers by the replica's."""

    def first(x, labels):
        x = models.dense("first", 16, x)
        count = engine.replica_count().astype(x.dtype)
        mean = engine.cross_replica_sum(x.mean(axis=0)) / count
        square = engine.cross_replica_sum((x**2).mean(axis=0)) / count
        x = (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3)
        return x * (1 + engine.replica_index().astype(x.dtype)), labels

    def second(x, labels):
        def body(total, row):
            return total + engine.cross_replica_sum(jnp.tanh(row).sum()), row

        total, x = jax.lax.scan(body, jnp.float32(0), x)
        return models.cross_entropy(models.dense("second", 10, x), labels) + total * 1e-3

    return [first, second]


def plain_together(variables, x, labels):
    """The same for all replicas at once, without this library: the mean of their losses, and these."""
    x = jax.nn.relu(x @ variables["first/kernel"] + variables["first/bias"])
    mean, square = x.mean(axis=(0, 1)), (x**2).mean(axis=(0, 1))
    x = (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3)
    x = x * (1 + jnp.arange(len(x)).astype(x.dtype))[:, None, None]
    total = jnp.tanh(x).sum()
    logits = jax.nn.relu(x @ variables["second/kernel"] + variables["second/bias"])
    losses = jax.vmap(models.cross_entropy)(logits, labels) + total * 1e-3
    return losses.mean(), losses


@pytest.mark.parametrize(
    ("num_replicas", "options"),
    [(1, {}), (2, {"dispatch_plan": engine.Chunking(2)}), (2, {"recompute": "auto"}), (4, {})],
)
def test_replicas_that_compute_together(num_replicas, options):
    pipeline = make(together_stages(), num_replicas, optimizer=optax.sgd(0.1), **options)
    (step, *_rest) = make_steps(num_replicas)
    state = pipeline.init(jax.random.key(3), step[0])
    variables = beside.copied(state).variables
    state, outputs = pipeline.step(state, step)
    total = jax.tree.map(jnp.zeros_like, variables)
    for number in range(COUNT):
        own = step[number * num_replicas : (number + 1) * num_replicas]
        x, labels = (np.stack(part) for part in zip(*own, strict=True))
        grads, losses = jax.grad(plain_together, has_aux=True)(variables, x, labels)
        total = jax.tree.map(jnp.add, total, grads)
        actual = np.atleast_1d(np.asarray(outputs.losses[number]))
        models.assert_trees_close(actual, np.asarray(losses))
    after = {name: value - jnp.float32(0.1) * total[name] for name, value in variables.items()}
    models.assert_trees_close(state.variables, after)


def test_replicas_are_known_in_stages_only():
    def stage(x, labels):
        return models.cross_entropy(models.dense("only", 10, x), labels)

    def optimizer(loss):
        return optax.sgd(engine.cross_replica_sum(loss))

    pipeline = make([stage], 2, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="cross_replica_sum was called outside of a program"):
        pipeline.init(jax.random.key(3), make_steps(1)[0][0])
    with pytest.raises(RuntimeError, match="replica_index"):
        engine.replica_index()


@pytest.mark.parametrize(
    ("shard", "options"),
    [
        (["optimizer_state"], {"device_mapping": [0, 0], "recompute": "auto"}),
        (["weights"], {"dispatch_plan": engine.Chunking(2), "donate": True}),
        (["optimizer_state", "weights"], {}),
        (["optimizer_state", "weights"], {"offload": ["weight_update_variables", "weights"]}),
    ],
    ids=str,
)
def test_what_replicas_share_out(shard, options):
    pipeline = make(noisy_stages(), 2, shard=shard, **options)
    state, _outputs = check(pipeline, make_steps(2))
    whole = make(noisy_stages(), 2, **options).init(jax.random.key(3), make_steps(2)[0][0])

    def bytes_per_device(tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    for name, before, after in (
        ("optimizer_state", whole.optimizer_state, state.optimizer_state),
        ("weights", whole.variables, state.variables),
    ):
        # All that trains has an even size; what normalization assigns stays whole.
        statistics = bytes_per_device({n: v for n, v in whole.variables.items() if "moving" in n})
        kept = statistics if name == "weights" else 0
        expected = bytes_per_device(before)
        assert bytes_per_device(after) == (kept + (expected - kept) // 2 if name in shard else expected)


def test_what_cannot_be_shared_out_stays_whole():
    pipeline = make(models.mlp_stages(2), 4, shard=["optimizer_state", "weights"])
    state, _outputs = check(pipeline, make_steps(4))
    plan = pipeline.plan_ipu_memory()
    for tree, planned in (
        (state.variables, [ipu.num_variable_bytes for ipu in plan]),
        (state.optimizer_state, [ipu.num_optimizer_bytes for ipu in plan]),
    ):
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        assert held == sum(planned) < sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    kernel, bias = state.variables["dense3/kernel"], state.variables["dense3/bias"]
    assert kernel.addressable_shards[0].data.shape == (2, 10)
    assert bias.addressable_shards[0].data.shape == (10,)


def test_what_is_to_be_shared_out_is_checked():
    with pytest.raises(
        ValueError, match="shard: each entry must be one of 'optimizer_state', 'weights'; got 'gradients'"
    ):
        make(models.mlp_stages(2), 2, shard=["gradients"])
    with pytest.raises(ValueError, match="shard must be a collection of names"):
        make(models.mlp_stages(2), 2, shard="weights")
