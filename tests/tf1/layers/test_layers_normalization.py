import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from ipu_pipeline import engine, layers
from tests.support import layer_cases, models

RANDOM = {  # beta and gamma that show
    "beta_initializer": jax.nn.initializers.normal(1.0),
    "gamma_initializer": jax.nn.initializers.normal(1.0),
}


def examples(rng, *shape, dtype="float32"):
    """With another mean and variance for each index of each axis."""
    x = rng.normal(size=shape)
    for axis, size in enumerate(shape):
        parameters = [size if other == axis else 1 for other in range(len(shape))]
        x = x * rng.uniform(0.5, 2.0, parameters) + rng.normal(size=parameters)
    return x.astype("float32").astype(dtype)


def flax_parameters(variables):
    names = {"gamma": "scale", "beta": "bias"}
    return {"params": {flax: variables[name] for name, flax in names.items() if name in variables}}


def flax_variables(variables):
    statistics = {"mean": variables["moving_mean"], "var": variables["moving_variance"]}
    return {**flax_parameters(variables), "batch_stats": statistics}


def flax_options(options):
    return {
        "epsilon": options.get("epsilon", 1e-3),
        "use_bias": options.get("center", True),
        "use_scale": options.get("scale", True),
        "use_fast_variance": False,
    }


# Batch normalization.


def test_batch_normalization_equals_flax(rng):
    cases = []
    for (shape, options), training in itertools.product(
        [
            ((5, 4), {}),
            ((3, 5, 4, 2), {}),
            ((3, 5, 4, 2), {"axis": 1}),
            ((3, 5, 4), {"axis": -2, "epsilon": 0.5}),
            ((5, 4), {"center": False}),
            ((5, 4), {"scale": False}),
            ((5, 4), {"scale": False, "center": False}),
        ],
        [True, False],
    ):
        axis = options.get("axis", -1)
        module = linen.BatchNorm(use_running_average=not training, axis=axis, **flax_options(options))
        layer = layers.BatchNormalization(
            moving_mean_initializer=rng.normal(size=shape[axis]),
            moving_variance_initializer=rng.uniform(0.5, 2.0, shape[axis]),
            **RANDOM,
            **options,
        )

        def reference(variables, x, module=module):
            return module.apply(flax_variables(variables), x, mutable=["batch_stats"])[0]

        cases.append(layer_cases.Case(layer, examples(rng, *shape), reference, training=training))
    layer_cases.check_all(cases)


def run_forwards(stage, micro_batches):
    """The outputs, and the variables before and after."""
    forwards = engine.Pipeline([stage], num_micro_batches=len(micro_batches))
    state = forwards.init(jax.random.key(0), micro_batches[0])
    new_state, outputs = forwards.step(state, micro_batches)
    return outputs.outputs, state.variables, new_state.variables


def test_moving_statistics_by_hand():
    first, second = np.float32([[1, 10], [3, 30]]), np.float32([[5, 0], [5, 4]])
    layer = layers.BatchNormalization(momentum=0.75)
    _outputs, before, after = run_forwards(lambda x: layer(x, training=True), [first, second])
    assert sorted(before) == [
        f"batch_normalization/{name}" for name in ("beta", "gamma", "moving_mean", "moving_variance")
    ]
    np.testing.assert_array_equal(before["batch_normalization/moving_mean"], [0, 0])
    np.testing.assert_array_equal(before["batch_normalization/moving_variance"], [1, 1])
    # Means 2, 20 and then 5, 2; biased variances 1, 100 and then 0, 4.
    means = [0.75 * 0.25 * 2 + 0.25 * 5, 0.75 * 0.25 * 20 + 0.25 * 2]
    variances = [0.75 * (0.75 + 0.25 * 1), 0.75 * (0.75 + 0.25 * 100) + 0.25 * 4]
    np.testing.assert_allclose(after["batch_normalization/moving_mean"], means, rtol=1e-6)
    np.testing.assert_allclose(after["batch_normalization/moving_variance"], variances, rtol=1e-6)


def test_momentum_is_099_and_a_layer_called_twice_moves_twice():
    twice = layers.BatchNormalization(momentum=0.5, center=False, scale=False, name="twice")

    def stage(x):
        layers.BatchNormalization(name="once")(x, training=True)
        return twice(x, training=True), twice(x + 10, training=True)

    _outputs, _before, after = run_forwards(stage, [np.float32([[1.0], [3.0]])])
    np.testing.assert_allclose(after["once/moving_mean"], [0.02], rtol=1e-5)
    np.testing.assert_allclose(after["twice/moving_mean"], [0.5 * (0.5 * 2) + 0.5 * 12])


def test_without_training_nothing_moves(rng):
    x = examples(rng, 4, 3)
    outputs, before, after = run_forwards(layers.BatchNormalization(), [x])
    models.assert_trees_close(before, after, 0.0)
    np.testing.assert_allclose(outputs[0], x / np.sqrt(1.001), rtol=1e-6)


def test_moving_statistics_of_half_precision_are_float32():
    x = np.float32([[1.0], [3.0]]).astype(jnp.bfloat16)
    layer = layers.BatchNormalization(moving_mean_initializer=2.125, dtype=jnp.bfloat16)
    outputs, _before, after = run_forwards(lambda x: layer(x, training=True), [x] * 200)
    assert outputs[0].dtype == after["batch_normalization/gamma"].dtype == jnp.bfloat16
    moved = after["batch_normalization/moving_mean"]
    assert moved.dtype == after["batch_normalization/moving_variance"].dtype == jnp.float32
    np.testing.assert_allclose(moved, [2 + 0.125 * 0.99**200], rtol=1e-5)


# Layer normalization.


def test_layer_normalization_equals_flax(rng):
    cases = []
    for shape, options in [
        ((5, 4), {}),
        ((3, 5, 4, 2), {}),
        ((3, 5, 4, 2), {"axis": 1}),
        ((3, 5, 4, 2), {"axis": [1, 2]}),
        ((3, 5, 4, 2), {"axis": (1, 2, 3), "epsilon": 0.5}),
        ((3, 5, 4), {"axis": (-2, -1), "center": False}),
        ((3, 5, 4), {"axis": (-1, 1), "scale": False}),
    ]:
        axes = options.get("axis", -1)
        axes = (axes,) if isinstance(axes, int) else tuple(sorted(axis % len(shape) for axis in axes))
        module = linen.LayerNorm(reduction_axes=axes, feature_axes=axes, **flax_options(options))

        def reference(variables, x, module=module):
            return module.apply(flax_parameters(variables), x)

        layer = layers.LayerNormalization(**RANDOM, **options)
        cases.append(layer_cases.Case(layer, examples(rng, *shape), reference))
    layer_cases.check_all(cases)


def test_variables_have_the_axes_in_the_order_of_the_inputs(rng):
    layer = layers.LayerNormalization(axis=(-1, 1))
    _outputs, before, _after = run_forwards(layer, [examples(rng, 3, 5, 4)])
    assert {name: value.shape for name, value in before.items()} == {
        "layer_normalization/gamma": (5, 4),
        "layer_normalization/beta": (5, 4),
    }


# Group normalization.


def test_group_normalization_equals_flax(rng):
    cases = []
    for shape, options in [
        ((5, 64), {}),
        ((3, 5, 4, 8), {"groups": 2}),
        ((3, 5, 4, 8), {"groups": 1, "epsilon": 0.5}),
        ((3, 5, 4, 8), {"groups": 8, "center": False}),
        ((3, 5, 4, 8), {"groups": -1, "scale": False}),
        ((3, 6, 4, 5), {"groups": 3, "axis": 1}),
        ((3, 5, 6, 4), {"groups": 2, "axis": -2}),
    ]:
        axis, groups = options.get("axis", -1), options.get("groups", 32)
        num_groups = shape[axis] if groups == -1 else groups
        module = linen.GroupNorm(num_groups=num_groups, **flax_options(options))

        def reference(variables, x, module=module, axis=axis):
            channels_last = jnp.moveaxis(x, axis, -1)
            return jnp.moveaxis(module.apply(flax_parameters(variables), channels_last), -1, axis)

        layer = layers.GroupNormalization(**RANDOM, **options)
        cases.append(layer_cases.Case(layer, examples(rng, *shape), reference))
    layer_cases.check_all(cases)


# All three.


def in_float32(axes, groups=None):
    """A reference: statistics over some axes in float32, the result in the dtype of the inputs."""

    def reference(variables, x):
        wide = x.astype("float32")
        shaped = wide if groups is None else wide.reshape(*x.shape[:-1], groups, -1)
        mean = jnp.mean(shaped, axes, keepdims=True)
        variance = jnp.mean((shaped - mean) ** 2, axes, keepdims=True)
        normalized = ((shaped - mean) / jnp.sqrt(variance + 1e-3)).reshape(x.shape)
        gamma, beta = (variables[name].astype("float32") for name in ("gamma", "beta"))
        return (normalized * gamma + beta).astype(x.dtype)

    return reference


def test_statistics_of_half_precision_are_float32(rng):
    """Far from 0, the mean itself cannot be told in the dtype of the inputs."""
    cases = []
    for dtype, far in (("bfloat16", 100), ("float16", 1000)):
        options, tolerance = {**RANDOM, "dtype": dtype}, layer_cases.tolerance(dtype)
        for layer, reference, training in (
            (layers.BatchNormalization(**options), in_float32((0, 1, 2)), True),
            (layers.LayerNormalization(**options), in_float32(-1), None),
            (layers.GroupNormalization(2, **options), in_float32((1, 2, 4), groups=2), None),
        ):
            x = (far + 2 * rng.normal(size=(4, 3, 3, 6))).astype("float32").astype(dtype)
            cases.append(layer_cases.Case(layer, x, reference, tolerance, training))
    outputs = layer_cases.check_all(cases)
    assert [y.dtype.name for y in outputs] == ["bfloat16"] * 3 + ["float16"] * 3


def test_inputs_are_cast_to_the_dtype(rng):
    x = examples(rng, 4, 6)
    found = layer_cases.run_cases(
        [
            layer_cases.Case(layers.BatchNormalization(dtype="float16"), x),
            layer_cases.Case(layers.LayerNormalization(dtype="float16"), x),
            layer_cases.Case(layers.GroupNormalization(2, dtype="float16"), x),
        ]
    )
    for outputs, variables, gradients in found:
        assert outputs.dtype == variables["gamma"].dtype == gradients["beta"].dtype == np.float16
        assert gradients["inputs"].dtype == np.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.BatchNormalization(axis=(1, 2)), r"axis must be an integer; got \(1, 2\)"),
        (lambda: layers.BatchNormalization(momentum=1.5), "momentum must be from 0 to 1; got 1.5"),
        (lambda: layers.BatchNormalization(epsilon=-1), "BatchNormalization: epsilon must be at least 0"),
        (lambda: layers.BatchNormalization(moving_mean_initializer="x"), "no initializer 'x'"),
        (lambda: layers.LayerNormalization(axis=()), "axis must name at least one axis; got none"),
        (lambda: layers.LayerNormalization(axis=(1, None)), "axis must be an integer; got None"),
        (lambda: layers.LayerNormalization(epsilon=float("nan")), "epsilon must be at least 0; got nan"),
        (lambda: layers.GroupNormalization(0), "GroupNormalization: groups must be a positive integer"),
        (lambda: layers.GroupNormalization(-2), "groups must be a positive integer; got -2"),
        (lambda: layers.GroupNormalization(2, axis=None), "axis must be an integer; got None"),
        (lambda: layers.GroupNormalization(2, dtype="int32"), "dtype must be a floating-point one"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (
            layers.BatchNormalization(2),
            (3, 4),
            r"BatchNormalization batch_normalization: axis .* got \[2\]",
        ),
        (layers.LayerNormalization((-1, 1)), (3, 4), r"different axes of the inputs; got \[-1, 1\]"),
        (layers.LayerNormalization(-3), (3, 4), r"layer_normalization: axis must name different axes"),
        (
            layers.GroupNormalization(4),
            (3, 6),
            "groups must divide the channels .* groups=4 and 6 channels",
        ),
        (layers.GroupNormalization(1, axis=-2), (3, 6), "not the first one, the batch; got -2"),
    ],
)
def test_wrong_inputs(layer, shape, message):
    with pytest.raises(ValueError, match=message):
        run_forwards(layer, [np.zeros(shape, "float32")])


def test_integers_are_an_error():
    with pytest.raises(TypeError, match="LayerNormalization layer_normalization needs floating-point"):
        run_forwards(layers.LayerNormalization(), [np.zeros((3, 4), "int32")])
