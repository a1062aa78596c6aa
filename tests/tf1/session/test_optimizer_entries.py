"""What is in an optimizer's state: read by name, and used as weights to evaluate with averages."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.optimizers import LossScalingOptimizer, with_averaged_weights
from tests.support import front

COUNT, UPDATES, DECAY = 2, 3, 0.75
WEIGHTS = {"a": np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4), "b": np.ones((4, 2), "float32")}


def rows(num=COUNT * UPDATES):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 3)).astype("float32") for _ in range(num)]


def weight(name):
    value = WEIGHTS[name]
    return ipu.get_variable(name, value.shape, initializer=lambda *_: jnp.asarray(value))


def first(x):
    return jnp.tanh(x @ weight("a"))


def second(x):
    return jnp.sum((x @ weight("b")) ** 2)


def loss_of(weights, x):
    return jnp.sum((jnp.tanh(x @ weights["a"]) @ weights["b"]) ** 2)


class Model(front.Pipelined):
    def __init__(self, optimizer=None, mapping=(0, 1)):
        options = {"repeat_count": UPDATES, "device_mapping": mapping}
        super().__init__([first, second], COUNT, rows, optimizer, **options)

    def run(self, session):
        session.run(self.initializer)
        return super().run(session)


differentiate = jax.jit(jax.grad(loss_of))


def plain_loop(optimizer):
    """The weights after each update, and the optimizer's state."""
    weights, state, after = WEIGHTS, optimizer.init(WEIGHTS), []
    for update in range(UPDATES):
        each = [differentiate(weights, x) for x in rows()[update * COUNT : (update + 1) * COUNT]]
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(jax.tree.map(lambda *g: sum(g), *each), state, weights)
            weights = optax.apply_updates(weights, changes)
        after.append(weights)
    return after, state


def averages(after):
    average = WEIGHTS
    for weights in after:
        average = {name: DECAY * average[name] + (1 - DECAY) * weights[name] for name in average}
    return average


def assert_close(found, wanted):
    assert np.linalg.norm(np.asarray(found) - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_state_and_averages_are_those_of_a_plain_loop(tmp_path):
    train = Model(with_averaged_weights(optax.adam(0.01), DECAY), (0, 0))
    evaluate = Model()
    after, state = plain_loop(optax.adam(0.01))
    average = averages(after)
    with ipu.Session() as session:
        train.run(session)
        session.save(tmp_path / "saved")
        kept = session.optimizer_state()
        assert kept[".inner[0].count"] == UPDATES
        for name in WEIGHTS:
            assert_close(kept[f".inner[0].mu[{name!r}]"], state[0].mu[name])
            assert_close(kept[f".average[{name!r}]"], average[name])
            assert_close(session.variables[name], after[-1][name])
        for name, weights in (("average", average), (".inner[0].nu", state[0].nu), ("mu", state[0].mu)):
            with session.weights_of(name):
                assert_close(session.variables["a"], weights["a"])
                assert_close(evaluate.run(session), [loss_of(weights, x) for x in rows()])
        assert_close(evaluate.run(session), [loss_of(after[-1], x) for x in rows()])
    with ipu.Session() as session:
        session.restore(tmp_path / "saved")
        with session.weights_of("average"):
            assert_close(evaluate.run(session), [loss_of(average, x) for x in rows()])


def test_an_entry_of_ones_own():
    """optax.ema of the weights, in somebody's transformation; the wrapped one trains on as before."""
    ema = optax.ema(DECAY, debias=False)

    def update(gradients, state, params):
        changes = jax.tree.map(lambda gradient: -0.01 * gradient, gradients)
        return changes, ema.update(optax.apply_updates(params, changes), state)[1]

    with ipu.Session() as session:
        Model(optax.GradientTransformation(ema.init, update), (0, 0)).run(session)
        wanted = {name: np.zeros_like(value) for name, value in WEIGHTS.items()}
        for weights in plain_loop(optax.sgd(0.01))[0]:
            wanted = {name: DECAY * wanted[name] + (1 - DECAY) * weights[name] for name in wanted}
        with session.weights_of("ema"):
            assert_close(session.variables["b"], wanted["b"])


def test_what_may_not_be_done_with_lent_weights(tmp_path):
    train, evaluate = Model(with_averaged_weights(optax.adam(0.01), DECAY)), Model()
    with ipu.Session() as session:
        train.run(session)
        session.save(tmp_path / "saved")
        own, kept = session.variables, session.optimizer_state()
        with pytest.raises(ZeroDivisionError), session.weights_of("average"):
            for refused in (
                lambda: session.run(train.program),
                lambda: session.save(tmp_path / "other"),
                lambda: session.restore(tmp_path / "saved"),
                lambda: session.load(WEIGHTS),
                lambda: session.run(ipu.global_variables_initializer()),
                lambda: session.weights_of("average").__enter__(),
            ):
                with pytest.raises(RuntimeError, match="the weights are 'average' of an optimizer's state"):
                    refused()
            evaluate.run(session)
            session.export(tmp_path / "exported", evaluate.program)
            average = session.variables
            raise ZeroDivisionError
        for name, value in session.variables.items():
            np.testing.assert_array_equal(value, own[name])
            assert np.any(average[name] != own[name])
        jax.tree.map(np.testing.assert_array_equal, session.optimizer_state(), kept)
        train.run(session)
    loaded = ipu.load_program(tmp_path / "exported")
    assert_close(loaded.run(rows()), [loss_of(average, x) for x in rows()])


def test_other_threads_wait():
    train, has_begun = Model(with_averaged_weights(optax.adam(0.01), DECAY)), threading.Event()

    def run_program():
        has_begun.set()
        session.run(train.program)

    with ipu.Session() as session:
        train.run(session)
        with session.weights_of("average"):
            session.run(train.initializer)
            training = threading.Thread(target=run_program)
            training.start()
            has_begun.wait()
            assert session.update_count() == UPDATES
        training.join()
        assert session.update_count() == 2 * UPDATES


def test_an_entry_has_all_that_is_trained():
    """Not that of some variables only, beside which the others would be the last weights."""
    partial = optax.masked(optax.trace(0.9), {"a": True, "b": False})
    with ipu.Session() as session:
        train = Model(optax.chain(partial, optax.scale(-0.1)), (0, 0))
        train.run(session)
        with pytest.raises(ValueError, match="each trained variable. These are, by path: none"):
            session.weights_of("trace").__enter__()


def test_random_keys_in_a_state_are_read_as_numbers():
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.scale(-0.1))
    with ipu.Session() as session:
        Model(optimizer, (0, 0)).run(session)
        found = session.optimizer_state()
    assert found["[0].rng_key"].dtype == np.uint32


def test_wrong_names():
    optimizer = optax.chain(optax.ema(0.5), optax.trace(0.9), optax.ema(0.9), optax.scale(-0.1))
    with ipu.Session() as session:
        with pytest.raises(KeyError, match="no optimizer state under the name 'Pipeline'"):
            session.optimizer_state()
        Model(optimizer, (0, 0)).run(session)
        with pytest.raises(KeyError, match="under the name 'Other'; the names are: Pipeline"):
            session.weights_of("ema", "Other").__enter__()
        with pytest.raises(ValueError, match=r"'ema' is the last name of several.*'\[0\].ema'"):
            session.weights_of("ema").__enter__()
        with pytest.raises(ValueError, match="'average' is not one of the entries"):
            session.weights_of("average").__enter__()
        with session.weights_of("[2].ema"):
            pass
    for wrong in (LossScalingOptimizer(optax.sgd(0.1)), 3):
        with pytest.raises(TypeError, match="with_averaged_weights: the optimizer must be"):
            with_averaged_weights(wrong, 0.5)
    with_averaged_weights(optax.sgd(0.1), np.float32(0.5))
    for decay in (1.0, -0.1, True, "0.5"):
        with pytest.raises(ValueError, match="decay must be a number from 0 to below 1"):
            with_averaged_weights(optax.sgd(0.1), decay)
