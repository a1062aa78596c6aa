"""Joint jaxprs of forward and backward in two halves: input gradients, then weight gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs.costs import count_operations
from ipu_pipeline.ground import jax_core

WIDTH, ROWS, LAYERS = 16, 8, 3


def dense(w, x):
    return jnp.tanh(x @ w)


def scanned(layer):
    """Layers with weights of their own, by a scan."""
    return lambda weights, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0]


def repeated(layer):
    """One layer several times, by a scan; its gradient is summed in what the backward carries."""
    return lambda w, x: jax.lax.scan(lambda x, _none: (layer(w, x), None), x, None, length=LAYERS)[0]


def cell(w, state, x):
    """A recurrent cell with a gate."""
    gate = jax.nn.sigmoid(x @ w[0] + state @ w[1])
    return gate * state + (1 - gate) * jnp.tanh(x @ w[2])


def recurrent(w, x):
    """A recurrent network over the rows, which returns all states."""

    def step(state, row):
        state = cell(w, state, row[None])
        return state, state[0]

    return jax.lax.scan(step, jnp.zeros((1, WIDTH), x.dtype), x)[1]


def normalised(w, x):
    y = dense(w[0], x)
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-3)
    return y * w[1][0] + w[2][0]


def written_in_place(w, x):
    array = jax.new_ref(jnp.zeros_like(x))
    array[...] = dense(w[0], x)
    array[...] = dense(w[1], array[...])
    return array[...] @ w[2]


def tied(w, x):
    return dense(w[0], dense(w[0].T, x)) @ w[1] + x


ONE, SEVERAL = (WIDTH, WIDTH), (LAYERS, WIDTH, WIDTH)
MODELS = {
    "dense": (dense, ONE),
    "norm": (normalised, SEVERAL),
    "tied": (tied, SEVERAL),
    "written in place": (written_in_place, SEVERAL),
    "repeated": (repeated(dense), ONE),
    "recurrent": (recurrent, SEVERAL),
    "nested scans": (scanned(repeated(dense)), SEVERAL),
    "scanned checkpoints": (scanned(jax.checkpoint(lambda w, x: dense(w, dense(w, x)))), SEVERAL),
    "checkpointed scan": (jax.checkpoint(scanned(dense)), SEVERAL),
    "branches in a scan": (
        scanned(lambda w, x: jax.lax.cond(x.sum() > 0, dense, lambda w, x: dense(w, x) + x, w, x)),
        SEVERAL,
    ),
}


def values_of(shape, dtype="float32"):
    rng = np.random.default_rng(0)
    return [rng.normal(size=s).astype(dtype) * 0.5 for s in (shape, (ROWS, WIDTH), (ROWS, WIDTH))]


def joint_of(model):
    """Takes weights, inputs and cotangents; returns the gradients of the inputs and of the weights."""

    def joint(w, x, cotangent):
        _outputs, pull_back = jax.vjp(model, w, x)
        of_weights, of_inputs = pull_back(cotangent)
        return of_inputs, of_weights

    return joint


def cut(model, values):
    """The two halves as programs, and what the second takes from the first."""
    closed_jaxpr = jax.make_jaxpr(joint_of(model))(*values)
    flat = jaxprs.flatten(jaxprs.take_apart(closed_jaxpr, {0}, [2]))
    of_inputs, of_weights = flat.outputs
    varying = jaxprs.dependents(flat, flat.inputs[1:])
    keepable = jaxprs.find_kept(jaxprs.find_computed(flat, [of_inputs]), varying)
    second = jaxprs.extract(flat, [of_weights], keepable)
    kept = [var for var in second.inputs if var in keepable]
    return flat, jaxprs.extract(flat, [of_inputs, *kept]), second, kept


def count_products(jaxpr, times=1):
    """The multiplications of a jaxpr's matrix products, as often as they run; of branches the most."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _others), _batch = params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += times * math.prod(sizes) * equation.outvars[0].aval.size
        elif name == "scan":
            total += count_products(params["jaxpr"].jaxpr, times * params["length"])
        elif name == "cond":
            total += max(count_products(branch.jaxpr, times) for branch in params["branches"])
        else:
            for body in jax_core.jaxprs_in_params(params):
                total += count_products(body, times)
    return total


@pytest.mark.parametrize("name", MODELS)
def test_halves_give_what_the_whole_gives_and_repeat_no_product(name):
    model, shape = MODELS[name]
    values = values_of(shape)
    flat, first, second, kept = cut(model, values)

    def run_halves(*values):
        given = dict(zip(flat.inputs, values, strict=True))
        of_inputs, *made = first(*(given[var] for var in first.inputs))
        given.update(zip(kept, made, strict=True))
        return [of_inputs, *second(*(given[var] for var in second.inputs))]

    halved, expected = jax.jit(lambda *values: (run_halves(*values), joint_of(model)(*values)))(*values)
    for found, whole in zip(halved, expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=2e-5, atol=1e-6)
    flat = jaxprs.flatten(jax.make_jaxpr(joint_of(model))(*values))
    whole = jaxprs.extract(flat, flat.outputs)
    halves = [half.closed_jaxpr.jaxpr for half in (first, second)]
    assert sum(map(count_products, halves)) == count_products(whole.closed_jaxpr.jaxpr)
    assert min(map(count_products, halves)) > 0
    if name == "scanned checkpoints":
        assert sum(map(count_operations, halves)) <= 1.01 * count_operations(whole.closed_jaxpr.jaxpr)


def test_of_weights_alone_nothing_is_kept():
    def model(w, x):
        return x @ jnp.tanh(w[0] @ w[1])

    values = values_of(SEVERAL)
    flat, _first, second, kept = cut(model, values)
    assert not kept
    assert set(second.inputs) == set(flat.inputs)


def test_what_a_broadcast_takes_is_kept_in_its_place():
    def model(w, x):
        return jnp.broadcast_to((x * w[0, 0]).sum(), x.shape) * 2

    values = values_of(ONE)
    _flat, _first, _second, kept = cut(model, values)
    assert all(var.aval.size == 1 for var in kept)


def test_branches_for_platforms_stay_together():
    """Cut in two by tracing them again, all of them would be compiled on each platform."""

    def model(w, x):
        return jax.lax.platform_dependent(w, x, tpu=lambda w, x: dense(w, x) + 1, default=dense)

    flat, *_halves = cut(model, values_of(ONE))
    platforms = [
        equation.params["branches_platforms"]
        for equation in flat.equations
        if equation.primitive.name == "cond"
    ]
    assert platforms
    assert None not in platforms
