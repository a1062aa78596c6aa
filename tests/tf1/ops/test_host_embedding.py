"""Tables in host memory: rows looked up and trained, against a plain loop of jax.grad."""

import contextlib
import gc
import logging
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import embedding_ops, loops
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedQueue
from ipu_pipeline.optimizers import (
    CrossReplicaOptimizer,
    GradientAccumulationOptimizerV2,
    LossScalingOptimizer,
    tf1,
)
from ipu_pipeline.pipelining_ops import PipelineSchedule, RecomputationMode, pipeline
from ipu_pipeline.tf1.session import program_runs
from tests.support import front, models

ROWS, COLUMNS, CLASSES, BATCH = 20, 6, 5, 4
RATE, TABLE_RATE = 0.1, 0.4


def make_batches(number, seed=5):
    rng = np.random.default_rng(seed)
    for _ in range(number):
        ids = rng.integers(0, ROWS, (BATCH, 3)).astype("int32")
        ids[0, 1] = ids[0, 0]  # a row that comes twice
        yield ids, rng.integers(0, CLASSES, BATCH).astype("int32")


def make_table(count=1, name="words", rate=TABLE_RATE, **options):
    spec = embedding_ops.HostEmbeddingSGDGAOptimizerSpec(rate, count) if rate else None
    return embedding_ops.create_host_embedding(
        name, [ROWS, COLUMNS], np.float32, optimizer_spec=spec, **options
    )


def encoder(table):
    def stage(ids, labels):
        with ipu.variable_scope("encoder"):
            return ipu.layers.Dense(8, "tanh")(jnp.sum(table.lookup(ids), axis=1)), ids, labels

    return stage


def decoder(table):
    def stage(x, ids, labels):
        x = jnp.concatenate([x, jnp.square(table.lookup(ids[:, 0]))], axis=1)
        with ipu.variable_scope("decoder"):
            logits = ipu.layers.Dense(CLASSES)(x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    return stage


def plain_loss(variables, ids, labels):
    table = variables["words"]
    x = jnp.sum(table[ids], axis=1)
    x = jnp.tanh(x @ variables["encoder/dense/kernel"] + variables["encoder/dense/bias"])
    x = jnp.concatenate([x, jnp.square(table[ids[:, 0]])], axis=1)
    logits = x @ variables["decoder/dense/kernel"] + variables["decoder/dense/bias"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


differentiate = jax.jit(jax.value_and_grad(plain_loss))


def plain(variables, batches, every, is_mean=False, num_replicas=1):
    """Losses, and variables after updates of as many batches each; those of all replicas move the table."""
    rates = dict.fromkeys(variables, RATE / every if is_mean else RATE)
    rates["words"] = TABLE_RATE * num_replicas
    descend = optax.stateless(lambda sums, _variables: {name: -rates[name] * sums[name] for name in sums})
    groups = list(zip(*[iter(batches)] * num_replicas, strict=True))
    return models.plain_loop(plain_loss, variables, groups, every, descend)[:2]


class Pipelined(front.Pipelined):
    """A pipeline of two stages, both of which look rows up."""

    def __init__(self, count=3, updates=2, table=None, replicas=1, missing=0, optimizer=None, **options):
        self.table = make_table(count) if table is None else table
        self.batches = list(make_batches(count * updates * replicas))
        self.fed = self.batches[: len(self.batches) - missing]
        stages, optimizer = [encoder(self.table), decoder(self.table)], optimizer or optax.sgd(RATE)
        super().__init__(stages, count, lambda: iter(self.fed), optimizer, repeat_count=updates, **options)

    def run(self, session):
        session.run(self.initializer)
        with self.table.register(session):
            return front.Pipelined.run(self, session)


class Looped:
    """The same model in a loop."""

    def __init__(self, iterations, every=1, factor=None, sharded=False):
        self.table = make_table(every if factor is None else factor)
        self.batches = list(make_batches(iterations))
        self.infeed, self.outfeed = IPUInfeedQueue(self.batches), IPUOutfeedQueue()
        self.initializer = self.infeed.initializer
        shard = ipu.scopes.ipu_shard if sharded else lambda _index: contextlib.nullcontext()
        optimizer = GradientAccumulationOptimizerV2(optax.sgd(RATE), every)

        def body(ids, labels):
            with shard(0):
                x, ids, labels = encoder(self.table)(ids, labels)
            with shard(1):
                loss = decoder(self.table)(x, ids, labels)
            return optimizer.minimize(loss), self.outfeed.enqueue(loss)

        self.program = front.compile_program(lambda: loops.repeat(iterations, body, [], self.infeed))

    run = Pipelined.run


@contextlib.contextmanager
def initialized(seed=3):
    """A session, and the variables' initial values."""
    with ipu.Session(seed=seed) as session:
        session.run(ipu.global_variables_initializer())
        yield session, session.variables


def assert_equal_variables(session, expected):
    models.assert_trees_close(session.variables, jax.tree.map(np.asarray, expected))


RECOMPUTED = {
    "pipeline_schedule": PipelineSchedule.Interleaved,
    "recomputation_mode": RecomputationMode.RecomputeThenBackpropagate,
}
SEQUENTIAL = {"pipeline_schedule": PipelineSchedule.Sequential, "device_mapping": [0, 0]}
REPLICAS = {"replicas": 2, "optimizer": CrossReplicaOptimizer(optax.sgd(RATE))}


@pytest.mark.parametrize(
    ("make", "num_ipus", "options"),
    [
        pytest.param(lambda: Pipelined(**RECOMPUTED), 2, {}, id="interleaved recomputed"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (lambda: Pipelined(**SEQUENTIAL, reduction_method="MEAN"), 2, {"is_mean": True}),
                (lambda: Pipelined(2, 1, **REPLICAS), 4, {"every": 2, "num_replicas": 2}),
                (lambda: Looped(4, every=2, sharded=True), 2, {"every": 2}),
            )
        ),
    ],
)
def test_training_equals_a_plain_loop(make, num_ipus, options):
    front.ipu_config(num_ipus, allow_recompute=True).configure_ipu_system()
    model = make()
    with initialized() as (session, start):
        losses = model.run(session)
        wanted, expected = plain(start, model.batches, **{"every": 3, **options})
        models.assert_trees_close(losses.reshape(wanted.shape), wanted)
        assert_equal_variables(session, expected)
        table = session.run(model.table.get_embedding_tensor())
        np.testing.assert_array_equal(table, session.variables["words"])


@pytest.mark.thorough
def test_updates_after_each_mini_batch_of_an_accumulating_loop():
    model = Looped(4, every=2, factor=1)
    with initialized() as (session, variables):
        model.run(session)
        found = session.variables["words"]
    total = jax.tree.map(jnp.zeros_like, variables)
    for number, batch in enumerate(model.batches, 1):
        _loss, gradients = differentiate(variables, *batch)
        total = jax.tree.map(jnp.add, total, gradients)
        variables = {**variables, "words": variables["words"] - TABLE_RATE * gradients["words"]}
        if number % 2 == 0:
            rest = {name: value - RATE * total[name] for name, value in variables.items()}
            variables = {**rest, "words": variables["words"]}
            total = jax.tree.map(jnp.zeros_like, variables)
    models.assert_trees_close(found, np.asarray(variables["words"]))


def test_runs_and_checkpoints_within_an_update(tmp_path):
    model = Looped(3, every=2)
    with initialized() as (session, start):
        model.run(session)
        with pytest.warns(UserWarning, match="saved within a weight update, without the gradients of rows"):
            session.save(tmp_path / "within")
        model.run(session)
        session.save(tmp_path / "complete")
        assert_equal_variables(session, plain(start, model.batches * 2, 2)[1])
        found = session.variables
    with ipu.Session() as session:
        session.restore(tmp_path / "within", infeeds=False)
        with pytest.raises(RuntimeError, match="gradients of the host embedding 'words' are known for 0"):
            model.run(session)
    with ipu.Session() as session:
        session.restore(tmp_path / "complete", infeeds=False)
        models.assert_trees_close(session.variables, found)


def test_a_step_that_did_not_end_leaves_the_table_as_it_was():
    model = Pipelined(updates=2, missing=1)
    with initialized() as (session, start):
        with pytest.raises(ipu.errors.OutOfRangeError):
            model.run(session)
        assert_equal_variables(session, plain(start, model.batches[:3], 3)[1])
        model.fed, before = model.batches, session.variables
        model.run(session)
        assert_equal_variables(session, plain(before, model.batches, 3)[1])


def make_counting(rows=4, rate=1.0, name="words", **options):
    """A table of zeros, of which each row that is looked up goes down by the rate and the loss's factor."""
    spec = embedding_ops.HostEmbeddingSGDGAOptimizerSpec(rate, options.pop("every", 1))
    return embedding_ops.create_host_embedding(
        name, [rows, 1], np.float32, optimizer_spec=spec, initializer="zeros", **options
    )


def minimize(loss, **options):
    weight = ipu.get_variable("v", initializer=1.0)
    return tf1.GradientDescentOptimizer(1.0).minimize(loss + 0 * weight, **options)


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_narrow_indices_and_a_lookup_of_no_rows(dtype):
    """Of an embedding that is made in what is compiled."""
    tables = []

    def step(ids):
        tables.append(make_counting(70_000))
        nothing = tables[-1].lookup(np.zeros((0, 2), np.int32))
        return minimize(tables[-1].lookup(ids).sum() + nothing.sum())

    ids = ipu.placeholder(dtype, [2])
    program = front.compile_program(step, inputs=[ids])
    last = np.iinfo(dtype).max
    with ipu.Session() as session, tables[-1].register(session):
        session.run(program, {ids: [100, last]})
        (trained,) = np.nonzero(session.variables["words"][:, 0])
    assert list(trained) == [100, min(last, 69_999)]


def test_two_loops_accumulate_for_one_table():
    table = make_counting(every=4)

    def loop(name, row):
        def body():
            loss = table.lookup(np.array([row])).sum() + ipu.get_variable(f"v_{name}", initializer=0.0)
            return GradientAccumulationOptimizerV2(optax.sgd(1.0), 4, name=name).minimize(loss)

        return front.compile_program(lambda: loops.repeat(2, body))

    first, second = loop("a", 0), loop("b", 1)
    with ipu.Session() as session, table.register(session):
        for program in (first, second, first):
            session.run(program)
        assert session.variables["words"].ravel().tolist() == [-4, 0, 0, 0]
        session.run(second)
        assert session.variables["words"].ravel().tolist() == [-4, -4, 0, 0]


def test_two_tables_in_one_loop():
    """Each has its own rate; that of one is of the specification without accumulation."""
    spec = {"optimizer_spec": embedding_ops.HostEmbeddingOptimizerSpec(0.5), "initializer": "zeros"}
    kinds = embedding_ops.create_host_embedding("kinds/a", [4, 1], np.float32, **spec)
    words = make_counting()

    def body():
        return minimize((words.lookup(np.array([0, 2])) + 3 * kinds.lookup(np.array([1, 1]))).sum())

    program = front.compile_program(lambda: loops.repeat(2, body))
    with ipu.Session() as session, words.register(session), kinds.register(session):
        session.run(program)
        assert session.variables["words"].ravel().tolist() == [-2, 0, -2, 0]
        assert session.variables["kinds/a"].ravel().tolist() == [0, -6, 0, 0]


def test_rows_that_are_not_there_do_not_train():
    """Also where only the derivative is needed, and the rows themselves are never looked up."""
    table = make_counting()
    ids = ipu.placeholder(np.int32, [2])
    program = front.compile_program(lambda x: minimize(table.lookup(x, clip_indices=False).sum()), [ids])
    with ipu.Session() as session, table.register(session):
        for row in (-1, 99):
            with pytest.raises(Exception, match=f"'words' has 4 rows, and row {row} was looked up"):
                session.run(program, {ids: [0, row]})
            assert not session.variables["words"].any()
        session.run(program, {ids: [0, 3]})
        assert session.variables["words"].ravel().tolist() == [-1, 0, 0, -1]


def test_other_programs_take_the_table_from_a_checkpoint(tmp_path):
    trained, frozen = make_counting(), embedding_ops.create_host_embedding("words", [4, 1], np.float32)
    step = front.compile_program(lambda: minimize(trained.lookup(np.array([2])).sum()))
    look = front.compile_program(
        lambda: (frozen.lookup(np.array([2])), ipu.get_variable("v", initializer=1.0))
    )
    with ipu.Session() as session, trained.register(session):
        session.run(step)
        session.save(tmp_path / "saved")
        assert sorted(session.variables) == ["v", "words"]
    assert "2 parameters" not in str(step.summary())
    with ipu.Session() as session, frozen.register(session), trained.register(session):
        session.restore(tmp_path / "saved")
        assert session.run(look[0]) == [[-1]]
        session.run(step)
        assert session.run(look[0]) == [[-2]]


def test_the_table_among_the_variables_that_are_trained():
    table = make_counting()

    def step(names):
        loss = table.lookup(np.array([0])).sum() + ipu.get_variable("v", initializer=0.0)
        assert [one.name for one in ipu.trainable_variables()] == ["v", "words"]
        return tf1.GradientDescentOptimizer(1.0).minimize(loss, var_list=names)

    only_table, only_v = (
        front.compile_program(lambda names=[name]: step(names)) for name in ("words", "v")
    )
    with ipu.Session() as session, table.register(session):
        session.run(only_table)
        assert (session.variables["words"][0, 0], session.variables["v"]) == (-1, 0)
        session.run(only_v)
        assert (session.variables["words"][0, 0], session.variables["v"]) == (-1, -1)


def test_lookups_outside_of_what_trains_are_told():
    table = make_counting()

    def step():
        rows = table.lookup(np.array([0]))
        return loops.repeat(1, lambda: minimize(rows.sum()))

    with pytest.warns(UserWarning, match="'words' is looked up outside of the pipelines and loops"):
        front.compile_program(step)


def test_an_estimator_whose_hook_registers_the_table(tmp_path):
    table = make_counting()

    class Register(ipu.ipu_session_run_hooks.SessionRunHook):
        def after_create_session(self, session, _coord):
            table.register(session).__enter__()

    def model_fn(features, mode):
        loss = table.lookup(features).sum()
        return ipu.ipu_estimator.IPUEstimatorSpec(mode, loss=loss, train_op=minimize(loss))

    options = front.ipu_config(1)
    config = ipu.ipu_run_config.RunConfig(ipu.ipu_run_config.IPURunConfig(2, options))
    estimator = ipu.ipu_estimator.IPUEstimator(model_fn, tmp_path, config)
    for _time in range(2):
        estimator.train(lambda: [np.array([1, 3], np.int32)] * 2, steps=2, hooks=[Register()])
    assert estimator.get_variable_value("words").ravel().tolist() == [0, -4, 0, -4]


def test_lookups_without_training():
    values = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    table = embedding_ops.HostEmbedding("numbers", values)
    ids = ipu.placeholder(np.int32, [3], name="ids")
    program = front.compile_program(table.lookup, inputs=[ids])
    with ipu.Session() as session, table.register(session):
        np.testing.assert_array_equal(session.run(program, {ids: [2, 0, 9]})[0], values[[2, 0, 3]])
        session.load({"numbers": values[::-1]})
        np.testing.assert_array_equal(session.run(program, {ids: [2, 0, -1]})[0], values[[1, 3, 3]])
    values[:] = 0  # the embedding has its own copy
    with ipu.Session() as session, table.register(session):
        assert session.run(program, {ids: [1, 1, 1]})[0].sum() == 36


def test_snapshots_keep_what_they_have():
    model = Pipelined()
    with ipu.Session(seed=3) as session:
        model.run(session)
        snapshot = session.take_snapshot()
        kept = np.array(snapshot.variables["words"])
        model.run(session)
        assert not np.array_equal(session.variables["words"], kept)
        np.testing.assert_array_equal(snapshot.variables["words"], kept)
    with ipu.Session() as other:
        other.take_over(snapshot, "a snapshot", feeds=False)
        model.run(other)
        assert not np.array_equal(other.variables["words"], kept)
    np.testing.assert_array_equal(snapshot.variables["words"], kept)


@pytest.mark.usefixtures("no_garbage")
def test_a_big_table_is_not_on_devices():
    table = embedding_ops.create_host_embedding("big", [20_000, 64], np.float32)
    ids = ipu.placeholder(np.int32, [8])
    program = front.compile_program(lambda ids: table.lookup(ids), inputs=[ids])
    with ipu.Session() as session, table.register(session):
        found = session.run(program, {ids: np.arange(8) * 2_000})[0]
        sizes = [array.size for array in jax.live_arrays()]
        np.testing.assert_array_equal(session.variables["big"][np.arange(8) * 2_000], found)
    assert 20_000 * 64 not in sizes


def test_others_read_weights_and_table_of_one_update(monkeypatch):
    table = make_counting()

    def body():
        return minimize(table.lookup(np.array([0])).sum() + ipu.get_variable("w", ()))

    program = front.compile_program(lambda: loops.repeat(3, body))
    read, threads, descend = [], [], program_runs._descend

    def read_variables(has_begun):
        has_begun.set()
        read.append(session.variables)

    def descend_while_others_read(*arguments):
        has_begun = threading.Event()
        thread = threading.Thread(target=read_variables, args=(has_begun,))
        thread.start()
        has_begun.wait()
        assert len(read) <= len(threads)  # it waits for the table
        descend(*arguments)
        threads.append(thread)

    monkeypatch.setattr(program_runs, "_descend", descend_while_others_read)
    with ipu.Session() as session, table.register(session):
        session.load({"w": np.float32(0)})
        session.run(program)
        for thread in threads:
            thread.join()
    assert len(read) == 3
    assert all(one["w"] == one["words"][0, 0] for one in read)


def test_a_fed_count_that_does_not_fit_is_told_before_anything_runs():
    table = make_counting(every=4)
    count = ipu.placeholder(np.int32, [], name="count")
    feeds = [IPUInfeedQueue([np.int32(1)] * 8) for _pipeline in range(2)]

    def one_pipeline(number, count):
        return pipeline(
            [table.lookup, lambda x: jnp.sum(x) + ipu.get_variable(f"v{number}", initializer=0.0)],
            count,
            infeed_queue=feeds[number],
            outfeed_queue=IPUOutfeedQueue(),
            optimizer_function=front.minimizing(optax.sgd(1.0)),
            name=f"pipeline{number}",
        )

    program = front.compile_program(lambda count: [one_pipeline(0, 4), one_pipeline(1, count)], [count])
    with ipu.Session() as session, table.register(session):
        session.run([feed.initializer for feed in feeds])
        with pytest.raises(ValueError, match=r"HostEmbeddingSGDGAOptimizerSpec\(1.0, 3\)"):
            session.run(program, {count: 3})
        assert session.update_count("pipeline0") == 0
        session.run(program, {count: 4})
        assert session.variables["words"].ravel().tolist() == [0, -8, 0, 0]


def test_a_table_goes_with_its_session(monkeypatch):
    """Also after a run that failed; JAX keeps programs, and these the embedding."""
    # pytest keeps what is logged, and with it the frames of the error.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)
    table = make_counting(rate=0)
    program = front.compile_program(lambda: table.lookup(np.array([9]), clip_indices=False))
    with ipu.Session() as session, table.register(session):
        with contextlib.suppress(Exception):
            session.run(program)
        array = weakref.ref(session._store.host_array(table.get_embedding_tensor().spec))
        assert array() is not None
    del session
    gc.collect()
    assert array() is None


def test_two_sessions_at_once():
    table = make_table(rate=0)
    ids = ipu.placeholder(np.int32, [2])
    started, go_on = threading.Event(), threading.Event()

    def wait(ids):
        started.set()
        go_on.wait()
        return ids

    def look(ids):
        return table.lookup(jax.pure_callback(wait, jax.ShapeDtypeStruct((2,), np.int32), ids))

    program = front.compile_program(look, inputs=[ids])
    errors = []

    def run_first():
        try:
            with ipu.Session() as first, table.register(first):
                first.run(program, {ids: [0, 1]})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_first)
    thread.start()
    started.wait()
    with ipu.Session() as second, table.register(second):
        with pytest.raises(RuntimeError, match="'words' is used by a run of another session"):
            second.run(program, {ids: [0, 1]})
        go_on.set()
        thread.join()
        second.run(program, {ids: [0, 1]})
    assert not errors


def compile_lookup(lookup):
    """Compiles what looks rows up in a table, and another of the same name."""
    table, other = make_table(), make_table()
    return table, front.compile_program(lambda: lookup(table, other))


def run_lookup(lookup, registered=1):
    table, program = compile_lookup(lambda table, _other: lookup(table))
    with ipu.Session() as session, contextlib.ExitStack() as stack:
        for _time in range(registered):
            stack.enter_context(table.register(session))
        session.run(program)


ROW, IDS, ONES = np.int32([3, 20]), np.zeros(2, np.int32), np.ones((3, 2), "float32")
HostEmbedding = embedding_ops.HostEmbedding


@pytest.mark.parametrize(
    ("refused", "error", "match"),
    [
        (lambda: make_table().lookup(IDS), RuntimeError, "lookup was called outside of a program"),
        (
            lambda: compile_lookup(lambda one, _: one.lookup(ONES)),
            TypeError,
            "indices must be integers; got float32",
        ),
        (
            lambda: compile_lookup(lambda one, other: one.lookup(0) + other.lookup(1)),
            ValueError,
            "Two host embeddings of the program are named 'words'",
        ),
        (
            lambda: compile_lookup(lambda one, _other: one.lookup(0) + ipu.get_variable("words", [6])),
            ValueError,
            "A host embedding and a variable of the program are named 'words'",
        ),
        (lambda: run_lookup(lambda one: one.lookup(IDS), 0), RuntimeError, "with host_embedding.register"),
        (
            lambda: run_lookup(lambda one: one.lookup(IDS), 2),
            RuntimeError,
            "'words' is registered with this session already",
        ),
        (
            lambda: run_lookup(lambda one: one.lookup(ROW, clip_indices=False)),
            Exception,
            "'words' has 20 rows, and row 20 was looked up",
        ),
        (lambda: Pipelined(optimizer=LossScalingOptimizer(optax.sgd(RATE))), NotImplementedError, "scales"),
        (lambda: Pipelined(table=make_table(2)), ValueError, r"HostEmbeddingSGDGAOptimizerSpec\(0.4, 3\)"),
        (lambda: Pipelined(table=make_table(1)), ValueError, "mini-batches in an update, but .* has 3"),
        (lambda: Looped(4, 2, factor=4), ValueError, r"HostEmbeddingSGDGAOptimizerSpec\(0.4, 2\)"),
        (lambda: make_table().register().__enter__(), ValueError, "requires an ipu_pipeline.Session"),
        (lambda: make_table()(None), NotImplementedError, "register"),
        (lambda: make_table(partition_strategy="ROW"), ValueError, "partition_strategy must be"),
        (lambda: make_table(rate=-1.0), ValueError, "at least 0"),
        (lambda: make_table(rate="0.1"), TypeError, "learning_rate must be a number"),
        (lambda: make_table(0), ValueError, "accumulation_factor must be at least 1"),
        (lambda: HostEmbedding("x", ONES[0]), ValueError, r"\[rows, columns\]"),
        (lambda: HostEmbedding("x", ONES.astype("int32")), ValueError, "floating-point"),
        (lambda: HostEmbedding("/x", ONES), ValueError, "without empty parts"),
        (lambda: embedding_ops.HostEmbeddingOptimizerSpec(0.1, "Adam"), ValueError, "'SGD'"),
        (lambda: HostEmbedding("x", ONES, optimizer_spec=0.1), ValueError, "optimizer_spec must be"),
    ],
)
def test_errors(refused, error, match):
    with pytest.raises(error, match=match):
        refused()
