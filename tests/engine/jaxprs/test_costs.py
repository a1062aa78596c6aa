"""Operations counted by hand, and what is not counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.extend import core as jex_core

from ipu_pipeline.engine.jaxprs.costs import count_operations, find_uncounted

X, W = jnp.zeros((3, 4)), jnp.zeros((4, 4))
DOT = 2 * 3 * 4 * 4
TANH = 10 * 3 * 4


def count(function, *arguments):
    return count_operations(jax.make_jaxpr(function)(*arguments).jaxpr)


def in_layers(x, kernels):
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)


def in_a_loop(x, w):
    return jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)


def with_own_jvp(function):
    decorated = jax.custom_jvp(function)
    decorated.defjvps(None)
    return decorated


def with_own_vjp(function):
    decorated = jax.custom_vjp(function)
    decorated.defvjp(lambda x: (function(x), None), lambda kept, g: (g,))
    return decorated


CALLS = [jax.jit, jax.checkpoint, with_own_jvp, with_own_vjp]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x: x, [(3, 4)], 0),
        (lambda x, w: x @ w, [(3, 4), (4, 4)], DOT),
        (lambda x, w: jnp.tanh(x @ w), [(3, 4), (4, 4)], DOT + TANH),
        (jax.lax.batch_matmul, [(7, 3, 4), (7, 4, 5)], 2 * 7 * 3 * 5 * 4),
        (in_layers, [(3, 4), (10, 4, 4)], 10 * (DOT + TANH)),
        (in_a_loop, [(3, 4), (4, 4)], DOT),  # its body, once
        *((call(lambda x: x @ W), [(3, 4)], DOT) for call in CALLS),
    ],
)
def test_operations(function, shapes, expected):
    assert count(function, *map(jnp.zeros, shapes)) == expected


@pytest.mark.parametrize(("groups", "summed"), [(1, 3 * 3 * 6), (2, 3 * 3 * 3)])
def test_convolutions(groups, summed):
    layouts = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    images, kernel = jnp.zeros((5, 8, 8, 6)), jnp.zeros((3, 3, 6 // groups, 16))
    found = count(
        lambda *given: jax.lax.conv_general_dilated(*given, (2, 2), "SAME", **layouts), images, kernel
    )
    assert found == 2 * (5 * 4 * 4 * 16) * summed


def test_of_branches_the_longest_counts():
    def branch(which, x, w):
        return jax.lax.cond(which, lambda x: jnp.tanh(x @ w), lambda x: x + 1, x)

    jaxpr = jax.make_jaxpr(branch)(True, X, W).jaxpr
    scalars = 10 * (len(jaxpr.eqns) - 1)  # that make the index of the branch
    assert count_operations(jaxpr) == DOT + TANH + scalars


# What is not counted.


def foreign(x):
    return jax.ffi.ffi_call("foreign", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def called_back(x):
    return jax.pure_callback(np.sin, x, x)


def double_kernel(source, target):
    target[...] = 2 * source[...]


def in_pallas(x):
    return pallas.pallas_call(double_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


somebodys_p = jex_core.Primitive("somebodys")
somebodys_p.def_abstract_eval(lambda x: x)


@jax.custom_vjp
def with_foreign_derivatives(x):
    return jnp.sin(x)


with_foreign_derivatives.defvjp(lambda x: (jnp.sin(x), x), lambda kept, g: (foreign(g),))


def uncounted(function, *arguments):
    return find_uncounted(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (foreign, {"ffi_call(foreign)"}),
        (called_back, {"pure_callback"}),
        (in_pallas, {"pallas_call"}),
        (lambda x: somebodys_p.bind(x) + called_back(x), {"somebodys", "pure_callback"}),
        (jnp.linalg.cholesky, {"cholesky"}),
        (jax.grad(lambda x: jnp.sum(with_foreign_derivatives(x))), {"ffi_call(foreign)"}),
    ],
)
def test_foreign_functions_are_named(function, names):
    x = jnp.ones((4, 4))
    assert uncounted(function, x) == names


@pytest.mark.parametrize(
    "wrap",
    [
        *CALLS,
        lambda f: lambda x: jax.lax.scan(lambda c, _: (jax.jit(f)(c), None), x, None, length=3),
        lambda f: lambda x: jax.lax.while_loop(lambda c: c[0] < 1, f, x),
        lambda f: lambda x: jax.lax.while_loop(lambda c: f(c)[0] < 1, lambda c: c, x),
        lambda f: lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jax.checkpoint(f), x),
        lambda f: lambda x: jax.lax.switch(0, [jnp.cos, jnp.sin, f], x),
        lambda f: lambda x: jax.lax.platform_dependent(x, cpu=f, default=jnp.sin),
        lambda f: lambda x: jax.lax.custom_linear_solve(f, x, lambda matvec, b: b),
    ],
)
def test_they_are_found_at_any_depth(wrap):
    assert uncounted(wrap(foreign), jnp.ones(4)) == {"ffi_call(foreign)"}
    assert uncounted(wrap(lambda x: x * 2.0), jnp.ones(4)) == frozenset()


def test_what_jax_computes_itself_is_counted():
    """So a primitive of JAX's is in the list, whichever module it comes from."""
    x, key = jnp.ones((4, 6)), jax.random.key(0)
    functions = [
        jax.nn.softmax,
        jax.nn.gelu,
        jax.nn.logsumexp,
        jax.scipy.special.i0,
        lambda x: jax.nn.dot_product_attention(*(x[None, :, None],) * 3),
        lambda x: jnp.split(x, 2) + [jnp.stack([x, x]), jnp.tile(x, 2), jnp.roll(x, 1)],
        lambda x: (jnp.sort(x), jnp.argsort(x), jax.lax.top_k(x, 2), jnp.unique(x, size=3)),
        lambda x: (jnp.fft.fft(x), jnp.cumsum(x), jnp.var(x), jnp.linalg.norm(x), jnp.median(x)),
        lambda x: (x[jnp.array([0, 1])], x.at[0].add(1.0), x.at[0].multiply(2.0), x.at[0].set(0.0)),
        lambda x: jax.lax.ragged_dot(x, jnp.ones((2, 6, 3)), jnp.array([2, 2])),
        lambda x: (jax.lax.optimization_barrier(x), jax.lax.stop_gradient(x)),
        lambda x: jax.lax.associative_scan(jnp.add, x),
        lambda x: jax.image.resize(x, (8, 8), "linear"),
        lambda x: jax.random.gamma(key, 1.0, x.shape) + jax.random.normal(key, x.shape),
        lambda x: (jax.random.permutation(key, x), jax.random.categorical(key, x), jax.random.split(key)),
        lambda x: jax.random.wrap_key_data(jax.random.key_data(key)),
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME"),
    ]
    for number, function in enumerate(functions):

        def total(x, function=function):
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(function(x)) if leaf.dtype == x.dtype)

        assert uncounted(function, x) == frozenset(), number
        assert uncounted(jax.grad(lambda x, total=total: total(x) + jnp.sum(x)), x) == frozenset(), number
