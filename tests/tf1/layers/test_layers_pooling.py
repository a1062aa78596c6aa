import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from ipu_pipeline import layers
from tests.support import layer_cases, models


def images(rng, height=7, width=6, dtype="float32"):
    return rng.normal(size=(2, height, width, 3)).astype("float32").astype(dtype)


KINDS = {"max": layers.MaxPooling2D, "average": layers.AveragePooling2D}


def test_pooling_equals_flax(rng):
    cases = []
    for options, kind, padding in itertools.product(
        [
            {},
            {"pool_size": 3},
            {"pool_size": (3, 2), "strides": 1},
            {"pool_size": (2, 3), "strides": (1, 2)},
            {"pool_size": 2, "strides": 3},
            {"pool_size": (7, 6)},
        ],
        KINDS,
        ["valid", "same"],
    ):
        window = options.get("pool_size", (2, 2))
        window = (window, window) if isinstance(window, int) else window
        strides = options.get("strides", window)
        strides = (strides, strides) if isinstance(strides, int) else strides

        given = window, strides, padding.upper()

        def reference(_variables, x, kind=kind, given=given):
            if kind == "max":
                return linen.max_pool(x, *given)
            return linen.avg_pool(x, *given, count_include_pad=False)

        layer = KINDS[kind](padding=padding, **options)
        cases.append(layer_cases.Case(layer, images(rng), reference, 1e-6))
    layer_cases.check_all(cases)


def test_a_window_larger_than_the_inputs(rng):
    layer_cases.check_all(
        [
            layer_cases.Case(
                KINDS[kind](15, padding="same"),
                images(rng),
                lambda _variables, x, reduce=reduce: reduce(x, (1, 2), keepdims=True),
                1e-6,
            )
            for kind, reduce in (("max", jnp.max), ("average", jnp.mean))
        ]
    )


def test_padding_and_equal_values():
    """Padding is no part of the mean, and loses against negative values; the first of equal ones wins."""
    x = np.arange(9, dtype="float32").reshape(1, 3, 3, 1)
    means, negative, equal = layer_cases.run_cases(
        [
            layer_cases.Case(layers.AveragePooling2D(padding="Same"), x),
            layer_cases.Case(layers.MaxPooling2D(padding="same"), np.full((1, 3, 3, 1), -2.0, "float32")),
            layer_cases.Case(layers.MaxPooling2D(), np.ones((1, 2, 2, 1), "float32")),
        ]
    )
    np.testing.assert_array_equal(means[0][0, :, :, 0], [[2.0, 3.5], [6.5, 8.0]])
    np.testing.assert_array_equal(negative[0], np.full((1, 2, 2, 1), -2.0))
    weight = layer_cases.loss_weights(equal[0]).item()
    np.testing.assert_array_equal(equal[2]["inputs"][0, :, :, 0], [[weight, 0], [0, 0]])


def test_half_precision(rng):
    """Means are summed in float32, and maxima are exact."""
    cases = []
    for dtype in ("bfloat16", "float16"):

        def mean(_variables, x, dtype=dtype):
            return jnp.mean(x.astype("float32"), (1, 2), keepdims=True).astype(dtype)

        for padding in ("valid", "same"):
            x = (1000 + images(rng, 16, 16)).astype(dtype)
            layer = layers.AveragePooling2D(16, padding=padding)
            cases.append(layer_cases.Case(layer, x, mean, layer_cases.tolerance(dtype)))
        largest = layer_cases.Case(
            layers.MaxPooling2D(),
            images(rng, dtype=dtype),
            lambda _variables, x: linen.max_pool(x, (2, 2), (2, 2)),
            0.0,
        )
        cases.append(largest)
    for case, outputs in zip(cases, layer_cases.check_all(cases), strict=True):
        assert outputs.dtype == case.x.dtype
        if isinstance(case.layer, layers.AveragePooling2D):
            expected = case.x.astype("float32").mean((1, 2), keepdims=True).astype(case.x.dtype)
            models.assert_trees_close(outputs, expected, 0.0)


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
