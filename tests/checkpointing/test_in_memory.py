"""In-memory checkpoints: what is written, which are found, and sessions and estimators that go on."""

import contextlib
import dataclasses
import errno
import gc
import itertools
import json
import logging
import os
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing import collective_calls, in_memory
from ipu_pipeline.checkpointing.in_memory import InMemorySeries, parts_of
from ipu_pipeline.checkpointing.states import Counts, FeedPosition, State
from ipu_pipeline.processes import launcher
from ipu_pipeline.processes.launcher import (
    MEMORY_EVERY_VARIABLE,
    MEMORY_VARIABLE,
    RESTART_VARIABLE,
    JobHistory,
)
from ipu_pipeline.queues.feeder import Position
from ipu_pipeline.tf1.estimator.summaries import FILE
from tests.support import joined
from tests.support.estimating import assert_same_variables, input_fn, make_small
from tests.support.front import session_of
from tests.support.launched import KilledError, finish_writing
from tests.support.resumable import Batches, Inference, Training, assert_same


def make_snapshot(variables, count=3):
    return State(
        7,
        "threefry2x32",
        variables,
        {"p": {"mu": jnp.ones(2)}},
        counts={"p": Counts(count, count)},
        feeds=(FeedPosition(("p",), Position(4 * count)),),
        extra={"global_step": count},
    ).replace_arrays(parts_of)


def take(series, variables, count=3):
    """A run with a checkpoint before it."""
    series.wait()
    series.hear([series.tell()])
    series.take(lambda: make_snapshot(variables, count))
    series.wait()
    series.note_run(count)


@pytest.fixture
def again(directory, restart):
    """A series as in a process that was started again."""

    def make(name="a", number=1):
        restart(number)
        return InMemorySeries(directory, name)

    return make


def files_in(directory):
    """Those that are checkpoints, without the name of the training."""
    found = (entry.name.partition("-")[2] for entry in directory.iterdir())
    return sorted(name for name in found if name and not name.endswith(".done"))


def devices(number, shape=(-1, 1)):
    return Mesh(np.array(jax.devices("cpu")[:number]).reshape(shape), ("replica", "model"))


def test_every_array_comes_back_to_the_last_bit(directory, again):
    mesh = devices(4, (2, 2))

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    large = np.arange(48, dtype=np.float32).reshape(8, 6)
    variables = {
        "of numpy": np.float32([1, np.nan, -0.0]),
        "scalar": jnp.float32(3),
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "eight bits": jnp.arange(5).astype(jnp.float8_e4m3fn),
        "empty": jnp.zeros((0, 3)),
        "flags": jnp.array([True, False]),
        "whole/on each": put(large),
        "over replicas": put(large, "replica"),
        "over a replica's devices": put(large, None, "model"),
        "over both": put(large, ("replica", "model")),
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6, impl="rbg"), (2, 3)),
    }
    take(InMemorySeries(directory, "a"), variables)
    series = again()
    found = series.find()
    assert series.runs == 0
    assert found.variables.keys() == variables.keys()
    for name, value in variables.items():
        back = found.variables[name]
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        if name.startswith("key"):
            assert jax.random.key_impl(back) == jax.random.key_impl(value)
            back, value = jax.random.key_data(back), jax.random.key_data(value)
        assert np.asarray(back).tobytes() == np.asarray(value).tobytes(), name
    assert found.variables["half"].dtype == ml_dtypes.bfloat16
    assert found.counts == {"p": Counts(3, 3)}
    np.testing.assert_array_equal(found.optimizers["p"]["mu"], [1, 1])
    assert found.feeds == (FeedPosition(("p",), Position(12)),)
    assert (found.seed, found.extra) == (7, {"global_step": 3})


def test_each_part_is_written_once(directory):
    """If 4 devices have the whole array, it is written once; if it is shared out, each part is."""
    large = np.zeros((256, 256), np.float32)
    for spec in (PartitionSpec(), PartitionSpec("replica"), PartitionSpec(("replica", "model"))):
        array = jax.device_put(large, NamedSharding(devices(4, (2, 2)), spec))
        (parts,) = parts_of([array])
        assert sum(part.nbytes for part in parts.parts) == large.nbytes, spec


def test_the_two_newest_are_kept_and_the_rest_is_written_over(directory, again):
    series = InMemorySeries(directory, "a")
    for count in range(5):
        take(series, {"x": np.full(3, count, np.float32)}, count)
        assert len(files_in(directory)) <= 2
    assert files_in(directory) == ["3-0-0of1", "4-0-0of1"]
    series = again()
    np.testing.assert_array_equal(series.find().variables["x"], [4, 4, 4])
    assert series.runs == 4
    take(series, {"x": np.zeros(0, np.float32)})  # shorter than what was there
    # What was found stays until the next is complete.
    assert files_in(directory) == ["4-0-0of1", "5-1-0of1"]
    assert again(number=2).find().variables["x"].shape == (0,)


def test_what_is_not_complete_is_not_found(directory, again):
    series = InMemorySeries(directory, "a")
    assert series.find() is None
    take(series, {"x": np.float32([1])})
    take(series, {"x": np.float32([2])})
    (newest,) = directory.glob("*-1-0-0of1")
    newest.rename(directory / newest.name.replace("0of1", "0of2"))  # the other process's part is missing
    found = again()
    np.testing.assert_array_equal(found.find().variables["x"], [1])
    assert found.runs == 0
    # Parts of one start and of the next one are not put together.
    (old,) = directory.glob("*-0of2")
    other = directory / old.name.replace("-1-0-0of2", "-1-1-1of2")
    other.write_bytes(old.read_bytes())
    assert again(number=2).find().variables["x"] == [1]
    assert again("b").find() is None


def test_parts_that_are_missing_are_an_error(directory, again):
    array = jax.device_put(np.arange(8.0), NamedSharding(devices(2, (2, 1)), PartitionSpec("replica")))
    leaf = parts_of([array])[0]
    half = dataclasses.replace(leaf, begins=leaf.begins[:1], parts=leaf.parts[:1])
    none = dataclasses.replace(leaf, begins=(), parts=())
    for parts, message in ((half, "lacks a part of variables/x"), (none, "lacks variables/x")):
        series = again(number=0)
        series.take(lambda parts=parts: State(7, "threefry2x32", {"x": parts}))
        series.wait()
        with pytest.raises(ValueError, match=message):
            again().find()
        series.drop()


def test_a_job_and_a_second_training_begin_without_what_is_there(directory, again):
    take(again(number=0), {"x": np.float32([1])})
    assert again(number=0).find() is None  # another job's
    assert files_in(directory) == []
    take(again(number=0), {"x": np.float32([1])})
    first = again()
    assert first.find() is not None
    take(first, {"x": np.float32([2])})
    second = InMemorySeries(directory, "a")  # in the same program, after an error that it has caught
    assert second.find() is None
    take(second, {"x": np.float32([3])})
    assert files_in(directory) == ["2-1-0of1"]  # no number comes twice
    third = again(number=2)
    assert third.find().variables["x"] == [3]
    third.leave()
    assert InMemorySeries(directory, "a").find().variables["x"] == [3]


def test_one_that_was_being_written_is_not_found(directory, monkeypatch, again):
    series = InMemorySeries(directory, "a")
    take(series, {"x": np.float32([1])})
    series.hear([series.tell()])

    def fail(self, stream):
        stream.write(b"ipu")
        raise KeyboardInterrupt  # here for SIGKILL: nothing is cleared away

    for _kill in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(in_memory._Content, "write", fail)
            with pytest.raises(KeyboardInterrupt):
                series._write(in_memory._Key(7, 1), make_snapshot({"x": np.float32([2])}))
        series = again()
        assert series.find().variables["x"] == [1]
    take(series, {"x": np.float32([3])})
    assert again().find().variables["x"] == [3]


def test_where_memory_is_full_training_goes_on_with_a_warning(directory, monkeypatch, caplog, again):
    series = InMemorySeries(directory, "a")
    take(series, {"x": np.float32([1])})

    def fail(self, stream):
        stream.write(b"ipu")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(in_memory._Content, "write", fail)
    with caplog.at_level(logging.WARNING):
        take(series, {"x": np.float32([2])})
        take(series, {"x": np.float32([3])})
    (record,) = caplog.records
    assert "No space left" in record.getMessage()
    assert "--memory-dir" in record.getMessage()
    assert files_in(directory) == ["0-0-0of1"]  # what was half written is not left
    assert again().find().variables["x"] == [1]


def test_if_one_process_cannot_write_all_stop_and_what_all_have_stays(directory):
    series = InMemorySeries(directory, "a")
    for count in range(3):
        take(series, {"x": np.float32([count])}, count)
    series.hear([series.tell(), ""])
    for _count in range(3):
        series.take(lambda: pytest.fail("nothing is to be taken"))
        series.wait()
        assert series.tell() == ""
    assert files_in(directory) == ["1-0-0of1", "2-0-0of1"]


def test_ctrl_c_while_a_checkpoint_is_taken_ends_the_run_after_it(directory):
    """All processes have then taken the same number."""
    series = InMemorySeries(directory, "a")

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return make_snapshot({"x": np.float32([1])})

    with pytest.raises(KeyboardInterrupt):
        series.take(interrupted)
    series.wait()
    assert files_in(directory) == ["0-0-0of1"]
    take(series, {"x": np.float32([2])})
    assert files_in(directory) == ["0-0-0of1", "1-0-0of1"]


def test_what_counts_of_a_jobs_time_is_each_run_once(directory, monkeypatch, again):
    """The first run of a program, which compiles, counts as long as the second one, if that is less."""
    now, told = [0.0], []
    monkeypatch.setattr(in_memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(launcher, "_useful", 0.0)
    monkeypatch.setattr(launcher, "_tell", told.append)

    def run(series, seconds, program=0):
        series.hear([series.tell()])
        series.take(lambda: make_snapshot({"x": np.float32([1])}))
        series.wait()
        now[0] += seconds
        series.note_run(7, program)
        return launcher.useful_seconds()

    series = InMemorySeries(directory, "a")
    assert [run(series, seconds) for seconds in (9.0, 1.0, 2.0)] == [0, 2, 4]
    assert [run(series, seconds, program=1) for seconds in (8.0, 0.5)] == [4, 5]
    assert run(series, 2.5) == 7.5
    launcher._useful = 0.0  # of another process
    del told[:]
    series = again()
    series.find()  # what is known is of before the last run, which is done again
    series.tell_resumed()
    assert (series.runs, launcher.useful_seconds()) == (5, 5.0)
    assert told == ["resumed 1"]
    assert [run(series, seconds) for seconds in (5.0, 2.0)] == [5.0, 9.0]
    series.drop()
    # A second training of the process is counted beside the first.
    series = InMemorySeries(directory, "a")
    assert series.find() is None
    assert [run(series, seconds) for seconds in (3.0, 3.0)] == [9.0, 15.0]


def test_every_so_many_runs(directory, monkeypatch, again):
    monkeypatch.setenv(MEMORY_EVERY_VARIABLE, "3")
    series = InMemorySeries(directory, "a")
    for count in range(8):
        take(series, {"x": np.float32([count])}, count)
    assert len(files_in(directory)) == 2
    found = again()
    assert found.find().variables["x"] == [6]
    assert found.runs == 6


def test_a_directory_that_is_gone_is_made_again_and_one_of_others_is_refused(directory):
    directory.rmdir()
    take(InMemorySeries(directory, "a"), {"x": np.float32([1])})
    assert files_in(directory) == ["0-0-0of1"]
    directory.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        InMemorySeries(directory, "a")


@pytest.mark.parametrize(
    ("variable", "value", "least"), [(RESTART_VARIABLE, "two", 0), (MEMORY_EVERY_VARIABLE, "0", 1)]
)
def test_a_number_of_the_launcher_that_is_none(variable, value, least, directory, monkeypatch):
    monkeypatch.setenv(variable, value)
    message = f"{variable} must be a whole number from {least}; it is '{value}'"
    with pytest.raises(ValueError, match=message):
        InMemorySeries(directory, "a")


def test_a_link_that_was_planted_is_not_followed(directory, tmp_path, caplog):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    series = InMemorySeries(directory, "a")
    series._started(0).symlink_to(victim)
    take(series, {"x": np.float32([1])})
    assert victim.read_text() == "precious"
    assert "No more checkpoints" in caplog.text


def test_the_buddy_is_on_another_machine():
    find = in_memory._find_buddies
    assert find(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert find(["a", "b", "c"]) == [1, 2, 0]
    assert find(["a", "b", "a"]) == [1, 0, 1]
    assert find(["a", "a"]) == [None, None]


def lose_a_memory(directories):
    """What each of two processes finds after a restart without what was in the second one's memory."""
    ipu.set_num_devices(2)  # of both processes, which it joins
    index = jax.process_index()
    os.environ[MEMORY_VARIABLE], os.environ[RESTART_VARIABLE] = directories[index], "0"
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1), ("replica", "model"))
    spread = NamedSharding(mesh, PartitionSpec("replica"))
    series = InMemorySeries.of_environment("a")
    for count in range(2):
        array = jax.make_array_from_process_local_data(spread, np.float32([count, index]), (4,))
        state = State(7, "threefry2x32", {"x": parts_of([array])[0]})
        series.meet()
        series.take(lambda state=state: state)
        series.wait()
        series.note_run(count)
    collective_calls.do_each(lambda: None)  # both have written
    if index == 1:
        shutil.rmtree(directories[1])
    in_memory._begun.clear()
    os.environ[RESTART_VARIABLE] = "1"
    again = InMemorySeries.of_environment("a")
    found = again.find()
    return again.runs, np.asarray(found.variables["x"]).tolist()


def test_what_a_lost_memory_had_is_in_the_buddys(tmp_path):
    directories = [str(tmp_path / f"memory{index}") for index in range(2)]
    (tmp_path / "run").mkdir()
    started = joined.start(
        lose_a_memory, 2, None, directories, directory=tmp_path / "run", joins_itself=True
    )
    found = joined.finish(started, tmp_path / "run", timeout=400)
    assert found == [(1, [1, 0, 1, 1])] * 2


# Sessions.


@pytest.fixture(scope="module")
def training():
    """A program that several tests use; each session has its own variables."""
    return Training()


@pytest.fixture
def sessions(restart):
    """Makes sessions as in a program that is started anew."""
    gc.collect()  # programs of other tests, whose variables would be saved, too

    def start(number):
        restart(number)
        return ipu.Session(seed=3)

    return start


def test_a_session_goes_on_with_the_run_in_which_its_process_ended(training, sessions):
    with session_of(training, seed=3) as reference:
        expected = [training.run(reference, 1) for _run in range(6)]
        losses = []
        for restart, wanted in enumerate((0, 2, 3)):
            # The last run of each start counts as the one in which it died.
            with sessions(restart) as session:
                training.start(session)
                first = session.resume()
                assert first == wanted
                for _run in range((3, 2, 3)[restart]):
                    losses.append((first, training.run(session, 1)))
                    first += 1
        assert [number for number, _loss in losses] == [0, 1, 2, 2, 3, 3, 4, 5]
        for number, loss in losses:
            np.testing.assert_array_equal(loss, expected[number])
        assert_same(session, reference)


def test_a_summary_has_the_bytes_of_checkpoints(training, sessions, directory, monkeypatch):
    program = training.program
    with sessions(0) as session:
        training.start(session)
        session.resume()
        training.run(session, 3)
    finish_writing()
    sizes = [path.stat().st_size for path in directory.glob("*of1")]
    assert len(sizes) == 2
    summary = program.summary()
    # A file also has a header, and arrays begin at multiples of 64 bytes.
    assert 0.9 * max(sizes) - 2**14 < summary.num_checkpoint_bytes < max(sizes)
    assert str(summary).splitlines()[-1].startswith("in-memory checkpoints: ")
    monkeypatch.delenv(MEMORY_VARIABLE)
    assert program.summary().num_checkpoint_bytes is None
    assert "in-memory" not in str(program.summary())


def test_a_session_that_is_not_launched_keeps_nothing(training, monkeypatch):
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    monkeypatch.setattr(InMemorySeries, "__init__", lambda *_given: pytest.fail("there is no directory"))
    with ipu.Session() as session:
        assert session.resume() == 0
        training.start(session)
        training.run(session, 1)


def test_resume_is_called_once_before_the_first_run_of_an_open_session(sessions):
    with sessions(0) as session:
        session.resume()
        with pytest.raises(RuntimeError, match="has called it before"):
            session.resume()
    with pytest.raises(RuntimeError, match="closed"):
        session.resume()


def test_what_would_replace_a_resumed_state_comes_before(training, sessions, tmp_path):
    with sessions(0) as session:
        session.resume()
        session.run(ipu.global_variables_initializer())  # at the first start, nothing is replaced
        training.start(session)
        training.run(session, 2)
        session.save(tmp_path / "saved")
    for replace in (
        lambda: session.run(ipu.global_variables_initializer()),
        lambda: session.restore(tmp_path / "saved"),
        lambda: session.load({"last/dense/bias": np.zeros(3)}),
    ):
        with sessions(1) as session:
            session.run(ipu.global_variables_initializer())
            assert session.resume() == 1
            with pytest.raises(RuntimeError, match="Do it before Session.resume"):
                replace()
            training.start(session)
            training.run(session, 1)
            replace()


def test_a_program_that_had_not_run_yet_begins_as_it_would_have(training, sessions):
    """The state of the first one has none of the second one's variables."""
    expected = []
    with ipu.Session(seed=3) as session:
        second = Training(1, name="second", scope="second")
        for each in (training, second):
            each.start(session)
            expected.append(each.run(session, 2))
    for restart in range(2):
        with sessions(restart) as session:
            done = session.resume()
            assert done == restart
            training.start(session)
            second.start(session)
            training.run(session, 2 - done)
            if restart:
                np.testing.assert_array_equal(second.run(session, 2), expected[1])


def test_a_run_that_fails_is_not_counted(sessions):
    """The data end in it; it is done again after the infeed's initializer."""
    data = list(itertools.islice(Batches(), 6))  # a run takes 4
    training = Training(1, dataset=data)
    with sessions(0) as session:
        training.start(session)
        session.resume()
        done = 0
        while done < 3:
            try:
                session.run(training.program)
                done += 1
            except ipu.errors.OutOfRangeError:
                session.run(training.initializer)
    with sessions(1) as session:
        assert session.resume() == 2


def test_an_initializer_in_the_same_call_goes_on_too(training, sessions):
    with ipu.Session(seed=3) as session:
        expected = []
        for _run in range(3):
            session.run([training.initializer, training.program])
            expected.append(session.run(training.outfeed.dequeue()))
    for restart in range(2):
        with sessions(restart) as session:
            done = session.resume()
            for number in range(done, 3 if restart else 2):
                session.run([training.initializer, training.program])
                found = session.run(training.outfeed.dequeue())
                np.testing.assert_array_equal(found, expected[number])
            assert done == restart


def test_runs_that_do_not_train_are_not_counted(training, sessions):
    inference = Inference(2)
    with sessions(0) as session:
        training.start(session)
        session.resume()
        for _run in range(2):
            training.run(session, 1)
            inference.run(session)
    with sessions(1) as session:
        assert session.resume() == 1


def test_none_is_taken_between_the_runs_of_one_update_of_a_table_in_host_memory(sessions):
    """Checkpoints lack the gradients of its rows; the second run is within an update."""
    from tests.tf1.ops.test_host_embedding import Looped

    training = Looped(3, every=2)
    for restart, wanted in enumerate((0, 0, 2)):
        with sessions(restart) as session:
            done = session.resume()
            assert done == wanted
            for _run in range((2, 3, 1)[restart]):
                training.run(session)


# Estimators.


@contextlib.contextmanager
def killed_at_the_end():
    """Nothing is saved on disk, and what is in memory stays there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ipu_pipeline.checkpointing.checkpoint_directories.CheckpointSeries.save", lambda *_given: None
        )
        patch.setattr(InMemorySeries, "drop", lambda _series: None)
        yield


def test_a_call_that_has_nothing_to_do_leaves_the_memory_to_a_later_one(directory, tmp_path, again):
    """As when a program trains, evaluates and trains on, and is killed in the second training."""
    make_small(tmp_path / "model").train(input_fn, max_steps=16)
    again(number=0)
    with killed_at_the_end():
        make_small(tmp_path / "model").train(input_fn, max_steps=48)
    again()
    estimator = make_small(tmp_path / "model")
    estimator.train(input_fn, max_steps=16)
    seen = []

    class Look(ipu.ipu_session_run_hooks.SessionRunHook):
        def before_run(self, run_context):
            seen.append(run_context.global_step)

    estimator.train(input_fn, max_steps=48, hooks=[Look()])
    assert seen[0] == 40


def test_an_estimator_goes_on_from_memory_if_that_is_newer_than_disk(directory, tmp_path, monkeypatch):
    class Stop(ipu.ipu_session_run_hooks.SessionRunHook):
        def after_run(self, run_context, _run_values):
            if run_context.global_step >= 32:
                raise KilledError

    reference = make_small(tmp_path / "reference")
    monkeypatch.delenv(MEMORY_VARIABLE)
    reference.train(input_fn, max_steps=48)
    monkeypatch.setenv(MEMORY_VARIABLE, str(directory))
    JobHistory(time.time()).write(directory)
    monkeypatch.setattr(launcher, "_useful", 0.0)
    estimator = make_small(tmp_path / "model", save_checkpoints_steps=1000)
    with monkeypatch.context() as patch, pytest.raises(KilledError):  # it drops nothing by itself
        patch.setattr(
            "ipu_pipeline.checkpointing.checkpoint_directories.CheckpointSeries.save", lambda *_given: None
        )
        estimator.train(input_fn, hooks=[Stop()], max_steps=48)
    assert estimator.latest_checkpoint() is None
    assert files_in(directory)
    estimator = make_small(tmp_path / "model", save_checkpoints_steps=1000)
    with monkeypatch.context() as patch:
        patch.setenv(RESTART_VARIABLE, "1")
        patch.setattr(in_memory, "_begun", {})
        estimator.train(input_fn, max_steps=48)
    assert_same_variables(estimator, reference)
    assert not files_in(directory)  # the end is on disk
    written = [json.loads(line) for line in (tmp_path / "model" / FILE).read_text().splitlines()]
    goodputs = [line["value"] for line in written if line["name"] == "goodput"]
    assert goodputs
    assert all(0 < value < 1 for value in goodputs)


@pytest.mark.parametrize("step", [8, 16])
def test_an_estimator_goes_on_from_disk_if_memory_is_not_newer(step, directory, tmp_path, caplog, again):
    estimator = make_small(tmp_path / "model")
    estimator.train(input_fn, max_steps=16)
    take(again(f"estimator {tmp_path / 'model'}", number=0), {"x": np.float32([1])}, step)
    again()
    with caplog.at_level(logging.INFO):
        make_small(tmp_path / "model").train(input_fn, max_steps=24)
    assert "from step 16, restored from" in caplog.text


def test_a_checkpoint_that_was_due_when_a_process_died_is_saved_then(directory, tmp_path, again):
    """The state in memory is of the same step."""
    with killed_at_the_end():
        make_small(tmp_path / "model", save_checkpoints_steps=16).train(input_fn, max_steps=24)
    again()
    estimator = make_small(tmp_path / "model", save_checkpoints_steps=16, keep_checkpoint_max=9)
    estimator.train(input_fn, max_steps=40)
    steps = sorted(int(path.name) for path in (tmp_path / "model" / "checkpoints").iterdir())
    assert steps == [16, 32, 40]
