"""What the leaves of micro-batches and inputs may be, wherever the stages run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ipu_pipeline import engine

X = np.ones(4, "float32")
KEYS = jax.random.split(jax.random.key(1), 3)


def make(read, device_mapping, **options):
    return engine.Pipeline(
        [lambda x, other: x + read(other), jnp.sum],
        num_micro_batches=3,
        device_mapping=device_mapping,
        **options,
    )


@pytest.mark.parametrize("device_mapping", [[0, 1], [0, 0]])
@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("train", "must hold numbers, booleans or random keys; got str 'train'. .*functools.partial"),
        (b"a.png", ".* got bytes b'a.png'"),
        (np.datetime64("2020-01-01"), ".* got datetime64 "),
        (object(), ".* got object <object"),
        (np.zeros(1, [("a", "i4")]), ".* got ndarray array"),
        (torch.ones(2, requires_grad=True), r"cannot be made an array: .* Use tensor.detach\(\).numpy\(\)"),
        (torch.ones(2, dtype=torch.bfloat16), "cannot be made an array: .*BFloat16"),
    ],
)
def test_leaves_that_jax_has_no_dtype_for(leaf, message, device_mapping):
    """A text was a tracer within the stage: `mode == "train"` was False. Others ran if none read them."""
    pipeline = make(lambda _other: 0, device_mapping)
    with pytest.raises(ValueError, match=rf"The micro-batch, at \[1\]\['a'\],? {message}"):
        pipeline.init(jax.random.key(0), (X, {"a": leaf}))
    pipeline = engine.Pipeline([lambda other, x: x], num_micro_batches=1, device_mapping=[0])
    with pytest.raises(ValueError, match=rf"The inputs, at \[0\],? {message}"):
        pipeline.trace(X, leaf)


@pytest.mark.parametrize("device_mapping", [[0, 1], [0, 0]])
def test_tensors_of_torch(device_mapping):
    pipeline = make(lambda other: other, device_mapping)
    data = [(torch.tensor(X), torch.tensor(number)) for number in (1.0, 2.0, 3.0)]
    outputs = pipeline.step(pipeline.init(jax.random.key(0), data[0]), data)[1].outputs
    np.testing.assert_array_equal(outputs, [8, 12, 16])


@pytest.mark.parametrize(
    "options",
    [{"device_mapping": [0, 1]}, {"device_mapping": [0, 0]}, {"device_mapping": [0, 1], "num_replicas": 3}],
)
def test_random_keys_are_data(options):
    pipeline = make(lambda key: jax.random.normal(key, X.shape), **options)
    expected = [jnp.sum(X + jax.random.normal(key, X.shape)) for key in KEYS]
    data = [(X, key) for key in KEYS for _replica in range(options.get("num_replicas", 1))]
    outputs = pipeline.step(pipeline.init(jax.random.key(0), data[0]), data)[1].outputs
    np.testing.assert_allclose(np.ravel(outputs), np.repeat(expected, len(data) // 3), rtol=1e-6)


def test_random_keys_as_inputs_and_in_splits():
    def model(key, x, other):
        return jnp.sum(x + jax.random.normal(key, X.shape) + jax.random.normal(other, X.shape))

    data = [(X, key) for key in KEYS]
    for stages in ([model], engine.split(model, 2, data[0], KEYS[0], measure=False, num_micro_batches=3)):
        pipeline = engine.Pipeline(stages, num_micro_batches=3)
        state = pipeline.init(jax.random.key(0), data[0], KEYS[0])
        outputs = pipeline.step(state, data, KEYS[0])[1].outputs
        np.testing.assert_allclose(outputs, [model(KEYS[0], *element) for element in data], rtol=1e-6)
