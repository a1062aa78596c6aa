"""Loss scaling equals a loop by hand, and an overflow in one stage skips the update in all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine, loops
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.optimizers import (
    GradientAccumulationOptimizerV2,
    LossScalingOptimizer,
    MapGradientOptimizer,
)
from ipu_pipeline.optimizers.wrappers import unwrap
from tests.support import front, models

NAMES = ("a", "b", "c")


def layer(name, x, dtype):
    size = 0.002 if name == "a" else 0.02  # its gradients are the largest
    w = engine.get_variable(name, (x.shape[-1], 10), dtype, jax.nn.initializers.normal(size))
    return x @ w


def stages(dtype):
    def last(x, labels):
        return models.cross_entropy(layer("c", x, dtype).astype("float32"), labels)

    return [
        lambda x, labels: (layer("a", x, dtype), labels),
        lambda x, labels: (jnp.tanh(layer("b", x, dtype)), labels),
        last,
    ]


@jax.jit
def plain_loss(variables, x, labels):
    x = jnp.tanh(x @ variables["a"] @ variables["b"]) @ variables["c"]
    return models.cross_entropy(x.astype("float32"), labels)


@jax.jit
def scaled_gradients(variables, x, labels, scale):
    return jax.grad(lambda variables: plain_loss(variables, x, labels) * scale)(variables)


@functools.cache
def steps(dtype):
    """Updates of three micro-batches; the third update has inputs that are much larger."""
    rng = np.random.default_rng(5)
    made = [models.mlp_batches(rng, 3, dtype=dtype) for _ in range(5)]
    x, labels = made[2][1]
    made[2][1] = (x * np.asarray(600, dtype), labels)
    return made


def by_hand(variables, dtype, scale, dynamic):
    """Per update the variables, the scale, and whether the gradients of each variable were finite."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    state, good, results = optimizer.init(models.as_float32(variables)), 0, []
    for step in steps(dtype):
        total = {name: jnp.zeros(value.shape, "float32") for name, value in variables.items()}
        for x, labels in step:
            gradients = scaled_gradients(variables, x, labels, scale)
            total = {name: total[name] + gradients[name].astype("float32") for name in NAMES}
        total = {name: value / len(step) for name, value in total.items()}
        finite = {name: bool(np.all(np.isfinite(value))) for name, value in total.items()}
        if all(finite.values()):
            wide = models.as_float32(variables)
            with jax.numpy_dtype_promotion("standard"):
                changes, state = optimizer.update({n: g / scale for n, g in total.items()}, state, wide)
            variables = {name: (wide[name] + changes[name]).astype(dtype) for name in NAMES}
            good += 1
            if dynamic and good == 2:
                scale, good = scale * np.float32(2), 0
        elif dynamic:
            scale, good = scale / np.float32(2), 0
        results.append((variables, scale, finite))
    return results


def optimizer(**options):
    return LossScalingOptimizer(optax.sgd(0.1, momentum=0.9), growth_interval=2, **options)


@pytest.mark.parametrize(
    ("dtype", "dynamic", "options"),
    [
        ("float16", True, {"donate": True}),
        pytest.param(
            "float16",
            False,
            {"device_mapping": [0] * 3, "block_bytes": 1, "offload": ["weight_update_variables"]},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "float32", True, {"device_mapping": [0] * 3, "donate": True}, marks=pytest.mark.thorough
        ),
    ],
)
def test_a_pipeline_equals_a_loop_by_hand(dtype, dynamic, options):
    scale = np.float32(2.0**16 if dynamic else 2.0**17)
    pipeline = engine.Pipeline(
        stages(dtype),
        num_micro_batches=3,
        optimizer=unwrap(optimizer(dynamic=dynamic, initial_scale=float(scale))).transformation,
        accumulator_dtype="float32",
        **options,
    )
    state = pipeline.init(jax.random.key(3), steps(dtype)[0][0])
    before = as_arrays(state.variables)
    expected = by_hand(before, dtype, scale, dynamic)
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    for step, (variables, scale, finite) in zip(steps(dtype), expected, strict=True):
        losses = [plain_loss(before, *element) for element in step]
        state, outputs = pipeline.step(state, step)
        after = as_arrays(state.variables)
        models.assert_trees_close(list(map(np.asarray, outputs.losses)), losses, tolerance)
        models.assert_trees_close(models.as_float32(after), models.as_float32(variables), tolerance)
        assert state.optimizer_state.scale == scale
        if not all(finite.values()):
            models.assert_trees_close(after, before, 0)
        before = after
    skipped = [number for number, (_v, _s, finite) in enumerate(expected) if not all(finite.values())]
    if dtype == "float32":
        assert not skipped
    else:
        assert expected[2][2] == {"a": False, "b": True, "c": True}  # one stage only
        assert 2 in skipped
        assert 4 not in skipped or not dynamic


def as_arrays(tree):
    return jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), tree)


def test_small_gradients_stay_only_with_a_scale():
    def run(optimizer):
        def stage(x):
            w = engine.get_variable("w", (4,), "float16", 0.0)
            return jnp.sum((w * x).astype("float32")) * 1e-8

        pipeline = engine.Pipeline(
            [lambda x: x, stage],
            num_micro_batches=1,
            optimizer=unwrap(optimizer).transformation,
            accumulator_dtype="float32",
        )
        x = np.ones(4, "float16")
        return pipeline.step(pipeline.init(jax.random.key(0), x), [x])[0].variables["w"]

    np.testing.assert_array_equal(run(optax.sgd(1e7)), 0)
    # The gradient and the weight are rounded to float16, each by 2**-11 at most.
    np.testing.assert_allclose(run(LossScalingOptimizer(optax.sgd(1e7))), -0.1, rtol=2**-10)


def test_loops_with_gradient_maps():
    """In float32, a power of two changes nothing: not what a map sees, and not what is accumulated."""

    def run(wrap):
        def body(x, labels):
            loss = models.cross_entropy(layer("b", layer("a", x, "float32"), "float32"), labels)
            clip = MapGradientOptimizer(optax.adam(0.01), lambda g, v: jnp.clip(g, -0.01, 0.01) + 0.1 * v)
            GradientAccumulationOptimizerV2(wrap(clip), 2).minimize(loss, name="same")

        elements = models.mlp_batches(np.random.default_rng(0), 4)
        infeed = IPUInfeedQueue(lambda: iter(elements))
        program = front.compile_program(lambda: loops.repeat(4, body, infeed_queue=infeed))
        with ipu.Session() as session:
            session.run([infeed.initializer])
            session.run(program)
            return session.variables

    expected = run(lambda opt: opt)
    models.assert_trees_close(run(lambda opt: LossScalingOptimizer(opt, growth_interval=1)), expected, 1e-6)


def test_a_map_cannot_hide_an_overflow():
    def body():
        w = ipu.get_variable("w", (), "float16", initializer=2.0)
        # What is mapped is finite also after it has been scaled.
        opt = MapGradientOptimizer(optax.sgd(1.0), lambda g, v: jnp.clip(g, -0.25, 0.25))
        opt = LossScalingOptimizer(opt, initial_scale=2.0**17)
        opt.minimize((w * 1.0).astype("float32"))

    program = front.compile_program(lambda: loops.repeat(2, body))
    with ipu.Session() as session:
        session.run(program)
        assert session.variables["w"] == 2  # 2 ** 17 and 2 ** 16 are infinite in float16
        session.run(program)
        assert session.variables["w"] == 1.5


@pytest.mark.parametrize(
    ("initial_scale", "gradient", "scales", "dynamic"),
    [
        (3.0, np.inf, [1.5, 1.0, 1.0], True),
        (0.5, np.inf, [0.5, 0.5, 0.5], True),  # one that began below 1 stays there
        (4.0, 1.0, [4.0, 8.0, 8.0, 16.0], True),  # a new interval begins when it grows
        (2.0**127, 1.0, [2.0**127] * 4, True),  # twice as much is infinite
        (4.0, np.inf, [4.0, 4.0], False),
    ],
)
def test_scales(initial_scale, gradient, scales, dynamic):
    transformation = unwrap(optimizer(dynamic=dynamic, initial_scale=initial_scale)).transformation
    params = {"w": jnp.float32(1)}
    state = transformation.init(params)
    for scale in scales:
        changes, state = transformation.update({"w": jnp.float32(gradient)}, state, params)
        assert changes["w"] == 0 or not np.isinf(gradient)
        assert state.scale == scale


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"initial_scale": 0}, ValueError, "initial_scale must be finite in float32 and above 0; got 0"),
        ({"initial_scale": "x"}, TypeError, "initial_scale must be a number; got 'x'"),
        ({"factor": 1}, ValueError, "factor must be finite in float32 and above 1; got 1"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be from 1 to"),
        ({"growth_interval": 1.5}, TypeError, "growth_interval must be an integer; got 1.5"),
        ({"dynamic": 1}, TypeError, "dynamic must be True or False; got 1"),
    ],
)
def test_arguments_are_checked(options, error, match):
    with pytest.raises(error, match=match):
        LossScalingOptimizer(optax.sgd(0.1), **options)


def test_two_cannot_be_nested():
    with pytest.raises(ValueError, match="scale the loss only once"):
        unwrap(LossScalingOptimizer(LossScalingOptimizer(optax.sgd(0.1))))
