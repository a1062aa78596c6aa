"""Products of matrices whose results are only transposed are computed the other way round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.ground import jax_core

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


def dense(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def scanned(w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, jnp.stack([w, w.T]))[0])


def checkpointed(w, x):
    return jnp.sum(jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w)(w, x))


def branching(w, x):
    return jax.lax.cond(x[0, 0, 0] > 0, lambda: jnp.sum((x @ w) ** 2), lambda: jnp.sum(jnp.cos(x @ w)))


def in_batches(w, x):
    """Each sample has a matrix of its own."""
    w = jnp.stack([w, w + 1])
    return jnp.sum(jnp.einsum("bri,bio->bro", x, w) ** 2)


def precise(w, x):
    return jnp.sum(jnp.matmul(x, w, precision="highest") ** 2)


def program_of(function, *values):
    flat = jaxprs.flatten(jax.make_jaxpr(jax.grad(function))(*values))
    return jaxprs.extract(flat, flat.outputs)


def count(jaxpr, name):
    inner = [body for equation in jaxpr.eqns for body in jax_core.jaxprs_in_params(equation.params)]
    own = sum(equation.primitive.name == name for equation in jaxpr.eqns)
    return own + sum(count(body, name) for body in inner)


@pytest.mark.parametrize("model", [dense, scanned, checkpointed, branching, in_batches, precise])
def test_gradients_of_kernels_are_not_transposed(model):
    program = program_of(model, W, X)
    turned = jaxprs.turn_products(program)
    before, after = program.closed_jaxpr.jaxpr, turned.closed_jaxpr.jaxpr
    assert count(after, "transpose") < count(before, "transpose")
    assert count(after, "dot_general") == count(before, "dot_general")
    given = (W, X)[: len(program.inputs)]
    np.testing.assert_allclose(turned(*given)[0], program(*given)[0], rtol=1e-5, atol=1e-6)


def twice(w, x):
    product = x[0] @ w
    return jnp.sum(product) + jnp.sum(product.T[0])


def another_order(w, x):
    return jnp.sum(jnp.transpose(jnp.tensordot(x, w, 1), (1, 0, 2))[0])


def narrow(w, x):
    return jnp.sum((x[0].astype("bfloat16") @ w.astype("bfloat16")).T[0])


def uneven(w, x):
    return jnp.sum(jnp.matmul(x[0], w, precision=("highest", "default")).T[0])


@pytest.mark.parametrize("model", [twice, another_order, narrow, uneven])
def test_other_products_stay(model):
    flat = jaxprs.flatten(jax.make_jaxpr(model)(W, X))
    program = jaxprs.extract(flat, flat.outputs)
    turned = jaxprs.turn_products(program)
    assert str(turned.closed_jaxpr) == str(program.closed_jaxpr)
