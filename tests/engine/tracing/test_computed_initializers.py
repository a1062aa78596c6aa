"""Initial values that a stage computes, where arrays have no content yet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine.tracing.specs import initial_value
from tests.support import front

KEY = jax.random.key(3)


def value_of(function):
    """The initial value of the only variable that a stage asks for."""
    pipeline = engine.Pipeline([function], num_micro_batches=1)
    pipeline.trace(np.zeros((2, 3), "float32"))
    (spec,) = pipeline.variables.values()
    return np.asarray(initial_value(spec, jax.random.key(0)))


def asking(make_initializer, shape=(3,), dtype=None):
    return lambda x: x + engine.get_variable("v", shape, dtype, make_initializer()).astype(x.dtype)


def looped(stage):
    return lambda x: jax.lax.scan(lambda carry, _none: (stage(carry), None), x, None, length=2)[0]


ARRAYS = {
    "zeros": (lambda: jnp.zeros(3), [0, 0, 0]),
    "computed": (lambda: jnp.arange(3.0) * 2 + 1, [1, 3, 5]),
    "scalar": (lambda: jnp.float32(2), [2, 2, 2]),
    "list": (lambda: [jnp.float32(1), 2.0, jnp.sqrt(jnp.float32(9))], [1, 2, 3]),
    "jitted": (lambda: jax.jit(jnp.ones, static_argnums=0)(3), [1, 1, 1]),
    "drawn": (lambda: jax.random.normal(KEY, (3,)), jax.random.normal(KEY, (3,))),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name):
    make_initializer, expected = ARRAYS[name]
    np.testing.assert_array_equal(value_of(asking(make_initializer)), np.asarray(expected, "float32"))


@pytest.mark.parametrize("wrap", [jax.jit, looped, jax.checkpoint])
def test_within_functions_that_are_traced_by_themselves(wrap):
    np.testing.assert_array_equal(value_of(wrap(asking(lambda: jnp.arange(3.0)))), [0, 1, 2])


def test_shapes_and_dtypes():
    found = value_of(asking(lambda: jnp.arange(3), None))
    assert found.dtype == "int32"
    assert value_of(asking(lambda: jnp.arange(3.0), (3,), jnp.int32)).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"Variable v: the initializer is an array of shape \(2,\), but"):
        value_of(asking(lambda: jnp.zeros(2)))
    with pytest.raises(ValueError, match=r"Variable v: the initializer .* has values that int32 does not"):
        value_of(asking(lambda: jnp.float32(1.5), (3,), jnp.int32))


def add(offset, key, shape, dtype):
    return jax.random.normal(key, shape, dtype) + offset


FUNCTIONS = {
    "closure": lambda two: jax.nn.initializers.normal(two),
    "jitted": lambda two: jax.jit(jax.nn.initializers.normal(two), static_argnums=(1, 2)),
    "partial": lambda two: functools.partial(add, two),
    "nested": lambda two: lambda *given: jax.nn.initializers.normal(two)(*given) * jnp.float32(3),
    "default": lambda two: lambda key, shape, dtype, offset=two: add(offset, key, shape, dtype),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_were_made_with_computed_values(name):
    make = FUNCTIONS[name]
    expected = value_of(asking(lambda: make(np.float32(2))))
    found = value_of(asking(lambda: make(jnp.sqrt(jnp.float32(4)))))
    np.testing.assert_array_equal(found, expected)
    assert np.unique(found).size == 3


def test_a_variable_that_another_stage_reads_starts_once():
    def first(x):
        with engine.variable_scope("a"):
            return x * engine.get_variable("v", (3,), initializer=jnp.arange(3.0))

    def second(x):
        with engine.variable_scope("a", reuse=True):
            return x + engine.get_variable("v", initializer=jnp.zeros(3))

    pipeline = engine.Pipeline([first, second], num_micro_batches=1)
    state = pipeline.init(jax.random.key(0), np.zeros((2, 3), "float32"))
    np.testing.assert_array_equal(state.variables["a/v"], [0, 1, 2])


def differentiated(x):
    return jax.grad(lambda x: (x * engine.get_variable("v", (3,), initializer=x[0])).sum())(x)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (lambda x: asking(lambda: x[0])(x), "that depends on what"),
        (lambda x: asking(lambda: engine.get_variable("u", (3,)) + 1.0)(x), "that depends on what"),
        (asking(lambda: jax.random.normal(engine.next_rng_key(), (3,))), "that depends on what"),
        (lambda x: asking(lambda: lambda key, shape, dtype: x[0])(x), "that depends on what"),
        (differentiated, "depends on what the function that is transformed is given"),
    ],
)
def test_what_depends_on_the_inputs(stage, message):
    with pytest.raises(ValueError, match=f"Variable v: its initializer needs a value .*{message}"):
        value_of(stage)


def test_a_computed_value_that_cannot_be_found():
    class Hidden:
        def __init__(self, value):
            self.value = value

        def __call__(self, *_given):
            return self.value

    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        value_of(asking(lambda: Hidden(jnp.zeros(3))))
    assert "Compute it in the initializer, or outside" in "".join(caught.value.__notes__)


def test_in_a_program_of_the_front():
    def function(x):
        return x + ipu.get_variable("outside", (3,), initializer=jnp.arange(3.0))

    program = front.compile_program(function, [np.float32(1)])
    with ipu.Session() as session:
        np.testing.assert_array_equal(session.run(program), [[1, 2, 3]])
