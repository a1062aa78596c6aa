import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from ipu_pipeline import layers
from tests.support import layer_cases, models


def images(rng, height=7, width=6, dtype="float32"):
    return rng.normal(size=(2, height, width, 3)).astype("float32").astype(dtype)


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pool_size": 3},
        {"pool_size": (3, 2), "strides": 1},
        {"pool_size": (2, 3), "strides": (1, 2)},
        {"pool_size": 2, "strides": 3},
        {"pool_size": (7, 6)},
    ],
    ids=str,
)
@pytest.mark.each_value
def test_pooling_equals_flax(rng, kind, padding, options):
    kinds = {"max": layers.MaxPooling2D, "average": layers.AveragePooling2D}
    layer = kinds[kind](padding=padding, **options)
    window = options.get("pool_size", (2, 2))
    window = (window, window) if isinstance(window, int) else window
    strides = options.get("strides", window)
    strides = (strides, strides) if isinstance(strides, int) else strides

    def reference(variables, x):
        if kind == "max":
            return linen.max_pool(x, window, strides, padding.upper())
        return linen.avg_pool(x, window, strides, padding.upper(), count_include_pad=False)

    layer_cases.check(layer, images(rng), reference, 1e-6)


@pytest.mark.parametrize("layer", [layers.MaxPooling2D, layers.AveragePooling2D])
def test_a_window_larger_than_the_inputs(rng, layer):
    def reference(variables, x):
        reduce = jnp.max if layer is layers.MaxPooling2D else jnp.mean
        return reduce(x, (1, 2), keepdims=True)

    layer_cases.check(layer(15, padding="same"), images(rng), reference, 1e-6)


def test_padding_is_no_part_of_the_mean():
    x = np.arange(9, dtype="float32").reshape(1, 3, 3, 1)
    outputs, _variables, _gradients = layer_cases.outputs_and_gradients(
        layers.AveragePooling2D(padding="Same"), x
    )
    np.testing.assert_array_equal(outputs[0, :, :, 0], [[2.0, 3.5], [6.5, 8.0]])


def test_negative_values_win_over_padding():
    x = np.full((1, 3, 3, 1), -2.0, "float32")
    outputs, _variables, _gradients = layer_cases.outputs_and_gradients(
        layers.MaxPooling2D(padding="same"), x
    )
    np.testing.assert_array_equal(outputs, np.full((1, 2, 2, 1), -2.0))


def test_the_first_of_equal_values_gets_the_gradient():
    x = np.ones((1, 2, 2, 1), "float32")
    outputs, _variables, gradients = layer_cases.outputs_and_gradients(layers.MaxPooling2D(), x)
    weight = layer_cases.loss_weights(outputs).item()
    np.testing.assert_array_equal(gradients["inputs"][0, :, :, 0], [[weight, 0], [0, 0]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("padding", ["valid", "same"])
def test_means_of_half_precision_are_summed_in_float32(rng, dtype, padding):
    x = (1000 + images(rng, 16, 16)).astype(dtype)
    layer = layers.AveragePooling2D(16, padding=padding)
    outputs = layer_cases.check(
        layer,
        x,
        lambda variables, x: jnp.mean(x.astype("float32"), (1, 2), keepdims=True).astype(dtype),
        layer_cases.tolerance(dtype),
    )
    expected = x.astype("float32").mean((1, 2), keepdims=True).astype(dtype)
    models.assert_trees_close(outputs, expected, 0.0)
    assert outputs.dtype == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_max_pooling_keeps_the_dtype(rng, dtype):
    def reference(variables, x):
        return linen.max_pool(x, (2, 2), (2, 2))

    assert layer_cases.check(layers.MaxPooling2D(), images(rng, dtype=dtype), reference, 0.0).dtype == dtype


@pytest.mark.parametrize("layer", [layers.MaxPooling2D, layers.AveragePooling2D])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_size": 0}, "Pooling2D: pool_size must be a positive integer or two of them"),
        ({"strides": (1, 0)}, r"strides must be .* got \(1, 0\)"),
        ({"padding": "full"}, "padding must be 'valid' or 'same'; got 'full'"),
        ({"data_format": "channels_first"}, "data_format must be 'channels_last'"),
    ],
)
def test_wrong_arguments(layer, options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)


@pytest.mark.parametrize(
    ("layer", "x", "error", "message"),
    [
        (
            layers.MaxPooling2D(),
            np.zeros((2, 3), "float32"),
            ValueError,
            "MaxPooling2D max_pooling2d needs",
        ),
        (layers.MaxPooling2D(), np.zeros((2, 4, 4, 1), "int32"), TypeError, "needs floating-point inputs"),
        (
            layers.AveragePooling2D(3),
            np.zeros((2, 4, 2, 1), "float32"),
            ValueError,
            "AveragePooling2D average_pooling2d with padding 'valid' needs inputs of at least 3 by 3",
        ),
    ],
)
def test_wrong_inputs(layer, x, error, message):
    with pytest.raises(error, match=message):
        layer_cases.outputs_and_gradients(layer, x)
