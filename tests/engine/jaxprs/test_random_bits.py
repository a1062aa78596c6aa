"""Random bits with the cipher written out: the same bits as JAX's, and no loop left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.jaxprs.cpu_forms import draws_bits, with_fast_random_bits

KEY = jax.random.key(7)
DRAWS = {
    "bits": lambda key: [jax.random.bits(key, (3, 5), f"uint{width}") for width in (8, 16, 32)],
    "a scalar": jax.random.bits,
    "nothing": lambda key: jax.random.bits(key, (0, 3)),
    "dropout": lambda key: jax.random.bernoulli(key, 0.9, (2, 64, 128)),
    "many keys": lambda key: jax.vmap(lambda own: jax.random.bits(own, (4,)))(jax.random.split(key, (3,))),
    "a scan": lambda key: jax.lax.map(lambda own: jax.random.bits(own, (4,)), jax.random.split(key, 3)),
    "a branch": lambda key: jax.lax.cond(
        jax.random.bernoulli(key), jax.random.bits, lambda own: jnp.uint32(1), key
    ),
    "recomputed": jax.checkpoint(lambda key: jax.random.randint(key, (7,), 0, 100)),
}


@pytest.mark.parametrize(
    "is_partitionable",
    [True, pytest.param(False, marks=pytest.mark.thorough)],
    ids=["partitionable", "original"],
)
def test_the_bits_are_jaxs(is_partitionable):
    def draw(key):
        return {name: function(key) for name, function in DRAWS.items()}

    with jax.threefry_partitionable(is_partitionable):
        expected = jax.jit(draw)(KEY)
        structure = jax.tree.structure(expected)
        flat = with_fast_random_bits(lambda key: jax.tree.leaves(draw(key)))
        found = jax.jit(flat)(KEY)
    jax.tree.map(np.testing.assert_array_equal, expected, structure.unflatten(found))


def test_no_loop_is_left():
    text = jax.jit(with_fast_random_bits(lambda key: [jax.random.bits(key, (8,))])).lower(KEY).as_text()
    assert "while" not in text
    assert "while" in jax.jit(lambda key: jax.random.bits(key, (8,))).lower(KEY).as_text()


def test_other_generators_stay_as_they_are():
    key = jax.random.key(7, impl="rbg")
    found = with_fast_random_bits(lambda key: [jax.random.bits(key, (8,))])(key)
    np.testing.assert_array_equal(found[0], jax.random.bits(key, (8,)))


def test_a_stage_on_a_cpu_draws_this_way():
    def stage(x):
        return jnp.where(jax.random.bernoulli(engine.next_rng_key(), 0.5, x.shape), x, 0)

    pipeline = engine.Pipeline([stage], num_micro_batches=1)
    pipeline.trace(np.ones((3, 4), np.float32))
    forward = pipeline.programs[0].forward
    key, count = jax.random.key(0), jnp.int32(0)
    arguments = [key, count, count, jnp.ones((3, 4))]
    assert forward.on("gpu") is forward
    assert draws_bits(jax.make_jaxpr(forward.function)(*arguments).jaxpr)
    assert not draws_bits(jax.make_jaxpr(forward.on("cpu").function)(*arguments).jaxpr)
