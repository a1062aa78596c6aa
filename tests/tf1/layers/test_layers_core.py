import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from ipu_pipeline import engine, layers
from tests.support import layer_cases


def run(stage, x, training=False, num_micro_batches=1):
    """What a stage returns, and the variables; in a program that trains, with a variable for it."""
    if training:

        def trained(x):
            return stage(x), jnp.mean(engine.get_variable("extra", (2,)))

        pipeline = engine.Pipeline(
            [trained],
            num_micro_batches=num_micro_batches,
            loss=lambda y, extra: extra,
            optimizer=optax.sgd(0.1),
        )
    else:
        pipeline = engine.Pipeline([stage], num_micro_batches=num_micro_batches)
    state = pipeline.init(jax.random.key(0), x)
    _state, outputs = pipeline.step(state, [x] * num_micro_batches)
    values = [output[0] if training else output for output in outputs.outputs]
    return (values if num_micro_batches > 1 else values[0]), state.variables


def test_dense(rng):
    x = rng.normal(size=(2, 5, 3)).astype("float32")
    y, variables = run(layers.Dense(4, activation="tanh", bias_initializer="ones"), x)
    assert sorted(variables) == ["dense/bias", "dense/kernel"]
    np.testing.assert_allclose(y, np.tanh(x @ variables["dense/kernel"] + 1), rtol=1e-5)
    y, variables = run(layers.Dense(4, use_bias=False, name="projection"), x)
    assert list(variables) == ["projection/kernel"]
    np.testing.assert_allclose(y, x @ variables["projection/kernel"], rtol=1e-5, atol=1e-6)


def test_dense_in_bfloat16(rng):
    x = rng.normal(size=(2, 3)).astype("float32")
    y, variables = run(layers.Dense(4, dtype=jnp.bfloat16), x)
    assert y.dtype == variables["dense/kernel"].dtype == jnp.bfloat16


def test_a_layer_called_twice_shares_its_variables(rng):
    layer = layers.Dense(3)
    x = rng.normal(size=(2, 3)).astype("float32")
    y, variables = run(lambda x: layer(layer(x)), x)
    assert sorted(variables) == ["dense/bias", "dense/kernel"]
    kernel = variables["dense/kernel"]
    np.testing.assert_allclose(y, x @ kernel @ kernel, rtol=1e-5)
    again, _variables = run(lambda x: layer(layer(x)), x)  # in another program
    np.testing.assert_array_equal(again, y)


def test_flatten_and_activation(rng):
    x = rng.normal(size=(2, 3, 4)).astype("float32")
    y, variables = run(lambda x: layers.Activation("relu")(layers.Flatten()(x)), x)
    assert variables == {}
    np.testing.assert_array_equal(y, np.maximum(x.reshape(2, 12), 0))
    assert run(layers.Flatten(), np.zeros(3, "int32"))[0].shape == (3, 1)
    np.testing.assert_array_equal(run(layers.Activation(jnp.sin), x)[0], jnp.sin(x))


def test_dropout():
    x = np.ones((100, 100), "float32")
    np.testing.assert_array_equal(run(layers.Dropout(0.3), x)[0], x)  # not training
    (first, second), _variables = run(layers.Dropout(0.3), x, training=True, num_micro_batches=2)
    for mask in (first, second):
        kept = np.asarray(mask) > 0
        np.testing.assert_allclose(np.asarray(mask)[kept], 1 / 0.7, rtol=1e-6)
        assert abs(kept.mean() - 0.7) < 0.02
    assert not np.array_equal(first, second)
    off, _variables = run(lambda x: layers.Dropout(0.3)(x, training=False), x, training=True)
    np.testing.assert_array_equal(off, x)
    on, _variables = run(lambda x: layers.Dropout(0.3)(x, training=True), x)
    assert (np.asarray(on) == 0).any()
    rows, _variables = run(layers.Dropout(0.5, noise_shape=(None, 1)), x, training=True)
    assert set(np.asarray(rows).mean(axis=1)) == {0.0, 2.0}
    seeded, _variables = run(layers.Dropout(0.3, seed=1), x, training=True)
    assert not np.array_equal(seeded, first)
    np.testing.assert_array_equal(run(layers.Dropout(0), x, training=True)[0], x)


@pytest.mark.parametrize(
    ("make", "x", "error", "message"),
    [
        (lambda: layers.Dense(0), None, ValueError, "units must be a positive integer; got 0"),
        (lambda: layers.Dense(2, activation="rellu"), None, ValueError, "no activation 'rellu'"),
        (lambda: layers.Dense(2, kernel_initializer="x"), None, ValueError, "no initializer 'x'"),
        (lambda: layers.Dropout(1.0), None, ValueError, "rate must be at least 0 and below 1"),
        (
            lambda: layers.Dense(2, use_bias="no"),
            None,
            TypeError,
            "use_bias must be True or False",
        ),
        (
            lambda: layers.Conv2D(2, 3, use_bias=0),
            None,
            TypeError,
            "use_bias must be True or False",
        ),
        (lambda: layers.LayerNormalization(center=None), None, TypeError, "center must be True or False"),
        (
            lambda: layers.Dropout(0.5, seed="x"),
            None,
            TypeError,
            "seed must be an integer or None",
        ),
        (lambda: layers.Dropout(0.5, seed=True), None, TypeError, "seed must be an integer or None"),
        (
            lambda: layers.Dropout(0.5, seed=2**32),
            None,
            ValueError,
            "seed must have 32 bits",
        ),
        (lambda: layers.Dense(2), np.zeros((2, 3), "int32"), TypeError, "Dense dense needs floating-point"),
        (lambda: layers.Dense(2), np.zeros(3, "float32"), ValueError, "rank 2 or more"),
        (
            lambda: layers.Dense(2, dtype="int32"),
            None,
            ValueError,
            "Dense: dtype must be a floating-point one",
        ),
        (
            lambda: layers.Embedding(0, 2),
            None,
            ValueError,
            "Embedding: input_dim must be a positive integer",
        ),
        (
            lambda: layers.Embedding(2, 2.0),
            None,
            ValueError,
            "output_dim must be a positive integer; got 2.0",
        ),
        (
            lambda: layers.Embedding(2, 3, name="tokens"),
            np.zeros((2, 3), "float32"),
            TypeError,
            r"Embedding tokens needs integer inputs; got float32\[2, 3\]",
        ),
        (lambda: layers.Embedding(2, 3), np.zeros(2, "bool"), TypeError, "needs integer inputs; got bool"),
    ],
)
def test_wrong_layers(make, x, error, message):
    with pytest.raises(error, match=message):
        run(make(), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_equals_flax(rng, dtype):
    x = rng.normal(size=(2, 5, 3)).astype("float32").astype(dtype)
    module = linen.Dense(4, dtype=dtype)
    layer = layers.Dense(4, bias_initializer="normal", dtype=dtype)
    layer_cases.check(
        layer, x, lambda variables, x: module.apply({"params": variables}, x), layer_cases.tolerance(dtype)
    )


def test_outside_of_a_program():
    with pytest.raises(RuntimeError, match="Dense was called outside of a program"):
        layers.Dense(2)(np.zeros((2, 2), "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 2)])
@pytest.mark.each_value
def test_embedding_equals_flax(rng, shape, dtype):
    x = rng.integers(0, 7, shape).astype("int32")  # numbers that occur twice add their gradients
    module = linen.Embed(7, 5, dtype=dtype)

    def reference(variables, x):
        return module.apply({"params": {"embedding": variables["embeddings"]}}, x)

    outputs = layer_cases.check(
        layers.Embedding(7, 5, dtype=dtype), x, reference, layer_cases.tolerance(dtype)
    )
    assert outputs.shape == (*shape, 5)


def test_embeddings_start_uniform():
    _y, variables = run(layers.Embedding(100, 50), np.zeros(2, "int32"))
    assert list(variables) == ["embedding/embeddings"]
    values = np.asarray(variables["embedding/embeddings"])
    assert values.shape == (100, 50)
    assert -0.05 <= values.min() < -0.0499
    assert 0.0499 < values.max() < 0.05


@pytest.mark.parametrize("name", ["normal", "random_normal"])
def test_normal_initializers(name):
    _y, variables = run(layers.Embedding(100, 50, name), np.zeros(2, "int32"))
    assert abs(np.std(variables["embedding/embeddings"]) - 0.05) < 0.002


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "uint32"])
def test_numbers_without_a_row(dtype):
    """Negative ones count from the end; beyond that rows are NaN, without a gradient."""
    x = np.array([299, 300, 1, -1, -300, -301]).astype(dtype)
    layer = layers.Embedding(300, 2)
    outputs, variables, gradients = layer_cases.outputs_and_gradients(layer, x)
    table = variables["embeddings"]
    weights = layer_cases.loss_weights(outputs)
    expected_gradient = np.zeros_like(table)
    for number, row, weight in zip(x.tolist(), np.asarray(outputs), weights, strict=True):
        if -300 <= number < 300:
            np.testing.assert_array_equal(row, table[number])
            expected_gradient[number] += weight
        else:
            assert np.isnan(row).all()
    np.testing.assert_allclose(gradients["embeddings"], expected_gradient, rtol=1e-6)


# What is trained.

FROZEN = {
    "Dense": lambda **o: layers.Dense(4, **o),
    "Conv1D": lambda **o: layers.Conv1D(4, 2, **o),
    "BatchNormalization": layers.BatchNormalization,
    "LayerNormalization": layers.LayerNormalization,
    "GroupNormalization": lambda **o: layers.GroupNormalization(2, **o),
    "LSTM": lambda **o: layers.LSTM(4, return_sequences=True, **o),
    "GRU": lambda **o: layers.GRU(4, return_sequences=True, **o),
    "Flax": lambda **o: layers.Flax(linen.Dense(4), **o),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_layers_that_are_not_trained(kind):
    """Keras's and tf.layers' `trainable=False`: an optimizer leaves their variables alone."""
    found = {}
    for trainable in (True, False):

        def stage(x, trainable=trainable):
            x = FROZEN[kind](name="own", trainable=trainable)(x)
            return jnp.sum(layers.Dense(2, name="last")(x) ** 2)

        pipeline = engine.Pipeline(
            [stage], num_micro_batches=1, loss=lambda loss: loss, optimizer=optax.sgd(0.1)
        )
        x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
        state = pipeline.init(jax.random.key(1), x)
        before = jax.tree.map(np.asarray, state.variables)
        state, _outputs = pipeline.step(state, [x])
        after = state.variables
        found[trainable] = {
            name for name in before if not name.startswith("last") and np.any(before[name] != after[name])
        }
        assert np.any(before["last/kernel"] != after["last/kernel"])
        assert before.keys() == after.keys()
    moving = {name for name in found[True] if "moving" in name}
    assert found[True] - moving
    assert found[False] == moving


def test_trainable_must_be_a_boolean():
    with pytest.raises(TypeError, match="Dense: trainable must be True or False; got 'no'"):
        layers.Dense(4, trainable="no")
