"""Sessions in several processes: what they train, read, save and restore is what one process does."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing.checkpoint_directories import DOCUMENT
from tests.support import front, joined, models

COUNT, MANY, SIZE = 4, 20, 4


def elements():
    """A data set with an order of its own."""
    rng = np.random.default_rng(5)
    while True:
        yield rng.normal(size=(SIZE, 12)).astype("float32"), rng.integers(0, 10, SIZE).astype("int32")


def train(schedule, num_replicas, directory, restore, num_runs, count=COUNT, **options):
    """Trains a model of four stages as an unchanged program would.

    It goes on from a checkpoint, if one is given. After each run, of two weight updates, it saves. Returns
    the losses that were dequeued, the variables and the optimizer's state.
    """
    front.ipu_config(4 * num_replicas).configure_ipu_system()
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def optimizer_function(loss):
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
        if num_replicas > 1:
            optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    compiled = front.compile_pipeline(
        models.mlp_stages(4),
        count,
        repeat_count=2,
        infeed_queue=infeed,
        outfeed_queue=outfeed,
        optimizer_function=optimizer_function,
        pipeline_schedule=ipu.pipelining_ops.PipelineSchedule[schedule],
        reduction_method="mean",
        **options,
    )
    losses = []
    with front.session_of(infeed, seed=3) as session:
        if restore:
            session.restore(restore)
        for run in range(num_runs):
            session.run(compiled)
            losses.append(session.run(outfeed.dequeue()))
            session.save(f"{directory}/{run}")
        return losses, session.variables, session.optimizer_state()


def train_all(directory, cases):
    """What `train` returns in each case, by name; each saves in a directory of this name."""
    found = {}
    for name, given in cases.items():
        print(name, flush=True)  # for whoever reads why this failed
        found[name] = train(directory=f"{directory}/{name}", **given)
        ipu.config.reset_ipu_configuration()
    return found


def case(schedule="Grouped", num_replicas=1, restore=None, num_runs=1, **options):
    given = {"schedule": schedule, "num_replicas": num_replicas, "restore": restore and str(restore)}
    return {**given, "num_runs": num_runs, **options}


def run(num_processes, directory, cases, function=train_all):
    """What each process returns. That with most devices is the first, as the processes take so many."""
    directory.mkdir()
    options = {"directory": directory, "joins_itself": True}
    started = joined.start(function, num_processes, None, str(directory), cases, **options)
    return joined.finish(started, directory, timeout=400)


def check_equal(made, name, expected):
    """Compares what processes returned in a case with what one did."""
    made, (wanted_losses, wanted_variables, wanted_state) = [one[name] for one in made], expected
    has_losses = [all(map(len, one[0])) for one in made]
    assert has_losses.count(True) == 1
    for (losses, variables, state), is_here in zip(made, has_losses, strict=True):
        models.assert_trees_close(variables, wanted_variables)
        models.assert_trees_close(state, wanted_state)
        if is_here:
            models.assert_trees_close(losses, wanted_losses)
        else:
            assert [one.shape for one in losses] == [(0, *wanted.shape[1:]) for wanted in wanted_losses]


def differ(directory):
    """What processes that feed, load, initialize, save and restore differently are told, and then train."""
    index = jax.process_index()
    front.ipu_config(4).configure_ipu_system()
    count, rate = ipu.placeholder(np.int32, name="count"), ipu.placeholder(np.float32, name="rate")
    fed, told = {count: 4, rate: 0.5}, {}
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements)
    seeds = np.random.default_rng(index)  # as an initializer of somebody's who forgot the seed

    def own(_key, shape, dtype):
        return seeds.normal(size=shape).astype(dtype)

    def failing(key, shape, dtype):
        if index:
            raise ValueError("There are none today.")
        return jnp.zeros(shape, dtype)

    def optimizer_function(loss):
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(rate))
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    def compile_model(initializer):
        def stage(x, _labels):
            return jnp.mean(x * ipu.get_variable("w", (12,), initializer=initializer))

        return front.compile_pipeline(
            [stage],
            count,
            infeed_queue=infeed,
            outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
            optimizer_function=optimizer_function,
        )

    programs = [compile_model(initializer) for initializer in (None, own, failing)]

    def tell(name, function):
        try:
            function()
            told[name] = None
        except (ValueError, ipu.errors.CheckpointError) as error:
            told[name] = str(error)

    with front.session_of(infeed, seed=3) as session:
        run = functools.partial(session.run, programs[0], fed)
        tell("count", lambda: session.run(programs[0], fed | {count: 4 + index}))
        tell("rate", lambda: session.run(programs[0], fed | {rate: 0.5 + index}))
        unknown = {ipu.placeholder(np.float32, [], name="unknown"): 1.0}
        tell("unknown", lambda: session.run(programs[0], fed | (unknown if index else {})))
        tell("wrong", lambda: session.run(programs[0], fed | unknown))
        tell("first", run)
        session.save(f"{directory}/one")
        run()
        session.save(f"{directory}/two")
        tell("save", lambda: session.save(f"{directory}/own{index}"))
        tell("restore", lambda: session.restore(f"{directory}/{['one', 'two'][index]}"))
        session.load({"w": np.full(12, index, np.float32)})
        tell("load", run)
        halves = {"w": np.full(12, 0.5, np.float32)}
        for _load in range(1 + index):
            session.load(halves)
        tell("loads", run)
        if not index:
            session.load(halves)
        tell("last", run)
        found = session.variables["w"]
    with ipu.Session(seed=3) as session:
        tell("initializer", lambda: session.run(programs[1], fed))
    with ipu.Session(seed=3) as session:
        tell("failing", lambda: session.run(programs[2], fed))
    return told, found


def train_all_and_differ(directory, cases):
    return train_all(directory, cases), differ(directory)


@pytest.mark.thorough
def test_two_processes_save_and_restore_and_are_told_where_they_differ(tmp_path):
    """A checkpoint of several processes is restored by one, and the other way round.

    Processes that differed trained on in silence, with the values of one or with replicas apart.
    """
    alone = train_all(tmp_path, {"alone": case(num_runs=2)})["alone"]
    cases = {"own": case(num_runs=2), "restored": case(restore=tmp_path / "alone" / "0")}
    # More micro-batches than a process alone fetches ahead: a step, which begins with all, never began.
    many = {"many": case(count=MANY)}
    returned = run(2, tmp_path / "two", cases | many, function=train_all_and_differ)
    made = [trained for trained, _differing in returned]
    check_equal(made, "own", alone)
    check_equal(made, "many", train_all(tmp_path, many)["many"])
    assert (tmp_path / "two" / "own" / "1" / DOCUMENT).exists()
    second = (alone[0][1:], *alone[1:])
    check_equal(made, "restored", second)
    again = train_all(tmp_path, {"again": case(restore=tmp_path / "two" / "own" / "0")})["again"]
    models.assert_trees_close(again, second)
    (told, first), (other, second) = (differing for _trained, differing in returned)
    assert told == other
    assert told["first"] is told["last"] is None
    np.testing.assert_array_equal(first, second)
    patterns = {
        "count": "value fed to placeholder 'count'.*4.*5",
        "rate": "value fed to placeholder 'rate'.*0.5.*1.5",
        "unknown": "keeps it from running: 'nothing' in process 0, .*'unknown'.* is not an input",
        "wrong": "^feed_dict: .*'unknown'.* is not an input",
        "failing": "keeps it from running: 'nothing' in process 0, .*There are none today",
        "save": "must name the same path; process 0: .*own0; process 1: .*own1",
        "restore": "different checkpoints.*one .*'Pipeline': 1.*two .*'Pipeline': 2",
        "load": "variable w: .*beginning with 0.0.*beginning with 1.0",
        "loads": "calls of Session.load: ",
        "initializer": "variable w: .*beginning with",
    }
    for name, pattern in patterns.items():
        assert told[name] is not None, name
        assert re.search(pattern, told[name], re.DOTALL), (name, told[name])


@pytest.mark.thorough
def test_replicas_in_processes(tmp_path):
    """And what replicas share out is restored by one process."""
    replicated = {"num_replicas": 2}
    shared = {"replicated_optimizer_state_sharding": True, "replicated_weight_sharding": True}
    cases = {
        "halves": case("ZeroBubble", **replicated),
        "many": case("Sequential", count=MANY, **replicated),
    }
    alone = train_all(tmp_path / "alone", {**cases, "parts": case(num_runs=2, **replicated)})
    second = (alone["parts"][0][1:], *alone["parts"][1:])
    made = run(2, tmp_path / "two", {"parts": case(num_runs=2, **replicated, **shared), **cases})
    for name in alone:
        check_equal(made, name, alone[name])
    restored = case("Interleaved", restore=tmp_path / "two" / "parts" / "0", **replicated)
    again = train_all(tmp_path / "again", {"parts": restored})["parts"]
    models.assert_trees_close(again, second)


def run_unevenly():
    """Trains a replica in each of two processes; the first begins a run that the second never does."""
    ipu.distributed.initialize(stall_timeout=5, death_timeout=5)
    front.ipu_config(4).configure_ipu_system()

    def optimizer_function(rate, loss):
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(rate))
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    model = front.Model(gradient_accumulation_count=4, optimizer_function=optimizer_function)
    with front.session_of(model, seed=3) as session:
        for _run in range(2):
            session.run(model.program, {model.rate: 0.1})
        if jax.process_index() == 0:
            session.run(model.program, {model.rate: 0.1})
        time.sleep(1000)


@pytest.mark.soak
def test_replicas_whose_processes_run_unevenly(tmp_path):
    """One that waits in the all-reduce for a process that does something else was not told of, and hung."""
    processes = joined.start(run_unevenly, 2, None, directory=tmp_path, joins_itself=True)
    with pytest.raises(AssertionError, match="process 1 does not go on, and process 0 cannot"):
        joined.finish(processes, tmp_path, timeout=400)
