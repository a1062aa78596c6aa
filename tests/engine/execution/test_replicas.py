"""Replicas of a pipeline: equal to a plain loop over the micro-batches of all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine, layers
from tests.support import beside, models

COUNT, UPDATES = 2, 2


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


def begun(pipeline, num_replicas=1, count=COUNT, seed=3):
    """The state before a step, and the step."""
    step = make_steps(num_replicas, count)[0]
    return pipeline.init(jax.random.key(seed), step[0]), step


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


@pytest.mark.thorough
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


def test_micro_batches_placed_once_and_data_that_end():
    """What is left of the data is dealt out anew, and nothing of it has been run."""
    pipeline = make(models.mlp_stages(2), 2, dispatch_plan=engine.Chunking(2))
    state, step = begun(pipeline, 2)
    placed = pipeline.place_micro_batches(step)
    first, _outputs = pipeline.step(state, step)
    second, _outputs = pipeline.step(state, placed)
    with pytest.raises(engine.OutOfRangeError, match="after 3 of the 4 micro-batches"):
        pipeline.step(state, step[:3])
    third, _outputs = pipeline.step(state, step)
    for again in (second, third):
        models.assert_trees_close(again.variables, first.variables, 0.0)


def test_another_number_later():
    """All replicas have the same variables."""
    pipeline = make(models.mlp_stages(2), 1, offload=["weights", "weight_update_variables"])
    data = make_steps(4)[0]
    state = pipeline.init(jax.random.key(3), data[0])
    expected = beside.copied(state)
    for num_replicas in (4, 2):
        pipeline.set_replicas(num_replicas)
        step = data[: COUNT * num_replicas]
        state, outputs = pipeline.step(state, step)
        expected, wanted = beside.step_plainly(pipeline, expected, step)
        models.assert_trees_close(outputs.losses, wanted.losses)
        models.assert_trees_close(state.variables, expected.variables)
        assert np.shape(outputs.losses[0]) == (num_replicas,)
        for variable in state.variables.values():
            assert len(variable.devices()) == num_replicas
            values = [np.asarray(shard.data) for shard in variable.addressable_shards]
            for value in values[1:]:
                np.testing.assert_array_equal(value, values[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": True}, "num_replicas must be an integer of at least 1"),
        (
            {"num_serialized": 2, "schedule": "sequential", "device_mapping": [0, 0]},
            "num_replicas must be 1 with num_serialized above 1",
        ),
        ({"shard": "weights"}, "shard must be a collection of names"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(models.mlp_stages(2), **{"num_replicas": 4, **options})


def test_too_few_devices():
    with pytest.raises(ValueError, match="needs 12 devices, .* of 3 replicas, but there are 8"):
        begun(make(models.mlp_stages(4), 3), 2)


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


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_replicas_that_compute_together(num_replicas):
    pipeline = make(together_stages(), num_replicas, optimizer=optax.sgd(0.1))
    state, step = begun(pipeline, num_replicas)
    variables = beside.copied(state).variables
    state, outputs = pipeline.step(state, step)
    differentiate = jax.jit(jax.grad(plain_together, has_aux=True))
    total = jax.tree.map(jnp.zeros_like, variables)
    for number in range(COUNT):
        own = step[number * num_replicas : (number + 1) * num_replicas]
        x, labels = (np.stack(part) for part in zip(*own, strict=True))
        grads, losses = differentiate(variables, x, labels)
        total = jax.tree.map(jnp.add, total, grads)
        actual = np.atleast_1d(np.asarray(outputs.losses[number]))
        models.assert_trees_close(actual, np.asarray(losses))
    after = {name: value - jnp.float32(0.1) / COUNT * total[name] for name, value in variables.items()}
    models.assert_trees_close(state.variables, after)


@jax.custom_vjp
def summing_gradients(x):
    return x


summing_gradients.defvjp(
    lambda x: (x, None), lambda _residual, gradient: (engine.cross_replica_sum(gradient),)
)


@pytest.mark.parametrize("mapping", [(0, 0), (0, 1)])
def test_a_derivative_alone_computes_with_other_replicas(mapping):
    stages = [lambda w, x: (summing_gradients(w * x), x), lambda _, y, x: jnp.sum(y) * jnp.sum(x)]
    options = {"num_micro_batches": 1, "optimizer": optax.sgd(1.0), "device_mapping": mapping}
    pipeline = make(stages, 2, parameters=[np.float32([1, 2]), ()], **options)
    batches = np.float32([[1, 2], [3, 5]])
    state = pipeline.init(jax.random.key(0), batches[0])
    (after,) = pipeline.step(state, list(batches))[0].variables.values()
    gradient = batches.sum() * batches.mean(axis=0)  # of y, from both replicas, and of w
    np.testing.assert_allclose(after, [1, 2] - gradient)
    with jax.disable_jit(), pytest.raises(RuntimeError, match="stages compute with other replicas"):
        pipeline.step(state, list(batches))


def test_replicas_are_known_in_stages_only():
    def stage(x, labels):
        return models.cross_entropy(models.dense("only", 10, x), labels)

    pipeline = make([stage], 2, optimizer=lambda loss: optax.sgd(engine.cross_replica_sum(loss)))
    with pytest.raises(RuntimeError, match="cross_replica_sum was called outside of a program"):
        begun(pipeline, 1)
    with pytest.raises(RuntimeError, match="replica_index"):
        engine.replica_index()


def test_what_replicas_share_out_and_what_stays_whole():
    pipeline = make(models.mlp_stages(1), 4, shard=["optimizer_state", "weights"])
    state, _step = begun(pipeline, 4)
    plan = engine.planning.plan_ipu_memory(pipeline)
    for tree, planned in (
        (state.variables, [ipu.num_variable_bytes for ipu in plan]),
        (state.optimizer_state, [ipu.num_optimizer_bytes for ipu in plan]),
    ):
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        assert held == sum(planned) < sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    kernel, bias = state.variables["dense3/kernel"], state.variables["dense3/bias"]
    assert kernel.addressable_shards[0].data.shape == (2, 10)
    assert bias.addressable_shards[0].data.shape == (10,)  # no multiple of four


@pytest.mark.parametrize("shard", ["optimizer_state", "weights"])
def test_one_of_the_two_is_shared_out(shard):
    state, _step = begun(make(models.mlp_stages(1), 2, shard=[shard]), 2)
    weight, moment = state.variables["dense0/kernel"], state.optimizer_state[0].mu["dense0/kernel"]
    parts = [array.addressable_shards[0].data.nbytes for array in (weight, moment)]
    whole = weight.nbytes
    assert parts == ([whole, whole // 2] if shard == "optimizer_state" else [whole // 2, whole])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"shard": ["weights"], "offload": ["weights"]}])
def test_replicas_op_by_op(options):
    """With random numbers and assigned variables, too."""
    pipeline = make(noisy_stages(), 2, **options)
    state, step = begun(pipeline, 2)
    expected, wanted = pipeline.step(state, step)
    with jax.disable_jit():
        found, outputs = pipeline.step(state, step)
    models.assert_trees_close(found.variables, expected.variables)
    models.assert_trees_close(outputs.losses, wanted.losses)
