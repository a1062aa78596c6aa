"""examples/flax_nnx.py: modules of Flax nnx as plain functions, equal to plain nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from tests.support import models
from tests.support.programs import run

nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed (extra flax)")
from examples import flax_nnx  # noqa: E402  # it imports Flax


def make_batches(rng, count):
    return [
        (rng.normal(size=(4, 784)).astype("float32"), rng.integers(0, 10, 4).astype("int32"))
        for _ in range(count)
    ]


@pytest.mark.thorough
def test_training_equals_plain_nnx(rng):
    modules = flax_nnx.make_modules(width=8, seed=0)
    for body in modules[1:3]:
        body.dropout.rate = 0.0
    micro_batches, optimizer = make_batches(rng, 4), optax.adam(0.01)
    trainer = flax_nnx.make_pipeline(modules, True, 4, optimizer=optimizer)
    state = trainer.init(jax.random.key(0), micro_batches[0])

    class Whole(nnx.Module):
        def __init__(self):
            self.parts = nnx.List(nnx.clone(module) for module in modules)

        def __call__(self, x):
            for part in self.parts:
                x = part(x)
            return x

    def loss(whole, images, labels):
        logits = whole(images)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    whole = Whole()
    with jax.numpy_dtype_promotion("standard"):
        plain = nnx.Optimizer(whole, optimizer, wrt=nnx.Param)
    for _update in range(3):
        state, outputs = trainer.step(state, micro_batches)
        found = [nnx.value_and_grad(loss)(whole, *each) for each in micro_batches]
        grads = jax.tree.map(
            lambda *leaves: sum(leaves[1:], leaves[0]) / 4, *(grads for _loss, grads in found)
        )
        with jax.numpy_dtype_promotion("standard"):
            plain.update(whole, grads)
        models.assert_trees_close(outputs.losses, [value for value, _grads in found])
    for part, parameters in zip(whole.parts, trainer.parameters(state), strict=True):
        models.assert_trees_close(parameters, nnx.state(part, nnx.Param))
        nnx.update(part, parameters)


def test_every_micro_batch_and_stream_drops_others():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.first(x), self.second(x)

    module = Twice(nnx.Rngs(0))
    masks = {}
    for is_training, num_steps in ((True, 2), (False, 1)):
        function, parameters = flax_nnx.split(module, is_training)
        pipeline = engine.Pipeline([function], parameters=[parameters], num_micro_batches=2)
        x = np.ones(64, "float32")
        state = pipeline.init(jax.random.key(0), (x, x))
        for _step in range(num_steps):
            state, outputs = pipeline.step(state, [(x, x)] * 2)
            found = [np.asarray(mask).tobytes() for masks, _labels in outputs.outputs for mask in masks]
            masks.setdefault(is_training, []).extend(found)
    assert len(set(masks[True])) == 8
    assert set(masks[False]) == {np.ones(64, "float32").tobytes()}


def test_batch_statistics_are_refused():
    with pytest.raises(
        ValueError, match="BatchNorm keeps more than parameters: mean, var.* use ipu.layers.Flax"
    ):
        flax_nnx.split(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), True)


@pytest.mark.thorough
def test_as_a_program():
    lines = run("examples/flax_nnx.py", as_tests=True).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Step 20", "Step 40", "Step 60", "Test accuracy"]
    assert float(lines[-1].split()[-1]) > 0.95
