"""Models and comparisons that several tests use."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from ipu_pipeline import engine, layers
from ipu_pipeline.engine.execution.contract import Request

SIZES = (16, 16, 8, 10)  # outputs of the dense layers


def dense(name, size, x, activation=jax.nn.relu):
    with engine.variable_scope(name):
        kernel = engine.get_variable("kernel", (x.shape[-1], size))
        bias = engine.get_variable("bias", (size,), initializer=jax.nn.initializers.normal(0.1))
    return activation(x @ kernel + bias)


def layer(index):
    activation = (lambda x: x) if index == len(SIZES) - 1 else jax.nn.relu
    return lambda x: dense(f"dense{index}", SIZES[index], x, activation)


def cross_entropy(logits, labels):
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def mlp_stages(num_stages):
    """Four dense layers and the loss in 1..4 stages. They take (x, labels); the last returns the loss."""
    groups = np.array_split(np.arange(len(SIZES)), num_stages)

    def make(group, is_last):
        def stage(x, labels):
            for index in group:
                x = layer(index)(x)
            return cross_entropy(x, labels) if is_last else (x, labels)

        return stage

    return [make(group, group is groups[-1]) for group in groups]


def mlp_batches(rng, num_micro_batches, size=4, dtype="float32"):
    return [
        (rng.normal(size=(size, 12)).astype(dtype), rng.integers(0, 10, size).astype("int32"))
        for _ in range(num_micro_batches)
    ]


# Four stages that have what stages may have: statistics, random numbers, a count, a variable of two of
# them, values that skip stages, marks. They take a scale, an input of the step, and an element (x, labels).

WIDTH, NUM_CLASSES = 8, 6


def weight(name, x, reuse=False, size=WIDTH):
    with engine.variable_scope(name, reuse=reuse):
        return engine.get_variable("kernel", (x.shape[-1], size), x.dtype)


def first_stage(scale, x, labels):
    h = jnp.tanh(x @ weight("first", x))
    h = layers.BatchNormalization(name="norm", dtype=h.dtype, momentum=0.8, epsilon=0.01)(h)
    return scale, h, x, labels, labels % 2 == 0


def second_stage(scale, h, x, labels, is_even):
    h = layers.Dropout(0.25, name="dropout")(h)
    before = jnp.tanh(h @ weight("shared", h) * scale)
    h, _unused = engine.recomputation_checkpoint((before, {"unused": labels}))
    h = engine.recomputation_checkpoint(jnp.sin(h) + before)  # used on both sides of the first mark
    h = jax.checkpoint(lambda h: jnp.tanh(h @ weight("second", h)))(h)
    count = engine.get_variable("count", (), "int32", trainable=False)
    engine.assign("count", count + 1)
    return scale, h * (1 + 0.02 * count.astype(h.dtype)), x, labels, is_even


def third_stage(scale, h, x, labels, is_even):
    h = jnp.sin(h @ weight("third", h))
    h = engine.constrain(h, PartitionSpec(None, "model")) + x
    return scale, jnp.where(is_even[:, None], h, jnp.sin(h)), labels, is_even


def last_stage(scale, h, labels, is_even):
    h = jnp.tanh(h @ weight("shared", h, reuse=True))
    logits = h @ weight("last", h, size=NUM_CLASSES)
    loss = cross_entropy(logits, labels)
    return {"loss": loss, "logits": logits, "scale": scale, "labels": labels, "even": is_even.sum()}


VARIOUS_STAGES = (first_stage, second_stage, third_stage, last_stage)


def various_batches(rng, num_micro_batches, size=4, dtype="float32"):
    return [
        (rng.normal(size=(size, WIDTH)).astype(dtype), rng.integers(0, NUM_CLASSES, size).astype("int32"))
        for _ in range(num_micro_batches)
    ]


def showing_gradients():
    """Adam with a trace without decay before it: the gradient that the optimizer was given."""
    return optax.chain(optax.trace(decay=0.0), optax.adam(0.01, eps=1e-2))


def elements_of(number, seed=0):
    return mlp_batches(np.random.default_rng(seed), number)


def as_float32(tree):
    return jax.tree.map(lambda leaf: leaf.astype("float32"), tree)


def assert_values_close(found, expected):
    """As `assert_trees_close`, of arrays by name, whatever their dtypes are."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert np.linalg.norm(value - expected[name]) <= 1e-5 * np.linalg.norm(expected[name]), name


def assert_trees_close(actual, expected, tolerance=1e-5):
    """Per leaf, the 2-norm of the difference at most `tolerance` of the reference's; same structure."""
    actual_leaves, actual_tree = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    assert actual_tree == expected_tree, (actual_tree, expected_tree)
    for (path, value), (_path, reference) in zip(actual_leaves, expected_leaves, strict=True):
        value, reference = np.asarray(value), np.asarray(reference)
        assert value.shape == reference.shape, path
        assert value.dtype == reference.dtype, path
        if not jnp.issubdtype(reference.dtype, jnp.floating):
            np.testing.assert_array_equal(value, reference)
            continue
        difference = np.linalg.norm((value - reference).astype(np.float64))
        bound = tolerance * np.linalg.norm(reference.astype(np.float64))
        assert difference <= bound, f"{jax.tree_util.keystr(path)}: {difference} > {bound}"


def on_one_device(tree):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.devices()[0]), tree)


def run_loop(loop, state, elements, iteration=0):
    """A state after iterations of a loop without carried values, on its devices."""
    runner = loop.prepare(jax.devices())
    taken = iter([runner.place_element(element) for element in elements])
    for number in range(len(elements)):
        request = Request([], loop.updated_every(), limit=1, total=1, iteration=iteration + number)
        pending = runner.fetch(state, request, lambda _wanted: [next(taken)])
        state = runner.run(state, pending).state
    return state


def plain_loop(loss_of, variables, groups, every, transformation, reduction="SUM"):
    """Weight updates of a plain loop of jax.grad, on the means over what replicas take at the same time.

    Args:
      loss_of: takes the variables and an element.
      variables: before.
      groups: for each iteration, the element of each replica.
      every: iterations per weight update.
      transformation: Optax's.
      reduction: "SUM", or else the gradients are divided by `every`.

    Returns:
      Losses, [iterations, replicas], or lists of them where the number of replicas changes; the variables
      after; the gradients of the update that is not complete.
    """
    state, losses, gradients = transformation.init(variables), [], []
    gradient_of = jax.jit(jax.value_and_grad(loss_of))
    for group in groups:
        found = [gradient_of(variables, *element) for element in group]
        losses.append([loss for loss, _gradient in found])
        gradients.append(jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *(g for _l, g in found)))
        if len(gradients) == every:
            total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *gradients)
            if reduction != "SUM":
                total = jax.tree.map(lambda leaf: leaf / every, total)
            with jax.numpy_dtype_promotion("standard"):
                changes, state = transformation.update(total, state, variables)
                variables = optax.apply_updates(variables, changes)
            gradients = []
    is_even = len({len(row) for row in losses}) == 1
    return np.array(losses) if is_even else losses, variables, gradients
