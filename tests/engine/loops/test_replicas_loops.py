"""Replicas of loops: each with elements and carried values of its own, and one weight update for all."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import loops, optimizers
from ipu_pipeline.engine.execution.runner import PlanRunner
from ipu_pipeline.errors import OutOfRangeError
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedQueue
from tests.support import front, models

pytestmark = pytest.mark.usefixtures("nothing_warned")


Accumulating = optimizers.CrossReplicaGradientAccumulationOptimizerV2
OPTIMIZERS = {"sgd": lambda: optax.sgd(0.1), "adam": lambda: optax.adam(0.01)}
HALVED = {"halved": lambda: optax.chain(optax.scale(0.5), optax.adam(0.01))}


def select(number):
    front.ipu_config(number).configure_ipu_system()


@contextlib.contextmanager
def on_ipus(number, source=None, **options):
    """A session on so many IPUs, in which a model's infeed, or the infeed, is initialized."""
    select(number)
    with ipu.Session(**options) as session:
        if source is not None:
            session.run(source.initializer)
        yield session


@contextlib.contextmanager
def started(model, num_ipus):
    """A session on so many IPUs, and a model's variables at its start."""
    with on_ipus(num_ipus, model, seed=3) as session:
        session.run(ipu.global_variables_initializer())
        yield session, session.variables


def stages(is_sharded, x, labels):
    """Two layers, both on one IPU or each on one of its own."""
    shard = ipu.scopes.ipu_shard if is_sharded else lambda _index: contextlib.nullcontext()
    with shard(0):
        x = models.dense("dense0", 6, x)
    with shard(1):
        return models.cross_entropy(models.dense("dense1", 10, x, jnp.tanh), labels)


def plain_loss(variables, x, labels):
    x = jax.nn.relu(x @ variables["dense0/kernel"] + variables["dense0/bias"])
    return models.cross_entropy(jnp.tanh(x @ variables["dense1/kernel"] + variables["dense1/bias"]), labels)


class Model:
    """A loop that trains, with queues."""

    def __init__(self, elements, count, every, optimizer="sgd", is_sharded=False, **options):
        self.infeed = IPUInfeedQueue(elements)
        self.outfeed = IPUOutfeedQueue()

        def body(number, x, labels):
            loss = stages(is_sharded, x, labels)
            opt = Accumulating(OPTIMIZERS[optimizer](), every, **options)
            return number + 1, opt.minimize(loss), self.outfeed.enqueue(loss)

        self.program = front.compile_program(lambda: loops.repeat(count, body, [np.int32(0)], self.infeed))
        self.initializer = self.infeed.initializer

    def run(self, session):
        assert session.run(self.program)[0] > 0
        return session.run(self.outfeed.dequeue())


def plain(variables, elements, num_replicas, every, optimizer, reduction="SUM"):
    """Losses [iterations, replicas] and variables of a plain loop, and the gradients left accumulated."""
    groups = [elements[n : n + num_replicas] for n in range(0, len(elements), num_replicas)]
    return plain_groups(variables, groups, every, optimizer, reduction)


@pytest.mark.parametrize(
    ("count", "every", "num_runs", "optimizer", "reduction", "num_replicas", "is_sharded"),
    [(5, 3, 3, "adam", "MEAN", 3, False), (2, 5, 5, "sgd", "RUNNING_MEAN", 2, True)],
)
def test_equals_a_plain_loop(count, every, num_runs, optimizer, reduction, num_replicas, is_sharded):
    """Also where a run ends within an update: the next one goes on with what was accumulated."""
    elements = models.elements_of(num_runs * count * num_replicas)
    model = Model(elements, count, every, optimizer, is_sharded, reduction_method=reduction)
    with started(model, num_replicas * (1 + is_sharded)) as (session, start):
        losses = np.concatenate([model.run(session) for _run in range(num_runs)])
        expected, variables, left = plain(start, elements, num_replicas, every, optimizer, reduction)
        assert losses.shape == (num_runs * count, num_replicas)
        assert not left
        models.assert_trees_close(losses, expected)
        models.assert_trees_close(session.variables, variables)
        name = "CrossReplicaGradientAccumulationOptimizerV2"
        assert session.update_count(name) == num_runs * count // every


def plain_groups(variables, groups, every, optimizer, reduction="SUM"):
    transformation = (OPTIMIZERS | HALVED)[optimizer]()
    losses, variables, left = models.plain_loop(
        plain_loss, variables, groups, every, transformation, reduction
    )
    return losses, jax.tree.map(np.asarray, variables), left


def test_the_optimizers_state_is_shared_out():
    """ZeRO-1: the same numbers, and a part of the state on each IPU."""
    elements = models.elements_of(12)
    found = []
    for is_shared in (False, True):
        model = Model(elements, 6, 3, "adam", replicated_optimizer_state_sharding=is_shared)
        with started(model, 2) as (session, _start):
            model.run(session)
            leaves = session._store.state.optimizers["CrossReplicaGradientAccumulationOptimizerV2"]
            kernel = leaves["[0].mu['dense0/kernel']"]
            assert kernel.sharding.is_fully_replicated is not is_shared
            found.append((session.variables, session.optimizer_state(state_name(session))))
    models.assert_trees_close(found[1], found[0], 1e-6)
    program = body_that_trains(Accumulating(optax.sgd(0.1), 3, replicated_optimizer_state_sharding=True))
    with (
        on_ipus(1) as session,
        pytest.warns(UserWarning, match="there is one replica, and nothing is sharded"),
    ):
        session.run(program)


def test_nests_of_optimizers():
    """The scale of the loss, a map of gradients, and state in host memory, as with one replica."""
    elements = models.elements_of(12)
    infeed, outfeed = IPUInfeedQueue(elements), IPUOutfeedQueue()

    def body(x, labels):
        loss = stages(True, x, labels)
        opt = optimizers.MapGradientOptimizer(optax.adam(0.01), lambda gradient, _variable: gradient * 0.5)
        opt = optimizers.LossScalingOptimizer(opt, 8.0)
        opt = optimizers.GradientAccumulationOptimizerV2(opt, 3, offload_weight_update_variables=True)
        return optimizers.CrossReplicaOptimizer(opt).minimize(loss), outfeed.enqueue(loss)

    program = front.compile_program(lambda: loops.repeat(6, body, [], infeed))
    with started(infeed, 4) as (session, start):
        session.run(program)
        losses, found = session.run(outfeed.dequeue()), session.variables
    expected, wanted, _left = plain(start, elements, 2, 3, "halved")
    models.assert_trees_close(losses, expected)
    models.assert_trees_close(found, wanted)


def state_name(session):
    (name,) = session._store.state.counts
    return name


# Carried values, and what a program returns.


def test_each_replica_carries_its_own():
    """And the first one's are what the program returns."""
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 13)])
    outfeed = IPUOutfeedQueue()

    def body(total, constant, x):
        index = ipu.replication_ops.replication_index()
        total = total + constant * x
        return total, constant, outfeed.enqueue((total, index))

    program = front.compile_program(lambda: loops.repeat(3, body, [np.float32(100), np.float32(2)], infeed))
    with on_ipus(4, infeed) as session:
        total, constant = session.run(program)
        totals, indices = session.run(outfeed.dequeue())
    expected = 100 + np.cumsum(2 * np.arange(1, 13).reshape(3, 4), axis=0)
    np.testing.assert_array_equal(totals, expected)
    np.testing.assert_array_equal(indices, [range(4)] * 3)
    assert (total, constant) == (expected[-1, 0], 2)


def test_what_replicas_have_apart_goes_on_in_the_program():
    """Through what is computed between loops, into another loop, and into a pipeline's inputs."""
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 5)])
    outfeeds = [IPUOutfeedQueue(), IPUOutfeedQueue()]

    def first(total, x):
        return total + ipu.cross_replica_ops.cross_replica_sum(x) * 0.0 + x

    def second(value, scale):
        ipu.replication_ops.replication_index()
        return value * scale, scale, outfeeds[0].enqueue(value)

    def stage(value):
        return value + ipu.replication_ops.replication_index().astype(np.float32)

    def function():
        total = loops.repeat(2, first, [np.float32(0)], infeed)
        scaled, _scale = loops.repeat(2, second, [total + 1.0, total])
        piped = {"inputs": [scaled * 10.0], "outfeed_queue": outfeeds[1], "device_mapping": [0, 0]}
        ipu.pipelining_ops.pipeline([stage, lambda x: x], 2, **piped)
        return scaled, total

    program = front.compile_program(function)
    with on_ipus(2, infeed) as session:
        scaled, total = session.run(program)
        enqueued, piped = (session.run(outfeed.dequeue()) for outfeed in outfeeds)
    sums = np.array([1 + 3, 2 + 4], np.float32)
    last = (sums + 1) * sums**2
    np.testing.assert_array_equal(enqueued, [sums + 1, (sums + 1) * sums])
    np.testing.assert_array_equal(piped, [last * 10 + [0, 1]] * 2)
    assert (scaled, total) == (last[0], sums[0])


def test_random_numbers_differ_between_replicas():
    outfeed = IPUOutfeedQueue()

    def body():
        ipu.replication_ops.replication_index()
        return outfeed.enqueue(jax.random.normal(ipu.next_rng_key(), (3,)))

    program = front.compile_program(lambda: loops.repeat(2, body))
    found = []
    try:
        for identical in (False, True):
            ipu.utils.reset_ipu_seed(5, experimental_identical_replicas=identical)
            with on_ipus(2) as session:
                session.run(program)
                found.append(session.run(outfeed.dequeue()))
    finally:
        ipu.utils.reset_ipu_seed(0)
    assert len(np.unique(found[0])) == 2 * 2 * 3
    np.testing.assert_array_equal(found[1][:, 0], found[1][:, 1])


def test_variables_that_bodies_assign():
    """Each replica's own within an update; means, or the first one's counters, after it and after a run."""
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 100)])
    outfeed = IPUOutfeedQueue()

    def body(x):
        mean = ipu.get_variable("mean", initializer=0.0, trainable=False)
        count = ipu.get_variable("count", initializer=0, trainable=False)
        w = ipu.get_variable("w", initializer=1.0)
        ipu.assign("mean", 0.5 * mean + x)
        ipu.assign("count", count + 1 + ipu.replication_ops.replication_index())
        opt = Accumulating(optax.sgd(0.0), 2)
        return opt.minimize(w * x), outfeed.enqueue(mean)

    program = front.compile_program(lambda: loops.repeat(3, body, [], infeed))
    with on_ipus(2, infeed) as session:
        session.run(program)
        means = session.run(outfeed.dequeue())
        # 1 | 2, then 0.5 + 3 | 1 + 4 = 3.5 | 5, of which the update makes 4.25, then 2.125 + 5 | + 6
        np.testing.assert_array_equal(means, [[0, 0], [1, 2], [4.25, 4.25]])
        assert session.variables["mean"] == 2.125 + 5.5
        assert session.variables["count"] == 3
        session.run(program)
        np.testing.assert_array_equal(session.run(outfeed.dequeue())[0], [7.625, 7.625])


def test_variables_of_a_loop_that_does_not_train_are_joined_at_its_end():
    """Here the order matters: the mean of squares is not the square of the mean."""

    def body(x):
        v = ipu.get_variable("v", initializer=0.0, trainable=False)
        ipu.assign("v", v * v + x)

    infeed = IPUInfeedQueue([np.float32(n) for n in (1, 3, 1, 1)], replication_factor=2)
    program = front.compile_program(lambda: loops.repeat(2, body, [], infeed))
    with on_ipus(2, infeed) as session:
        session.run(program)
        assert session.variables["v"] == (1 * 1 + 1 + 3 * 3 + 1) / 2


def test_gradients_through_values_of_all_replicas():
    """The loss of each replica depends on what all of them have, as in one large model."""
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 7)])

    def body(x):
        w = ipu.get_variable("w", initializer=2.0)
        mean = ipu.cross_replica_ops.cross_replica_mean(w * x)
        loss = (w * x - mean) ** 2 + ipu.cross_replica_ops.cross_replica_sum(jnp.sin(w * x))
        return optimizers.CrossReplicaOptimizer(optax.sgd(0.01)).minimize(loss)

    program = front.compile_program(lambda: loops.repeat(2, body, [], infeed))
    with on_ipus(3, infeed) as session:
        session.run(program)
        found = session.variables["w"]

    def total(w, x):
        return jnp.sum((w * x - jnp.mean(w * x)) ** 2 + jnp.sum(jnp.sin(w * x)))

    w = jnp.float32(2)
    for x in (jnp.arange(1.0, 4.0), jnp.arange(4.0, 7.0)):
        w = w - 0.01 * jax.grad(total)(w, x) / 3
    models.assert_trees_close(found, np.asarray(w))


# Loops that end by a condition.


def test_while_loops_go_on_together():
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 21)])
    outfeed = IPUOutfeedQueue()

    def body(total, x):
        return total + ipu.cross_replica_ops.cross_replica_sum(x), outfeed.enqueue(x)

    program = front.compile_program(
        lambda: loops.while_loop(lambda total: total < 20, body, [np.float32(0)], infeed)
    )
    with on_ipus(2, infeed) as session:
        assert session.run(program) == [1 + 2 + 3 + 4 + 5 + 6]
        np.testing.assert_array_equal(session.run(outfeed.dequeue()), [[1, 2], [3, 4], [5, 6]])
        assert session.run(program) == [7 + 8 + 9 + 10]


def test_a_condition_that_differs_between_replicas_is_an_error():
    """It would wait for ever: one replica would train on, and the other not."""
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 21)])

    def body(total, x):
        w = ipu.get_variable("w", initializer=0.0)
        return total + x, optimizers.CrossReplicaOptimizer(optax.sgd(1.0)).minimize(w * x)

    program = front.compile_program(
        lambda: loops.while_loop(lambda total: total < 9.5, body, [np.float32(0)], infeed)
    )
    with on_ipus(2, infeed) as session:
        with pytest.raises(
            ValueError, match=r"the same in all replicas.* True in replicas \[0\] of 2 only"
        ):
            session.run(program)
        assert session.variables["w"] == -(1.5 + 3.5 + 5.5)  # what was done stands


def test_a_count_that_differs_between_replicas_is_an_error():
    infeed = IPUInfeedQueue([np.int32(n) for n in range(1, 9)])

    def first(total, x):
        return total + x + 0 * ipu.cross_replica_ops.cross_replica_sum(x)

    def function():
        number = loops.repeat(1, first, [np.int32(0)], infeed)
        return loops.repeat(number, lambda total: total + 1, [np.int32(0)])

    program = front.compile_program(function)
    told = r"must be the same in all replicas.* gave them \[1, 2\]"
    with on_ipus(2, infeed) as session, pytest.raises(ValueError, match=told):
        session.run(program)


@pytest.mark.parametrize("is_between", [False, True])
def test_replicas_that_do_not_fit_are_an_error(is_between):
    """Those of a loop on one IPU each, and of one on two: the values of one of them would be lost."""
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 9)])

    def first(total, x):
        return total + x + 0.0 * ipu.cross_replica_ops.cross_replica_sum(x)

    def second(total):
        with ipu.scopes.ipu_shard(0):
            total = total + 1.0
        with ipu.scopes.ipu_shard(1):
            return total + ipu.cross_replica_ops.cross_replica_sum(total)

    def function():
        one = loops.repeat(1, first, [np.float32(0)], infeed)
        return one + loops.repeat(1, second, [np.float32(0) if is_between else one])

    program = front.compile_program(function)
    given = "loops with different numbers of replicas: 2, 4" if is_between else "has 2 replicas, and takes"
    with on_ipus(4, infeed) as session, pytest.raises(ValueError, match=given):
        session.run(program)


def test_while_loops_of_at_most_so_many_iterations():
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 21)])
    limit = ipu.placeholder(np.int32)

    def body(total, x):
        ipu.replication_ops.replication_index()
        return total + x

    def function():
        options = {"infeed_queue": infeed, "maximum_iterations": limit}
        return loops.while_loop(lambda total: total < 20, body, [np.float32(0)], **options)

    program = front.compile_program(function)
    with on_ipus(2, infeed) as session:
        for most, expected in ((2, 1 + 3), (0, 0), (3, 5 + 7 + 9)):
            assert session.run(program, {limit: most}) == [expected]


# Sessions: ends of data, interrupts, checkpoints.


def test_data_that_end_within_a_round_keep_what_was_done():
    elements = models.elements_of(12)
    short = elements[:7]
    model = Model(lambda: iter(short), 6, 1)
    with started(model, 2) as (session, start):
        with pytest.raises(OutOfRangeError):
            session.run(model.program)
        assert session.update_count("CrossReplicaGradientAccumulationOptimizerV2") == 3
        losses, variables, _left = plain(start, elements[:6], 2, 1, "sgd")
        models.assert_trees_close(session.run(model.outfeed.dequeue()), losses)
        models.assert_trees_close(session.variables, variables)


def test_a_checkpoint_within_an_update_goes_on_with_other_replicas(tmp_path):
    """What replicas accumulated is saved as their mean, from which any number of them goes on."""
    before, after = 2, 3
    elements = models.elements_of(2 * before + 4 * after)
    model = Model(elements, 2, 3, "adam")
    with started(model, before) as (session, start):
        losses = [*model.run(session)]
        session.save(tmp_path / "saved")
    model = Model(elements[2 * before :], 4, 3, "adam")
    with on_ipus(after, model) as session:
        session.restore(tmp_path / "saved", infeeds=False)
        losses += [*model.run(session)]
        variables = session.variables
    left = iter(elements)
    groups = [list(itertools.islice(left, number)) for number in (before, before, *[after] * 4)]
    expected, wanted, _left = plain_groups(start, groups, 3, "adam")
    for row, other in zip(losses, expected, strict=True):
        models.assert_trees_close(row, np.array(other))
    models.assert_trees_close(variables, wanted)


def test_a_restored_session_goes_on_in_the_data(tmp_path):
    elements = models.elements_of(20)
    model = Model(elements, 2, 1)
    with started(model, 2) as (session, start):
        losses = [model.run(session) for _run in range(2)]
        session.save(tmp_path / "saved")
    with front.session_of(model) as session:
        session.restore(tmp_path / "saved")
        losses.append(model.run(session))
        expected, variables, _left = plain(start, elements[:12], 2, 1, "sgd")
        models.assert_trees_close(np.concatenate(losses), expected)
        models.assert_trees_close(session.variables, variables)


def test_an_interrupted_run_goes_on(monkeypatch):
    """What was done stands, and the elements of the iteration that was not come again."""
    elements = models.elements_of(12)
    model = Model(elements, 4, 3, "adam")
    run, calls = PlanRunner.run, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*arguments)

    with started(model, 2) as (session, start):
        monkeypatch.setattr(PlanRunner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(model.program)
        losses = model.run(session)
        expected, variables, left = plain(start, elements, 2, 3, "adam")
        assert not left
        models.assert_trees_close(losses, expected)
        models.assert_trees_close(session.variables, variables)


# How many replicas there are, and what is refused.


@pytest.mark.parametrize("is_loop", [True, False])
def test_queues_say_how_many_replicas_there_are(is_loop):
    """An older program's `replication_factor`: inference in loops and pipelines has so many replicas."""
    infeed = IPUInfeedQueue([np.float32(n) for n in range(6)], "in", 0, 2)
    outfeed = IPUOutfeedQueue("out", replication_factor=2)

    def function():
        if is_loop:
            return loops.repeat(3, lambda x: outfeed.enqueue(x * 2.0), [], infeed)
        options = {"infeed_queue": infeed, "outfeed_queue": outfeed, "device_mapping": [0, 0]}
        return ipu.pipelining_ops.pipeline([lambda x: x, lambda x: x * 2.0], 3, **options)

    program = front.compile_program(function)
    with on_ipus(2, infeed) as session:
        session.run(program)
        np.testing.assert_array_equal(session.run(outfeed.dequeue()), [[0, 2], [4, 6], [8, 10]])


def body_that_trains(optimizer, infeed=None):
    def body(*element):
        w = ipu.get_variable("w", initializer=0.0)
        return optimizer.minimize(w * ipu.cross_replica_ops.cross_replica_sum(jnp.float32(1)))

    return front.compile_program(lambda: loops.repeat(3, body, [], infeed))


def test_wrong_numbers_of_replicas():
    infeed = IPUInfeedQueue([np.float32(1)] * 6, replication_factor=2)
    plain_optimizer = optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.1), 1)
    with pytest.raises(ValueError, match="not a valid replicated .* replication_factor of a queue is 2"):
        body_that_trains(plain_optimizer, infeed)
    program = body_that_trains(optimizers.CrossReplicaOptimizer(optax.sgd(0.1)), infeed)
    with (
        on_ipus(3, infeed) as session,
        pytest.raises(
            ValueError, match=r"replication_factor=2, but .* 3 replica\(s\) .*auto_select_ipus to 2"
        ),
    ):
        session.run(program)
    outfeed = IPUOutfeedQueue(replication_factor=3)
    with pytest.raises(ValueError, match="must be the same; got 2, 3"):
        front.compile_program(lambda: loops.repeat(1, outfeed.enqueue, [], infeed))
    program = body_that_trains(plain_optimizer)
    with ipu.Session() as session, pytest.raises(ValueError, match="no optimizer averages the gradients"):
        session.run(program)
    with on_ipus(1) as session:
        session.run(program)
        assert session.variables["w"] == np.float32(-0.1) * 3


def test_more_ipus_alone_make_no_replicas():
    outfeed = IPUOutfeedQueue()
    program = front.compile_program(lambda: loops.repeat(3, lambda x: (x + 1, outfeed.enqueue(x)), [0.0]))
    with on_ipus(4) as session:
        session.run(program)
        assert session.run(outfeed.dequeue()).shape == (3,)


@pytest.mark.thorough
def test_what_is_told_of_them(tmp_path):
    model = Model(models.elements_of(12), 3, 3, is_sharded=True)
    with started(model, 4) as (session, _start), ipu.reports.capture(tmp_path) as captured:
        text = str(model.program.placement())
        session.run(model.program)
    assert "in 2 replicas" in text
    assert f"{jax.devices()[0]}, {jax.devices()[2]}" in text
    (facts,) = captured.profile.pipelines
    assert (facts.kind, facts.num_replicas) == ("loop", 2)
    (placed,) = model.program.placement().calls
    assert facts.edges == placed.edges  # what is carried comes from the last shard, not from the feed
