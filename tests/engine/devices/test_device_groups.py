"""Both ways to copy arrays to another device give the same bits on the same device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline.engine.devices import device_groups as groups_module
from ipu_pipeline.engine.devices import placement

DTYPES = ("float32", "float16", "bfloat16", "int32", "uint8", "bool", "complex64")
SHAPES = ((), (0,), (5,), (3, 4, 2))


def make_groups(has_copy):
    groups = groups_module.make_groups(jax.devices(), [0, 2])
    if not has_copy:
        groups = tuple(dataclasses.replace(group, has_one_client=False) for group in groups)
    assert all((group.copy is not None) == has_copy for group in groups)
    return groups


def make_arrays(group, rng):
    made = []
    for dtype in DTYPES:
        for shape in SHAPES:
            values = rng.integers(0, 2, shape) if dtype == "bool" else 100 * rng.normal(size=shape)
            made.append(np.asarray(values, jnp.dtype(dtype)))
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45], "float32")
    return placement.put([*made, special], group)


def assert_same_bits(actual, expected, group):
    for array, other in zip(actual, expected, strict=True):
        assert array.dtype == other.dtype
        assert array.shape == other.shape
        assert array.sharding == group.replicated
        assert array.devices() == set(group.devices)
        assert np.asarray(array).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("has_copy", [True, False])
def test_copies_agree_with_device_put(has_copy, rng):
    source, target = make_groups(has_copy)
    arrays = make_arrays(source, rng)
    copies = placement.copy_to(arrays, target)
    assert_same_bits(copies, jax.device_put(arrays, target.replicated), target)
    assert_same_bits(placement.copy_to(copies, source), arrays, source)
    assert placement.copy_to([], target) == []


@pytest.mark.parametrize("has_copy", [True, False])
def test_copies_of_what_is_still_being_computed(has_copy):
    source, target = make_groups(has_copy)
    (x,) = placement.put([np.ones((300, 300), "float32")], source)
    result = jax.jit(lambda x: x @ x @ x)(x)
    (copy,) = placement.copy_to([result], target)
    del result
    np.testing.assert_array_equal(copy, 90000.0)


@pytest.mark.parametrize("has_copy", [True, False])
def test_copies_of_random_keys(has_copy):
    source, target = make_groups(has_copy)
    keys = placement.put([jax.random.key(3), jax.random.split(jax.random.key(4), 5)], source)
    copies = placement.copy_to([*keys, jax.device_put(1.0, source.replicated)], target)[:2]
    assert [copy.dtype for copy in copies] == [key.dtype for key in keys]
    assert_same_bits(map(jax.random.key_data, copies), map(jax.random.key_data, keys), target)


def test_copies_outlive_a_donated_original():
    source, target = make_groups(has_copy=True)
    (x,) = placement.put([np.arange(1000, dtype="float32")], source)
    (copy,) = placement.copy_to([x], target)
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(x))
    np.testing.assert_array_equal(copy, np.arange(1000, dtype="float32"))


def aligned(count):
    """An array whose memory JAX would share on a CPU."""
    memory = np.zeros(count + 16, "float32")
    first = -memory.ctypes.data % 64 // 4
    return memory[first : first + count]


@pytest.mark.parametrize("has_send", [True, False])
def test_host_copies_share_no_memory(has_send):
    _other, group = make_groups(has_copy=True)
    if not has_send:
        group.__dict__["send"] = None  # as with another jaxlib
    square = aligned(10_000).reshape(100, 100)
    arrays = [aligned(10_000), square.T, square[::2, 3:], np.zeros(7, "int32"), np.float32(0)]
    before = [np.array(array) for array in arrays]
    placed = placement.put_host_copies(arrays, group)
    for array in arrays[:-1]:
        array[...] = 1
    assert_same_bits(placed, jax.device_put(before, group.replicated), group)
