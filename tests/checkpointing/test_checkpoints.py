import dataclasses
import gc
import json
import os
import pathlib
import shutil
import threading
import warnings

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.checkpointing.checkpoint_directories import (
    CheckpointSeries,
    read_checkpoint,
    read_document,
)
from ipu_pipeline.errors import CheckpointError
from ipu_pipeline.optimizers import GradientAccumulationOptimizerV2, LossScalingOptimizer
from ipu_pipeline.pipelining_ops import PipelineSchedule
from tests.checkpointing.written_before.write import as_numbers
from tests.support.front import compile_pipeline, compile_program, minimizing, session_of
from tests.support.resumable import Batches, Inference, Training, assert_same, loss_of, make_stages


@pytest.fixture(scope="module")
def known():
    """Programs that several tests use, by their number of stages; each session has its own variables."""
    return {}


@pytest.fixture
def training_of(known):
    """Makes a program of so many stages, or finds it."""

    def find(num_stages):
        if num_stages not in known:
            known[num_stages] = Training(num_stages)
        return known[num_stages]

    return find


@pytest.fixture
def training(training_of):
    return training_of(2)


@pytest.fixture
def alone(known):
    """No program of another test is there, which a checkpoint might fit."""
    known.clear()
    gc.collect()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of two stages after three updates, and the session after three more."""
    path = tmp_path_factory.mktemp("trained") / "checkpoint"
    training = Training(2)
    with session_of(training, seed=7) as session:
        training.run(session, 3)
        session.save(path)
        losses = training.run(session, 3)
    return path, session, losses


@pytest.fixture
def path(trained):
    return trained[0]


@pytest.fixture
def expected(trained):
    return trained[1]


@pytest.fixture
def snapshot(path):
    return read_checkpoint(path)


def go_on(path, training, updates=3, **options):
    """A session that goes on from a checkpoint, and its losses."""
    with ipu.Session(seed=99) as session:
        session.restore(path, **options)
        training.start(session)
        return session, training.run(session, updates)


def assert_close(one, other):
    """The programs of other splits are compiled otherwise, which may change last bits."""
    mine, theirs = one.variables, other.variables
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert np.linalg.norm(value - theirs[name]) <= 1e-5 * np.linalg.norm(theirs[name]), name


@pytest.mark.parametrize("num_stages", [1, 2])
def test_training_goes_on_exactly_in_any_split(trained, num_stages, training_of):
    path, expected, losses = trained
    session, found = go_on(path, training_of(num_stages))
    assert session.seed == 7
    assert session.update_count() == expected.update_count() == 6
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    if num_stages == 2:
        assert_same(session, expected)
    assert_close(session, expected)


def test_a_data_set_of_grain_goes_on_by_its_own_state(tmp_path):
    data = Batches()

    dataset = grain.MapDataset.range(40).shuffle(seed=3).repeat().map(lambda n: (data.x[n], data.y[n]))
    training = Training(1, dataset=dataset.to_iter_dataset())
    with session_of(training) as session:
        training.run(session, 13)
        session.save(tmp_path / "checkpoint")
        training.run(session, 3)
    assert_same(session, go_on(tmp_path / "checkpoint", training)[0])
    (feed,) = read_document(tmp_path / "checkpoint")["feeds"]
    assert (feed["count"], feed["state_count"]) == (52, 48)


def test_the_infeed_may_be_initialized_before(path, expected, training):
    with session_of(training) as session:
        training.run(session, 1)  # from here nothing is left
        session.restore(path)
        training.run(session, 3)
    assert_same(session, expected)


def test_the_data_set_can_begin_anew(trained, training):
    path, _expected, losses = trained
    _session, found = go_on(path, training, infeeds=False)
    assert not np.array_equal(found, losses)


def test_a_checkpoint_of_a_restored_session_is_the_same(path, expected, training, tmp_path):
    with ipu.Session() as session:
        session.restore(path)
        session.save(tmp_path / "again")
    first, second = read_document(path), read_document(tmp_path / "again")
    assert {**first, "files": None} == {**second, "files": None}
    assert_same(go_on(tmp_path / "again", training)[0], expected)


def test_the_session_goes_on_after_it_was_saved_and_closed(expected, training, tmp_path):
    path = tmp_path / "same path"
    with session_of(training, seed=7) as session:
        for number in range(6):
            training.run(session, 1)
            session.save(path)
            assert read_document(path)["pipelines"]["Pipeline"]["update_count"] == number + 1
    with session_of(training, seed=7) as unsaved:
        training.run(unsaved, 6)
    assert_same(session, unsaved)
    assert_same(session, expected)
    assert os.listdir(tmp_path) == ["same path"]
    session.save(path)
    assert [feed["count"] for feed in read_document(path)["feeds"]] == [24]


def test_training_as_inference_and_back(path, training_of, tmp_path):
    inference, one_stage, training = Inference(2), Inference(1), training_of(1)
    with ipu.Session() as session, ipu.Session() as other:
        session.restore(path)
        training.start(other)
        other.restore(path)
        predictions = inference.run(session)
        np.testing.assert_allclose(one_stage.run(other), predictions, rtol=1e-5, atol=1e-6)
        session.save(tmp_path / "inference")
        other.restore(tmp_path / "inference")
        training.run(other, 1)
        assert other.update_count() == 4
    with ipu.Session(seed=1) as session:
        one_stage.run(session)
        session.save(tmp_path / "untrained")
    assert go_on(tmp_path / "untrained", training, 1)[0].update_count() == 1


OPTIMIZERS = {
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "several": lambda: LossScalingOptimizer(
        optax.chain(
            optax.add_noise(0.1, 0.5, 3),  # has random keys
            optax.MultiSteps(optax.adam(optax.linear_schedule(1e-2, 1e-3, 5)), 2).gradient_transformation(),
        ),
        initial_scale=2.0**4,
        growth_interval=2,
    ),
}


def clipped(name, num_stages=2, **options):
    return pytest.param("global norm", num_stages, options, id=name, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("optimizer", "num_stages", "options"),
    [
        ("several", 1, {}),
        # The order in which a stage adds gradients is that of the micro-batches, wherever it begins.
        clipped("halves", pipeline_schedule=PipelineSchedule["ZeroBubble"]),
        clipped("searched", pipeline_schedule=PipelineSchedule.searched()),
        clipped("looped", 4, pipeline_schedule=PipelineSchedule["Looped"], device_mapping=[0, 1, 0, 1]),
    ],
)
def test_resuming_is_exact(optimizer, num_stages, options, tmp_path):
    """Also with keys of another kind than that of the process which goes on."""
    training = Training(num_stages, optimizer=OPTIMIZERS[optimizer](), repeat_count=3, **options)
    with jax.default_prng_impl("rbg"), ipu.Session(seed=2) as session:
        training.start(session)
        training.run(session, 1)
        session.save(tmp_path / "checkpoint")
        snapshot = session.take_snapshot()
        training.run(session, 2)
        session.save(tmp_path / "one")
    other, _losses = go_on(tmp_path / "checkpoint", training, 2)
    assert_same(session, other)
    other.save(tmp_path / "other")
    one, two = read_checkpoint(tmp_path / "one"), read_checkpoint(tmp_path / "other")
    arrays = (jax.tree.map(as_numbers, each.arrays()) for each in (one, two))
    jax.tree.map(np.testing.assert_array_equal, *arrays)
    assert one.document() == two.document()
    CheckpointSeries(tmp_path / "series").save(1, snapshot)
    at_once, later = (read_document(tmp_path / name)["pipelines"] for name in ("checkpoint", "series/1"))
    assert at_once == later


def test_float64_and_low_precision_variables(tmp_path):
    def stage(x):
        total = jnp.sum(x)
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.bool_):
            value = np.array([1, 0, 1]).astype(dtype)
            weight = ipu.get_variable(f"w {np.dtype(dtype).name}", [3], dtype, initializer=value)
            total = total + jnp.sum(weight.astype(jnp.float32))
        empty = ipu.get_variable("empty.with/odd [name]", [0, 2], initializer=np.zeros([0, 2], "float32"))
        return total + jnp.sum(empty)

    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    program = compile_pipeline([stage], 1, inputs=[np.ones(2, "float32")], outfeed_queue=outfeed)
    with ipu.Session() as session, ipu.Session() as other:
        session.run(program)
        session.save(tmp_path / "checkpoint")
        other.restore(tmp_path / "checkpoint")
        other.run(program)
        assert_same(session, other)
        assert "empty.with/odd [name]" in other.variables
        np.testing.assert_array_equal(session.run(outfeed.dequeue()), [12, 12])


def loop_program(infeed, cut, count):
    """A loop that accumulates over four iterations, in two shards or one."""

    def body(x, y):
        with ipu.scopes.ipu_shard(0), ipu.variable_scope("shared"):
            x = ipu.layers.Dense(6, activation=jnp.tanh)(x)
        with ipu.scopes.ipu_shard(1 if cut else 0):
            with ipu.variable_scope("shared", reuse=True):
                x = ipu.layers.Dense(6)(x)
            loss = jnp.mean(x**2) + jnp.mean(y)
            return GradientAccumulationOptimizerV2(optax.adam(1e-2), 4).minimize(loss)

    return compile_program(lambda: ipu.loops.repeat(count, body, [], infeed))


def test_a_loop_in_the_middle_of_accumulating(tmp_path):
    def start(session, cut):
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(Batches())
        program = loop_program(infeed, cut, 6)
        session.run(infeed.initializer)
        session.run(program)
        return program

    with ipu.Session(seed=3) as session:
        program = start(session, True)
        session.save(tmp_path / "checkpoint")
        session.run(program)
    assert read_document(tmp_path / "checkpoint")["pipelines"]
    for cut_after in (True, False):
        with ipu.Session() as other:
            other.restore(tmp_path / "checkpoint")
            start(other, cut_after)
        if cut_after:
            assert_same(session, other)
        assert_close(other, session)


# What does not fit.


def test_another_model_is_refused_with_what_differs(path, alone):
    training = Training(1, width=8)
    with session_of(training) as session:
        training.run(session, 1)
        before = session.variables
        with pytest.raises(CheckpointError) as raised:
            session.restore(path)
        jax.tree.map(np.testing.assert_array_equal, session.variables, before)
        training.run(session, 1)
    text = str(raised.value)
    assert f"The checkpoint {path} is not of this model." in text
    assert "of another shape or dtype: a/dense/bias is float32[16], not float32[8]" in text
    assert "missing" not in text
    assert "extra" not in text


def extended(names, is_alone=False):
    """The model with other variables as well, or these alone."""

    def stage(x, y):
        for name in names:
            x = x + ipu.get_variable(name, [6])
        return x, y

    stages = [stage] if is_alone else [stage, *make_stages(2)]
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    return compile_pipeline(stages, 1, inputs=next(iter(Batches())), outfeed_queue=outfeed)


def test_missing_and_extra_variables_are_listed(path, alone, tmp_path):
    more = extended(["new/one", "new/two"])
    with ipu.Session() as session:
        with pytest.raises(CheckpointError, match="missing in the checkpoint: new/one, new/two"):
            session.restore(path)
        assert session.variables == {}
        session.restore(path, allow_partial=True)
        session.run(more)
        assert {"new/one", "a/dense/kernel"} <= session.variables.keys()
        session.save(tmp_path / "more")
    del more
    training = Training(1)
    with pytest.raises(CheckpointError, match="extra in the checkpoint: new/one, new/two"):
        go_on(tmp_path / "more", training)
    go_on(tmp_path / "more", training, 1, allow_partial=True)


def test_a_program_that_is_compiled_later_is_checked_when_it_runs(path, alone):
    with ipu.Session() as session:
        session.restore(path)
        program = extended(["new/one"])
        with pytest.raises(CheckpointError, match="missing in the checkpoint: new/one"):
            session.run(program)
        wide = Training(2, width=8)
        wide.start(session)
        with pytest.raises(CheckpointError, match="of another shape or dtype"):
            wide.run(session, 1)
        momentum = Training(2, optimizer=optax.sgd(0.1, momentum=0.9))
        momentum.start(session)
        with pytest.raises(ValueError, match="optimizer state of another structure"):
            momentum.run(session, 1)


def test_programs_of_another_model_do_not_matter(path, alone):
    others = extended(["elsewhere"], is_alone=True), Inference(1, width=8)  # the second is outdated
    own = Inference(1)
    with ipu.Session() as session:
        session.restore(path)
    del others, own


def test_a_data_set_that_is_shorter_than_the_position(path):
    data = Batches()
    training = Training(2, dataset=[(data.x[0], data.y[0])] * 5)
    with pytest.raises(CheckpointError, match="ended after 5 elements. They were to go on after 12"):
        go_on(path, training, 1)


# What cannot be read or written.


def test_wrong_paths(tmp_path, path):
    session = ipu.Session()
    with pytest.raises(ipu.errors.NoCheckpointError, match="There is no checkpoint at"):
        session.restore(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not complete: it has no checkpoint.json"):
        session.restore(tmp_path / "empty")
    with pytest.raises(ValueError, match="There is nothing to save"):
        session.save(tmp_path / "new")
    session.restore(path)
    with pytest.raises(ValueError, match="exists and is no checkpoint"):
        session.save(tmp_path)
    session.save(tmp_path / "deep" / "er")
    session.close()
    with pytest.raises(RuntimeError, match="closed Session"):
        session.restore(path)
    assert sorted(os.listdir(tmp_path)) == ["deep", "empty"]


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_every_damaged_file_is_named(path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    read_checkpoint(copy)
    for file in files_of(copy):
        content = file.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]
        for damaged in (None, content[:middle], flipped):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as raised:
                read_checkpoint(copy)
            assert file.name in str(raised.value)
        file.write_bytes(content)
    read_checkpoint(copy)


def rewritten(path, **changes):
    """Changes a checkpoint's document, as another version of the library would have written it."""
    document = {**read_document(path), **changes}
    document["sha256"] = checkpoint_directories._digest_of(document)
    (path / checkpoint_directories.DOCUMENT).write_text(json.dumps(document))


def test_other_formats(path, tmp_path):
    shutil.copytree(path, tmp_path / "copy")
    rewritten(tmp_path / "copy", version=2)
    with pytest.raises(CheckpointError, match="has version 2 of the format; this library reads version 1"):
        read_checkpoint(tmp_path / "copy")
    rewritten(tmp_path / "copy", format="another")
    with pytest.raises(CheckpointError, match="no checkpoint of this library"):
        read_checkpoint(tmp_path / "copy")


def test_what_was_there_stays_when_a_save_fails(path, tmp_path, monkeypatch):
    shutil.copytree(path, tmp_path / "checkpoint")

    def fail(*_arguments):
        raise OSError("No space left on device")

    with ipu.Session() as session:
        session.restore(path)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_directories, "_complete", fail)
            with pytest.raises(OSError, match="No space"):
                session.save(tmp_path / "checkpoint")
            with pytest.raises(OSError, match="No space"):
                session.save(tmp_path / "new")
        assert os.listdir(tmp_path) == ["checkpoint"]
        read_checkpoint(tmp_path / "checkpoint")


# Series.


def make_series(directory, snapshot, steps, **options):
    series = CheckpointSeries(directory, **options)
    for step in steps:
        series.start_saving(step, snapshot)
    series.wait()
    return series


def test_the_oldest_ones_are_deleted(tmp_path, snapshot):
    series = make_series(tmp_path / "series", snapshot, [10, 20, 30, 5_000], max_to_keep=2)
    assert series.steps() == [30, 5_000]
    assert series.latest() == tmp_path / "series" / "5000"
    assert make_series(tmp_path / "all", snapshot, [1, 2, 3]).steps() == [1, 2, 3]
    assert CheckpointSeries(tmp_path / "nowhere").steps() == []
    assert CheckpointSeries(tmp_path / "nowhere").read_latest() is None


def test_the_newest_one_that_reads_is_found(tmp_path, snapshot):
    series = make_series(tmp_path, snapshot, [10, 20, 30])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert series.read_latest()[0] == 30
    next(tmp_path.joinpath("30").rglob("_METADATA")).write_bytes(b"")
    (tmp_path / "40").mkdir()
    shutil.copytree(tmp_path / "30", tmp_path / "35")
    (tmp_path / "35" / checkpoint_directories.DOCUMENT).unlink()
    (tmp_path / "35" / "notes.txt").touch()
    with pytest.warns(UserWarning, match="were skipped") as caught:
        assert series.read_latest()[0] == 20
    (warning,) = caught
    assert "step 20 restored" in str(warning.message)
    assert f"{tmp_path / '40'} is not complete" in str(warning.message)
    assert "_METADATA is damaged" in str(warning.message)
    assert series.steps() == [10, 20, 30, 35, 40]
    with pytest.warns(UserWarning, match="skipped"):
        assert series.read_latest(set_aside=True)[0] == 20
    assert series.steps() == [10, 20]
    series = make_series(tmp_path, snapshot, [30])
    assert series.read_latest()[0] == 30
    assert set(os.listdir(tmp_path)) == {"10", "20", "30", "unreadable-30-0", "unreadable-35-0"}


def test_none_that_reads_is_refused(tmp_path, snapshot):
    series = make_series(tmp_path, snapshot, [10, 20])
    (tmp_path / "10" / checkpoint_directories.DOCUMENT).write_text("{")
    (tmp_path / "20" / checkpoint_directories.DOCUMENT).unlink()
    message = "None of the checkpoints .* can be read: .*20 is not complete.*10.* is damaged"
    with pytest.raises(CheckpointError, match=message):
        series.read_latest(set_aside=True)
    assert series.steps() == [10, 20]


def test_what_was_never_complete_is_no_checkpoint(tmp_path, snapshot):
    """A process that is killed while it writes its first one has lost nothing else."""
    series = make_series(tmp_path, snapshot, [10])
    (tmp_path / "10" / checkpoint_directories.DOCUMENT).unlink()
    (tmp_path / "10" / "process1.npz").touch()  # of another process
    (tmp_path / "12.orbax-checkpoint-tmp").mkdir()
    (tmp_path / ".13.being-written-123").mkdir()
    with pytest.warns(UserWarning, match="were skipped, and there is no other one: .*10 is not complete"):
        assert series.read_latest(set_aside=True) is None
    make_series(tmp_path, snapshot, [10])
    assert os.listdir(tmp_path) == ["10"]


def test_a_step_that_is_there_stays(tmp_path, snapshot):
    series = make_series(tmp_path, snapshot, [10])
    before = (tmp_path / "10" / checkpoint_directories.DOCUMENT).stat().st_mtime_ns
    series.save(10, snapshot)
    assert (tmp_path / "10" / checkpoint_directories.DOCUMENT).stat().st_mtime_ns == before
    (tmp_path / "10" / checkpoint_directories.DOCUMENT).unlink()
    series.save(10, snapshot)
    assert series.read_latest()[0] == 10


def test_an_old_one_that_cannot_be_deleted_fails_nothing(tmp_path, snapshot, monkeypatch, caplog):
    delete = shutil.rmtree

    def refuse(path, ignore_errors=False):
        if path == tmp_path / "10":
            raise PermissionError("not permitted")
        delete(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    series = make_series(tmp_path, snapshot, [10, 20], max_to_keep=1)
    assert series.steps() == [10, 20]
    assert series.read_latest()[0] == 20
    assert "could not be deleted: not permitted" in caplog.text
    assert "could not be saved" not in caplog.text


def test_what_others_change_meanwhile(tmp_path, snapshot):
    series = make_series(tmp_path / "series", snapshot, [10, 20])
    shutil.rmtree(tmp_path / "series")
    series.save(20, snapshot)
    assert series.read_latest()[0] == 20


def test_what_orbax_still_writes_after_ctrl_c_is_not_in_the_way(tmp_path, snapshot, monkeypatch):
    """Its threads go on for a while after a save that was interrupted."""
    path = tmp_path / "checkpoint"
    original, begun = orbax.checkpoint.Checkpointer.save, []

    def save(self, directory, *arguments, **options):
        begun.append(pathlib.Path(directory).parent)
        if len(begun) == 1:
            raise KeyboardInterrupt
        if len(begun) == 2:
            begun[0].mkdir()  # by a thread of the first one
            (begun[0] / "arrays").write_text("of the save before")
        return original(self, directory, *arguments, **options)

    monkeypatch.setattr(orbax.checkpoint.Checkpointer, "save", save)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_directories.write_checkpoint(path, snapshot)
    checkpoint_directories.write_checkpoint(path, snapshot)
    assert read_checkpoint(path).seed == snapshot.seed
    checkpoint_directories.write_checkpoint(path, snapshot)
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("num_times", [1, 3, 100])
def test_others_who_look_while_a_checkpoint_is_replaced(tmp_path, snapshot, monkeypatch, num_times):
    """They put the old one back, as its writer might have been killed just then."""
    path = tmp_path / "checkpoint"
    checkpoint_directories.write_checkpoint(path, snapshot)
    rename, left = pathlib.Path.rename, [num_times]

    def rename_and_look(self, target):
        renamed = rename(self, target)
        if "being-replaced" in str(target) and left[0] > 0:
            left[0] -= 1
            assert checkpoint_directories.read_document(path)  # by another process
        return renamed

    monkeypatch.setattr(pathlib.Path, "rename", rename_and_look)
    newer = dataclasses.replace(snapshot, seed=snapshot.seed + 1)
    if num_times < 100:
        checkpoint_directories.write_checkpoint(path, newer)
        assert read_checkpoint(path).seed == newer.seed
    else:
        with pytest.raises(OSError, match="not empty"):
            checkpoint_directories.write_checkpoint(path, newer)
        assert read_checkpoint(path).seed == snapshot.seed
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_killed_while_a_checkpoint_is_replaced(tmp_path, path):
    """Between the two renamings the old one lies beside its place; whoever looks next puts it back."""
    shutil.copytree(path, tmp_path / ".checkpoint.being-replaced-123")
    (tmp_path / ".checkpoint.being-written-123").mkdir()
    snapshot = read_checkpoint(tmp_path / "checkpoint")
    # What may be another process's is left to whoever writes.
    assert set(os.listdir(tmp_path)) == {"checkpoint", ".checkpoint.being-written-123"}
    checkpoint_directories.write_checkpoint(tmp_path / "checkpoint", snapshot)
    assert os.listdir(tmp_path) == ["checkpoint"]
    # One that was interrupted when all but deleting the old one was done.
    shutil.copytree(path, tmp_path / f".checkpoint.being-replaced-{os.getpid()}")
    checkpoint_directories.write_checkpoint(tmp_path / "checkpoint", snapshot)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_the_end_of_an_epoch(tmp_path):
    """Where the data had ended, the initializer begins them again; where not, they go on."""
    data = Batches()
    training = Training(1, dataset=[(data.x[number], data.y[number]) for number in range(10)])

    def epoch(session):
        training.start(session)
        with pytest.raises(ipu.errors.OutOfRangeError):
            training.run(session, 5)

    with ipu.Session() as at_once:
        epoch(at_once)
        epoch(at_once)
    with ipu.Session() as first, ipu.Session() as second:
        epoch(first)
        first.save(tmp_path / "checkpoint")
        second.restore(tmp_path / "checkpoint")
        epoch(second)
    assert at_once.update_count() == second.update_count() == 4
    assert_same(at_once, second)


def test_a_data_set_that_fails_at_first_when_resumed(path, expected):
    failures = [OSError("network")]

    class Failing(Batches):
        def __iter__(self):
            if failures and is_resumed:
                raise failures.pop()
            return super().__iter__()

    is_resumed = False
    training = Training(2, dataset=Failing())
    with ipu.Session() as session:
        session.restore(path)
        training.start(session)
        is_resumed = True
        with pytest.raises(OSError, match="network"):
            training.run(session, 3)
        training.run(session, 3)
    assert_same(session, expected)


def test_errors_are_told_once_per_save_and_the_last_good_one_stays(tmp_path, snapshot, monkeypatch, caplog):
    series = make_series(tmp_path, snapshot, [10], max_to_keep=1)

    def fail(*_arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_directories, "_complete", fail)
        for step in (20, 30):
            series.start_saving(step, snapshot)
            series.wait()
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "checkpoint of step 20" in caplog.messages[0]
    assert "No space left on device" in caplog.messages[0]
    assert f"the last good one is {tmp_path / '10'}" in caplog.messages[0]
    assert sorted(os.listdir(tmp_path)) == ["10"]
    series.start_saving(30, snapshot)
    series.wait()
    assert series.read_latest()[0] == 30
    assert series.steps() == [30]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_snapshot_is_not_changed_by_what_runs_meanwhile(num_stages, training_of, tmp_path):
    training = training_of(num_stages)
    with session_of(training, seed=7) as session:
        training.run(session, 1)
        snapshot = session.take_snapshot()
        expected = session.variables
        may_write = threading.Event()
        original = checkpoint_directories._storable

        def wait(snapshot):
            may_write.wait(400)
            return original(snapshot)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_directories, "_storable", wait)
            series = CheckpointSeries(tmp_path)
            series.start_saving(8, snapshot)
            training.run(session, 2)
            may_write.set()
            series.wait()
    step, found = series.read_latest()
    assert step == 8
    for name, value in found.variables.items():
        np.testing.assert_array_equal(value, expected[name])
        assert not np.array_equal(value, session.variables[name])
    assert found.feeds[0].position.count == 4


def test_two_pipelines_on_one_infeed(tmp_path):
    """The position belongs to the infeed: whichever pipeline runs first goes there."""
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(Batches())
    initializer = infeed.initializer

    def stage(x, y):
        return loss_of(x[:, :3] * ipu.get_variable("w", (3,)), y)

    options = {"infeed_queue": infeed, "outfeed_queue": ipu.ipu_outfeed_queue.IPUOutfeedQueue()}
    options["optimizer_function"] = minimizing(optax.sgd(0.1))
    one, two = (compile_pipeline([stage], 2, name=name, **options) for name in ("one", "two"))

    with ipu.Session() as session:
        for program in (initializer, one, two, two):
            session.run(program)
        session.save(tmp_path / "checkpoint")
        for program in (two, one, two):
            session.run(program)
    assert [feed["count"] for feed in read_document(tmp_path / "checkpoint")["feeds"]] == [6]
    with ipu.Session() as other:
        other.restore(tmp_path / "checkpoint")
        for program in (initializer, two, one, two):
            other.run(program)
        assert infeed.position.count == 12
    assert_same(session, other)


# Links, odd entries, and others at work.


def test_a_link_stays_a_link(tmp_path, snapshot):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "here")  # leads nowhere yet
    for number in range(3):
        checkpoint_directories.write_checkpoint(
            tmp_path / "link", dataclasses.replace(snapshot, seed=number)
        )
        assert read_checkpoint(tmp_path / "link").seed == number
        assert (tmp_path / "link").is_symlink()
        assert set(os.listdir(tmp_path)) == {"disk", "link"}
        assert os.listdir(tmp_path / "disk") == ["here"]


def test_odd_entries_of_a_series(tmp_path, path, snapshot):
    """A file, numbers that are written otherwise, a link that leads nowhere, and one to a checkpoint."""
    shutil.copytree(path, tmp_path / "elsewhere")
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "500").write_text("notes")
    (tmp_path / "series" / "0016").mkdir()
    (tmp_path / "series" / "007").mkdir()  # is no second step 7
    (tmp_path / "series" / "\u0663").mkdir()  # a decimal digit, too
    (tmp_path / "series" / "99").symlink_to(tmp_path / "nowhere")
    (tmp_path / "series" / "7").symlink_to(tmp_path / "elsewhere")
    series = CheckpointSeries(tmp_path / "series", max_to_keep=2)
    assert series.steps() == [7]
    assert series.read_latest()[0] == 7
    for step in (99, 500):
        series.save(step, snapshot)
        assert series.read_latest()[0] == step
    assert series.steps() == [99, 500]
    assert read_checkpoint(tmp_path / "elsewhere").seed == 7  # only the link to it was deleted
    left = {"99", "500", "0016", "007", "\u0663", "unreadable-99-0", "unreadable-500-0"}
    assert set(os.listdir(tmp_path / "series")) == left


def test_reading_while_a_new_one_replaces_the_only_one(tmp_path, snapshot, monkeypatch):
    """The trainer keeps one: it writes the next and deletes this, which another process wants to read."""
    series = make_series(tmp_path, snapshot, [10], max_to_keep=1)
    steps = iter([20, 30])
    read = checkpoint_directories.read_checkpoint

    def overtaken(path):
        step = next(steps, None)
        if step is not None:
            make_series(tmp_path, snapshot, [step], max_to_keep=1)
        return read(path)

    monkeypatch.setattr(checkpoint_directories, "read_checkpoint", overtaken)
    assert series.read_latest()[0] == 30


def test_values_that_are_no_numbers_are_not_loaded():
    with ipu.Session() as session:
        for value in (None, "text", np.datetime64("2020-01-01"), [1, [2, 3]], object(), b"1"):
            with pytest.raises((TypeError, ValueError), match="load|inhomogeneous"):
                session.load({"w": value})
            assert session.variables == {}


def test_names_that_no_program_has_are_not_loaded(alone, tmp_path):
    with ipu.Session() as session, pytest.raises(TypeError, match="full names; got the key 1"):
        session.load({1: 0.0})
    training = Training(1)
    name = next(iter(training.program.variables))
    with session_of(training) as session:
        training.run(session, 1)
        before = session.variables
        message = f"no compiled program has a variable '{name}x' .did you mean '{name}'"
        with pytest.raises(ValueError, match=message):
            session.load({f"{name}x": before[name], name: before[name] + 1})
        assert session.variables.keys() == before.keys()
        jax.tree.map(np.testing.assert_array_equal, session.variables, before)
        session.save(tmp_path / "checkpoint")
        session.restore(tmp_path / "checkpoint")
    del training
    gc.collect()
    with ipu.Session() as session:
        session.load({"nowhere": 1.0})  # no program of this model is known yet
        training = Training(1)
        training.start(session)
        with pytest.raises(ValueError, match="no compiled program has a variable 'nowhere'"):
            training.run(session, 1)
        training.run(session, 1)
        assert "nowhere" not in session.variables
