import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from ipu_pipeline import layers
from tests.support import layer_cases


def images(rng, height=7, width=6, channels=4, dtype="float32"):
    return rng.normal(size=(2, height, width, channels)).astype("float32").astype(dtype)


def test_conv2d_equals_flax(rng):
    cases = []
    for options in (
        {},
        {"strides": (2, 1)},
        {"strides": 2},
        {"dilation_rate": (1, 2)},
        {"dilation_rate": 2, "strides": (2, 3)},
        {"groups": 2},
        {"groups": 4, "strides": (3, 2), "use_bias": False},
        {"kernel_size": 1},
        {"kernel_size": (2, 4), "strides": (1, 2)},
        {"kernel_size": (7, 6), "strides": 3},
        {"activation": "tanh", "kernel_initializer": "he_normal"},
    ):
        for padding in ("valid", "same"):
            options = {"kernel_size": (3, 2), **options}
            layer = layers.Conv2D(8, padding=padding, bias_initializer="normal", **options)
            module = layer_cases.flax_convolution(layer, 8, layer.groups)

            def reference(variables, x, module=module, options=options):
                outputs = module.apply({"params": variables}, x)
                return jnp.tanh(outputs) if "activation" in options else outputs

            cases.append(layer_cases.Case(layer, images(rng), reference))
    layer_cases.check_all(cases)


def test_conv2d_in_half_precision_and_of_the_smallest_inputs(rng):
    cases = []
    for dtype in ("bfloat16", "float16"):
        layer = layers.Conv2D(3, 3, padding="same", bias_initializer="normal", dtype=dtype)
        module = linen.Conv(3, (3, 3), dtype=dtype)

        def reference(variables, x, module=module):
            return module.apply({"params": variables}, x)

        x = images(rng, dtype=dtype)
        cases.append(layer_cases.Case(layer, x, reference, layer_cases.tolerance(dtype)))

    def dilated(variables, x):
        return jax.lax.conv_general_dilated(
            x,
            variables["kernel"],
            (1, 1),
            [(0, 0), (0, 0)],
            rhs_dilation=(2, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    layer = layers.Conv2D(3, 3, dilation_rate=2, use_bias=False)
    outputs = layer_cases.check_all([*cases, layer_cases.Case(layer, images(rng, 5, 5), dilated)])
    assert [y.dtype for y in outputs[:2]] == [jnp.bfloat16, jnp.float16]
    assert outputs[2].shape == (2, 1, 1, 3)


def test_variables_defaults_and_dtypes(rng):
    x = images(rng)
    plain, any_case, cast = layer_cases.run_cases(
        [
            layer_cases.Case(layers.Conv2D(6, (3, 2), groups=2), x),
            layer_cases.Case(layers.Conv2D(2, 3, padding="SAME", data_format="Channels_Last"), x),
            layer_cases.Case(layers.Conv2D(3, 3, dtype=jnp.bfloat16), x),
        ]
    )
    variables = plain[1]
    assert {name: value.shape for name, value in variables.items() if name != "inputs"} == {
        "kernel": (3, 2, 2, 6),
        "bias": (6,),
    }
    np.testing.assert_array_equal(variables["bias"], np.zeros(6))
    limit = np.sqrt(6 / (3 * 2 * 2 + 3 * 2 * 6))  # Glorot's, of the channels of one group
    assert 0.9 * limit < np.abs(variables["kernel"]).max() <= limit
    assert any_case[0].shape == (2, 7, 6, 2)
    outputs, variables, gradients = cast
    assert outputs.dtype == variables["kernel"].dtype == gradients["bias"].dtype == jnp.bfloat16
    assert gradients["inputs"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": 0}, "Conv2D: filters must be a positive integer; got 0"),
        ({"filters": True}, "filters must be a positive integer; got True"),
        ({"kernel_size": (3, 0)}, r"kernel_size must be a positive integer or two of them.*got \(3, 0\)"),
        ({"kernel_size": (3, 3, 3)}, r"kernel_size must be .* got \(3, 3, 3\)"),
        ({"kernel_size": "33"}, "kernel_size must be .* got '33'"),
        ({"strides": 0}, "strides must be a positive integer"),
        ({"strides": 1.0}, "strides must be a positive integer"),
        ({"dilation_rate": -1}, "dilation_rate must be a positive integer"),
        ({"groups": 0}, "groups must be a positive integer; got 0"),
        ({"groups": 3}, "groups must divide filters; got groups=3 and filters=4"),
        ({"padding": "causal"}, "padding must be 'valid' or 'same'; got 'causal'"),
        ({"padding": 1}, "padding must be 'valid' or 'same'; got 1"),
        ({"data_format": "channels_first"}, "data_format must be 'channels_last'.* got 'channels_first'"),
        ({"activation": "rellu"}, "no activation 'rellu'"),
        ({"bias_initializer": "x"}, "no initializer 'x'"),
        ({"dtype": "int32"}, "Conv2D: dtype must be a floating-point one; got int32"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        layers.Conv2D(**{"filters": 4, "kernel_size": 3, **options})


@pytest.mark.parametrize(
    ("options", "x", "error", "message"),
    [
        ({}, np.zeros((2, 7, 6), "float32"), ValueError, r"Conv2D conv2d needs .* rank 4.*\(2, 7, 6\)"),
        ({}, np.zeros((2, 7, 6, 4), "int32"), TypeError, "Conv2D conv2d needs floating-point inputs"),
        ({"groups": 4}, np.zeros((2, 7, 6, 6), "float32"), ValueError, "groups must divide the channels"),
        ({}, np.zeros((2, 7, 2, 4), "float32"), ValueError, "needs inputs of at least 3 by 3"),
        ({"dilation_rate": 4}, np.zeros((2, 9, 8, 4), "float32"), ValueError, "at least 9 by 9"),
        ({"padding": "same"}, np.zeros((2, 0, 2, 4), "float32"), ValueError, "at least 1 by 1"),
    ],
)
def test_wrong_inputs(options, x, error, message):
    with pytest.raises(error, match=message):
        layer_cases.outputs_and_gradients(layers.Conv2D(4, 3, **options), x)
