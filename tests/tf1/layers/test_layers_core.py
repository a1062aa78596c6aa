import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from ipu_pipeline import engine, layers
from tests.support import layer_cases


def run(stage, x, training=False, num_micro_batches=1):
    """What a stage returns for each micro-batch, and the variables; in training, with a variable for it."""

    def with_loss(x):
        return stage(x), jnp.mean(engine.get_variable("extra", (2,))) if training else None

    options = {"loss": lambda _y, extra: extra, "optimizer": optax.sgd(0.1)} if training else {}
    pipeline = engine.Pipeline([with_loss], num_micro_batches=num_micro_batches, **options)
    state = pipeline.init(jax.random.key(0), x)
    _state, outputs = pipeline.step(state, [x] * num_micro_batches)
    return [values for values, _loss in outputs.outputs], state.variables


def test_dense_flatten_and_activation(rng):
    """A layer that is called twice shares its variables."""
    x = rng.normal(size=(2, 3, 3)).astype("float32")
    twice = layers.Dense(3, name="twice")

    def stage(x):
        return (
            layers.Dense(4, activation="tanh", bias_initializer="ones")(x),
            layers.Dense(4, use_bias=False, name="projection")(x),
            layers.Dense(4, dtype=jnp.bfloat16, name="half")(x),
            twice(twice(x)),
            layers.Activation("relu")(layers.Flatten()(x)),
            layers.Flatten()(x[:, 0, 0]),
            layers.Activation(jnp.sin)(x),
        )

    ((biased, projected, half, y, flat, column, sines),), variables = run(stage, x)
    names = {f"{layer}/{name}" for layer in ("dense", "half", "twice") for name in ("kernel", "bias")}
    assert {*variables} == names | {"projection/kernel"}
    np.testing.assert_allclose(biased, np.tanh(x @ variables["dense/kernel"] + 1), rtol=1e-5)
    np.testing.assert_allclose(projected, x @ variables["projection/kernel"], rtol=1e-5, atol=1e-6)
    assert half.dtype == variables["half/kernel"].dtype == jnp.bfloat16
    kernel = variables["twice/kernel"]
    np.testing.assert_allclose(y, x @ kernel @ kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(flat, np.maximum(x.reshape(2, 9), 0))
    assert column.shape == (2, 1)
    np.testing.assert_allclose(sines, np.sin(x), rtol=1e-6)


def test_dropout():
    x = np.ones((100, 100), "float32")

    def stage(x):
        return {
            "plain": layers.Dropout(0.3)(x),
            "off": layers.Dropout(0.3)(x, training=False),
            "rows": layers.Dropout(0.5, noise_shape=(None, 1))(x),
            "none": layers.Dropout(0)(x),
            "seeded": layers.Dropout(0.3, seed=1)(x),
        }

    twice = lambda x: (layers.Dropout(0.3)(x), layers.Dropout(0.3)(x, training=True))  # noqa: E731
    ((not_training, dropped),), _variables = run(twice, x)
    np.testing.assert_array_equal(not_training, x)
    assert (np.asarray(dropped) == 0).any()
    (first, second), _variables = run(stage, x, training=True, num_micro_batches=2)
    for mask in (first["plain"], second["plain"]):
        kept = np.asarray(mask) > 0
        np.testing.assert_allclose(np.asarray(mask)[kept], 1 / 0.7, rtol=1e-6)
        assert abs(kept.mean() - 0.7) < 0.02
    assert not np.array_equal(first["plain"], second["plain"])
    np.testing.assert_array_equal(first["off"], x)
    np.testing.assert_array_equal(first["none"], x)
    assert set(np.asarray(first["rows"]).mean(axis=1)) == {0.0, 2.0}
    assert not np.array_equal(first["seeded"], first["plain"])


def test_dense_and_embedding_equal_flax(rng):
    module, table = linen.Dense(4, dtype="bfloat16"), linen.Embed(7, 5)
    layer = layers.Dense(4, bias_initializer="normal", dtype="bfloat16")
    x = rng.normal(size=(2, 5, 3)).astype("float32").astype("bfloat16")
    numbers = rng.integers(0, 7, (2, 3, 2)).astype("int32")  # which add their gradients if they occur twice

    def apply(variables, x):
        return module.apply({"params": variables}, x)

    def look_up(variables, x):
        return table.apply({"params": {"embedding": variables["embeddings"]}}, x)

    dense = layer_cases.Case(layer, x, apply, layer_cases.tolerance("bfloat16"))
    outputs = layer_cases.check_all([dense, layer_cases.Case(layers.Embedding(7, 5), numbers, look_up)])
    assert outputs[1].shape == (2, 3, 2, 5)


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
    """Their rows are NaN, without a gradient; -1 is not the last row, as it would be in NumPy."""
    numbers = np.array([299, 300, 1, -1, -300, -301])
    xs = [numbers.astype(dtype) for dtype in ("int32", "int8", "uint32")]
    found = layer_cases.run_cases([layer_cases.Case(layers.Embedding(300, 2), x) for x in xs])
    for x, (outputs, variables, gradients) in zip(xs, found, strict=True):
        table = variables["embeddings"]
        weights = layer_cases.loss_weights(outputs)
        expected_gradient = np.zeros_like(table)
        for number, row, weight in zip(x.tolist(), outputs, weights, strict=True):
            if 0 <= number < 300:
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
    """Keras's and tf.layers' `trainable=False`; statistics move all the same."""

    def stage(x):
        for kind, make in FROZEN.items():
            make(name=f"own/{kind}", trainable=False)(x)
        return jnp.sum(layers.BatchNormalization(name="trained")(x))

    pipeline = engine.Pipeline([stage], num_micro_batches=1)
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    pipeline.trace(x)
    trained = {name for name, spec in pipeline.variables.items() if spec.trainable}
    assert trained == {"trained/gamma", "trained/beta"}
    assert {name.split("/")[1] for name in pipeline.variables if name.startswith("own/")} == set(FROZEN)
    norm = layers.BatchNormalization(trainable=False)
    pipeline = engine.Pipeline([lambda x: norm(x, training=True)], num_micro_batches=1)
    state = pipeline.init(jax.random.key(1), x)
    mean = np.asarray(state.variables["batch_normalization/moving_mean"])
    state, _outputs = pipeline.step(state, [x])
    assert np.all(mean != state.variables["batch_normalization/moving_mean"])
