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

    def stage(x):
        return (
            layers.Dense(4, activation="tanh", bias_initializer="ones")(x),
            layers.Dense(4, use_bias=False, name="projection")(x),
            layers.Dense(4, dtype=jnp.bfloat16, name="half")(x),
        )

    (biased, projected, half), variables = run(stage, x)
    assert list(variables) == [
        *["dense/kernel", "dense/bias", "projection/kernel"],
        *["half/kernel", "half/bias"],
    ]
    np.testing.assert_allclose(biased, np.tanh(x @ variables["dense/kernel"] + 1), rtol=1e-5)
    np.testing.assert_allclose(projected, x @ variables["projection/kernel"], rtol=1e-5, atol=1e-6)
    assert half.dtype == variables["half/kernel"].dtype == jnp.bfloat16


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

    def stage(x):
        flat = layers.Activation("relu")(layers.Flatten()(x))
        return flat, layers.Flatten()(x[:, 0, 0]), layers.Activation(jnp.sin)(x)

    (flat, column, sines), variables = run(stage, x)
    assert variables == {}
    np.testing.assert_array_equal(flat, np.maximum(x.reshape(2, 12), 0))
    assert column.shape == (2, 1)
    np.testing.assert_array_equal(sines, jnp.sin(x))


def test_dropout():
    x = np.ones((100, 100), "float32")

    def stage(x):
        return {
            "plain": layers.Dropout(0.3)(x),
            "off": layers.Dropout(0.3)(x, training=False),
            "on": layers.Dropout(0.3)(x, training=True),
            "rows": layers.Dropout(0.5, noise_shape=(None, 1))(x),
            "none": layers.Dropout(0)(x),
        }

    found, _variables = run(stage, x)  # not training
    assert {name for name, value in found.items() if (np.asarray(value) == 0).any()} == {"on"}
    np.testing.assert_array_equal(found["plain"], x)
    (first, second), _variables = run(stage, x, training=True, num_micro_batches=2)
    for mask in (first["plain"], second["plain"]):
        kept = np.asarray(mask) > 0
        np.testing.assert_allclose(np.asarray(mask)[kept], 1 / 0.7, rtol=1e-6)
        assert abs(kept.mean() - 0.7) < 0.02
    assert not np.array_equal(first["plain"], second["plain"])
    np.testing.assert_array_equal(first["off"], x)
    np.testing.assert_array_equal(first["none"], x)
    assert set(np.asarray(first["rows"]).mean(axis=1)) == {0.0, 2.0}
    seeded, _variables = run(layers.Dropout(0.3, seed=1), x, training=True)
    assert not np.array_equal(seeded, first["plain"])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: layers.Dense(0), ValueError, "units must be a positive integer; got 0"),
        (lambda: layers.Dense(2, activation="rellu"), ValueError, "no activation 'rellu'"),
        (lambda: layers.Dense(2, kernel_initializer="x"), ValueError, "no initializer 'x'"),
        (lambda: layers.Dense(2, use_bias="no"), TypeError, "use_bias must be True or False"),
        (lambda: layers.Dense(2, dtype="int32"), ValueError, "Dense: dtype must be a floating-point one"),
        (lambda: layers.Dense(4, trainable="no"), TypeError, "trainable must be True or False; got 'no'"),
        (lambda: layers.Conv2D(2, 3, use_bias=0), TypeError, "use_bias must be True or False"),
        (lambda: layers.LayerNormalization(center=None), TypeError, "center must be True or False"),
        (lambda: layers.Dropout(1.0), ValueError, "rate must be at least 0 and below 1"),
        (lambda: layers.Dropout(0.5, seed="x"), TypeError, "seed must be an integer or None"),
        (lambda: layers.Dropout(0.5, seed=True), TypeError, "seed must be an integer or None"),
        (lambda: layers.Dropout(0.5, seed=2**32), ValueError, "seed must have 32 bits"),
        (lambda: layers.Embedding(0, 2), ValueError, "Embedding: input_dim must be a positive integer"),
        (lambda: layers.Embedding(2, 2.0), ValueError, "output_dim must be a positive integer; got 2.0"),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("layer", "x", "error", "message"),
    [
        (layers.Dense(2), np.zeros((2, 3), "int32"), TypeError, "Dense dense needs floating-point"),
        (layers.Dense(2), np.zeros(3, "float32"), ValueError, "rank 2 or more"),
        (
            layers.Embedding(2, 3, name="tokens"),
            np.zeros((2, 3), "float32"),
            TypeError,
            r"Embedding tokens needs integer inputs; got float32\[2, 3\]",
        ),
        (layers.Embedding(2, 3), np.zeros(2, "bool"), TypeError, "needs integer inputs; got bool"),
    ],
)
def test_wrong_inputs(layer, x, error, message):
    with pytest.raises(error, match=message):
        run(layer, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_and_embedding_equal_flax(rng, dtype):
    module, table = linen.Dense(4, dtype=dtype), linen.Embed(7, 5, dtype=dtype)
    tolerance = layer_cases.tolerance(dtype)
    dense = layer_cases.Case(
        layers.Dense(4, bias_initializer="normal", dtype=dtype),
        rng.normal(size=(2, 5, 3)).astype("float32").astype(dtype),
        lambda variables, x: module.apply({"params": variables}, x),
        tolerance,
    )
    embeddings = [
        layer_cases.Case(
            layers.Embedding(7, 5, dtype=dtype),
            rng.integers(0, 7, shape).astype("int32"),  # numbers that occur twice add their gradients
            lambda variables, x: table.apply({"params": {"embedding": variables["embeddings"]}}, x),
            tolerance,
        )
        for shape in [(4,), (2, 3), (2, 3, 2)]
    ]
    _dense, *outputs = layer_cases.check_all([dense, *embeddings])
    assert [y.shape for y in outputs] == [(4, 5), (2, 3, 5), (2, 3, 2, 5)]


def test_outside_of_a_program():
    with pytest.raises(RuntimeError, match="Dense was called outside of a program"):
        layers.Dense(2)(np.zeros((2, 2), "float32"))


def test_initial_values_of_embeddings():
    def stage(x):
        for name in ("uniform", "normal", "random_normal"):
            yield layers.Embedding(100, 50, name, name=name)(x)
        yield layers.Embedding(100, 50)(x)

    _y, variables = run(lambda x: tuple(stage(x)), np.zeros(2, "int32"))
    values = {name: np.asarray(value) for name, value in variables.items()}
    for name in ("uniform/embeddings", "embedding/embeddings"):
        assert values[name].shape == (100, 50)
        assert -0.05 <= values[name].min() < -0.0499
        assert 0.0499 < values[name].max() < 0.05
    for name in ("normal/embeddings", "random_normal/embeddings"):
        assert abs(np.std(values[name]) - 0.05) < 0.002


def test_numbers_without_a_row():
    """Negative ones count from the end; beyond that rows are NaN, without a gradient."""
    numbers = np.array([299, 300, 1, -1, -300, -301])
    xs = [numbers.astype(dtype) for dtype in ("int32", "int8", "uint8", "uint32")]
    found = layer_cases.run_cases([layer_cases.Case(layers.Embedding(300, 2), x) for x in xs])
    for x, (outputs, variables, gradients) in zip(xs, found, strict=True):
        table = variables["embeddings"]
        weights = layer_cases.loss_weights(outputs)
        expected_gradient = np.zeros_like(table)
        for number, row, weight in zip(x.tolist(), outputs, weights, strict=True):
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


def test_layers_that_are_not_trained():
    """Keras's and tf.layers' `trainable=False`: an optimizer leaves their variables alone."""

    def stage(x):
        total = 0.0
        for kind, make in FROZEN.items():
            y = make(name=f"own/{kind}", trainable=False)(x)
            total += jnp.sum(layers.Dense(2, name=f"last/{kind}")(y) ** 2)
        return total + jnp.sum(layers.BatchNormalization(name="trained")(x) ** 2)

    pipeline = engine.Pipeline(
        [stage], num_micro_batches=1, loss=lambda loss: loss, optimizer=optax.sgd(0.1)
    )
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    state = pipeline.init(jax.random.key(1), x)
    before = jax.tree.map(np.asarray, state.variables)
    state, _outputs = pipeline.step(state, [x])
    changed = {name for name in before if np.any(before[name] != state.variables[name])}
    moving = {f"moving_{name}" for name in ("mean", "variance")}
    assert changed == {
        *[name for kind in FROZEN for name in (f"last/{kind}/kernel", f"last/{kind}/bias")],
        *[f"{norm}/{name}" for norm in ("own/BatchNormalization", "trained") for name in moving],
        *["trained/gamma", "trained/beta"],
    }
