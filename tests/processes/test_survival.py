"""Training that is killed or told to stop."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing.checkpoint_directories import CheckpointSeries
from ipu_pipeline.ipu_session_run_hooks import SessionRunHook
from tests.support.estimating import assert_same_variables, input_fn, make_estimator, make_small
from tests.support.joined import hold_port
from tests.support.programs import begin
from tests.support.resumable import Batches, Training, assert_same

THREAD_RUNS = int(os.environ.get("THREAD_RUNS", "1000"))
KILLS = int(os.environ.get("KILLS", "50"))
STEPS = 40 * KILLS


def start(directory, max_steps, *options):
    return begin("-W", "always", "-m", "tests.support.survivor", directory, max_steps, *options)


def finish(process, code):
    out, errors = process.communicate(timeout=400)
    assert process.returncode == code, out + errors
    return out, errors


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Estimators after so many steps, by their number."""
    found = {}

    def train(steps):
        if steps not in found:
            directory = tmp_path_factory.mktemp(f"uninterrupted{steps}")
            found[steps] = make_estimator(directory).train(input_fn, max_steps=steps)
            ipu.config.reset_ipu_configuration()
        return found[steps]

    return train


class Signal(SessionRunHook):
    """Sends this process SIGTERM after step 16."""

    def after_run(self, run_context, _run_values):
        if run_context.global_step == 16:
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_ends_training_after_the_update_and_it_goes_on(tmp_path, caplog):
    with caplog.at_level("INFO", "ipu_pipeline"):
        with pytest.raises(SystemExit) as raised:
            make_small(tmp_path / "one").train(input_fn, hooks=[Signal()], max_steps=40)
        assert raised.value.code == 128 + signal.SIGTERM
        assert f"Training ends at step 16 by signal {int(signal.SIGTERM)}" in caplog.text
        ipu.config.reset_ipu_configuration()
        one = make_small(tmp_path / "one").train(input_fn, max_steps=24)
        assert "Training goes on from step 16" in caplog.text
    ipu.config.reset_ipu_configuration()
    assert_same_variables(one, make_small(tmp_path / "whole").train(input_fn, max_steps=24))


def test_a_signal_ends_a_run_of_many_updates(tmp_path):
    class Signalling(Batches):
        def __iter__(self):
            for number, element in enumerate(super().__iter__()):
                if number == 100:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield element

    estimator = make_small(tmp_path, iterations_per_loop=200_000)
    with pytest.raises(SystemExit):
        estimator.train(Signalling, max_steps=200_000)
    assert 0 < estimator.get_variable_value("global_step") < 200_000


@pytest.mark.thorough
def test_a_process_that_gets_a_signal_and_one_that_is_killed_go_on(tmp_path, uninterrupted):
    process = start(tmp_path, 400, "every=400", "pause=1")
    while process.stdout.readline() != "step 8\n":
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _out, errors = finish(process, 143)
    assert "Traceback" not in errors
    step = make_estimator(tmp_path).get_variable_value("global_step")
    assert f"Training ends at step {step} by signal 15" in errors
    assert 8 <= step < 400
    process = start(tmp_path, 8000, "pause=0.5")
    while max(CheckpointSeries(tmp_path / "checkpoints").steps()) <= step:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    _out, errors = finish(process, -signal.SIGKILL)
    assert f"Training goes on from step {step}" in errors
    assert "Traceback" not in errors
    last = max(CheckpointSeries(tmp_path / "checkpoints").steps()) + 4
    make_estimator(tmp_path).train(input_fn, max_steps=last)
    assert_same_variables(make_estimator(tmp_path), uninterrupted(last))


@pytest.mark.thorough
def test_a_signal_to_one_ends_all_after_the_same_update(tmp_path, uninterrupted):
    num_processes, address = 2, hold_port()
    joining = {
        "IPU_PIPELINE_COORDINATOR_ADDRESS": f"127.0.0.1:{address.getsockname()[1]}",
        "IPU_PIPELINE_NUM_PROCESSES": str(num_processes),
        "IPU_PIPELINE_DEATH_TIMEOUT": "300",
        "PJRT_NPROC": "1",
    }
    program = ("-m", "tests.support.survivor", tmp_path, 40_000, "pause=0.05")
    with address, contextlib.ExitStack() as left:
        processes = []
        for number in range(num_processes):
            log = left.enter_context((tmp_path / f"log{number}").open("w"))
            joining["IPU_PIPELINE_PROCESS_ID"] = str(number)
            processes.append(begin(*program, output=subprocess.DEVNULL, error_output=log, **joining))
        while CheckpointSeries(tmp_path / "checkpoints").latest() is None:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.02)
        processes[0].send_signal(signal.SIGTERM)
        statuses = [process.wait(400) for process in processes]
    errors = [(tmp_path / f"log{number}").read_text() for number in range(num_processes)]
    assert statuses == [128 + signal.SIGTERM] * 2, errors
    assert not any("Traceback" in text for text in errors), errors
    step = CheckpointSeries(tmp_path / "checkpoints").steps()[-1]
    assert all(f"at step {step}" in text for text in errors), errors
    make_estimator(tmp_path).train(input_fn, max_steps=step + 8)  # one process alone
    assert_same_variables(make_estimator(tmp_path), uninterrupted(step + 8))


def wait_for_checkpoint(process, directory, after=-1):
    """Reads a process's steps until there is a checkpoint of a step after another one."""
    while max(CheckpointSeries(directory / "checkpoints").steps(), default=-1) <= after:
        assert process.stdout.readline(), process.communicate()


@pytest.mark.soak
def test_killed_at_random_moments(tmp_path, uninterrupted):
    """kill -9 while it trains and saves: every restart goes on, and the end is that of other training."""
    generator = random.Random(KILLS)  # noqa: S311  # of moments
    kills = resumed = 0
    while kills < KILLS:
        process = start(tmp_path, STEPS, "pause=0.01")
        begin = "created\n" if generator.random() < 0.1 else "step"
        while not (line := process.stdout.readline()).startswith(begin):
            assert line, process.communicate()
        if kills == 0:  # on a slow machine every kill might come before the first checkpoint
            wait_for_checkpoint(process, tmp_path)
        # Some right away, and some so late that several checkpoints are written.
        timer = threading.Timer(generator.choice([0.05, 0.3, 1.0]) * generator.random(), process.kill)
        timer.start()
        _out, errors = process.communicate(timeout=400)
        timer.cancel()
        assert process.returncode in (0, -signal.SIGKILL), errors
        assert "Traceback" not in errors, errors
        kills += process.returncode != 0
        resumed += "Training goes on from step" in errors
        if process.returncode == 0:  # it came to its end: from the beginning once more
            assert_same_variables(make_estimator(tmp_path), uninterrupted(STEPS))
            shutil.rmtree(tmp_path)
    _out, errors = finish(start(tmp_path, STEPS), 0)
    assert "Traceback" not in errors
    assert_same_variables(make_estimator(tmp_path), uninterrupted(STEPS))
    assert resumed > 0


def compile_two():
    """Two training programs that share no variable, one over two devices and one on one."""
    return [
        Training(2, dataset=Batches(seed=number), name=name, scope=name, device_mapping=mapping)
        for number, (name, mapping) in enumerate({"one": [0, 1], "two": [0, 0]}.items())
    ]


@pytest.mark.parametrize(
    "num_runs",
    [pytest.param(20, marks=pytest.mark.thorough), pytest.param(THREAD_RUNS, marks=pytest.mark.soak)],
)
def test_two_threads_train_on_one_session(num_runs, tmp_path):
    """While a third one reads and saves: all is as if they had trained one after the other."""
    together, apart = compile_two(), compile_two()
    saved, is_done = [], threading.Event()

    def work(session, number):
        losses = []
        for _run in range(num_runs):
            losses += list(together[number].run(session, 1))
        while len(saved) < 2 and not saving.done():  # a session has no queue: its turn may come late
            time.sleep(0.01)
        return losses

    def read_and_save(session):
        while not is_done.is_set():
            path = tmp_path / str(len(saved))
            session.save(path)
            saved.append(path)
            assert all(np.isfinite(value).all() for value in session.variables.values())

    with ipu.Session(seed=3) as session, ipu.Session(seed=3) as plain:
        for both, one in ((together, session), (apart, plain)):
            for training in both:
                training.start(one)
            one.run(ipu.global_variables_initializer())
        with ThreadPoolExecutor(3) as threads:
            saving = threads.submit(read_and_save, session)
            try:
                losses = list(threads.map(work, [session] * 2, range(2)))
            finally:
                is_done.set()
            saving.result()
        states = {name: [plain.variables] for name in ("one", "two")}
        for training, name, found in zip(apart, states, losses, strict=True):
            expected = []
            for _run in range(num_runs):
                expected += list(training.run(plain, 1))
                states[name].append(plain.variables)
            np.testing.assert_array_equal(found, expected)
        assert_same(session, plain)
    assert len(saved) > 1
    for path in random.Random(0).sample(saved, min(len(saved), 5)):  # noqa: S311  # of checkpoints
        with ipu.Session() as session:
            session.restore(path)
            variables = session.variables
            for name, known in states.items():
                wanted = known[session.update_count(name)]
                for full_name, value in variables.items():
                    if full_name.startswith(f"{name}/"):
                        np.testing.assert_array_equal(value, wanted[full_name])
