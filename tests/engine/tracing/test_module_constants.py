"""Modules that have their parameters in them: in a stage that is trained they may not become constants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ipu_pipeline import engine, layers

X = np.arange(6, dtype="float32").reshape(2, 3) ** 2


def linear():
    return nnx.Linear(3, 3, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    def __init__(self):
        self.linear, self.norm = linear(), nnx.BatchNorm(3, rngs=nnx.Rngs(0), use_running_average=True)

    def __call__(self, x):
        return self.norm(self.linear(x))


def last(x):
    return jnp.mean((x @ engine.get_variable("w", (3, 2))) ** 2)


def make(*stages, **options):
    return engine.Pipeline([*stages, last], num_micro_batches=1, optimizer=optax.sgd(0.1), **options)


block = Block()


def uses_a_global(x):
    return block(x)


def calls_another(x):
    return uses_a_global(x)


def uses_a_closure():
    inner = linear()
    return lambda x: inner(x)


class Model:
    def __init__(self):
        self.layers = [linear()]

    def encode(self, x):
        return self.layers[0](x)


MODULES = {
    "a stage": (lambda: Block(), r"stage 0 \(Block\) is the Flax module Block"),
    "a global": (lambda: uses_a_global, r"stage 0 \(uses_a_global\) uses block, the Flax module Block"),
    "a global of another": (lambda: calls_another, "uses block, the Flax module Block"),
    "a closure": (uses_a_closure, "uses inner, the Flax module Linear"),
    "a partial": (
        lambda: functools.partial(lambda m, x: m(x), linear()),
        "uses a value bound to it, the Fl",
    ),
    "a method": (lambda: Model().encode, r"stage 0 \(encode\) uses layers, the Flax module Linear"),
    "jitted": (lambda: jax.jit(uses_a_closure()), "uses inner, the Flax module Linear"),
    "scanned": (
        lambda: lambda x: jax.lax.scan(lambda c, _none: (block(c), None), x, None, length=2)[0],
        "uses block, the Flax module Block",
    ),
    "beside parameters": (
        lambda: engine.Stage(lambda p, x: block(x) * p, np.float32(1)),
        "uses block, the Flax module Block",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_whose_parameters_would_not_be_trained(name):
    stage, message = MODULES[name]
    with pytest.raises(ValueError, match=message) as caught:
        make(stage()).trace(X)
    assert "would be constants, which are not trained. Take them out by nnx.split" in str(caught.value)


def test_that_nothing_is_trained_is_no_fault_of_its_own():
    training = {"optimizer": optax.sgd(0.1)}
    with pytest.raises(ValueError, match=r"^stage 0 \(Block\) is the Flax module Block"):
        engine.Pipeline([Block(), jnp.mean], num_micro_batches=1, **training).trace(X)


def merged(module):
    """A stage of a module and its parameters, as users write it."""
    graphdef, parameters, rest = nnx.split(module, nnx.Param, ...)
    return engine.Stage(lambda p, x: nnx.merge(graphdef, p, rest)(x), parameters, "merged")


def test_what_may_have_modules():
    """Their parameters are variables, or there are none; others are arrays that the user took out."""
    dropout = nnx.Dropout(0.1, deterministic=True)
    statistics = nnx.BatchNorm(
        3, use_bias=False, use_scale=False, use_running_average=True, rngs=nnx.Rngs(0)
    )
    graphdef, arrays = nnx.split(linear())
    frozen = layers.Flax(linear(), trainable=False, name="frozen")
    stages = {
        "merged": merged(block),
        "a layer": lambda x: layers.Flax(block, name="block")(x),
        "a layer that is not trained": lambda x: frozen(x),
        "without parameters": lambda x: statistics(dropout(x)),
        "sizes": lambda x: x * block.linear.out_features,
        "arrays": lambda x: nnx.merge(graphdef, arrays)(x),
    }
    pipeline = make(*stages.values(), device_mapping=[0] * (len(stages) + 1))
    state = pipeline.init(jax.random.key(0), X)
    state, _outputs = pipeline.step(state, [X])
    (trained,) = (name for name in state.variables if name.startswith("merged/linear/kernel"))
    assert not np.array_equal(state.variables[trained], block.linear.kernel[...])
    np.testing.assert_array_equal(state.variables["frozen/kernel"], linear().kernel[...])


def test_without_training_modules_are_constants():
    module = Block()
    pipeline = engine.Pipeline([module, lambda x: x * 2], num_micro_batches=1)
    state = pipeline.init(jax.random.key(0), X)
    _state, outputs = pipeline.step(state, [X])
    np.testing.assert_allclose(outputs.outputs[0], module(X) * 2, rtol=1e-6)


@jax.tree_util.register_pytree_node_class
class Scaled:
    """A pytree that can be called, as the modules of Equinox."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale

    def tree_flatten(self):
        return [self.scale], None

    @classmethod
    def tree_unflatten(cls, _none, children):
        return cls(*children)


def test_pytrees_that_can_be_called():
    scaled = Scaled(jnp.arange(3.0))
    message = r"stage 0 \(Scaled\) is a pytree that can be called: its arrays would"
    with pytest.raises(ValueError, match=message):
        make(scaled).trace(X)
    make(lambda x: scaled(x)).trace(X)  # constants that are arrays
    pipeline = make(engine.Stage(lambda module, x: module(x), scaled))
    assert "stage0/0" in pipeline.init(jax.random.key(0), X).variables
    listed = engine.Pipeline([lambda module, x: module(x)], parameters=[scaled], num_micro_batches=1)
    assert isinstance(listed.parameters(listed.init(jax.random.key(0), X))[0], Scaled)
