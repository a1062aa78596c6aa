"""Operations counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from ipu_pipeline.engine.jaxprs.costs import count_operations, has_convolutions

X, W = jnp.zeros((3, 4)), jnp.zeros((4, 4))
DOT = 2 * 3 * 4 * 4
TANH = 10 * 3 * 4


def count(function, *arguments):
    return count_operations(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_products():
    assert count(lambda x, w: x @ w, X, W) == DOT
    assert count(lambda x, w: jnp.tanh(x @ w), X, W) == DOT + TANH
    batched = count(lambda a, b: jax.lax.batch_matmul(a, b), jnp.zeros((7, 3, 4)), jnp.zeros((7, 4, 5)))
    assert batched == 2 * 7 * 3 * 5 * 4


@pytest.mark.parametrize(("groups", "summed"), [(1, 3 * 3 * 6), (2, 3 * 3 * 3)])
def test_convolutions(groups, summed):
    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(
            images,
            kernel,
            (2, 2),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    images, kernel = jnp.zeros((5, 8, 8, 6)), jnp.zeros((3, 3, 6 // groups, 16))
    assert count(convolve, images, kernel) == 2 * (5 * 4 * 4 * 16) * summed


def test_a_scan_counts_as_often_as_it_turns():
    def layers(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)

    assert count(layers, X, jnp.zeros((10, 4, 4))) == 10 * (DOT + TANH)


def test_a_loop_without_a_known_number_of_turns_counts_once():
    def loop(x, w):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)

    assert count(loop, X, W) == DOT


def test_of_branches_the_longest_counts():
    def branch(which, x, w):
        return jax.lax.cond(which, lambda x: jnp.tanh(x @ w), lambda x: x + 1, x)

    jaxpr = jax.make_jaxpr(branch)(True, X, W).jaxpr
    scalars = 10 * (len(jaxpr.eqns) - 1)  # that make the index of the branch
    assert count_operations(jaxpr) == DOT + TANH + scalars


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.custom_jvp, jax.custom_vjp])
def test_what_is_called_counts(wrap):
    function = wrap(lambda x, w: x @ w)
    if wrap is jax.custom_vjp:
        function.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: kept)
    elif wrap is jax.custom_jvp:
        function.defjvps(None, None)
    assert count(function, X, W) == DOT


def test_nothing():
    assert count(lambda x: x, X) == 0


def test_convolutions_are_found_within_loops_and_calls():
    def convolve(x, kernel):
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    def within(x, kernel):
        return jax.lax.scan(lambda x, _: (jax.jit(convolve)(x, kernel), None), x, None, length=2)

    x, kernel = jnp.ones((1, 3, 4, 4)), jnp.ones((3, 3, 3, 3))
    assert has_convolutions(jax.make_jaxpr(convolve)(x, kernel).jaxpr)
    assert has_convolutions(jax.make_jaxpr(within)(x, kernel).jaxpr)
    assert not has_convolutions(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(X, W).jaxpr)
