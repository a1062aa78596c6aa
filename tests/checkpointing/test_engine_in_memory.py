"""JAX programs that go on from memory."""

import dataclasses
import itertools
import logging

import jax
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.checkpointing import in_memory
from ipu_pipeline.processes import launcher
from ipu_pipeline.processes.launcher import MEMORY_EVERY_VARIABLE, MEMORY_VARIABLE
from tests.support.engine_resumer import make_pipeline, train
from tests.support.launched import KilledError
from tests.support.resumable import MICRO_BATCHES, Batches


@pytest.fixture(scope="module")
def pipeline():
    return make_pipeline(2, 1)


BATCHES = list(itertools.islice(Batches(), MICRO_BATCHES))  # of a step


def initial(pipeline):
    return pipeline.init(jax.random.key(3), BATCHES[0])


def keep(checkpoints, state):
    """Saves a state, and waits until it is written."""
    checkpoints.save(state)
    checkpoints._series.wait()


def assert_same(one, other):
    assert one.update_count == other.update_count
    assert one.execution_count == other.execution_count
    trees = [(state.variables, state.optimizer_state) for state in (one, other)]
    mine, theirs = map(jax.tree_util.tree_leaves_with_path, trees)
    for (path, value), (other_path, wanted) in zip(mine, theirs, strict=True):
        assert path == other_path
        np.testing.assert_array_equal(value, wanted, err_msg=jax.tree_util.keystr(path))
    assert (jax.random.key_data(one.key) == jax.random.key_data(other.key)).all()


def test_a_program_that_is_started_again_ends_as_one_that_was_not(
    pipeline, restart, directory, monkeypatch
):
    """The order of the data goes on by `extra`; dropout, statistics and Adam by the state."""
    monkeypatch.setenv(MEMORY_EVERY_VARIABLE, "3")
    expected, found = {}, {}

    def note(into, step, losses, last=None):
        assert into.setdefault(step, losses) == losses
        if step == last:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.delenv(MEMORY_VARIABLE)  # nothing is kept
        whole = train(pipeline, 9, lambda *told: note(expected, *told))
    assert not list(directory.iterdir())
    for number, last in enumerate((0, 4, 6)):
        restart(number)
        with pytest.raises(KilledError):
            train(pipeline, 9, lambda *told, last=last: note(found, *told, last))
    restart(3)
    again = []
    state = train(pipeline, 9, lambda *told: (again.append(told[0]), note(found, *told)))
    assert again[0] == 6
    assert found == expected
    assert_same(state, whole)


def test_the_newer_state_is_taken(pipeline, restart, caplog):
    """The one in memory, or the one that the program has read from disk."""
    restart(0)
    checkpoints = engine.InMemoryCheckpoints(pipeline)
    states = [checkpoints.restore(initial(pipeline))]
    for number in range(3):
        checkpoints.save(states[-1], {"number": number})
        kept = jax.tree.map(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, states[-1])
        states[-1:] = [kept, pipeline.step(states[-1], BATCHES)[0]]
    checkpoints._series.wait()
    for given, number in ((0, 2), (1, 2), (2, 2), (3, None)):
        restart(1)
        checkpoints = engine.InMemoryCheckpoints(pipeline)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found = checkpoints.restore(states[given])
        if number is None:
            assert found is states[given]
            assert checkpoints.extra == {}
            assert not caplog.records
        else:
            assert_same(found, states[number])
            assert checkpoints.extra == {"number": number}
            assert "Training goes on with run 2, restored from memory." in caplog.text


def make_counting(**options):
    """Two replicas of a stage that remembers, each for itself, what it has seen."""

    def remember(x):
        seen = engine.get_variable("seen", x.shape[1:], initializer="zeros", trainable=False)
        engine.assign("seen", 0.9 * seen + 0.1 * x.mean(0))
        w = engine.get_variable("w", x.shape[1:], initializer="ones")
        return ((x - seen) * w).sum()

    return engine.Pipeline(
        [remember],
        num_micro_batches=2,
        optimizer=optax.adam(0.1),
        **({"num_replicas": 2, "joins_assigned": False} | options),
    )


def test_each_replica_has_its_own_values_again(restart):
    data = np.random.default_rng(0).normal(size=(6, 4, 3, 5)).astype(np.float32)
    states, losses = [], []
    for is_killed in (False, True):
        restart(0)
        pipeline = make_counting()
        checkpoints = engine.InMemoryCheckpoints(pipeline)
        state = checkpoints.restore(pipeline.init(jax.random.key(0), data[0, 0]))
        found = []
        while state.execution_count < len(data):
            checkpoints.save(state)
            if is_killed and state.execution_count == 4:
                checkpoints._series.wait()
                restart(1)
                is_killed, pipeline = False, make_counting()
                checkpoints = engine.InMemoryCheckpoints(pipeline)
                state = checkpoints.restore(pipeline.init(jax.random.key(0), data[0, 0]))
                assert state.execution_count == 4
                continue
            state, outputs = pipeline.step(state, list(data[state.execution_count]))
            found.append(np.asarray(outputs.losses))
        states.append(state)
        losses.append(found)
    np.testing.assert_array_equal(*losses)
    assert_same(*states)
    rows = [[shard.data for shard in state.variables["seen"].addressable_shards] for state in states]
    np.testing.assert_array_equal(*rows)
    assert not np.array_equal(*rows[0])


@pytest.mark.parametrize(
    "options", [{"num_replicas": 1, "joins_assigned": True}, {"num_replicas": 3}, {"joins_assigned": True}]
)
def test_other_replicas_take_the_first_ones_values(options, restart):
    restart(0)
    pipeline, data = make_counting(), np.ones((4, 3, 5), np.float32)
    checkpoints = engine.InMemoryCheckpoints(pipeline)
    state = checkpoints.restore(pipeline.init(jax.random.key(0), data[0]))
    state, _outputs = pipeline.step(state, [data[0], 2 * data[1], data[2], 2 * data[3]])
    keep(checkpoints, state)
    restart(1)
    other = make_counting(**options)
    found = engine.InMemoryCheckpoints(other).restore(other.init(jax.random.key(0), data[0]))
    np.testing.assert_array_equal(found.variables["seen"], state.variables["seen"])
    for shard in found.variables["seen"].addressable_shards:
        np.testing.assert_allclose(shard.data, 0.19, rtol=1e-6)


def test_variables_of_numpy_may_be_written_to(pipeline, restart):
    """While the state is being written."""
    restart(0)
    checkpoints = engine.InMemoryCheckpoints(pipeline)
    state = checkpoints.restore(initial(pipeline))
    own = {name: np.array(value) for name, value in state.variables.items()}
    checkpoints.save(dataclasses.replace(state, variables=own))
    for value in own.values():
        value.fill(7)
    checkpoints._series.wait()
    restart(1)
    assert_same(engine.InMemoryCheckpoints(pipeline).restore(initial(pipeline)), state)


def test_two_trainings_are_known_by_their_order(pipeline, restart):
    restart(0)
    states, kept = [initial(pipeline), initial(pipeline)], []
    for number, state in enumerate(states):
        for _step in range(number + 1):
            state, _outputs = pipeline.step(state, BATCHES)
        checkpoints = engine.InMemoryCheckpoints(pipeline)
        keep(checkpoints, checkpoints.restore(state))
        kept.append(state)
    restart(1)
    for state in kept:
        assert_same(engine.InMemoryCheckpoints(pipeline).restore(initial(pipeline)), state)


def test_progress_and_goodput(pipeline, restart, monkeypatch):
    """A step counts when the next one begins; the first one, which compiles, as long as the second."""
    now, told = [0.0], []
    monkeypatch.setattr(in_memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(launcher, "_useful", 0.0)
    monkeypatch.setattr(launcher, "_tell", told.append)
    monkeypatch.setattr(launcher, "_told_at", -1.0)
    restart(0)
    checkpoints = engine.InMemoryCheckpoints(pipeline)
    state = checkpoints.restore(initial(pipeline))
    useful = []
    for seconds in (9.0, 1.0, 2.0, 4.0):
        checkpoints.save(state)
        useful.append(launcher.useful_seconds())
        state, _outputs = pipeline.step(state, BATCHES)
        now[0] += seconds
    assert useful == [0, 0, 2, 4]
    assert [text.split()[2:] for text in told] == [["0", "1", "0"], ["1", "2", "2"], ["2", "3", "4"]]


def test_wrong_uses(pipeline, restart, directory, monkeypatch):
    restart(0)
    with pytest.raises(TypeError, match=r"pipeline must be an engine\.Pipeline; got NoneType"):
        engine.InMemoryCheckpoints(None)
    checkpoints, state = engine.InMemoryCheckpoints(pipeline), initial(pipeline)
    with pytest.raises(RuntimeError, match="call restore before the first step"):
        checkpoints.save(state)
    message = r"InMemoryCheckpoints\.restore: state must be .* step returns a pair"
    with pytest.raises(TypeError, match=message):
        checkpoints.restore((state, None))
    checkpoints.restore(state)
    with pytest.raises(RuntimeError, match="was called before"):
        checkpoints.restore(state)
    with pytest.raises(TypeError, match="extra must be a dict; got list"):
        checkpoints.save(state, [1])
    with pytest.raises(TypeError, match="extra must be JSON: Object of type ndarray"):
        checkpoints.save(state, {"x": np.ones(2)})
    with pytest.raises(TypeError, match=r"InMemoryCheckpoints\.save: state must be"):
        checkpoints.save(None)
    with pytest.raises(TypeError, match="jax.jit"):
        jax.jit(checkpoints.save)(state)
    pipeline.step(state, BATCHES)  # with `donate`
    with pytest.raises(ValueError, match="state's variable .* has been deleted|donate"):
        checkpoints.save(state)
    assert not list(directory.iterdir())


def test_what_is_in_memory_is_of_another_model(restart):
    restart(0)
    one, other = make_pipeline(2, 1), engine.Pipeline([lambda x, y: x * y], num_micro_batches=1)
    checkpoints = engine.InMemoryCheckpoints(one)
    state, _outputs = one.step(checkpoints.restore(initial(one)), BATCHES)
    keep(checkpoints, state)
    restart(1)
    state = other.init(jax.random.key(0), (np.float32(1), np.float32(2)))
    with pytest.raises(ValueError, match="a/dense/kernel"):
        engine.InMemoryCheckpoints(other).restore(state)
    restart(1)
    again = make_pipeline(2, 1)
    untraced = engine.InMemoryCheckpoints(again)
    with pytest.raises(RuntimeError, match="traced"):
        untraced.restore(state)
    with pytest.raises(RuntimeError, match="call restore before the first step"):
        untraced.save(state)
    other = initial(again)  # which traces it: nothing is lost
    assert untraced.restore(other).execution_count == 1
