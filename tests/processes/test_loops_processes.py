"""Loops in several processes: what they train and return is what one process does."""

import contextlib
import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import loops, optimizers
from ipu_pipeline.errors import OutOfRangeError, ProcessError
from tests.support import front, joined, models

CASES = {
    "replicas": (2, False),
    "replicas of shards": (2, True),
    "shards": (1, True),
    "one device": (1, False),
}
LENGTH = 80  # elements of the data


def elements():
    rng = np.random.default_rng(5)
    for _number in range(LENGTH):
        yield rng.normal(size=(4, 3)).astype(np.float32), np.float32(rng.normal())


def train(num_replicas, is_sharded, directory):
    """What some programs give: losses, returned values, variables, and what ends them."""
    front.ipu_config(num_replicas * (1 + is_sharded)).configure_ipu_system()
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    shard = ipu.scopes.ipu_shard if is_sharded else lambda _index: contextlib.nullcontext()

    def forward(x, shift):
        with shard(0):
            h = jnp.tanh(x @ ipu.get_variable("a", (3, 5)))
        with shard(1):
            return jnp.mean(h @ ipu.get_variable("b", (5, 2))) + shift

    def body(total, x, shift):
        loss = forward(x, shift)
        opt = optimizers.CrossReplicaGradientAccumulationOptimizerV2(optax.adam(0.05), 3)
        with shard(1):
            return total + shift, opt.minimize(loss), outfeed.enqueue(loss)

    def climbing(total, x, shift):
        with shard(0):
            total = total + ipu.cross_replica_ops.cross_replica_mean(jnp.sum(x) + 10.0)
        with shard(1):
            return total + ipu.cross_replica_ops.cross_replica_sum(shift * 0.0)

    def function():
        total = loops.repeat(5, body, [np.float32(0)], infeed)
        return total, loops.while_loop(lambda total: total < 40, climbing, [total * 0.5], infeed)

    def evaluating(total, x, shift):
        h = jnp.tanh(x @ ipu.get_variable("a", (3, 5)))
        return total + jnp.mean(h @ ipu.get_variable("b", (5, 2))) + shift

    other = ipu.ipu_infeed_queue.IPUInfeedQueue(elements)
    evaluation = front.compile_program(lambda: loops.repeat(2, evaluating, [np.float32(0)], other))
    compiled = front.compile_program(function)
    found = []
    with ipu.Session(seed=3) as session:
        session.run([infeed.initializer, other.initializer])
        for _number in range(2):  # on the device of one process, which the variables come to
            session.run(compiled)
            found.append((session.run(evaluation), session.run(outfeed.dequeue()), session.variables))
        values = session.run(compiled)
        found.append((values, session.run(outfeed.dequeue()), session.variables))
        session.save(f"{directory}/saved")
        with contextlib.suppress(OutOfRangeError):
            while True:
                values = session.run(compiled)
        found.append((values, session.run(outfeed.dequeue()), session.variables))
        session.restore(f"{directory}/saved", infeeds=False)
        session.run(infeed.deleter)
        found.append((values, session.run(outfeed.dequeue()), session.variables))
    return found


def train_all(directory, cases):
    found = {}
    for name in cases:
        print(name, flush=True)  # for whoever reads why this failed
        found[name] = train(*CASES[name], directory / name.replace(" ", "_"))
        ipu.config.reset_ipu_configuration()
    return found


def check_all(made, cases, tmp_path):
    """Compares what processes returned with what one does."""
    expected = train_all(tmp_path / "alone", cases)
    for name in cases:
        for number, wanted in enumerate(expected[name]):
            parts = [one[name][number] for one in made]
            for values, _losses, variables in parts:
                models.assert_trees_close(values, wanted[0])
                models.assert_trees_close(variables, wanted[2])
            here = [losses for _values, losses, _variables in parts if len(losses)]
            assert len(here) == (len(wanted[1]) > 0), name
            if here:
                models.assert_trees_close(here[0], wanted[1])


def train_on_data_that_fail(ends, is_pipeline, index=None):
    """Replicas whose data end, or raise, in the process of one of them; caught, and gone on with others."""
    if index is None:
        index = ipu.popdist.getInstanceIndex()
    front.ipu_config(2).configure_ipu_system()
    starts = itertools.count()

    def data():
        yield from itertools.islice(elements(), LENGTH if next(starts) or index == 0 else 19)
        if not ends:
            raise ArithmeticError("There are no more.")

    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def loss_of(x, shift):
        return jnp.mean(x @ ipu.get_variable("a", (3, 5))) ** 2 + shift

    optimizer = optimizers.CrossReplicaOptimizer(optax.sgd(0.1))

    def body(x, shift):
        loss = loss_of(x, shift)
        return optimizer.minimize(loss), outfeed.enqueue(loss)

    if is_pipeline:
        program = front.compile_pipeline(
            [lambda x, shift: (x, shift), loss_of],
            2,
            repeat_count=3,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            device_mapping=[0, 0],
            optimizer_function=front.minimizing(optimizer),
        )
    else:
        program = front.compile_program(lambda: loops.repeat(6, body, [], infeed))
    told, initializer = [], infeed.initializer
    with ipu.Session(seed=3) as session:
        session.run(initializer)
        session.run(program)
        try:
            session.run(program)
        except (OutOfRangeError, ProcessError, ArithmeticError) as error:
            told.append((type(error).__name__, str(error)))
        session.run(initializer)
        session.run(program)
        return told, session.variables


def train_and_fail(directory, cases, failing):
    """What replicas give, and then those whose data fail."""
    trained, failed = train_all(directory, cases), []
    for case in failing:
        failed.append(train_on_data_that_fail(*case))
        ipu.config.reset_ipu_configuration()
    return trained, failed


def start_and_check(tmp_path, num_processes, cases, failing=()):
    directory = tmp_path / f"in {num_processes}"
    directory.mkdir()
    given = (directory, cases, failing)
    options = {"directory": directory, "joins_itself": True}
    started = joined.start(train_and_fail, num_processes, None, *given, **options)
    made = joined.finish(started, directory, timeout=400)
    check_all([one for one, _failed in made], cases, tmp_path)
    for (ends, is_pipeline), *found in zip(failing, *(failed for _one, failed in made), strict=True):
        (told, first), (other, second) = found
        _told, expected = train_on_data_that_fail(ends, is_pipeline, index=1)
        ipu.config.reset_ipu_configuration()
        models.assert_trees_close(first, expected)
        models.assert_trees_close(second, expected)
        kinds = [kind for kind, _text in (*told, *other)]
        assert kinds == (["OutOfRangeError"] * 2 if ends else ["ProcessError", "ArithmeticError"])
        assert told[0][1].startswith("In process 1, which reads the micro-batches: ")


@pytest.mark.thorough
def test_replicas_in_two_processes(tmp_path):
    """Where data failed in one process, the others went on with the step, and waited for ever."""
    start_and_check(tmp_path, 2, ["replicas"], [(False, True), (True, False)])


@pytest.mark.thorough
def test_shards_and_replicas_in_processes(tmp_path):
    start_and_check(tmp_path, 2, ["replicas of shards", "shards", "one device"])
