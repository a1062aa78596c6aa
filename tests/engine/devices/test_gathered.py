"""A whole state on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from ipu_pipeline import engine

PARAMETERS = [{"w": np.full((4, 4), 0.5, "float32")}, {"w": np.full((4, 2), 0.25, "float32")}]
MICRO_BATCHES = [np.ones((2, 4), "float32")] * 4


def make(**options):
    return engine.Pipeline(
        [lambda p, x: jnp.tanh(x @ p["w"]), lambda p, x: jnp.mean((x @ p["w"]) ** 2)],
        parameters=PARAMETERS,
        num_micro_batches=2,
        optimizer=optax.adam(0.1),
        donate=True,
        **options,
    )


OPTIONS = {
    "replicas that share out": {"num_replicas": 2, "shard": ["optimizer_state", "weights"]},
    "host memory": {"offload": ["weight_update_variables", "weights"]},
    "tensor parallel": {
        "tensor_parallel": engine.TensorParallel(2, {"stage0/w": PartitionSpec(None, "model")})
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_functions_of_a_whole_state(options):
    pipeline = make(**options)
    state = pipeline.init(jax.random.key(0), MICRO_BATCHES[0])
    state, _outputs = pipeline.step(state, iter(MICRO_BATCHES))
    expected = jax.device_get(state.variables)
    gathered = engine.gathered(state)
    arrays = [leaf for leaf in jax.tree.leaves(gathered) if isinstance(leaf, jax.Array)]
    assert {array.sharding.memory_kind for array in arrays} == {"device"}
    assert {array.device for array in arrays} == {jax.devices()[0]}
    assert len(arrays) == len(jax.tree.leaves(state)) - 2  # two counts
    pipeline.step(state, iter(MICRO_BATCHES))  # which destroys the state, and not the copies
    norm = np.sqrt(sum(np.sum(value**2) for value in expected.values()))
    np.testing.assert_allclose(optax.tree.norm(gathered.variables), norm, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, gathered.variables, expected)


def test_devices_and_other_leaves():
    state = make().init(jax.random.key(0), MICRO_BATCHES[0])
    gathered = engine.gathered(state, jax.devices()[3])
    assert gathered.variables["stage1/w"].device == jax.devices()[3]
    assert gathered.key.devices() == {jax.devices()[3]}
    np.testing.assert_array_equal(*(jax.random.key_data(own.key) for own in (gathered, state)))
    assert engine.gathered(state.variables["stage1/w"]).device == jax.devices()[1]
    mixed = engine.gathered({"array": np.ones(2), "number": 3, "nothing": None, "text": "a"})
    assert isinstance(mixed.pop("array"), jax.Array)
    assert mixed == {"number": 3, "nothing": None, "text": "a"}


def test_wrong_uses():
    pipeline = make()
    state = pipeline.init(jax.random.key(0), MICRO_BATCHES[0])
    with pytest.raises(TypeError, match="gathered: device must be a device of JAX; got 1"):
        engine.gathered(state, 1)
    with pytest.raises(TypeError, match="gathered was called in a function that JAX traces"):
        jax.jit(engine.gathered)(np.ones(2))
    pipeline.step(state, iter(MICRO_BATCHES))
    with pytest.raises(ValueError, match=r"tree\['stage0/w'\] has been deleted. With donate=True"):
        engine.gathered(state.variables)
