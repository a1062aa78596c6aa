import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine, layers


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
        (lambda: layers.Dense(2), np.zeros((2, 3), "int32"), TypeError, "Dense dense needs floating-point"),
        (lambda: layers.Dense(2), np.zeros(3, "float32"), ValueError, "rank 2 or more"),
    ],
)
def test_wrong_layers(make, x, error, message):
    with pytest.raises(error, match=message):
        run(make(), x)


def test_outside_of_a_program():
    with pytest.raises(RuntimeError, match="Dense was called outside of a program"):
        layers.Dense(2)(np.zeros((2, 2), "float32"))
