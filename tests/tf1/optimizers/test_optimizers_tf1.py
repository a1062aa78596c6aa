"""`ipu.optimizers.tf1`: each optimizer against a NumPy statement of TensorFlow 1's formula, and decays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.optimizers import tf1
from tests.support import front

RATE = 0.1


def by_hand(rule):
    """Weights after each of five updates, of a rule that changes the weights in place; g(w) = w**2 - 1."""
    w = np.array([0.3, -0.2, 1.5, 0.0])
    state, found = {}, []
    for count in range(1, 6):
        g = w**2 - 1
        w = rule(w, g, count, state)
        found.append(w)
    return found


def by_optax(optimizer):
    w = jnp.array([0.3, -0.2, 1.5, 0.0])
    state, found, update = optimizer.init(w), [], jax.jit(optimizer.update)
    for _count in range(5):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(w**2 - 1, state, w)
        w = optax.apply_updates(w, updates)
        found.append(np.asarray(w))
    return found


def momentum(nesterov):
    def rule(w, g, count, state):
        a = state["a"] = 0.9 * state.get("a", 0) + g
        return w - RATE * (g + 0.9 * a if nesterov else a)

    return rule


def moments(g, state, beta1=0.9, beta2=0.999):
    m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    return m, v


def adam(w, g, count, state, decay=0.0, epsilon=1e-2):
    m, v = moments(g, state)
    rate = RATE * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return w - decay * w - rate * m / (np.sqrt(v) + epsilon)


def adam_weight_decay(w, g, count, state, decay=0.01):
    m, v = moments(g, state)
    return w - RATE * (m / (np.sqrt(v) + 1e-6) + decay * w)


def lamb(w, g, count, state):
    m, v = moments(g, state)
    u = m / (np.sqrt(v) + 1e-6) + 0.01 * w
    return w - RATE * np.linalg.norm(w) / np.linalg.norm(u) * u


def rmsprop(centered):
    def rule(w, g, count, state):
        s = state["s"] = 0.8 * state.get("s", 1.0) + 0.2 * g**2
        mean = state["mean"] = 0.8 * state.get("mean", 0.0) + 0.2 * g
        a = state.get("a", 0) * 0.5
        a = state["a"] = a + RATE * g / np.sqrt(s - (mean**2 if centered else 0) + 1e-10)
        return w - a

    return rule


def adagrad(w, g, count, state):
    s = state["s"] = state.get("s", 0.1) + g**2
    return w - RATE * g / np.sqrt(s)


def adadelta(w, g, count, state):
    s = state["s"] = 0.95 * state.get("s", 0) + 0.05 * g**2
    d = np.sqrt(state.get("u", 0) + 1e-3) / np.sqrt(s + 1e-3) * g
    state["u"] = 0.95 * state.get("u", 0) + 0.05 * d**2
    return w - RATE * d


def ftrl(power, l1, l2, shrinkage):
    def rule(w, g, count, state):
        n = state.get("n", 0.1)
        grown = state["n"] = n + g**2
        z = state.get("z", 0) + g + 2 * shrinkage * w - (grown**power - n**power) / RATE * w
        state["z"] = z
        new = -(z - np.sign(z) * l1) / (grown**power / RATE + 2 * l2)
        return np.where(np.abs(z) > l1, new, 0.0)

    return rule


OPTIMIZERS = {
    "sgd": (tf1.GradientDescentOptimizer(RATE), lambda w, g, count, state: w - RATE * g),
    "momentum": (tf1.MomentumOptimizer(RATE, 0.9), momentum(False)),
    "nesterov": (tf1.MomentumOptimizer(RATE, 0.9, use_nesterov=True), momentum(True)),
    "adam": (tf1.AdamOptimizer(RATE, epsilon=1e-2), adam),
    "adamw": (tf1.AdamWOptimizer(0.02, RATE, epsilon=1e-2), functools.partial(adam, decay=0.02)),
    "adam weight decay": (tf1.AdamWeightDecayOptimizer(RATE, 0.01), adam_weight_decay),
    "lamb": (tf1.LAMBOptimizer(RATE, 0.01), lamb),
    "rmsprop": (tf1.RMSPropOptimizer(RATE, 0.8, 0.5), rmsprop(False)),
    "centered rmsprop": (tf1.RMSPropOptimizer(RATE, 0.8, 0.5, centered=True), rmsprop(True)),
    "adagrad": (tf1.AdagradOptimizer(RATE), adagrad),
    "adadelta": (tf1.AdadeltaOptimizer(RATE, epsilon=1e-3), adadelta),
    "ftrl": (tf1.FtrlOptimizer(RATE), ftrl(0.5, 0.0, 0.0, 0.0)),
    "ftrl with strengths": (
        tf1.FtrlOptimizer(RATE, -0.4, 0.1, 0.2, 0.3, l2_shrinkage_regularization_strength=0.05),
        ftrl(0.4, 0.2, 0.3, 0.05),
    ),
}


def test_each_is_tensorflows_formula():
    for name, (optimizer, rule) in OPTIMIZERS.items():
        for ours, expected in zip(by_optax(optimizer), by_hand(rule), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6, err_msg=name)


def test_variables_are_excluded_by_their_names():
    """Of BERT's decay, and in LAMB of the ratio of norms, too."""
    names = ["layer0/ffn/bias", "layer0/LayerNorm/gamma", "kernel"]
    params = {name: jnp.array([0.3, -0.2]) for name in names}
    for optimizer, rule in (
        (tf1.AdamWeightDecayOptimizer(RATE, 0.01, exclude_from_weight_decay=["LayerNorm", "bias$"]), None),
        (tf1.LAMBOptimizer(RATE, 0.01, exclude_from_weight_decay=["LayerNorm", "bias$"]), lamb),
    ):
        updates, _state = optimizer.update(params, optimizer.init(params), params)
        w = np.array([0.3, -0.2])
        for name, update in updates.items():
            own = adam_weight_decay if name == "kernel" else functools.partial(adam_weight_decay, decay=0)
            own = rule if rule is not None and name == "kernel" else own
            np.testing.assert_allclose(w + update, own(w, w, 1, {}), rtol=1e-5, err_msg=name)


def test_they_are_transformations():
    """Gradients clipped by their global norm, then TensorFlow 1's Adam, and averaged weights."""
    adam_of_part = optax.chain(optax.clip_by_global_norm(1.0), tf1.AdamOptimizer(RATE, epsilon=1e-2))
    averaged = ipu.optimizers.with_averaged_weights(adam_of_part, 0.5)
    found = by_optax(optax.multi_transform({"all": averaged}, "all"))

    def rule(w, g, count, state):
        return adam(w, g / max(1, np.linalg.norm(g)), count, state)

    np.testing.assert_allclose(found, by_hand(rule), rtol=2e-5, atol=2e-6)


def test_defaults_are_tensorflows():
    assert tf1.AdamOptimizer().name == "Adam"
    small = tf1.RMSPropOptimizer(RATE)  # a mean of squares of 1 at first, and epsilon within the root
    updates, _state = small.update(jnp.ones(1), small.init(jnp.ones(1)), jnp.ones(1))
    np.testing.assert_allclose(updates, [-RATE / np.sqrt(0.9 + 0.1 + 1e-10)], rtol=1e-6)


@pytest.mark.parametrize("kind", [tf1.AdamOptimizer, tf1.FtrlOptimizer, tf1.RMSPropOptimizer])
def test_rates_may_be_functions_of_the_number_of_updates(kind):
    constant, schedule = kind(RATE), kind(lambda _count: jnp.float32(RATE))
    for one, other in zip(by_optax(constant), by_optax(schedule), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_arguments_that_are_refused_or_have_no_effect():
    with pytest.warns(UserWarning, match="use_locking has no effect"):
        tf1.GradientDescentOptimizer(RATE, use_locking=True)
    with pytest.raises(ValueError, match="initial_accumulator_value must be positive; got 0"):
        tf1.AdagradOptimizer(RATE, 0)
    with pytest.raises(TypeError, match="must be a list of regular expressions; got 'bias'"):
        tf1.LAMBOptimizer(RATE, 0.01, exclude_from_weight_decay="bias")
    with pytest.raises(ValueError, match="learning_rate_power must be at most 0; got 0.5"):
        tf1.FtrlOptimizer(RATE, 0.5)
    with pytest.raises(ValueError, match="must be from 0; got -1"):
        tf1.FtrlOptimizer(RATE, l1_regularization_strength=-1)
    with pytest.raises(TypeError, match="AdamOptimizer: it does not wrap .*chain.other, AdamOptimizer"):
        tf1.AdamOptimizer(optax.clip_by_global_norm(1.0))
    with pytest.raises(ValueError, match="linear_name must be None"):
        tf1.FtrlOptimizer(RATE, linear_name="x")


@pytest.mark.parametrize(
    ("decay", "arguments", "formula"),
    [
        (tf1.exponential_decay, (0.5,), lambda s: 0.1 * 0.5 ** (s / 4)),
        (tf1.exponential_decay, (0.5, True), lambda s: 0.1 * 0.5 ** (s // 4)),
        (tf1.natural_exp_decay, (0.5,), lambda s: 0.1 * np.exp(-0.5 * s / 4)),
        (tf1.inverse_time_decay, (0.5, True), lambda s: 0.1 / (1 + 0.5 * (s // 4))),
        (tf1.polynomial_decay, (0.01, 2.0), lambda s: 0.09 * (1 - min(s, 4) / 4) ** 2 + 0.01),
        (
            functools.partial(tf1.polynomial_decay, cycle=True),  # with the default power
            (0.01,),
            lambda s: 0.09 * (1 - s / (4 * max(1, -(-s // 4)))) + 0.01,
        ),
        (tf1.cosine_decay, (0.2,), lambda s: 0.1 * (0.4 * (1 + np.cos(np.pi * min(s, 4) / 4)) + 0.2)),
    ],
)
def test_decays(decay, arguments, formula):
    for step in (0, 1, 3, 4, 5, 9):
        expected = pytest.approx(formula(step), rel=1e-5)
        assert float(decay(0.1, step, 4, *arguments)) == expected
        assert float(jax.jit(lambda s: decay(0.1, s, 4, *arguments))(jnp.int32(step))) == expected


def test_piecewise_constants():
    found = [float(tf1.piecewise_constant(step, [2, 5], [1.0, 0.5, 0.1])) for step in (0, 2, 3, 5, 6)]
    assert found == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.1])
    with pytest.raises(ValueError, match="one more than boundaries; got 2 and 2"):
        tf1.piecewise_constant(0, [1, 2], [1.0, 0.5])


def test_in_programs_as_they_write_them():
    """A loop that minimizes by itself, and a pipeline, with a rate that is fed; both as Optax says."""
    rate = ipu.placeholder(np.float32, [], name="rate")

    def body(rate, w_sum):
        w = ipu.get_variable("w", [2], initializer=jax.nn.initializers.constant(0.5))
        loss = jnp.sum(jnp.square(w - 1))
        return rate, w_sum + jnp.sum(w), tf1.RMSPropOptimizer(rate).minimize(loss)

    program = front.compile_program(lambda rate: ipu.loops.repeat(5, body, [rate, 0.0]), inputs=[rate])
    with ipu.Session() as session:
        session.run(ipu.global_variables_initializer())
        found = session.run(program, {rate: RATE})
    transformation = tf1.RMSPropOptimizer(RATE)
    w, total = jnp.full(2, 0.5), 0.0
    state = transformation.init(w)
    for _count in range(5):
        total += w.sum()
        updates, state = transformation.update(2 * (w - 1), state, w)
        w = w + updates
    assert found[1] == pytest.approx(float(total), rel=1e-6)
    output = ipu.pipelining_ops.OptimizerFunctionOutput(tf1.AdamOptimizer(RATE), jnp.float32(0))
    assert output.opt.name == "Adam"
