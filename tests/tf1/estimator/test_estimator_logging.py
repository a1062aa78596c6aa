"""What estimators log, show on a terminal and write; and what they find out before anything compiles."""

import io
import logging
import math
import os
import re
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing.checkpoint_directories import check_writable
from ipu_pipeline.ipu_session_run_hooks import SessionRunArgs
from tests.support.estimating import finite_input_fn, hook_of, input_fn, make_small, scalars_in
from tests.support.terminals import Screen, shown


def test_an_estimator_says_what_it_does_and_orbax_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)  # of the root
    levels = {name: logging.getLogger(name).level for name in ("", "absl", "orbax")}
    estimator = make_small(tmp_path, log_step_count_steps=16, save_checkpoints_steps=16)
    estimator.train(input_fn, steps=32)
    estimator.evaluate(finite_input_fn)
    ours = [record for record in caplog.records if record.name.startswith("ipu_pipeline")]
    assert {record.name for record in ours} == {"ipu_pipeline", "ipu_pipeline.estimator"}
    patterns = [
        r"Training from step 0 to 32: 4 micro-batches per weight update, up to 8 per run\.",
        r"Compiled \d+ programs in \S+ s.*",
        *[r"loss = \S+, step = 8", r"global_step/sec: \S+, examples/sec: \S+"],
        *[r"loss = \S+, step = 16", r"global_step/sec: \S+, examples/sec: \S+"],
        *[r"loss = \S+, step = 32", r"global_step/sec: \S+, examples/sec: \S+"],
        rf"The checkpoint of step 32 is saved in {tmp_path}/checkpoints/32\.",
        r"Training ended at step 32, after \S+ s\.",
        rf"The variables come from {tmp_path}/checkpoints/32\.",
        r"Compiled \d+ programs in \S+ s.*",
        r"Evaluation at step 32: loss = \S+, largest = \S+",
    ]
    told = [record.getMessage() for record in ours]
    saved = rf"The checkpoint of step 16 is saved in {tmp_path}/checkpoints/16\."
    (number,) = [number for number, message in enumerate(told) if re.fullmatch(saved, message)]
    assert number > told.index("loss = " + told[4].removeprefix("loss = "))  # a thread writes it
    del told[number]
    assert len(told) == len(patterns)
    for message, pattern in zip(told, patterns, strict=True):
        assert re.fullmatch(pattern, message), message
    assert "orbax" not in {part for record in caplog.records for part in record.pathname.split(os.sep)}
    assert {name: logging.getLogger(name).level for name in levels} == levels


def test_a_user_of_orbax_keeps_its_messages(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    filters = len(logging.getLogger("absl").filters)
    make_small(tmp_path / "model").train(input_fn, steps=8)
    assert len(logging.getLogger("absl").filters) <= filters + 1  # that of errors, at the first save
    caplog.clear()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "own", args=ocp.args.PyTreeSave({"a": np.arange(3)}))
    assert [record for record in caplog.records if record.name == "absl"]


@pytest.mark.parametrize(("every", "steps"), [(8, [8, 16, 24, 32]), (16, [8, 16, 32]), (None, [])])
def test_save_summary_steps(every, steps, tmp_path, caplog):
    caplog.set_level(logging.INFO, "ipu_pipeline")
    config = {"log_step_count_steps": 24, "save_summary_steps": every}
    make_small(tmp_path, **config).train(input_fn, steps=32)
    losses = {step: value for step, name, value in scalars_in(tmp_path) if name == "loss"}
    assert list(losses) == steps
    logged = re.findall(r"loss = (\S+), step = (\d+)", caplog.text)
    assert [int(step) for _loss, step in logged] == [8, 24, 32]
    if every == 8:  # what is logged is the mean over more runs than are written
        mean = (losses[16] + losses[24]) / 2
        np.testing.assert_allclose(
            [float(loss) for loss, _step in logged], [losses[8], mean, losses[32]], 1e-5
        )


@pytest.mark.parametrize("is_disabled", [False, True])
def test_the_bar_on_a_terminal(is_disabled, tmp_path, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TQDM_DISABLE", "1" if is_disabled else "")
    handler = logging.StreamHandler(screen)
    logger = logging.getLogger("ipu_pipeline.estimator")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)  # which forgets what was asked of it before
    try:
        make_small(tmp_path, log_step_count_steps=8).train(input_fn, steps=16)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    lines = shown(screen.getvalue())
    bars = [line for line in lines if "Training: " in line]
    assert "loss = " not in "".join(bars)  # messages have lines of their own
    assert len([line for line in lines if re.fullmatch(r"loss = \S+, step = \d+", line)]) == 2
    if is_disabled:
        assert bars == []
        assert "\r" not in screen.getvalue()
    else:
        (bar,) = bars
        assert re.search(r"100%.* 16/16 .* loss \d", bar)


def test_a_state_whose_loss_is_not_finite_is_not_saved(tmp_path, caplog):
    """Where training ends as programs do whose loss is not finite."""

    def fail(run_context, run_values):
        if not math.isfinite(run_values.results):
            raise FloatingPointError(f"step {run_context.global_step}")

    hook = hook_of(before_run=lambda _run_context: SessionRunArgs("loss"), after_run=fail)

    def with_a_nan():
        for number, (x, y) in enumerate(finite_input_fn(40)):
            yield (x * np.float32("nan") if number == 20 else x), y

    estimator = make_small(tmp_path, save_checkpoints_steps=8)
    with pytest.raises(FloatingPointError, match="step 24"):
        estimator.train(lambda: with_a_nan, hooks=[hook], steps=40)
    assert estimator.get_variable_value("global_step") == 16
    assert "The state after step 24 is not saved, since the loss is nan." in caplog.text
    assert all(np.isfinite(estimator.get_variable_value(name)).all() for name in ["w"])


# Where nothing can be written. The tests may run as root, whom permissions do not stop.


@pytest.fixture
def no_place(tmp_path):
    """A path below a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "below" / "it"


def test_train_finds_a_model_dir_that_cannot_be_written_before_anything_else(no_place):
    called = []
    estimator = make_small(no_place)
    with pytest.raises(NotADirectoryError, match="train: checkpoints and .* written to .*/it: "):
        estimator.train(lambda: called.append(1), steps=8)
    assert not called


def test_training_that_is_done_needs_no_place(tmp_path, monkeypatch):
    estimator = make_small(tmp_path).train(input_fn, steps=8)

    def refuse(*_arguments, **_options):
        raise AssertionError

    monkeypatch.setattr(sys.modules["ipu_pipeline.tf1.estimator.base"], "check_writable", refuse)
    estimator.train(input_fn, max_steps=8)
    with pytest.raises(AssertionError):
        estimator.train(input_fn, max_steps=9)


def test_save_finds_a_path_that_cannot_be_written_before_it_takes_anything(no_place, monkeypatch):
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        program = ipu.ipu_compiler.compile(lambda: ipu.get_variable("a", [], initializer=1.0) * 2)
    with ipu.Session() as session:
        session.run(program)
        monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)  # it is not even imported
        with pytest.raises(NotADirectoryError, match="save: a checkpoint cannot be written to .*/below: "):
            session.save(no_place)
        with pytest.raises(NotADirectoryError, match="save: a checkpoint cannot be written to .*/it: "):
            ipu.Saver().save(session, no_place)


def test_what_can_be_written_is_left_as_it_was(tmp_path):
    check_writable(tmp_path / "not" / "there" / "yet", "it")
    check_writable(tmp_path, "it")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="it cannot be written to .*link"):
        check_writable(tmp_path / "link", "it")
    if os.path.exists("/proc/self"):
        with pytest.raises(OSError, match="it cannot be written to /proc/ipu: /proc: "):
            check_writable(type(tmp_path)("/proc/ipu"), "it")


def test_a_full_disk_is_found(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, _data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_options: Full())
    with pytest.raises(OSError, match=f"it cannot be written to {tmp_path}: .*: No space left on device"):
        check_writable(tmp_path, "it")
    check_writable(tmp_path, "it", may_be_full=True)
