"""Layers over one axis, of single channels, that enlarge, and that take means over all of an image."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline import layers
from tests.support import layer_cases


def rows(rng, length=9, channels=4):
    return rng.normal(size=(2, length, channels)).astype("float32")


def images(rng, height=7, width=6, channels=4):
    return rng.normal(size=(2, height, width, channels)).astype("float32")


def test_conv1d_equals_flax(rng):
    cases = []
    for options in (
        {},
        {"strides": 2},
        {"dilation_rate": 3},
        {"groups": 2, "use_bias": False},
        {"kernel_size": (4,), "strides": (3,), "activation": "relu"},
    ):
        for padding in ("valid", "same", "causal"):
            options = {"kernel_size": 3, **options}
            layer = layers.Conv1D(8, padding=padding, bias_initializer="normal", **options)
            module = layer_cases.flax_convolution(layer, 8, layer.groups)

            def reference(variables, x, module=module, options=options):
                outputs = module.apply({"params": variables}, x)
                return jax.nn.relu(outputs) if "activation" in options else outputs

            cases.append(layer_cases.Case(layer, rows(rng), reference))
    layer_cases.check_all(cases)


def test_depthwise_conv2d_equals_flax(rng):
    cases = []
    for padding in ("valid", "same"):
        for options in (
            {},
            {"depth_multiplier": 3},
            {"strides": 2, "use_bias": False},
            {"dilation_rate": (1, 2)},
        ):
            layer = layers.DepthwiseConv2D((3, 2), padding=padding, bias_initializer="normal", **options)
            module = layer_cases.flax_convolution(layer, 4 * layer.depth_multiplier, 4)

            def reference(variables, x, layer=layer, module=module):
                kernel = variables["depthwise_kernel"]
                params = {"kernel": kernel.reshape(*layer.kernel_size, 1, -1)}
                params |= {"bias": variables["bias"]} if layer.use_bias else {}
                return module.apply({"params": params}, x)

            cases.append(layer_cases.Case(layer, images(rng), reference))
    layer_cases.check_all(cases)


def test_conv2d_transpose_is_the_gradient_of_conv2d(rng):
    cases = []
    for padding, kernel_size, strides in itertools.product(
        ("valid", "same"), ((3, 2), (1, 4)), (1, 2, (3, 2))
    ):
        layer = layers.Conv2DTranspose(3, kernel_size, strides, padding, bias_initializer="normal")

        def reference(variables, x, layer=layer, padding=padding):
            sizes = [
                size * step if padding == "same" else size * step + max(length - step, 0)
                for size, step, length in zip(x.shape[1:3], layer.strides, layer.kernel_size, strict=True)
            ]

            def forward(images):
                return jax.lax.conv_general_dilated(
                    images,
                    variables["kernel"],
                    layer.strides,
                    padding.upper(),
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                )

            outputs, gradient = jax.vjp(forward, jnp.zeros((x.shape[0], *sizes, 3), x.dtype))
            assert outputs.shape == x.shape
            return gradient(x)[0] + variables["bias"]

        cases.append(layer_cases.Case(layer, images(rng), reference))
    layer_cases.check_all(cases)


def test_global_average_pooling(rng):
    cases = [
        layer_cases.Case(
            layers.GlobalAveragePooling2D(keepdims=keepdims),
            images(rng),
            lambda _variables, x, keepdims=keepdims: jnp.mean(x, (1, 2), keepdims=keepdims),
            1e-6,
        )
        for keepdims in (False, True)
    ]
    assert [outputs.shape for outputs in layer_cases.check_all(cases)] == [(2, 4), (2, 1, 1, 4)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: layers.Conv1D(3, (2, 2)), ValueError, "kernel_size must be a positive integer"),
        (lambda: layers.Conv1D(3, 0), ValueError, "kernel_size must be a positive integer; got 0"),
        (lambda: layers.Conv1D(3, 2, padding="full"), ValueError, "padding must be"),
        (lambda: layers.Conv1D(3, 2, groups=2), ValueError, "groups must divide filters"),
        (lambda: layers.DepthwiseConv2D(2, depth_multiplier=0), ValueError, "depth_multiplier must be"),
        (lambda: layers.Conv2DTranspose(2, 2, output_padding=1), NotImplementedError, "must be None"),
        (lambda: layers.Conv2DTranspose(2, 2, data_format="channels_first"), ValueError, "channels_last"),
        (lambda: layers.GlobalAveragePooling2D(keepdims=1), TypeError, "must be True or False"),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_wrong_inputs(rng):
    for layer, x in [
        (layers.Conv1D(2, 3), np.zeros((2, 2, 1), np.float32)),
        (layers.Conv1D(2, 3), images(rng)),
        (layers.Conv1D(2, 1, groups=2), np.zeros((2, 2, 1), np.float32)),
        (layers.DepthwiseConv2D(9), images(rng)),
        (layers.GlobalAveragePooling2D(), rows(rng)),
    ]:
        with pytest.raises(ValueError, match="needs inputs of|groups must divide"):
            layer_cases.check(layer, x, lambda _variables, x: x, 1)
