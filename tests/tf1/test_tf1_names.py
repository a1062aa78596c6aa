"""Names that programs for TensorFlow 1 on IPUs use: scopes, variables, savers, functions of `ipu.ops`."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import nn_ops, normalization_ops, rand_ops
from tests.support import front

pytestmark = pytest.mark.usefixtures("nothing_warned")


# Scopes


def test_auto_reuse_and_scopes_that_are_opened_again():
    def function():
        with ipu.variable_scope("a") as scope:
            first = ipu.get_variable("w", (2,))
            with ipu.variable_scope("b", reuse=ipu.AUTO_REUSE):
                inner = ipu.get_variable("w", (3,)) + ipu.get_variable("w", (3,))
        with ipu.variable_scope("c"), ipu.variable_scope(scope, reuse=True):
            assert ipu.get_variable_scope() == scope == scope.name == "a"
            again = ipu.get_variable("w", (2,))
        with ipu.variable_scope(scope) as scope:
            with pytest.raises(ValueError, match="a/w already exists"):
                ipu.get_variable("w", (2,))
            scope.reuse_variables()
            ipu.get_variable("w", (2,))
        with pytest.raises(RuntimeError, match="scope 'a' is not the innermost one"):
            scope.reuse_variables()
        return first + again, inner

    assert {*front.compile_program(function).variables} == {"a/w", "a/b/w"}


def test_default_names():
    def function():
        found = []
        for _time in range(2):
            with ipu.variable_scope(None, default_name="block"):
                found.append(ipu.get_variable("w", (2,)))
        with ipu.variable_scope("used"):
            found.append(ipu.get_variable("w", (2,)))
        with ipu.variable_scope(None, default_name="used") as scope:
            assert scope == "used_1"
        with ipu.variable_scope("outer"), ipu.variable_scope(default_name="block") as scope:
            assert scope == "outer/block"
        with ipu.variable_scope("named", default_name="block") as scope:
            assert scope == "named"
        return sum(found)

    assert {*front.compile_program(function).variables} == {"block/w", "block_1/w", "used/w"}


def test_what_scopes_say_to_variables():
    """Also a scope that is opened again in another one."""

    def function():
        with ipu.variable_scope("a", dtype=jnp.bfloat16, initializer="ones") as scope:
            first = ipu.get_variable("w", (2,))
            with ipu.variable_scope("b", initializer=3.0):
                second = ipu.get_variable("w", (2,))
                third = ipu.get_variable("v", (2,), jnp.float32, initializer="zeros")
        with ipu.variable_scope("b", initializer=4.0), ipu.variable_scope(scope):
            return first, second, third, ipu.get_variable("u", (2,))

    found = front.results(function)
    assert [value.tolist() for value in found] == [[1, 1], [3, 3], [0, 0], [1, 1]]
    assert [value.dtype for value in found] == [jnp.bfloat16, jnp.bfloat16, np.float32, jnp.bfloat16]


def test_custom_getters():
    """The usual one keeps variables in float32 where computations are in float16."""
    asked = []

    def in_float32(getter, name, dtype=None, *args, **kwargs):
        asked.append(name)
        return getter(name, *args, dtype=jnp.float32, **kwargs).astype(dtype)

    def doubled(getter, *args, **kwargs):
        return 2 * getter(*args, **kwargs)

    def function():
        with ipu.variable_scope("a", custom_getter=in_float32, dtype=jnp.float16):
            with ipu.variable_scope("b", custom_getter=doubled):
                inner = ipu.get_variable("w", (2,), initializer="ones")
            layer = ipu.layers.Dense(3, kernel_initializer="ones", dtype=jnp.float16)
            return inner, layer(jnp.ones((1, 2), jnp.float16))

    compiled = front.compile_program(function)
    assert asked == ["a/b/w", "a/dense/kernel", "a/dense/bias"]
    assert {str(spec.dtype) for spec in compiled.variables.values()} == {"float32"}
    with ipu.Session() as session:
        inner, outputs = session.run(compiled)
    assert (inner.dtype, inner.tolist()) == (np.float16, [2, 2])
    assert (outputs.dtype, outputs.tolist()) == (np.float16, [[2, 2, 2]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": None}, ValueError, "name must be a non-empty string"),
        ({"name": None, "default_name": "a//b"}, ValueError, "default_name must be a non-empty string"),
        ({"name": "a", "reuse": "yes"}, ValueError, "reuse must be True, AUTO_REUSE"),
        ({"name": "a", "custom_getter": 3}, TypeError, "custom_getter must be a function"),
        ({"name": "a", "dtype": str}, TypeError, "dtype must be one of numbers"),
        ({"name": "a", "initializer": "wibble"}, ValueError, "There is no initializer 'wibble'"),
        ({"name": "a", "use_resource": False}, ValueError, "use_resource must be True"),
    ],
)
def test_wrong_scopes(arguments, error, message):
    def function():
        with ipu.variable_scope(**arguments):
            return jnp.zeros(())

    with pytest.raises(error, match=message):
        front.compile_program(function)


def test_get_variable():
    def function():
        options = {"initializer": "glorot_uniform", "regularizer": abs, "use_resource": True}
        message = "regularizer of variable 'w' has no effect.*add_decayed_weights"
        with pytest.warns(UserWarning, match=message):
            ipu.get_variable("w", (2, 2), **options)
        with pytest.raises(ValueError, match="use_resource must be True"):
            ipu.get_variable("v", (2,), use_resource=False)

    front.compile_program(function)
    scope = ipu.variable_scope(default_name="a")
    with pytest.raises(RuntimeError, match="default_name was called outside of a program"), scope:
        pass


# Variables


def test_lists_of_variables():
    def function():
        ipu.get_variable("w", (2,))
        ipu.get_variable("n", (), np.int32, 3)
        assert [spec.name for spec in ipu.global_variables()] == ["w", "n"]
        assert [spec.name for spec in ipu.trainable_variables()] == ["w"]
        return ipu.get_variable("v", (2,))

    compiled = front.compile_program(function)
    assert {"v"} <= {spec.name for spec in ipu.global_variables()}
    assert all(spec.trainable for spec in ipu.trainable_variables())
    del compiled


# Savers


def compile_training():
    def stage():
        return jnp.sum(ipu.get_variable("w", (3,), initializer="ones") ** 2)

    return front.Pipelined([stage], 1, optimizer=optax.adam(0.1)).program


def test_a_saver_keeps_the_newest(tmp_path):
    """And deletes and counts nothing but checkpoints."""
    trained, saver = compile_training(), ipu.Saver(max_to_keep=2)
    directory = tmp_path / "checkpoints"
    assert ipu.latest_checkpoint(directory) is None
    for name in ("0", "2020"):
        (directory / name).mkdir(parents=True)
        (directory / name / "photo").write_text("x")
    with ipu.Session() as session:
        with pytest.raises(ValueError, match="nothing to save"):
            saver.save(session, directory)
        for step in range(1, 5):
            session.run(trained)
            assert saver.save(session, directory) == str(directory / str(step))
        saver.save(session, directory)  # the same once more
        values = session.variables["w"]
        session.run(trained)
        later = session.variables["w"]
    assert sorted(path.name for path in directory.iterdir()) == ["0", "2020", "3", "4"]
    assert ipu.latest_checkpoint(str(directory)) == str(directory / "4")
    with ipu.Session() as session:
        saver.restore(session, ipu.latest_checkpoint(directory))
        np.testing.assert_array_equal(session.variables["w"], values)
        session.run(trained)
        np.testing.assert_array_equal(session.variables["w"], later)
        path = ipu.Saver(max_to_keep=None).save(session, directory, np.int64(100))
        assert path == str(directory / "100")
        assert ipu.Saver(max_to_keep=1).save(session, directory, global_step=7) == str(directory / "7")
    assert sorted(path.name for path in directory.iterdir()) == ["0", "100", "2020", "7"]


def test_a_saver_as_in_tensorflow(tmp_path):
    """The path is a prefix there, and the newest checkpoint is asked for by the directory around it."""
    trained = compile_training()
    assert ipu.latest_checkpoint(tmp_path) is None
    with ipu.Session() as session:
        session.run(trained)
        for step in (1, 2):
            path = ipu.Saver().save(session, save_path=tmp_path / "model.ckpt", global_step=step)
        assert ipu.latest_checkpoint(tmp_path) == path == str(tmp_path / "model.ckpt" / "2")
        assert ipu.latest_checkpoint(tmp_path / "model.ckpt") == path
        none = ipu.latest_checkpoint(tmp_path / "other")
        with pytest.raises(
            ValueError, match="it is None, as latest_checkpoint returns it where there is none"
        ):
            ipu.Saver().restore(session, none)
    with pytest.raises(ValueError, match="var_list must be None"):
        ipu.Saver([trained])
    for number in (-1, 1.5, True, "3"):
        with pytest.raises(ValueError, match="max_to_keep must be an integer from 0, or None"):
            ipu.Saver(max_to_keep=number)


def test_a_dict_is_run_in_its_order():
    trained = compile_training()
    with ipu.Session() as session:
        found = session.run({"z": ipu.global_variables_initializer(), "b": trained})
        assert list(found) == ["z", "b"]
        assert session.update_count() == 1  # after the initializer, not before it
        with pytest.raises(TypeError, match="or a list or dict of them; got str"):
            session.run({"a": "b"})


def test_arguments_of_queues_that_mean_nothing():
    infeed = functools.partial(ipu.ipu_infeed_queue.IPUInfeedQueue, [np.zeros(1)])
    kinds = {"IPUInfeedQueue": infeed, "IPUOutfeedQueue": ipu.ipu_outfeed_queue.IPUOutfeedQueue}
    for argument, reason in (("device_ordinal", "by its ipu_scope"), ("optimise_latency", "as")):
        for kind, make in kinds.items():
            make(**{argument: 0})  # what Graphcore has where it is not given
            with pytest.warns(UserWarning, match=f"{kind}.{argument}=1. has no effect: .*{reason}"):
                make(**{argument: 1})


def test_positions_of_queues_in_all_sdks():
    """The second argument of an infeed was its name, then the device's number; it never was a depth."""
    infeed, outfeed = ipu.ipu_infeed_queue.IPUInfeedQueue, ipu.ipu_outfeed_queue.IPUOutfeedQueue
    modes = ipu.ipu_outfeed_queue.IPUOutfeedMode
    data = [np.zeros(1)]
    depths = [infeed(data, *some).prefetch_depth for some in ((), (0,), ("in",), (None,))]
    assert depths == [3, 3, 3, 3]
    assert infeed(data, 0, 5).prefetch_depth == infeed(data, "in", 0, 1, 2, 5).prefetch_depth == 5
    assert infeed(data, "in", prefetch_depth=5).prefetch_depth == 5
    assert infeed(data, data_to_prefetch=7).prefetch_depth == 7
    assert infeed(data, "in", 0, 2).replication_factor == 2
    assert infeed(data, replication_factor=2).replication_factor == 2
    with pytest.warns(UserWarning, match="IPUInfeedQueue.device_ordinal=1. has no effect"):
        infeed(data, 1)
    assert outfeed(modes.LAST).outfeed_mode is outfeed("out", modes.LAST).outfeed_mode is modes.LAST
    assert outfeed("out", outfeed_all=False).outfeed_mode is modes.LAST
    assert outfeed("out", outfeed_all=np.False_).outfeed_mode is modes.LAST
    assert outfeed("out", None, True, 0, 3).replication_factor == 3
    with pytest.warns(UserWarning, match="io_batch_size=4. has no effect"):
        outfeed("out", io_batch_size=4)
    for wrong in (
        lambda: infeed(data, 0, 3, False, 4),
        lambda: infeed(data, 0, 3, prefetch_depth=4),
        lambda: outfeed("out", modes.ALL, True),
        lambda: outfeed(modes.ALL, outfeed_mode=modes.ALL),
        lambda: outfeed(outfeed_all="yes"),
        lambda: outfeed(outfeed_all=0),
    ):
        with pytest.raises(TypeError, match="position|outfeed_all"):
            wrong()
    for number in (0, True, 1.5):
        with pytest.raises(ValueError, match="replication_factor must be an integer of at least 1"):
            infeed(data, replication_factor=number)


def test_errors_name_queues_by_their_feed_names():
    queue = ipu.ipu_infeed_queue.IPUInfeedQueue([np.zeros(1, np.float32)], "training")
    compiled = front.compile_program(lambda: ipu.loops.repeat(1, lambda x: None, [], queue))
    with ipu.Session() as session, pytest.raises(RuntimeError, match="The infeed 'training' has not been"):
        session.run(compiled)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue("losses")
    assert not outfeed.enqueued
    with pytest.raises(ValueError, match="The outfeed 'losses' was dequeued before"):
        outfeed.read()


# Functions


@pytest.mark.parametrize(("axis", "is_strided"), [(-1, True), (1, False)])
def test_group_norm(rng, axis, is_strided):
    x = rng.normal(1, 3, (2, 6, 4, 6)).astype(np.float32)
    initializers = {"gamma": 2.0, "beta": 1.0}
    options = {"strided_channel_grouping": is_strided, "param_initializers": initializers}
    (found,) = front.results(lambda x: normalization_ops.group_norm(x, 3, axis, **options), x)
    last = np.moveaxis(x, axis, -1)
    expected = np.empty_like(last)
    for group in range(3):
        channels = slice(group, None, 3) if is_strided else slice(2 * group, 2 * group + 2)
        part = last[..., channels]
        mean, variance = (f(part, axis=(1, 2, 3), keepdims=True) for f in (np.mean, np.var))
        expected[..., channels] = (part - mean) / np.sqrt(variance + 1e-6) * 2 + 1
    np.testing.assert_allclose(found, np.moveaxis(expected, -1, axis), rtol=1e-4, atol=1e-5)


def test_layer_and_instance_norm(rng):
    x = rng.normal(1, 3, (2, 5, 4)).astype(np.float32)

    for function, axes in ((normalization_ops.layer_norm, (1, 2)), (normalization_ops.instance_norm, (1,))):
        mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        expected = (x - mean) / np.sqrt(variance + 1e-6)
        np.testing.assert_allclose(front.results(function, x)[0], expected, rtol=1e-4, atol=1e-5)


def test_variables_of_normalizations():
    x = jnp.ones((2, 4))

    def function():
        y = normalization_ops.group_norm(x)
        y = normalization_ops.group_norm(y, center=False, trainable=False)
        y = normalization_ops.layer_norm(y, scope="own")
        return normalization_ops.layer_norm(y, scope="own", reuse=True)

    found = front.compile_program(function).variables
    names = {"GroupNorm/gamma", "GroupNorm/beta", "GroupNorm_1/gamma", "own/gamma", "own/beta"}
    assert {*found} == names
    assert not found["GroupNorm_1/gamma"].trainable


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs": np.ones((2, 4), np.int32)}, TypeError, "must be floating-point"),
        ({"inputs": np.ones(4, np.float32)}, ValueError, r"inputs must be \[batch, ...\]"),
        ({"channels_axis": 0}, ValueError, "one of their axes but the first"),
        ({"channels_axis": 5}, ValueError, "one of their axes but the first"),
        ({"groups": 3}, ValueError, "groups must divide the 4 channels"),
        ({"variables_collections": ["a"]}, ValueError, "must be None"),
        ({"param_initializers": {"delta": 0.0}}, ValueError, "are for beta and gamma"),
        ({"center": None}, TypeError, "True or False; got None. SDKs before 2.0 had reduction"),
        ({"center": True, "scale": (1,)}, TypeError, "scale must be True or False"),
    ],
)
def test_wrong_normalizations(arguments, error, message):
    arguments = {"inputs": np.ones((2, 4), np.float32), **arguments}
    with pytest.raises(error, match=message):
        front.compile_program(lambda: normalization_ops.group_norm(**arguments))


def test_activations():
    x = np.linspace(-4, 4, 9, dtype=np.float32)
    np.testing.assert_allclose(nn_ops.gelu(x), jax.nn.gelu(x), rtol=1e-6)
    np.testing.assert_allclose(nn_ops.gelu(x, False), jax.nn.gelu(x, approximate=False), rtol=1e-6)
    np.testing.assert_array_equal(nn_ops.gelu(x, True, "name"), nn_ops.gelu(x, name="name"))
    with pytest.raises(TypeError, match="approximate must be True or False; got 'name'.*pass it as name="):
        nn_ops.gelu(x, "name")
    np.testing.assert_allclose(nn_ops.hard_sigmoid(x), np.clip(0.2 * x + 0.5, 0, 1), rtol=1e-6)
    assert nn_ops.hard_sigmoid(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_embedding_lookup():
    table, ids = np.arange(12.0, dtype=np.float32).reshape(6, 2), np.array([[5, 0], [1, 1]])
    lookup = ipu.ops.embedding_ops.embedding_lookup
    np.testing.assert_array_equal(lookup(table, ids, name="x"), table[ids])
    np.testing.assert_array_equal(lookup(table, [0, 4], indices_are_sorted=True), table[[0, 4]])
    for name, value in {
        "serialization_factor": 3,
        "one_hot_threshold": 0,
        "min_encoding_size": 1216,
    }.items():
        with pytest.warns(UserWarning, match=f"{name} has no effect"):
            np.testing.assert_array_equal(lookup(table, ids, **{name: value}), table[ids])
    with pytest.raises(ValueError, match="got 0. SDKs before 2.0 had one_hot_threshold there"):
        lookup(table, ids, None, 0, 1216)
    with pytest.raises(TypeError, match="ids must be integers"):
        lookup(table, [0.5])
    with pytest.raises(ValueError, match="must divide the 6 rows; got 4"):
        lookup(table, ids, serialization_factor=4)
    with pytest.raises(ValueError, match="must be a table"):
        lookup(1.0, ids)


def test_dropout():
    x = np.full((400, 50), 3.0, np.float32)

    def stage(x):
        return rand_ops.dropout(x, 0.25), rand_ops.dropout(x, 0.25, noise_shape=(None, 1))

    (free, by_row), _variables = front.Pipelined([stage], 2, inputs=[x]).once()
    assert set(np.unique(free)) == {0, 4}
    assert abs((free == 0).mean() - 0.25) < 0.01
    assert not np.array_equal(free[0], free[1])
    assert (by_row == by_row[..., :1]).all()
    assert 0 < (by_row == 0).mean() < 1
    same = [rand_ops.dropout(x, seed=[1, 2]) for _time in range(2)]
    np.testing.assert_array_equal(*same)
    assert not np.array_equal(same[0], rand_ops.dropout(x, seed=[1, 3]))
    np.testing.assert_array_equal(rand_ops.dropout(x, 0), x)
    with pytest.warns(UserWarning, match="ref=False has no effect"):
        np.testing.assert_array_equal(same[0], rand_ops.dropout(x, seed=[1, 2], seed_modifier=1, ref=False))
    assert not np.array_equal(same[0], rand_ops.dropout(x, seed=[1, 2], seed_modifier=2))


def test_wrong_dropout():
    for arguments, error, message in (
        ({"rate": 1.0}, ValueError, "rate must be a number from 0"),
        ({"rate": True}, ValueError, "rate must be a number from 0"),
        ({"noise_shape": (2,)}, ValueError, "noise_shape must have 1, None or the size"),
        ({"noise_shape": (2, 5)}, ValueError, "noise_shape must have 1, None or the size"),
        ({"seed": [1, 2, 3]}, ValueError, "seed must be one or two integers"),
        ({"seed": 1.5}, ValueError, "seed must be one or two integers"),
        ({"x": np.ones((2, 3), np.int32)}, TypeError, "must be floating-point"),
        ({}, RuntimeError, "outside of"),
    ):
        with pytest.raises(error, match=message):
            rand_ops.dropout(**{"x": np.ones((2, 3), np.float32), **arguments})
    for seed in (None, [1, 2], np.array([1, 2]), 0, 7):
        with pytest.raises(
            (ValueError, TypeError), match="Older SDKs had the seed second and the rate third"
        ):
            rand_ops.dropout(np.ones((2, 3), np.float32), seed, 0.3)


def test_outlined_functions():
    @ipu.outlined_function
    def double(x):
        return 2 * x

    @ipu.outlined_function(unique_sharding=True)
    def triple(x):
        return 3 * x

    assert double(triple(1)) == 6
    with pytest.raises(TypeError, match="func must be a function"):
        ipu.outlined_function(3)
    assert ipu.ops.pipelining_ops is ipu.pipelining_ops
    assert ipu.ops.functional_ops.outlined_function is ipu.outlined_function


# What a reviewer found


def test_scopes_end_with_the_function_that_they_are_in():
    def reusing():
        value = ipu.get_variable("w", (2,))
        ipu.get_variable_scope().reuse_variables()
        return value + ipu.get_variable("w", (2,))

    with pytest.raises(ValueError, match="w already exists"):
        front.Pipelined([reusing, lambda x: x + ipu.get_variable("w", (2,))], 1)
    with pytest.raises(ValueError, match="z already exists"):
        front.compile_program(lambda: ipu.get_variable("z", (2,)) + ipu.get_variable("z", (2,)))
    with pytest.raises(RuntimeError, match="outside of a program"):
        ipu.get_variable_scope().reuse_variables()


def test_seeds_beside_sessions_and_data_sets():
    def rows():
        while True:
            ipu.utils.reset_ipu_seed(0)
            yield np.ones(2, np.float32)

    front.Pipelined([lambda x: x], 2, rows).once()
    stopped = threading.Event()

    def make():
        while not stopped.is_set():
            ipu.Session()

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _time in range(200):
            ipu.utils.reset_ipu_seed(0)
    finally:
        stopped.set()
        thread.join()
