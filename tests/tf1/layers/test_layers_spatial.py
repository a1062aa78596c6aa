"""Convolutions and pooling, compared with Flax's."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from ipu_pipeline import engine, layers
from tests.support import layer_cases, models
from tests.support.layer_cases import Case


def numbers(rng, *shape, dtype="float32"):
    return rng.normal(size=(2, *shape)).astype("float32").astype(dtype)


def flax_convolution(layer, x, activation=lambda outputs: outputs):
    """A case of Conv2D or Conv1D, which are Flax's Conv."""
    module = layer_cases.flax_convolution(layer, layer.filters, layer.groups)
    return Case(layer, x, lambda variables, x: activation(module.apply({"params": variables}, x)))


def test_convolutions_equal_flax(rng):
    x, row, normal = numbers(rng, 7, 6, 4), numbers(rng, 9, 4), {"bias_initializer": "normal"}
    last = layers.Conv1D(8, (4,), (3,), "same", groups=2, activation="relu", **normal)
    cases = [
        (layers.Conv2D(8, (3, 2), (2, 1), "same", activation="tanh", **normal), x, jnp.tanh),
        (layers.Conv2D(8, (3, 2), dilation_rate=(1, 2), groups=2, use_bias=False), x),
        (layers.Conv2D(8, (2, 4), (2, 3), "same", dilation_rate=2, **normal), x),
        (layers.Conv1D(8, 3, padding="causal", dilation_rate=3, **normal), row),
        (last, row, jax.nn.relu),
    ]
    layer_cases.check_all([flax_convolution(*case) for case in cases])


def depthwise(x, **options):
    layer = layers.DepthwiseConv2D((3, 2), bias_initializer="normal", **options)
    module = layer_cases.flax_convolution(layer, 4 * layer.depth_multiplier, 4)

    def reference(variables, x):
        params = {"kernel": variables["depthwise_kernel"].reshape(*layer.kernel_size, 1, -1)}
        params |= {"bias": variables["bias"]} if layer.use_bias else {}
        return module.apply({"params": params}, x)

    return Case(layer, x, reference)


def transposed(x, kernel_size, strides, padding):
    """The gradient of a convolution."""
    layer = layers.Conv2DTranspose(3, kernel_size, strides, padding, bias_initializer="normal")

    def reference(variables, x):
        sizes = [
            size * step if padding == "same" else size * step + max(length - step, 0)
            for size, step, length in zip(x.shape[1:3], layer.strides, layer.kernel_size, strict=True)
        ]

        def forward(images):
            given, axes = (layer.strides, padding.upper()), ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(images, variables["kernel"], *given, dimension_numbers=axes)

        outputs, gradient = jax.vjp(forward, jnp.zeros((x.shape[0], *sizes, 3), x.dtype))
        assert outputs.shape == x.shape
        return gradient(x)[0] + variables["bias"]

    return Case(layer, x, reference)


def test_depthwise_and_transposed_convolutions(rng):
    x = numbers(rng, 7, 6, 4)
    layer_cases.check_all(
        [
            depthwise(x, padding="same", depth_multiplier=3, dilation_rate=(1, 2)),
            depthwise(x, strides=2, use_bias=False),
            transposed(x, (3, 2), (3, 2), "valid"),
            transposed(x, (1, 4), 2, "same"),
        ]
    )


def pooled(x, kind, window, strides, padding):
    given = window, strides, padding.upper()
    if kind == "max":
        layer = layers.MaxPooling2D(window, strides, padding)
        return Case(layer, x, lambda _variables, x: linen.max_pool(x, *given), 1e-6)
    layer = layers.AveragePooling2D(window, strides, padding)
    return Case(layer, x, lambda _variables, x: linen.avg_pool(x, *given, count_include_pad=False), 1e-6)


def test_pooling_equals_flax(rng):
    """Padding is no part of a mean; also with a window that is larger than the inputs."""
    x = numbers(rng, 7, 6, 3)

    def mean(_variables, x):
        return jnp.mean(x, (1, 2), keepdims=True)

    cases = [
        pooled(x, "max", (3, 2), (1, 1), "same"),
        pooled(x, "average", (2, 3), (1, 2), "same"),
        Case(layers.MaxPooling2D(), x, lambda _variables, x: linen.max_pool(x, (2, 2), (2, 2))),
        Case(layers.AveragePooling2D(15, padding="Same"), x, mean),
        Case(layers.MaxPooling2D(15, padding="same"), x, lambda _, x: jnp.max(x, (1, 2), keepdims=True)),
        Case(layers.GlobalAveragePooling2D(), x, lambda _variables, x: jnp.mean(x, (1, 2))),
        Case(layers.GlobalAveragePooling2D(keepdims=True), x, mean),
    ]
    assert [outputs.shape for outputs in layer_cases.check_all(cases)[-2:]] == [(2, 3), (2, 1, 1, 3)]


def test_maxima_of_negative_and_of_equal_values():
    """Padding loses against negative values; the first of equal ones has the gradient."""
    below = Case(layers.MaxPooling2D(padding="same"), np.full((1, 3, 3, 1), -2.0, "float32"))
    ones = Case(layers.MaxPooling2D(), np.ones((1, 2, 2, 1), "float32"))
    negative, equal = layer_cases.run_cases([below, ones])
    np.testing.assert_array_equal(negative[0], np.full((1, 2, 2, 1), -2.0))
    weight = layer_cases.loss_weights(equal[0]).item()
    np.testing.assert_array_equal(equal[2]["inputs"][0, :, :, 0], [[weight, 0], [0, 0]])


def test_half_precision(rng):
    """Convolutions are Flax's; means are summed in float32."""
    module, tolerance = linen.Conv(3, (3, 3), dtype="bfloat16"), layer_cases.tolerance("bfloat16")
    far = (1000 + numbers(rng, 16, 16, 3)).astype("bfloat16")
    layer = layers.Conv2D(3, 3, padding="same", bias_initializer="normal", dtype="bfloat16")

    def convolution(variables, x):
        return module.apply({"params": variables}, x)

    def mean(_variables, x):
        return jnp.mean(x.astype("float32"), (1, 2), keepdims=True).astype(x.dtype)

    near = numbers(rng, 7, 6, 4, dtype="bfloat16")
    pooling = Case(layers.AveragePooling2D(16, padding="same"), far, mean, tolerance)
    outputs, means = layer_cases.check_all([Case(layer, near, convolution, tolerance), pooling])
    assert outputs.dtype == means.dtype == jnp.bfloat16
    expected = far.astype("float32").mean((1, 2), keepdims=True).astype(far.dtype)
    models.assert_trees_close(means, expected, 0.0)


def test_variables_defaults_and_dtypes(rng):
    x = numbers(rng, 7, 6, 4)
    layer = layers.Conv2D(6, (3, 2), groups=2, data_format="Channels_Last")
    variables = engine.Pipeline([layer], num_micro_batches=1).init(jax.random.key(0), x).variables
    assert variables["conv2d/kernel"].shape == (3, 2, 2, 6)
    np.testing.assert_array_equal(variables["conv2d/bias"], np.zeros(6))
    limit = np.sqrt(6 / (3 * 2 * 2 + 3 * 2 * 6))  # Glorot's, of the channels of one group
    assert 0.9 * limit < np.abs(variables["conv2d/kernel"]).max() <= limit
    half = {"conv2d/kernel": "bfloat16", "conv2d/bias": "bfloat16"}
    assert layer_cases.dtypes_of(layers.Conv2D(3, 3, dtype=jnp.bfloat16), x) == (["bfloat16"], half)
