import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from ipu_pipeline import engine, layers
from tests.support import layer_cases

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


def batch_normalizations(rng):
    for shape, options, training in [
        ((3, 5, 4, 2), {"axis": 1, "scale": False}, True),
        ((5, 4), {"epsilon": 0.5, "center": False}, False),
    ]:
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

        yield layer_cases.Case(layer, examples(rng, *shape), reference, training=training)


def run_forwards(stage, micro_batches):
    """The outputs, and the variables before and after."""
    forwards = engine.Pipeline([stage], num_micro_batches=len(micro_batches))
    state = forwards.init(jax.random.key(0), micro_batches[0])
    new_state, outputs = forwards.step(state, micro_batches)
    return outputs.outputs, state.variables, new_state.variables


def test_moving_statistics_by_hand():
    """A layer that is called twice moves twice; without training nothing moves."""
    first, second = np.float32([[1, 10], [3, 30]]), np.float32([[5, 0], [5, 4]])
    twice = layers.BatchNormalization(momentum=0.5, center=False, scale=False, name="twice")

    def stage(x):
        layers.BatchNormalization(momentum=0.75, name="norm")(x, training=True)
        layers.BatchNormalization(name="default")(x, training=True)
        twice(x, training=True)
        twice(x + 10, training=True)
        return layers.BatchNormalization(name="still")(x)

    outputs, before, after = run_forwards(stage, [first, second])
    names = {f"norm/{name}" for name in ("beta", "gamma", "moving_mean", "moving_variance")}
    assert {name for name in before if name.startswith("norm/")} == names
    np.testing.assert_array_equal(before["norm/moving_mean"], [0, 0])
    np.testing.assert_array_equal(before["norm/moving_variance"], [1, 1])
    # Means 2, 20 and then 5, 2; biased variances 1, 100 and then 0, 4.
    means = [0.75 * 0.25 * 2 + 0.25 * 5, 0.75 * 0.25 * 20 + 0.25 * 2]
    variances = [0.75 * (0.75 + 0.25 * 1), 0.75 * (0.75 + 0.25 * 100) + 0.25 * 4]
    np.testing.assert_allclose(after["norm/moving_mean"], means, rtol=1e-6)
    np.testing.assert_allclose(after["norm/moving_variance"], variances, rtol=1e-6)
    np.testing.assert_allclose(after["default/moving_mean"][0], 0.99 * 0.01 * 2 + 0.01 * 5, rtol=1e-5)
    once = 0.5 * (0.5 * 2) + 0.5 * 12  # each call takes half of what was, and half of its mean
    np.testing.assert_allclose(after["twice/moving_mean"][0], 0.5 * (0.5 * once + 0.5 * 5) + 0.5 * 15)
    for name in ("still/moving_mean", "still/moving_variance"):
        np.testing.assert_array_equal(before[name], after[name])
    np.testing.assert_allclose(outputs[0], first / np.sqrt(1.001), rtol=1e-6)


def test_rank_4_is_computed_as_by_the_fused_kernel():
    """TensorFlow 1's, whose variance has Bessel's correction, and whose epsilon is never below 1.001e-5."""
    x = np.arange(8, dtype="float32").reshape(2, 2, 2, 1) / 1000
    expected = {"last": x.var() * 8 / 7, "other": x.var(), "flat": x.var()}

    def stage(x):
        settings = {"momentum": 0.0, "epsilon": 1e-6}
        layers.BatchNormalization(axis=2, name="other", **settings)(x.reshape(2, 4, 1, 1), training=True)
        layers.BatchNormalization(name="flat", **settings)(x.reshape(8, 1), training=True)
        return layers.BatchNormalization(name="last", **settings)(x, training=True)

    outputs, _before, after = run_forwards(stage, [x])
    for name, variance in expected.items():
        np.testing.assert_allclose(after[f"{name}/moving_variance"], [variance], rtol=1e-5)
    normalized = (x - x.mean()) / np.sqrt(x.var() + 1.001e-5)
    np.testing.assert_allclose(outputs[0], normalized, rtol=1e-5, atol=1e-6)


# Layer and group normalization.


def layer_normalizations(rng):
    for shape, options in [
        ((3, 5, 4, 2), {"axis": (1, 2, 3), "epsilon": 0.5, "center": False}),
        ((3, 5, 4), {"axis": (-1, 1), "scale": False}),
    ]:
        axes = options.get("axis", (-1,))
        axes = tuple(sorted(axis % len(shape) for axis in axes))
        module = linen.LayerNorm(reduction_axes=axes, feature_axes=axes, **flax_options(options))

        def reference(variables, x, module=module):
            return module.apply(flax_parameters(variables), x)

        layer = layers.LayerNormalization(**RANDOM, **options)
        yield layer_cases.Case(layer, examples(rng, *shape), reference)


def test_variables_have_the_axes_in_the_order_of_the_inputs():
    pipeline = engine.Pipeline([layers.LayerNormalization(axis=(-1, 1))], num_micro_batches=1)
    pipeline.trace(np.zeros((3, 5, 4), "float32"))
    assert {*pipeline.variables} == {"layer_normalization/gamma", "layer_normalization/beta"}
    assert {spec.shape for spec in pipeline.variables.values()} == {(5, 4)}


def group_normalizations(rng):
    for shape, options in [
        ((5, 64), {"scale": False, "epsilon": 0.5, "strided_channel_grouping": False}),
        ((3, 6, 4, 5), {"groups": -1, "axis": 1, "center": False}),
    ]:
        axis, groups = options.get("axis", -1), options.get("groups", 32)
        num_groups = shape[axis] if groups == -1 else groups
        module = linen.GroupNorm(num_groups=num_groups, **flax_options(options))

        def reference(variables, x, module=module, axis=axis):
            channels_last = jnp.moveaxis(x, axis, -1)
            return jnp.moveaxis(module.apply(flax_parameters(variables), channels_last), -1, axis)

        layer = layers.GroupNormalization(**RANDOM, **options)
        yield layer_cases.Case(layer, examples(rng, *shape), reference)


# All three.


def test_normalizations_equal_flax(rng):
    layer_cases.check_all(
        [*batch_normalizations(rng), *layer_normalizations(rng), *group_normalizations(rng)]
    )


def in_float32(axes, groups=None):
    """A reference: statistics over some axes in float32, the result in the dtype of the inputs."""

    def reference(variables, x):
        wide = x.astype("float32")
        shaped = wide if groups is None else wide.reshape(*x.shape[:-1], -1, groups)
        mean = jnp.mean(shaped, axes, keepdims=True)
        variance = jnp.mean((shaped - mean) ** 2, axes, keepdims=True)
        normalized = ((shaped - mean) / jnp.sqrt(variance + 1e-3)).reshape(x.shape)
        gamma, beta = (variables[name].astype("float32") for name in ("gamma", "beta"))
        return (normalized * gamma + beta).astype(x.dtype)

    return reference


def test_statistics_of_half_precision_are_float32(rng):
    """Far from 0, the mean itself cannot be told in the dtype of the inputs."""
    options, tolerance = {**RANDOM, "dtype": "bfloat16"}, layer_cases.tolerance("bfloat16")
    xs = (100 + 2 * rng.normal(size=(2, 4, 3, 3, 6))).astype("float32").astype("bfloat16")
    batch, group = layers.BatchNormalization(**options), layers.GroupNormalization(2, **options)
    cases = [
        layer_cases.Case(batch, xs[0], in_float32((0, 1, 2)), tolerance, True),
        layer_cases.Case(group, xs[1], in_float32((1, 2, 3), groups=2), tolerance),
    ]
    assert {y.dtype.name for y in layer_cases.check_all(cases)} == {"bfloat16"}


def test_inputs_are_cast_to_the_dtype(rng):
    x, group = examples(rng, 4, 6), functools.partial(layers.GroupNormalization, 2)
    for make in (layers.BatchNormalization, layers.LayerNormalization, group):
        outputs, variables = layer_cases.dtypes_of(make(dtype="float16"), x)
        trained = {dtype for name, dtype in variables.items() if "moving" not in name}
        assert {*outputs, *trained} == {"float16"}
