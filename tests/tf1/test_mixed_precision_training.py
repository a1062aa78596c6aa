"""Training in mixed precision: equal to a plain loop of the same casts, in memory, kept, and by Flax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import ipu_pipeline as ipu
from ipu_pipeline import engine, layers, mixed_precision
from ipu_pipeline.engine.inspect import Edge
from ipu_pipeline.optimizers import LossScalingOptimizer
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support import front, layer_cases, models

NUM = 2  # micro-batches
# XLA otherwise leaves out casts to 16 bits and back within a program, so that results depend on where a
# model is cut.
AS_WRITTEN = {"xla_allow_excess_precision": False}
WORDS, LENGTH, WIDTH = 11, 6, 8


def mixed(function):
    """A stage in mixed precision."""
    return mixed_precision("mixed_bfloat16")(function)


@mixed
def first(tokens):
    return layers.Embedding(WORDS, WIDTH, name="words")(tokens), tokens


@mixed
def second(x, tokens):
    with ipu.variable_scope("block"):
        y = layers.LayerNormalization(name="norm")(x)
        y = layers.Dense(2 * WIDTH, use_bias=False, activation="gelu", name="up")(y)
        return x + layers.Dense(WIDTH, name="down")(y), tokens


@mixed
def third(x, tokens):
    x = layers.LayerNormalization(name="norm")(x)
    return cross_entropy(layers.Dense(WORDS, dtype=jnp.float32, name="head")(x), tokens)


def cross_entropy(logits, tokens):
    logits, wanted = logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1)
    return models.cross_entropy(logits, wanted)


def plain_loss(variables, tokens):
    """The same model of its variables, with every cast written out."""
    half = jnp.bfloat16

    def norm(x, name):
        x = x.astype("float32")
        mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        x = (x - mean) * jax.lax.rsqrt(variance + 1e-3)
        return (x * variables[f"{name}/gamma"] + variables[f"{name}/beta"]).astype(half)

    def dense(x, name, dtype=half):
        y = x.astype(dtype) @ variables[f"{name}/kernel"].astype(dtype)
        bias = variables.get(f"{name}/bias")
        return y if bias is None else y + jnp.broadcast_to(bias, y.shape).astype(dtype)

    x = jnp.take(variables["words/embeddings"], tokens, axis=0).astype(half)
    y = jax.nn.gelu(dense(norm(x, "block/norm"), "block/up"), approximate=False)
    x = x + dense(y, "block/down")
    return cross_entropy(dense(norm(x, "norm"), "head", jnp.float32), tokens)


def token_batches():
    """Sequences that go up by one or two."""
    rng = np.random.default_rng(3)
    starts, steps = rng.integers(0, WORDS, (NUM, 8, 1)), rng.integers(1, 3, (NUM, 8, 1))
    return list(((starts + steps * np.arange(LENGTH)) % WORDS).astype("int32"))


@pytest.mark.thorough
def test_a_model_of_words_equals_the_plain_loop():
    options = {"optimizer": optax.trace(decay=0.0)}  # its state is the gradient
    options["reduction"] = "sum"
    options |= {"forward_options": [AS_WRITTEN] * 3, "backward_options": [AS_WRITTEN] * 3}
    options |= {"device_mapping": [0, 1, 0], "recompute": "auto"}
    pipeline = engine.Pipeline([first, second, third], num_micro_batches=NUM, **options)
    batches = token_batches()
    state = pipeline.init(jax.random.key(1), batches[0])
    variables = models.on_one_device(state.variables)
    differentiate = jax.jit(jax.value_and_grad(plain_loss), compiler_options=AS_WRITTEN)
    losses, gradients = zip(*[differentiate(variables, tokens) for tokens in batches], strict=True)
    sums = jax.tree.map(lambda *leaves: sum(leaves), *gradients)
    assert {value.dtype.name for value in state.variables.values()} == {"float32"}
    after, outputs = pipeline.step(state, batches)
    models.assert_trees_close(models.on_one_device(list(outputs.losses)), list(losses))
    models.assert_trees_close(models.on_one_device(after.optimizer_state.trace), sums)


def gradients_of(stages, micro_batches):
    """What the optimizer gets after a step, by the variables' names."""
    options = {"optimizer": optax.trace(decay=0.0), "reduction": "sum"}
    pipeline = engine.Pipeline(stages, num_micro_batches=len(micro_batches), **options)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    return pipeline.step(state, micro_batches)[0].optimizer_state.trace


def test_gradients_are_added_in_float32():
    """301 ones: in bfloat16, 256 + 1 is 256."""

    @mixed
    def stage(x):
        return jnp.sum(layers.Dense(2, name="dense")(x).astype("float32"))

    for gradient in gradients_of([stage], [np.ones((1, 3), "float32")] * 301).values():
        np.testing.assert_array_equal(gradient, np.full(gradient.shape, 301, "float32"))


def test_the_gradient_of_a_bias_is_added_in_float32():
    """Of 301 examples within one micro-batch, too."""

    layer = layers.Dense(2, name="dense", dtype=jnp.bfloat16, param_dtype=jnp.float32)
    stages = [lambda x: jnp.sum(layer(x), axis=1), lambda y: jnp.sum(y.astype("float32"))]
    gradients = gradients_of(stages, [np.ones((301, 3), "float32")])
    np.testing.assert_array_equal(gradients["dense/bias"], np.full(2, 301, "float32"))


# Memory and transfers.

BATCH, UNITS = 4, 64


def compile_dense(**dtypes):
    """A program with three stages of dense layers."""

    def hidden(x, name):
        for number in range(2):
            x = layers.Dense(UNITS, activation="tanh", name=f"{name}{number}", **dtypes)(x)
        return x

    stages = [
        lambda x: hidden(x, "a"),
        lambda x: hidden(x, "b"),
        lambda x: jnp.mean(hidden(x, "c").astype("float32")),
    ]
    return front.Pipelined(stages, NUM, [np.zeros((BATCH, UNITS), "float32")], optax.sgd(0.1)).program


def test_half_the_bytes_are_held_and_sent_and_no_weight_is_held():
    whole, half = compile_dense(), compile_dense(dtype=jnp.bfloat16, param_dtype=jnp.float32)
    activation, halved = BATCH * UNITS * 4, BATCH * UNITS * 2
    plans = (engine.planning.plan_memory(program.calls[0].pipeline)[:2] for program in (whole, half))
    for expected, held in zip(*plans, strict=True):
        assert 3 * activation <= expected.num_held_bytes < UNITS * UNITS * 4  # a weight's bytes
        assert held.num_held_bytes == expected.num_held_bytes / 2
        assert held.in_flight == expected.in_flight
    placed = half.placement().calls[0]
    feed, *between = placed.edges
    assert feed == Edge(None, 0, activation, 0)
    one_way = [Edge(0, 1, halved, 0), Edge(1, 2, halved, 0)]
    assert between[::2] == one_way
    assert between[1::2] == [Edge(edge.target, edge.source, 0, halved) for edge in one_way]
    wanted = [part.num_variable_bytes for part in whole.placement().calls[0].parts]
    assert [part.num_variable_bytes for part in placed.parts] == wanted


# Through the front: float16 with a scale of the loss, loops, checkpoints.


SMALL = 1e-8
RATE = 0.05 / SMALL
SCALE = 2.0**26


def make_model(scale=None, **options):
    def first_stage(rate, x, labels):
        with mixed_precision("mixed_float16"):
            return front.first_stage(rate, x, labels)

    def second_stage(rate, x, labels):
        with ipu.variable_scope("second"), mixed_precision("mixed_float16"):
            logits = layers.Dense(10)(x).astype("float32")
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
        return rate, loss * np.float32(SMALL)  # so that gradients are zero in float16 without a scale

    def optimizer_function(rate, loss):
        transformation = optax.sgd(rate, momentum=0.9)
        if scale is not None:
            transformation = LossScalingOptimizer(transformation, initial_scale=scale)
        return OptimizerFunctionOutput(transformation, loss)

    batches = list(front.data(3)())
    return front.Model(
        dataset=lambda: (batch for _ in range(1000) for batch in batches),
        computational_stages=[first_stage, second_stage],
        optimizer_function=optimizer_function,
        **options,
    )


@pytest.mark.thorough
def test_float16_trains_with_a_scale_and_not_without(tmp_path):
    """And a checkpoint keeps all 32 bits."""
    path, scaled = tmp_path / "checkpoint", make_model(SCALE, repeat_count=5)
    with front.session_of(scaled, seed=1) as session:
        runs = [scaled.run(session, RATE)]
        session.save(path)
        kernel = np.asarray(session.variables["first/dense/kernel"])
        runs += [scaled.run(session, RATE) for _ in range(7)]
        variables = dict(session.variables)
    losses = np.mean(runs, axis=1) / SMALL
    assert losses[0] > 1.5
    assert losses[-1] < 0.2, losses
    assert {value.dtype.name for value in variables.values()} == {"float32"}
    assert not np.array_equal(kernel, kernel.astype(np.float16).astype(np.float32))
    with ipu.Session(seed=2) as session:
        session.restore(path)
        session.run(scaled.initializer)
        np.testing.assert_array_equal([scaled.run(session, RATE) for _ in range(2)], runs[1:3])
    model = make_model()
    with front.session_of(model, seed=1) as session:
        session.create_variables(model.program)
        start = dict(session.variables)
        model.run(session, RATE)
        models.assert_trees_close({n: np.asarray(v) for n, v in session.variables.items()}, start, 0)
    assert not np.array_equal(variables["first/dense/kernel"], start["first/dense/kernel"])


def test_an_exported_program(tmp_path):
    """What goes between its stages, and what comes out, is in 16 bits."""

    @mixed
    def stage(x):
        return layers.Dense(4)(x)

    x = np.ones((2, 4), "float32")
    model = front.Pipelined([stage, stage], 2, [x, 2 * x])
    with front.session_of(model, seed=1) as session:
        expected = model.run(session)
        session.export(tmp_path / "exported", model.program)
    assert expected.dtype == jnp.bfloat16
    loaded = ipu.load_program(tmp_path / "exported")
    np.testing.assert_array_equal(loaded.run([x, 2 * x]), expected)


def test_in_a_loop():
    """Losses and variables by the casts written out; what is enqueued in 16 bits stays so."""
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data())
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    @mixed
    def body(x, labels):
        logits = layers.Dense(10, name="dense")(x)
        loss = models.cross_entropy(logits.astype("float32"), labels)
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.1), 2)
        return optimizer.minimize(loss), outfeed.enqueue((loss, logits))

    def plain(variables, x, labels):
        y = x.astype(jnp.bfloat16) @ variables["dense/kernel"].astype(jnp.bfloat16)
        y += jnp.broadcast_to(variables["dense/bias"], y.shape).astype(jnp.bfloat16)
        return models.cross_entropy(y.astype("float32"), labels)

    program = front.compile_program(lambda: ipu.loops.repeat(4, body, [], infeed))
    with ipu.Session(seed=1) as session:
        session.run(infeed.initializer)
        session.create_variables(program)
        start = dict(session.variables)
        session.run(program)
        losses, logits = session.run(outfeed.dequeue())
        trained = dict(session.variables)
    assert {value.dtype.name for value in trained.values()} == {"float32"}
    assert (losses.dtype, logits.dtype) == (np.float32, jnp.bfloat16)
    groups = [[element] for element in itertools.islice(front.data()(), 4)]
    expected, wanted, _rest = models.plain_loop(plain, start, groups, 2, optax.sgd(0.1))
    losses, expected = np.ravel(losses), np.ravel(expected)
    models.assert_trees_close(losses[:2], expected[:2])
    models.assert_trees_close(losses, expected, 2e-3)  # XLA may leave out casts of gradients
    models.assert_trees_close(trained, jax.tree.map(np.asarray, wanted), 5e-3)


# Modules of Flax.


ROWS = np.random.default_rng(5).normal(size=(8, 12)).astype("float32")


class Block(linen.Module):
    """With dtypes of its own, or without."""

    dtype: str | None = None
    param_dtype: str = "float32"
    has_norm: bool = True

    @linen.compact
    def __call__(self, x, train=True):
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        x = linen.Dense(6, **dtypes)(x)
        if self.has_norm:
            x = linen.BatchNorm(use_running_average=not train, momentum=0.8, **dtypes)(x)
        return linen.Dense(3, **dtypes)(jnp.tanh(x))


class NnxBlock(nnx.Module):
    def __init__(self, **dtypes):
        dtypes["rngs"] = nnx.Rngs(7)
        self.dense = nnx.Linear(12, 6, **dtypes)
        self.norm = nnx.BatchNorm(6, momentum=0.8, **dtypes)
        self.out = nnx.Linear(6, 3, **dtypes)

    def __call__(self, x):
        return self.out(jnp.tanh(self.norm(self.dense(x))))


def make_block(kind, **dtypes):
    return Block(**dtypes) if kind == "linen" else NnxBlock(**dtypes)


def trained(layer):
    """Outputs, variables and gradients of a layer that trains for one micro-batch."""

    def stage(x):
        y = layer(x)
        return jnp.mean(y.astype("float32") ** 2), y

    pipeline = engine.Pipeline(
        [stage],
        num_micro_batches=1,
        loss=lambda loss, _y: loss,
        optimizer=optax.trace(decay=0.0),
        forward_options=[AS_WRITTEN],
        backward_options=[AS_WRITTEN],
    )
    state, outputs = pipeline.step(pipeline.init(jax.random.key(3), ROWS), [ROWS])
    return outputs.outputs[0][1], state.variables, state.optimizer_state.trace


def test_a_module_is_as_if_it_had_the_dtypes():
    """As Flax does it: its own `dtype` casts inputs and parameters in each module.

    Those of linen's normalizations are not cast; the gradients that they get through our cast are rounded.
    """
    options = {"has_norm": False}
    with_dtypes = layers.Flax(make_block("linen", dtype="bfloat16", **options), name="linen")
    without = layers.Flax(make_block("linen", **options), name="linen", dtype="bfloat16")
    outputs, ours, gradients = trained(without)
    assert outputs.dtype == "bfloat16"
    models.assert_trees_close((outputs, ours, gradients), trained(with_dtypes))
    assert {value.dtype.name for value in ours.values()} == {"float32"}


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_parameters_of_a_module_have_the_param_dtype(kind):
    layer = layers.Flax(make_block(kind), dtype=jnp.float32, param_dtype=jnp.bfloat16)
    outputs, variables = layer_cases.dtypes_of(layer, ROWS)
    assert outputs == ["float32"]
    found = {name.rpartition("/")[2]: dtype for name, dtype in variables.items()}
    trained = dict.fromkeys(("kernel", "bias", "scale"), "bfloat16")
    assert found == {**trained, "mean": "float32", "var": "float32"}


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_module_in_a_block(kind):
    plain, own = make_block(kind), make_block(kind, dtype="float32", param_dtype="float16")
    outside = make_block(kind, param_dtype="float16")

    def stage(x):
        with mixed_precision(dtype=jnp.bfloat16):
            a = layers.Flax(plain, name="a")(x)  # its parameters are as they were
        with mixed_precision("mixed_bfloat16"):
            b = layers.Flax(own, name="b")(x)  # whose own dtype comes last
        return a, b, layers.Flax(outside, name="c")(x)

    outputs, variables = layer_cases.dtypes_of(stage, ROWS)
    assert outputs == ["bfloat16", "float32", "float32"]
    kernels = {name[0]: dtype for name, dtype in variables.items() if name.endswith("kernel")}
    assert kernels == {"a": "float32", "b": "float32", "c": "float16"}


class Counting(linen.Module):
    """Keeps something in float32, also when it is told to compute in another dtype."""

    @linen.compact
    def __call__(self, x):
        scale = self.param("scale", jax.nn.initializers.ones, (), np.float32)
        last = self.variable("kept", "last", jnp.zeros, x.shape, np.float32)
        number = self.variable("kept", "number", jnp.zeros, (), np.int32)
        last.value = x * scale
        number.value = number.value + 1
        return last.value


def test_what_a_module_keeps_is_cast_back():
    x = np.full((2,), 1.0, "float32")
    layer = layers.Flax(Counting(), dtype=jnp.bfloat16)
    pipeline = engine.Pipeline([layer], num_micro_batches=2)
    state, outputs = pipeline.step(pipeline.init(jax.random.key(3), x), [x, 2 * x])
    assert outputs.outputs[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.variables["flax/kept/last"], 2 * x)
    assert state.variables["flax/kept/last"].dtype == np.float32
    assert state.variables["flax/kept/number"] == 3  # once in `init`
