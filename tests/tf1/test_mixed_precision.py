"""Variables in float32 and computation in 16 bits: layers, functions, blocks of `mixed_precision`, Flax."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import ipu_pipeline as ipu
from ipu_pipeline import engine, layers, mixed_precision
from ipu_pipeline.ops import normalization_ops
from tests.support import layer_cases, models

HALVES = ["bfloat16", "float16"]
MIXED = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
EXACT = 1e-5  # the reference has the same casts and operations, so that nothing is rounded differently


def wide(x):
    return x.astype("float32")


def normalized(x, axes):
    """x in float32, with mean 0 and variance 1 over some axes."""
    x = wide(x)
    return (x - jnp.mean(x, axes, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, axes, keepdims=True) + 1e-3)


def biased(v, y):
    """The bias is cast after it was given the outputs' shape, so that its gradient is summed in float32."""
    return y + jnp.broadcast_to(v["bias"], y.shape).astype(y.dtype)


def convolution(v, x):
    dimensions, kernel = ("NHWC", "HWIO", "NHWC"), v["kernel"].astype(x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dimensions)


# The layer's arguments; and what it does, written out: `v` are its variables, `x` is cast.
LAYERS = {
    "Dense": (
        {"units": 3, "activation": "tanh", "bias_initializer": "normal"},
        lambda v, x: jnp.tanh(biased(v, x @ v["kernel"].astype(x.dtype))),
    ),
    "Embedding": ({"input_dim": 7, "output_dim": 3}, lambda v, x: jnp.take(v["embeddings"], x, axis=0)),
    "Conv2D": (
        {"filters": 6, "kernel_size": 3, "activation": "relu", "bias_initializer": "normal"},
        lambda v, x: jax.nn.relu(biased(v, convolution(v, x))),
    ),
    "BatchNormalization": (
        {"gamma_initializer": "normal", "beta_initializer": "normal"},
        lambda v, x: normalized(x, (0, 1, 2)) * v["gamma"] + v["beta"],
    ),
}


def inputs_of(kind, rng):
    if kind == "Embedding":
        return rng.integers(0, 7, (2, 5)).astype("int32")
    return rng.normal(size=(2, 5, 4, 4)).astype("float32")


def test_layers_equal_their_casts_written_out():
    """In one of the two dtypes, and every other layer in the other."""
    cases, dtypes = [], [HALVES[number % 2] for number in range(len(LAYERS))]
    for dtype, (kind, (arguments, apply)) in zip(dtypes, LAYERS.items(), strict=True):

        def reference(variables, x, kind=kind, apply=apply, dtype=dtype):
            assert {value.dtype.name for value in variables.values()} == {"float32"}
            return apply(variables, x if kind == "Embedding" else x.astype(dtype)).astype(dtype)

        layer = getattr(layers, kind)(dtype=dtype, param_dtype="float32", **arguments)
        x = inputs_of(kind, np.random.default_rng(1234))
        cases.append(layer_cases.Case(layer, x, reference, EXACT))
    assert [outputs.dtype.name for outputs in layer_cases.check_all(cases)] == dtypes


def values_of(stage, x, key=0):
    """What a stage returns, and its variables."""
    pipeline = engine.Pipeline([stage], num_micro_batches=1)
    state = pipeline.init(jax.random.key(key), x)
    _state, outputs = pipeline.step(state, [x])
    return outputs.outputs[0], state.variables


def dtypes_of(stage):
    return layer_cases.dtypes_of(stage, np.ones((2, 4), "float32"))


def test_a_block_is_as_arguments(rng):
    xs = {kind: inputs_of(kind, rng) for kind in ("Dense", "BatchNormalization")}

    def make(**dtypes):
        return {kind: getattr(layers, kind)(**LAYERS[kind][0], name=kind, **dtypes) for kind in xs}

    def in_a_block(**xs):
        with mixed_precision("mixed_bfloat16"):
            return {kind: layer(xs[kind]) for kind, layer in make().items()}

    with mixed_precision("mixed_bfloat16"):
        made = make()
    expected, start = values_of(lambda **xs: {kind: make(**MIXED)[kind](x) for kind, x in xs.items()}, xs)
    for stage in (in_a_block, lambda **xs: {kind: made[kind](x) for kind, x in xs.items()}):
        outputs, variables = values_of(stage, xs)
        assert {value.dtype.name for value in outputs.values()} == {"bfloat16"}
        models.assert_trees_close(jax.tree.map(wide, outputs), jax.tree.map(wide, expected), 0)
        models.assert_trees_close(variables, start, 0)


def test_who_says_what():
    """For each dtype an argument, then the blocks from within, then what was always so."""

    def stage(x):
        x = layers.Dense(4, name="always")(x)
        with mixed_precision(dtype="bfloat16"):
            yield layers.Dense(4, name="both")(x)
            with mixed_precision(param_dtype="float32") as policy:
                assert (policy.dtype, policy.param_dtype) == (jnp.bfloat16, jnp.float32)
                yield layers.Dense(4, name="mixed")(x)
                yield layers.Dense(4, name="own", dtype="float16")(x)
                yield layers.Dense(4, name="stored", param_dtype="float16")(x)
            with mixed_precision("mixed_float16"):
                yield layers.Dense(4, name="inner")(x)
                with mixed_precision("float32"):
                    yield layers.Dense(4, name="whole")(x)
                with mixed_precision(policy):
                    yield layers.Dense(4, name="again")(x)
            with mixed_precision(None):
                yield layers.Dense(4, name="same")(x)
        with mixed_precision(param_dtype="bfloat16"):
            yield layers.Dense(4, name="narrow")(x)
        yield x

    outputs, variables = dtypes_of(lambda x: tuple(stage(x)))
    of = {name.partition("/")[0]: dtype for name, dtype in variables.items() if name.endswith("kernel")}
    always = of.pop("always")
    assert (outputs.pop(), always) == ("float32", "float32")
    assert list(zip(of, outputs, of.values(), strict=True)) == [
        ("both", "bfloat16", "bfloat16"),
        ("mixed", "bfloat16", "float32"),
        ("own", "float16", "float32"),
        ("stored", "bfloat16", "float16"),
        ("inner", "float16", "float32"),
        ("whole", "float32", "float32"),
        ("again", "bfloat16", "float32"),
        ("same", "bfloat16", "bfloat16"),
        ("narrow", "float32", "bfloat16"),
    ]


def test_what_has_no_variables_keeps_its_dtype():
    @mixed_precision("mixed_bfloat16")
    def stage(x):
        kinds = ("MaxPooling2D", "AveragePooling2D", "GlobalAveragePooling2D", "Flatten")
        made = [getattr(layers, kind)()(x) for kind in kinds]
        made += [layers.Activation("softmax")(x), layers.Dropout(0.5)(x, training=True)]
        return *made, ipu.rand_ops.dropout(x), ipu.get_variable("own", (2,))

    outputs, variables = layer_cases.dtypes_of(stage, np.ones((2, 4, 4, 1), "float32"))
    assert set(outputs) == {"float32"}
    assert variables == {"own": "float32"}


def test_normalization_ops(rng):
    functions = ["group_norm", "layer_norm", "instance_norm"]

    def stage(x):
        for name in functions:
            normalize = getattr(normalization_ops, name)
            with mixed_precision(**MIXED):
                yield normalize(x)
            with mixed_precision(param_dtype=jnp.float32):
                yield normalize(x.astype("float16"))
            yield normalize(x.astype("bfloat16"))

    x = rng.normal(size=(2, 3, 4)).astype("float32")
    found, variables = values_of(lambda x: tuple(stage(x)), x)
    assert [out.dtype.name for out in found] == ["bfloat16", "float16", "bfloat16"] * 3
    dtypes = [variables[name].dtype.name for name in variables if name.endswith("gamma")]
    assert dtypes == ["float32", "float32", "bfloat16"] * 3
    for y, z, narrow in zip(*[iter(found)] * 3, strict=True):
        np.testing.assert_array_equal(wide(y), wide(narrow))  # gamma is 1 and beta 0
        np.testing.assert_allclose(wide(z), wide(y), atol=2e-2)


def test_moving_statistics_are_never_narrow():
    dtypes = [("bfloat16", "bfloat16"), ("float16", "float32")]
    statistics = ("moving_mean", "moving_variance")

    def stage(x):
        for dtype, param_dtype in dtypes:
            options = {"dtype": dtype, "param_dtype": param_dtype, "momentum": 0.999}
            yield jnp.mean(wide(layers.BatchNormalization(name=f"norm_{dtype}", **options)(x)))

    training = {"optimizer": optax.sgd(0.1)}
    pipeline = engine.Pipeline([lambda x: sum(stage(x))], num_micro_batches=2, **training)
    x = np.full((4, 2), 1.5, "float32")
    state, _outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x, x])
    for dtype, param_dtype in dtypes:
        own = {name: state.variables[f"norm_{dtype}/{name}"] for name in ("gamma", *statistics)}
        np.testing.assert_allclose(own["moving_mean"], 1.5 * (1 - 0.999**2), rtol=1e-4)  # 2**-9 in bfloat16
        assert own["gamma"].dtype == param_dtype
        assert {own[name].dtype.name for name in statistics} == {"float32"}


def test_statistics_in_64_bits_beside_variables_in_32():
    with jax.enable_x64(True):
        layer = layers.BatchNormalization(dtype="float64", param_dtype="float32")
        x = np.arange(8.0).reshape(4, 2)
        ((outputs, variables, _gradients),) = layer_cases.run_cases([layer_cases.Case(layer, x)])
        assert outputs.dtype == np.float64
        assert {variables[name].dtype.name for name in ("gamma", "moving_mean")} == {"float32"}
        expected = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
        np.testing.assert_allclose(outputs, expected, rtol=1e-12)


dense, flax = functools.partial(layers.Dense, 2), functools.partial(layers.Flax, linen.Dense(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dense(param_dtype="int8"), "Dense: param_dtype must be a floating-point one; got int8"),
        (lambda: layers.Conv1D(2, 2, dtype="mixed_float16"), "Conv1D: dtype .*got 'mixed_f.*param_dtype"),
        (lambda: flax(dtype=bool), "Flax: dtype must be a floating-point one; got bool"),
        (lambda: mixed_precision(dtype=complex).__enter__(), "mixed_precision: dtype .*got complex128"),
        (lambda: mixed_precision(param_dtype="x").__enter__(), "mixed_precision: param_dtype .*got 'x'"),
        (lambda: mixed_precision("mixed").__enter__(), "policy must be 'mixed_bfloat16', .*got 'mixed'"),
        (lambda: mixed_precision("int8").__enter__(), "policy must be .*got 'int8'"),
        (lambda: mixed_precision(jnp.bfloat16).__enter__(), "policy must be .*dtype="),
        (lambda: mixed_precision("mixed_bfloat16", dtype="float16").__enter__(), "alone.* dtype='float16'"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    assert layers.Dense(1).dtype == np.float32  # nothing is left of it


def test_dtypes_that_need_64_bits(rng):
    for stage, name in (
        (layers.Dense(2, dtype="float64", param_dtype="float32"), "Dense dense"),
        (layers.Dense(2, dtype="float32", param_dtype="float64"), "Variable dense/kernel"),
        (mixed_precision(dtype="float64")(normalization_ops.layer_norm), "LayerNorm"),
    ):
        with pytest.raises(ValueError, match=f"{name}: dtype float64 needs 64-bit mode"):
            values_of(stage, np.ones((2, 4), "float32"))


def test_a_block_ends_with_an_error_and_is_its_threads_own():
    layer = layers.Dense(1)
    with pytest.raises(KeyError), mixed_precision("mixed_bfloat16"):
        assert layer.dtype == jnp.bfloat16
        raise KeyError
    assert layer.dtype == np.float32
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def other():
        with mixed_precision("mixed_float16"):
            inside.set()
            go_on.wait(600)
            seen.append(dtypes_of(layers.Dense(1)))

    thread = threading.Thread(target=other)
    with mixed_precision("mixed_bfloat16"):
        thread.start()
        assert inside.wait(600)
        here = dtypes_of(layers.Dense(1))
        go_on.set()
        thread.join()
    assert here[0] == ["bfloat16"]
    assert seen == [(["float16"], here[1])]


def test_a_layer_that_is_applied_again_in_another_block():
    layer = layers.Dense(4)

    def other_computation(x):
        with mixed_precision("mixed_bfloat16"):
            y = layer(x)
        with mixed_precision("mixed_float16"):
            return y, layer(x)

    assert dtypes_of(other_computation) == (
        ["bfloat16", "float16"],
        {"dense/kernel": "float32", "dense/bias": "float32"},
    )

    def other_variables(x):
        with mixed_precision("bfloat16"):
            return layer(layers.Dense(4, name="first")(layer(x)).astype("float32"))

    with pytest.raises(ValueError, match="share variable dense/kernel.*bfloat16.*float32"):
        values_of(lambda x: (layer(x), other_variables(x)), np.ones((2, 4), "float32"))


def test_jax_does_not_use_the_trace_of_another_block():
    """A function within jax.jit is traced once for each block, though its arguments look the same."""
    inner = jax.jit(lambda x: normalization_ops.layer_norm(x, center=False, scale=False))

    def stage(x):
        before = inner(x)
        with mixed_precision(dtype="bfloat16"):
            y = inner(x)
            with mixed_precision(dtype="float16"):
                z = inner(x)
            again = inner(x)
        return before, y, z, again, inner(x)

    assert dtypes_of(stage)[0] == ["float32", "bfloat16", "float16", "bfloat16", "float32"]


def test_inner_functions_of_jax():
    """Bodies of loops, checkpoints, and functions within jax.jit, which are another layer in each block."""
    x = np.ones((2, 4), "float32")
    inner = jax.jit(lambda x: layers.Dense(4)(x))

    def body(carry, _index):
        with mixed_precision("mixed_bfloat16"):
            return layers.Dense(4, name="body")(carry).astype("float32"), None

    def stage(x):
        y, _nothing = jax.lax.scan(body, x, None, length=3)
        whole = inner(y)
        with mixed_precision("mixed_bfloat16"):
            return whole, inner(y), jax.checkpoint(layers.Dense(4, name="checkpoint"))(y)

    outputs, variables = layer_cases.dtypes_of(stage, x)
    assert outputs == ["float32", "bfloat16", "bfloat16"]
    kernels = [name.partition("/")[0] for name in variables if name.endswith("kernel")]
    assert kernels == ["body", "dense", "dense_1", "checkpoint"]
    assert set(variables.values()) == {"float32"}
    (whole, half, _checkpoint), values = values_of(stage, x)
    y = x
    for _ in range(3):
        y = wide(y.astype(jnp.bfloat16) @ values["body/kernel"].astype(jnp.bfloat16))
    np.testing.assert_allclose(whole, y @ values["dense/kernel"], rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(wide(half), y @ values["dense_1/kernel"], rtol=2e-2, atol=2e-2)


def test_activations_keep_the_dtype():
    names = ["elu", "exponential", "gelu", "leaky_relu", "linear", "relu", "relu6", "selu", "sigmoid"]
    names += ["silu", "softmax", "softplus", "swish", "tanh"]

    for dtype in HALVES:
        made = [layers.Dense(4, name, dtype=dtype, param_dtype="float32") for name in names]
        outputs, _variables = dtypes_of(lambda x, made=made: [layer(x) for layer in made])
        assert outputs == [dtype] * len(names)
