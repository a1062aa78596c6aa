"""Keys of jaxprs: equal for equal equations of other variables, and different for others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline.engine.jaxprs.equality import identify

X = jnp.ones((4, 4))


def key(function, *arguments):
    """Of a function that is traced anew."""
    return identify(jax.make_jaxpr(lambda *values: function(*values))(*(arguments or (X, X))))


def loop(length=3, constant=1.0):
    def body(carry, _element):
        return carry * constant, carry

    return lambda x, y: jax.lax.scan(body, x @ y, length=length)


def block(x, y):
    return jax.grad(lambda x: (jax.nn.softmax(jax.nn.relu(x @ y)) * np.arange(4.0)).sum())(x)


def vectorized(x, y):
    @jax.custom_batching.custom_vmap
    def function(x):
        return x @ y

    function.def_vmap(lambda size, are_batched, x: (function(x), True))
    return function(x)


@pytest.mark.parametrize(
    "function",
    [
        vectorized,
        block,
        loop(),
        loop(constant=np.float32("nan")),
        lambda x, y: jax.random.fold_in(jax.random.key(1), 2),
    ],
    ids=["rule for vmap", "derivative", "loop", "nan", "random key"],
)
def test_traced_twice(function):
    assert key(function) == key(function)
    assert hash(key(function)) == hash(key(function))


DIFFERENT = {
    "operands": (lambda x, y: x - y, lambda x, y: y - x),
    "operations": (lambda x, y: x - y, lambda x, y: x + y),
    "literals": (lambda x, y: x * 2.0, lambda x, y: x * 3.0),
    "signs of zero": (lambda x, y: x * 0.0, lambda x, y: x * -0.0),
    "literals' dtypes": (lambda x, y: (x, 1), lambda x, y: (x, 1.0)),
    "results": (lambda x, y: (x, y), lambda x, y: (y, x)),
    "number of results": (lambda x, y: x + y, lambda x, y: (x + y, x)),
    "read values": (lambda x, y: (x + 1) * (y + 2) * (x + 1), lambda x, y: (x + 1) * (y + 2) * (y + 2)),
    "zeros in parameters": tuple(
        lambda x, y, fill=fill: x.at[5].get(mode="fill", fill_value=fill) for fill in (0.0, -0.0)
    ),
    "parameters": (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
    "precisions": (jnp.matmul, lambda x, y: jnp.matmul(x, y, precision="highest")),
    "constants": (lambda x, y: x + np.eye(4), lambda x, y: x + np.ones((4, 4))),
    "arrays of JAX": (lambda x, y: x + jnp.eye(4)[0], lambda x, y: x + X),
    "numbers of turns": (loop(3), loop(4)),
    "inner literals": (loop(3), loop(3, 2.0)),
}


@pytest.mark.parametrize(("first", "second"), DIFFERENT.values(), ids=DIFFERENT)
def test_different(first, second):
    assert key(first) == key(first)
    assert key(first) != key(second)


def test_shapes_and_dtypes():
    def double(x):
        return x * 2

    assert key(double, X) != key(double, X[:3])
    assert key(double, X) != key(double, X.astype(jnp.bfloat16))
    assert key(double, X[0, 0]) != key(double, 1.0)  # weakly typed


def test_constants_are_equal_by_value():
    first, second = np.eye(4), np.eye(4)
    assert key(lambda x, y: x + first) == key(lambda x, y: x + second)
    assert key(lambda x, y: x + jnp.asarray(first)) == key(lambda x, y: x + jnp.asarray(second))


def test_functions_of_python_cannot_be_compared():
    def call(x, y):
        return jax.pure_callback(lambda z: z, x, x)

    assert key(call) != key(call)


def test_rules_of_transformations_do_not_count():
    def cube(factor):
        @jax.custom_vjp
        def function(x, y):
            return x**factor + y

        function.defvjp(lambda x, y: (function(x, y), None), lambda _saved, g: (g, g))
        return function

    assert key(cube(3)) == key(cube(3))
    assert key(cube(3)) != key(cube(2))
