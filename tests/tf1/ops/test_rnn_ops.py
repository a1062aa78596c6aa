"""`rnn_ops` and the recurrent layers, compared with plain loops over the steps, and with torch."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ipu_pipeline as ipu
from ipu_pipeline import engine, layers, rnn_ops
from ipu_pipeline.layers import recurrent
from tests.support import front, layer_cases, models
from tests.support.recurrent_formulas import plain_gru, plain_lstm

pytestmark = pytest.mark.usefixtures("nothing_warned")


TIME, BATCH, FEATURES, UNITS = 4, 5, 3, 2
LENGTHS = np.array([4, 0, 2, 1, 3], np.int32)
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2, "float16": 3e-3}


def flat(xp, values):
    return xp.concatenate([value.reshape(-1) for value in jax.tree.leaves(values)])


class Case(NamedTuple):
    """How a layer is called, with what it takes as variables; `formula` is of these variables."""

    kind: Any
    resets_after: bool = False
    lengths: Any = None
    has_state: bool = True
    is_time_major: bool = True
    is_recomputed: bool = False

    def apply(self, x):
        options = {"reset_after": True} if self.resets_after else {}
        layer, arguments = self.kind(UNITS, x.dtype, **options), []
        if self.lengths is not None:
            arguments.append(self.lengths)
        if self.kind is AUGRU:
            shape = (TIME, BATCH) if self.is_time_major else (BATCH, TIME)
            arguments.append(engine.get_variable("scores", shape, x.dtype))
        if self.has_state:
            names = "ch" if self.kind in (LSTM, DynamicLSTM) else "h"
            states = {name: engine.get_variable(name, (BATCH, UNITS), x.dtype) for name in names}
            arguments.append(StateTuple(**states) if "c" in states else states["h"])
        if not self.is_time_major:
            return layer(jnp.swapaxes(x, 0, 1), *arguments, time_major=False)
        return (jax.checkpoint(layer) if self.is_recomputed else layer)(x, *arguments)

    def formula(self, xp, v):
        x, zeros = v["inputs"], xp.zeros((BATCH, UNITS), v["inputs"].dtype)
        lengths = None if self.lengths is None else LENGTHS
        if self.kind in (LSTM, DynamicLSTM):
            states = v.get("c", zeros), v.get("h", zeros)
            return plain_lstm(xp, x, *states, v["kernel"], v["biases"], lengths)
        biases = v.get("biases")
        if self.kind is AUGRU:
            biases = xp.concatenate([v["bias_r_u"], v["bias_c"]])
            if self.resets_after:
                biases = xp.stack([biases, biases], axis=1)
        scores = v.get("scores")
        if not self.is_time_major and scores is not None:
            scores = scores.T
        return plain_gru(xp, x, v["h"], v["kernel"], biases, lengths, scores)


def any_value(getter, name, **options):
    """A custom getter that lets all variables start from random values, also those that begin with 1."""
    return getter(name, **{**options, "initializer": jax.nn.initializers.normal(0.5)})


LSTM, GRU, AUGRU = rnn_ops.PopnnLSTM, rnn_ops.PopnnGRU, rnn_ops.PopnnAUGRU
DynamicLSTM, DynamicGRU = rnn_ops.PopnnDynamicLSTM, rnn_ops.PopnnDynamicGRU
StateTuple = rnn_ops.LSTMStateTuple
ALL = [
    Case(LSTM, has_state=False),
    Case(GRU, is_recomputed=True),
    Case(LSTM),
    Case(DynamicLSTM, lengths=LENGTHS),
    Case(GRU),
    Case(GRU, resets_after=True),
    Case(DynamicGRU, lengths=LENGTHS.tolist()),
    Case(DynamicGRU, True, LENGTHS.astype("uint8"), is_time_major=False),
    Case(AUGRU, lengths=LENGTHS),
    Case(AUGRU, True, LENGTHS, is_time_major=False),
]


@pytest.mark.parametrize(
    ("cases", "dtypes"),
    [
        ([ALL[9]], ["float64"]),
        pytest.param(ALL, ["float64"] * len(ALL), marks=pytest.mark.thorough),
        pytest.param(ALL, ["float32", "bfloat16", "float16"] * 3 + ["float32"], marks=pytest.mark.thorough),
    ],
)
def test_layers(rng, cases, dtypes):
    """Outputs and states by NumPy, and the gradient of every weight, state, input and score.

    In float64, or in a mixture of other dtypes, which a program of float64 cannot have.
    """
    with jax.enable_x64(dtypes[0] == "float64"):
        accurate = jnp.float64 if dtypes[0] == "float64" else jnp.float32

        def calling(case, dtype):
            def apply(x):
                with ipu.variable_scope("case", custom_getter=any_value):
                    return flat(jnp, case.apply(x))

            return layer_cases.Case(apply, rng.normal(size=(TIME, BATCH, FEATURES)).astype(dtype))

        found = layer_cases.run_cases([calling(*pair) for pair in zip(cases, dtypes, strict=True)])

        def plain_loss(all_variables):
            losses = []
            for case, variables in zip(cases, all_variables, strict=True):
                cast = {name: value.astype(accurate) for name, value in variables.items()}
                losses.append(layer_cases.loss(flat(jnp, case.formula(jnp, cast))))
            return sum(losses)

        expected_gradients = jax.jit(jax.grad(plain_loss))([variables for _y, variables, _g in found])
        for case, dtype, one, gradients in zip(cases, dtypes, found, expected_gradients, strict=True):
            wide = {name: value.astype(np.float64) for name, value in one[1].items()}
            outputs = flat(np, case.formula(np, wide)).astype(dtype)
            name = str(case)
            models.assert_trees_close({name: one[::2]}, {name: (outputs, gradients)}, TOLERANCES[dtype])


# The layouts of torch


def lay_out(blocks, order, axis):
    """Blocks of torch's rows, in another order, along an axis of ours."""
    parts = np.split(blocks.detach().numpy(), len(order))
    return np.stack([parts[number] for number in order], axis=axis)


def kernels(module, order):
    of_inputs, of_state = (
        np.concatenate(lay_out(weight, order, 0)).T for weight in (module.weight_ih_l0, module.weight_hh_l0)
    )
    return of_inputs, of_state


def assert_as_torch(function, inputs, expected):
    models.assert_trees_close(
        front.results(function, *inputs), [value.detach().numpy() for value in expected]
    )


def test_lstm_equals_torch(rng):
    module = torch.nn.LSTM(FEATURES, UNITS)
    x = rng.normal(size=(TIME, BATCH, FEATURES)).astype("float32")
    order = [0, 1, 2, 3]  # torch, too, has i, f, candidate, o
    of_inputs, of_state = kernels(module, order)
    biases = lay_out(module.bias_ih_l0 + module.bias_hh_l0, order, 0)
    h, c = (rng.normal(size=(BATCH, UNITS)).astype("float32") for _number in range(2))

    def function(x, h, c):
        whole = np.concatenate([of_inputs, of_state])
        outputs, state = LSTM(UNITS, weights_initializer=whole, bias_initializer=biases)(
            x, StateTuple(c, h)
        )
        initial = {"kernel_initializer": of_inputs, "recurrent_initializer": of_state}
        initial |= {"bias_initializer": biases.reshape(-1), "unit_forget_bias": False}
        keras = layers.LSTM(UNITS, **initial, return_sequences=True, return_state=True)
        sequence, keras_h, keras_c = keras(jnp.swapaxes(x, 0, 1), initial_state=[h, c])
        return outputs, state.h, state.c, jnp.swapaxes(sequence, 0, 1), keras_h, keras_c

    outputs, (h_n, c_n) = module(torch.tensor(x), (torch.tensor(h)[None], torch.tensor(c)[None]))
    assert_as_torch(function, (x, h, c), [outputs, h_n[0], c_n[0]] * 2)


def test_gru_equals_torch(rng):
    module = torch.nn.GRU(FEATURES, UNITS)
    x = rng.normal(size=(TIME, BATCH, FEATURES)).astype("float32")
    order = [1, 0, 2]  # torch has r, z, candidate
    of_inputs, of_state = kernels(module, order)
    biases = np.stack([lay_out(b, order, 0) for b in (module.bias_ih_l0, module.bias_hh_l0)], axis=1)
    h = rng.normal(size=(BATCH, UNITS)).astype("float32")

    def function(x, h):
        initial = {"weights_initializer": np.concatenate([of_inputs, of_state]), "bias_initializer": biases}
        layer = GRU(UNITS, **initial, reset_after=True)
        initial = {"kernel_initializer": of_inputs, "recurrent_initializer": of_state}
        initial["bias_initializer"] = np.swapaxes(biases, 0, 1).reshape(2, -1)
        keras = layers.GRU(UNITS, **initial, return_state=True, time_major=True)
        last, keras_h = keras(x, initial_state=h)
        return *layer(x, h), last, keras_h

    outputs, h_n = module(torch.tensor(x), torch.tensor(h)[None])
    assert_as_torch(function, (x, h), [outputs, h_n[0], outputs[-1], h_n[0]])


# In programs


SEQUENCE = np.linspace(-1, 1, TIME * BATCH * FEATURES, dtype="float32").reshape(TIME, BATCH, FEATURES)


def test_sharing_variables():
    """A layer called again, and another one of its name with reuse; a sequence may be cut."""

    def function(x):
        layer = LSTM(UNITS, name="encoder")
        whole, state = layer(x)
        first, between = layer(x[:2])
        with ipu.variable_scope(ipu.get_variable_scope(), reuse=True):
            second, end = LSTM(UNITS, name="encoder")(x[2:], between)
        return whole, jnp.concatenate([first, second]), *state, *end

    compiled = front.compile_program(function, [SEQUENCE])
    assert sorted(compiled.variables) == ["encoder/biases", "encoder/kernel"]
    with ipu.Session() as session:
        whole, cut, *states = session.run(compiled)
    # XLA may join operations of one in other ways than those of the other.
    np.testing.assert_allclose(whole, cut, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(states[:2], states[2:], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(whole[-1], states[1])


def test_loops_carry_states():
    """The body of a loop calls a layer, with the state of the iteration before."""

    def function(x):
        layer = GRU(UNITS)
        body = lambda x, state: (x, layer(x, state)[1])  # noqa: E731
        _x, looped = ipu.loops.repeat(3, body, [x, jnp.zeros(layer.state_shape(BATCH))])
        _outputs, once = layer(jnp.concatenate([x] * 3))
        return looped, once

    np.testing.assert_array_equal(*front.results(function, SEQUENCE))


def test_building_ahead():
    """Variables exist before the first call, and can be read, for a penalty on the weights."""
    seen = {}

    def function(x):
        penalty = jnp.float32(0)
        for layer in (LSTM(UNITS, seed=7), DynamicGRU(UNITS, reset_after=True), AUGRU(UNITS)):
            assert (layer.num_layers, layer.num_units) == (1, UNITS)
            with pytest.raises(ValueError, match="input_size is not known yet. Call the layer"):
                _unknown = layer.canonical_weight_shape
            layer.build((None, BATCH, FEATURES))
            assert layer.input_size == FEATURES
            assert list(layer.kernel.shape) == layer.canonical_weight_shape
            assert list(layer.biases.shape) == layer.canonical_bias_shapes
            seen[layer.kind] = layer.canonical_weight_shape, layer.canonical_bias_shapes
            penalty += jnp.sum(layer.kernel**2) + jnp.sum(layer.biases)
        return LSTM(UNITS)(x)[0], penalty

    compiled = front.compile_program(function, [np.ones((TIME, BATCH, FEATURES), "float32")])
    rows = FEATURES + UNITS
    assert seen == {
        "popnn_lstm": ([rows, 4 * UNITS], [4, UNITS]),
        "popnn_dynamic_gru": ([rows, 3 * UNITS], [3, 2, UNITS]),
        "popnn_augru": ([rows, 3 * UNITS], [3, UNITS]),
    }
    others = ("popnn_dynamic_gru", "popnn_lstm", "popnn_lstm_1")
    names = {f"{layer}/{variable}" for layer in others for variable in ("biases", "kernel")}
    assert {*compiled.variables} == names | {
        f"popnn_augru/{name}" for name in ("bias_c", "bias_r_u", "kernel")
    }
    kernels = []
    for seed in (0, 1):
        with ipu.Session(seed) as session:
            session.create_variables(compiled)
            found = session.variables
            kernels.append((found["popnn_lstm/kernel"], found["popnn_lstm_1/kernel"]))
            assert not found["popnn_lstm/biases"].any()
            assert (found["popnn_augru/bias_r_u"] == 1).all()
            assert not found["popnn_augru/bias_c"].any()
    np.testing.assert_array_equal(kernels[0][0], kernels[1][0])  # which has a seed of its own
    assert not np.array_equal(kernels[0][1], kernels[1][1])
    limit = np.sqrt(6 / (rows + 4 * UNITS))  # Glorot's, of the whole kernel
    assert 0.7 * limit < np.abs(kernels[0][1]).max() <= limit


def test_mixed_precision():
    """Computation in 16 bits, variables in 32."""

    def stage(x):
        with ipu.mixed_precision("mixed_bfloat16"):
            outputs, state = LSTM(UNITS)(x)
            last = layers.GRU(UNITS)(outputs)
        return outputs, state, last

    dtypes, variables = layer_cases.dtypes_of(stage, np.ones((TIME, BATCH, FEATURES), "float32"))
    assert set(dtypes) == {"bfloat16"}
    assert set(variables.values()) == {"float32"}


def test_weights_are_not_kept_for_each_step():
    """What the backward needs of a step has the batch's size, also where weights are cast within it."""

    def loss(kernel, recurrent_kernel, x):
        zeros, activations = jnp.zeros((BATCH, UNITS), jnp.bfloat16), (jnp.tanh, jax.nn.sigmoid)
        given = x, StateTuple(zeros, zeros), kernel, recurrent_kernel, None, *activations
        return jnp.sum(recurrent.run_lstm(*given)[0].astype(jnp.float32))

    weights = jnp.ones((FEATURES, 4 * UNITS)), jnp.ones((UNITS, 4 * UNITS))
    x = jnp.ones((TIME, BATCH, FEATURES), jnp.bfloat16)
    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*weights, x))
    kept = {shape.split(",")[0] for shape in re.findall(rf"\[{TIME},(\d+,\d+)\]", program)}
    assert kept == {str(BATCH)}


@pytest.mark.parametrize(
    ("activations", "activate", "gate"),
    [
        (("relu", "hard_sigmoid"), lambda x: np.maximum(x, 0), lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
        ((jnp.sin, "softmax"), np.sin, lambda x: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)),
    ],
)
def test_activations_and_what_is_returned(activations, activate, gate, rng):
    x = rng.normal(size=(1, BATCH, FEATURES)).astype("float32")
    kernel = rng.normal(size=(FEATURES + UNITS, 4 * UNITS)).astype("float32")
    options = dict(zip(("activation", "recurrent_activation"), activations, strict=True))
    options |= {"weights_initializer": kernel, "return_state": False}
    (found,) = front.results(lambda x: LSTM(UNITS, **options)(x), x)
    i, _f, candidate, o = np.split(x[0] @ kernel[:FEATURES], 4, axis=1)
    expected = gate(o) * activate(gate(i) * activate(candidate))
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)


# Layers


def test_keras_layers(rng):
    """What arguments of LSTM and GRU do, by the layers without them."""
    x = rng.normal(size=(BATCH, TIME, FEATURES)).astype("float32")

    def function(x):
        def called(kind, x, initial_state=None, **options):
            with ipu.variable_scope("layers", reuse=True):
                return kind(UNITS, name=kind.kind, **options)(x, initial_state=initial_state)

        def whole(kind, x, **options):
            return called(kind, x, return_sequences=True, return_state=True, **options)

        pairs = []
        for kind in (layers.LSTM, layers.GRU):
            outputs, *states = whole(kind, x, bias_initializer="normal")
            pairs += [(called(kind, x), outputs[:, -1]), (called(kind, x, return_sequences=True), outputs)]
            pairs += [(states[0], outputs[:, -1]), (whole(kind, x, unroll=True), (outputs, *states))]
            backwards = whole(kind, x, go_backwards=True)
            pairs.append((backwards, whole(kind, x[:, ::-1])))
            swapped, *same = whole(kind, jnp.swapaxes(x, 0, 1), time_major=True)
            pairs += [(jnp.swapaxes(swapped, 0, 1), outputs), (same, states)]
            first, *between = whole(kind, x[:, :2])
            pairs.append((first, outputs[:, :2]))
            second, *end = whole(kind, x[:, 2:], initial_state=between)
            pairs += [(second, outputs[:, 2:]), (end, states)]
            if kind is layers.LSTM:
                h, c = between
                pairs.append((whole(kind, x[:, 2:], initial_state=StateTuple(c=c, h=h))[0], second))
        return [jax.tree.leaves(side) for side in zip(*pairs, strict=True)]

    compiled = front.compile_program(function, [x])
    shapes = {name: spec.shape for name, spec in compiled.variables.items()}
    assert shapes == {
        "layers/lstm/kernel": (FEATURES, 4 * UNITS),
        "layers/lstm/recurrent_kernel": (UNITS, 4 * UNITS),
        "layers/lstm/bias": (4 * UNITS,),
        "layers/gru/kernel": (FEATURES, 3 * UNITS),
        "layers/gru/recurrent_kernel": (UNITS, 3 * UNITS),
        "layers/gru/bias": (2, 3 * UNITS),
    }
    with ipu.Session() as session:
        found, expected = session.run(compiled)
        for value, same in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, same, rtol=1e-5, atol=1e-6)
        bias = session.variables["layers/lstm/bias"].reshape(4, UNITS)
        assert (bias[1] == 1).all()  # that of the forget gate
        assert (bias[[0, 2, 3]] != 0).all()
        columns = session.variables["layers/gru/recurrent_kernel"]
        np.testing.assert_allclose(columns @ columns.T, np.eye(UNITS), atol=1e-5)


def test_keras_layers_without_biases(rng):
    x = rng.normal(size=(BATCH, TIME, FEATURES)).astype("float32")

    def function(x):
        return (
            layers.LSTM(UNITS, use_bias=False)(x),
            layers.GRU(UNITS, use_bias=False)(x),
            layers.GRU(UNITS, use_bias=False, reset_after=False)(x),
            layers.GRU(UNITS, reset_after=False)(x[:, :0], initial_state=[jnp.ones((BATCH, UNITS))]),
        )

    compiled = front.compile_program(function, [x])
    with ipu.Session() as session:
        lstm, after, before, unchanged = session.run(compiled)
        v = session.variables
    zeros = np.zeros((BATCH, UNITS))
    for found, name, formula, states, biases in (
        (lstm, "lstm", plain_lstm, (zeros, zeros), np.zeros((4, UNITS))),
        (after, "gru", plain_gru, (zeros,), np.zeros((3, 2, UNITS))),
        (before, "gru_1", plain_gru, (zeros,), np.zeros((3, UNITS))),
    ):
        kernel = np.concatenate([v[f"{name}/kernel"], v[f"{name}/recurrent_kernel"]])
        *_others, expected = formula(np, np.swapaxes(x, 0, 1), *states, kernel, biases)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert v["gru_2/bias"].shape == (3 * UNITS,)
    assert (unchanged == 1).all()


def test_dropout_of_inputs():
    """The same features of an example in all steps: then outputs are those of inputs that lack them."""

    options = {"activation": None, "recurrent_activation": jnp.ones_like, "dropout": 0.5, "dropout_seed": 1}
    options |= {"kernel_initializer": "ones", "recurrent_initializer": "zeros", "return_sequences": True}

    def stage(x):
        drops = layers.LSTM(UNITS, **options)  # which sums the inputs up
        return drops(x, training=True), drops(x), drops(x, training=False)

    pipeline = engine.Pipeline([stage], num_micro_batches=1)
    x = np.ones((64, TIME, 2), "float32")
    _state, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x])
    dropped, *kept = (np.asarray(value)[..., 0] for value in outputs.outputs[0])
    steps = np.arange(1, TIME + 1)
    assert {tuple(row) for row in dropped} == {tuple(steps * total) for total in (0, 2, 4)}
    for outputs in kept:
        np.testing.assert_array_equal(outputs, np.broadcast_to(2 * steps, (64, TIME)))


# What is not possible


X = np.ones((TIME, BATCH, FEATURES), "float32")
S = np.zeros((BATCH, UNITS), "float32")  # a state
SCORES = np.zeros((TIME, BATCH), "float32")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LSTM(0), ValueError, "PopnnLSTM: num_units must be a positive integer; got 0"),
        (lambda: GRU(2, "int32"), ValueError, "PopnnGRU: dtype must be a floating-point one"),
        (lambda: GRU(2, partials_dtype=3), ValueError, "partials_dtype must be a floating"),
        (lambda: LSTM(2, seed="a"), TypeError, "seed must be an integer or None; got 'a'"),
        (lambda: LSTM(2, activation="tan"), ValueError, "no activation 'tan'"),
        (lambda: LSTM(2, weights_initializer="x"), ValueError, "no initializer 'x'"),
        (lambda: LSTM(2, return_state=1), TypeError, "return_state must be True or False"),
        (lambda: GRU(2, reset_after=1), TypeError, "reset_after must be True or False"),
        (lambda: LSTM(2)(X[0]), ValueError, r"of rank 3, \[time, batch, features\]; got shape"),
        (lambda: LSTM(2)(X.astype("int32")), TypeError, "needs floating-point inputs"),
        (lambda: LSTM(2)(X, training=None), TypeError, "training must be True or False"),
        (lambda: LSTM(2)(X, (S, S)), TypeError, r"must be an LSTMStateTuple; got a tuple. Give .*\(c, h\)"),
        (lambda: LSTM(2)(X, StateTuple(S, S[:1])), ValueError, r"state.h must .* \(5, 2\), .*got \(1, 2\)"),
        (lambda: GRU(2)(X, S.astype("int32")), TypeError, "initial_state must .*-point.* got int32"),
        (lambda: GRU(2)(X, [S]), TypeError, r"must be an array of shape \(5, 2\); got a list"),
        (lambda: DynamicGRU(2)(X, None), TypeError, r"seq_len must be integers of shape \(5,\)"),
        (lambda: DynamicGRU(2)(X, [0.5] * 5), TypeError, "seq_len must be integers; got float"),
        (lambda: DynamicLSTM(2)(X, [1, 2]), ValueError, r"shape \(5,\), one length per example"),
        (lambda: DynamicLSTM(2)(X, LENGTHS + 1), ValueError, r"from 0 to 4, .*got \[5, 1, 3, 2, 4\]"),
        (lambda: AUGRU(2)(X, LENGTHS, None), TypeError, "attention_score must be an array"),
        (lambda: AUGRU(2)(X, LENGTHS, LENGTHS), TypeError, "attention_score must .*-point.* got int32"),
        (lambda: AUGRU(2)(X, LENGTHS, SCORES.T), ValueError, r"\(4, 5\), .* time_major=True; got \(5, 4\)"),
        (
            lambda: AUGRU(2)(X, LENGTHS[:4], SCORES.T, time_major=False),
            ValueError,
            r"must have shape \(4, 5\), \[batch, time\] since time_major=False; got \(5, 4\)",
        ),
        (lambda: LSTM(2).build((4, 3)), ValueError, r"input_shape must be \[time, batch"),
        (lambda: LSTM(2).build((4, 3, None)), ValueError, "positive integer for features"),
        (lambda: layers.LSTM(2.0), ValueError, "LSTM: units must be a positive integer; got 2.0"),
        (lambda: layers.LSTM(2, stateful=True), ValueError, "LSTM: stateful=True is not possible, since a"),
        (lambda: layers.GRU(2, unroll=1), TypeError, "GRU: unroll must be True or False"),
        (lambda: layers.GRU(2, dropout=1.0), ValueError, "rate must be at least 0 and below 1"),
        (lambda: layers.GRU(2)(X[0]), ValueError, r"GRU gru needs inputs of rank 3, \[batch, time"),
        (lambda: layers.LSTM(2)(X, initial_state=S), TypeError, r"must be two arrays, \[h, c\]"),
        (
            lambda: layers.LSTM(2, time_major=True)(X, initial_state=[S, S.T]),
            ValueError,
            r"initial_state's c must have shape \(5, 2\)",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        front.compile_program(call)


def test_another_number_of_features():
    layer = GRU(2)
    with pytest.raises(ValueError, match="must have 3 features, for which the layer was built; got 2"):
        front.compile_program(lambda: (layer(X), layer(X[..., :2])))


def test_outside_of_a_program():
    with pytest.raises(RuntimeError, match="PopnnLSTM was called outside of a program"):
        LSTM(2)(X)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LSTM(2, partials_dtype=np.float16), "partials_dtype has no effect: products"),
        (lambda: GRU(2, options={"a": 1}), "PopnnGRU: options has no effect: it was for Poplar"),
        (lambda: GRU(2, options_bwd={"a": 1}), "options_bwd has no effect"),
        (lambda: GRU(2, available_memory_proportion_fwd=0.2), "available_memory_proportion_fwd has no"),
        (lambda: AUGRU(2, bias_initializer="ones"), "PopnnAUGRU: bias_initializer has no effect, as in"),
        (lambda: layers.LSTM(2, partials_dtype="float16"), "LSTM: partials_dtype has no effect"),
        (lambda: layers.GRU(2, options={"a": 1}), "GRU: options has no effect"),
    ],
)
def test_arguments_for_poplar(make, message):
    with pytest.warns(UserWarning, match=message):
        make()
    make()  # only the first time
    LSTM(2, np.float32, np.float32, options={}, options_bwd=None)  # what they were by default
