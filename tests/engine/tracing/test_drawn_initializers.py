"""Initial values without a program for each shape: the same to the last bit, from the same few programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import initializers as jax_initializers

from ipu_pipeline import engine
from ipu_pipeline.engine.tracing import initializers
from ipu_pipeline.engine.tracing.initializers import find_initializer
from tests.support.compilations import compilations

KEY = jax.random.key(7)
DRAWN = {
    "glorot_uniform": find_initializer("glorot_uniform"),
    "normal": jax_initializers.normal(0.02),
    "uniform": find_initializer("uniform"),
    "constant": jax_initializers.constant(0.3),
    "zeros": jax_initializers.zeros,
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in DRAWN), ("uniform", "bfloat16")]
)
def test_values_are_those_of_the_initializer(name, dtype):
    for shape in (3, 3, 4, 8), (150, 200):
        made = initializers.draw(DRAWN[name], KEY, shape, jnp.dtype(dtype))
        expected = np.asarray(DRAWN[name](KEY, shape, jnp.dtype(dtype)))
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
        assert made.tobytes() == expected.tobytes()
        assert made.flags.writeable  # nobody else has it


def test_values_where_jax_has_64_bits():
    with jax.enable_x64(True):
        made = initializers.draw(jax_initializers.normal(), KEY, (5, 6), jnp.dtype("float64"))
        assert made.tobytes() == np.asarray(jax_initializers.normal()(KEY, (5, 6), "float64")).tobytes()


def test_pieces_join(monkeypatch):
    monkeypatch.setattr(initializers, "_SIZES", (16, 64))
    initializer = jax_initializers.truncated_normal(0.1)
    made = initializers.draw(initializer, KEY, (31, 11), jnp.dtype("float32"))
    assert made.tobytes() == np.asarray(initializer(KEY, (31, 11), jnp.float32)).tobytes()


def test_other_shapes_compile_nothing():
    initializers.draw(jax_initializers.he_normal(), KEY, (3, 4), jnp.dtype("float32"))
    with compilations() as found:
        for shape in (5, 6), (2, 3, 4), (9, 1):
            initializers.draw(jax_initializers.he_normal(), KEY, shape, jnp.dtype("float32"))
        initializers.draw(jax_initializers.lecun_normal(), KEY, (8, 8), jnp.dtype("float32"))
    assert found == []


@pytest.mark.parametrize(
    ("initializer", "key"),
    [
        (lambda key, shape, dtype: jax.random.normal(key, shape, dtype), KEY),
        (jax_initializers.orthogonal(), KEY),
        (jax_initializers.delta_orthogonal(), KEY),
        (jax_initializers.normal(), jax.random.key(0, impl="rbg")),
        (jax_initializers.normal(), jax.random.key(0, impl="unsafe_rbg")),
    ],
    ids=["own", "orthogonal", "delta", "rbg", "unsafe_rbg"],
)
def test_other_initializers_and_kinds_of_keys_are_left_to_jax(initializer, key):
    assert initializers.draw(initializer, key, (3, 3, 4, 8), jnp.dtype("float32")) is None


def test_wrong_arguments_are_left_to_the_initializer():
    def stage(x):
        return x + engine.get_variable("w", (3,), initializer=jax_initializers.lecun_normal())

    pipeline = engine.Pipeline([stage], num_micro_batches=1)
    with pytest.raises(ValueError, match="Must be at least 2D.*\n.*initial value of variable w"):
        pipeline.init(KEY, jnp.ones(3))
