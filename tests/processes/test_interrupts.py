"""Ctrl-C, in processes of their own."""

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.processes import interrupts
from ipu_pipeline.tf1.session import program_runs
from tests.support import front
from tests.support.programs import begin
from tests.support.resumable import Training

INTERRUPTS = int(os.environ.get("INTERRUPTS", "200"))
UPDATES = 20


def test_deferred_lets_the_section_finish():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("section")
        done.append("after")
    assert done == ["section"]
    with interrupts.deferred():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_signal_does_not_wait():
    with pytest.raises(interrupts.StoppedAtOnce), interrupts.stopping_on_signals() as request:
        signal.raise_signal(signal.SIGTERM)
        assert request.number == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)
    with interrupts.stopping_on_signals() as request:
        request.is_final = True
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_ctrl_c_while_a_program_calls_back():
    """Where the callback is in the main thread, as it may be on a CPU, JAX makes another error of it."""

    def interrupt(x):
        if is_interrupting:
            raise KeyboardInterrupt
        return x

    is_interrupting = False
    x = ipu.placeholder(np.float32, [2])
    program = front.compile_program(
        lambda x: jax.pure_callback(interrupt, jax.ShapeDtypeStruct((2,), np.float32), x), inputs=[x]
    )
    with ipu.Session() as session:
        for is_interrupting in (True, False, True):  # JAX starts programs by another way the second time
            with pytest.raises(KeyboardInterrupt) if is_interrupting else contextlib.nullcontext():
                session.run(program, {x: [1, 2]})
        is_interrupting = False
        np.testing.assert_array_equal(session.run(program, {x: [1, 2]})[0], [1, 2])


def test_what_handlers_raise_in_callbacks_is_raised_again():
    for last, expected in [
        ("KeyboardInterrupt: ", KeyboardInterrupt),
        ("ipu_pipeline.processes.interrupts.StoppedAtOnce", interrupts.StoppedAtOnce),
        ("ValueError: a KeyboardInterrupt", None),
    ]:
        for kind in (RuntimeError, ValueError):
            error = kind(f"INTERNAL: CpuCallback error calling callback: Traceback:\n  File\n{last}\n")
            with pytest.raises(expected or kind), interrupts.raised_if_wrapped():
                raise error


@contextlib.contextmanager
def _interrupted_in_garbage_collection(is_time):
    """Ctrl-C in a callback of the garbage collector, whose exceptions Python ignores; JAX has one, too."""
    is_done = False

    def interrupt(*_):
        nonlocal is_done
        if not is_done and threading.current_thread() is threading.main_thread() and is_time():
            is_done = True
            signal.raise_signal(signal.SIGINT)

    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 10)  # as programs have it
    gc.callbacks.append(interrupt)
    try:
        yield
    finally:
        gc.callbacks.remove(interrupt)
        gc.set_threshold(*thresholds)
        if not was_enabled:
            gc.disable()


@pytest.mark.parametrize("mapping", [pytest.param("01", marks=pytest.mark.thorough), "00"])
def test_ctrl_c_in_garbage_collection_ends_a_run(mapping):
    mapping = [int(ipu) for ipu in mapping]
    model = front.Model(repeat_count=100_000, gradient_accumulation_count=8, device_mapping=mapping)
    before = sys.unraisablehook
    with front.session_of(model) as session:
        # However long the first compilation takes.
        interrupted = _interrupted_in_garbage_collection(lambda: session.update_count() > 0)
        with interrupted, pytest.raises(KeyboardInterrupt):
            session.run(model.program, {model.rate: 0.01})
        assert 0 < session.update_count() < 100_000
    assert sys.unraisablehook is before


def test_ctrl_c_in_garbage_collection_ends_a_call_of_poptorch():
    torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    from ipu_pipeline import poptorch

    class Interrupted(torch.nn.Module):
        is_interrupted = False

        def forward(self, rows):
            if not self.is_interrupted:
                type(self).is_interrupted = True
                with _interrupted_in_garbage_collection(lambda: True):
                    gc.collect()
                    time.sleep(400)
            return 2 * rows

    model, rows = poptorch.inferenceModel(Interrupted()), torch.ones(1, 3)
    with pytest.raises(KeyboardInterrupt):
        model(rows)
    assert torch.equal(model(rows), 2 * rows)


class _OnItsEnd:
    def __init__(self, function):
        self._function = function

    def __del__(self):
        self._function()


def test_what_a_handler_raises_is_raised_again_if_python_ignored_it():
    def end(number, frame):
        raise SystemExit(3)

    def wait_for_end():
        _OnItsEnd(lambda: signal.raise_signal(signal.SIGTERM))
        time.sleep(400)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with interrupts.sent_again_if_ignored(), pytest.raises(SystemExit):
            wait_for_end()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_python_ignored_otherwise_is_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(ignored.exc_type))

    def fail():
        raise ValueError

    def interrupt():
        raise KeyboardInterrupt

    def in_another_thread():
        _OnItsEnd(interrupt)

    with interrupts.sent_again_if_ignored():
        _OnItsEnd(fail)
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        time.sleep(0.05)  # in which nothing is to come
    assert told == [ValueError, KeyboardInterrupt]


def test_ctrl_c_before_a_run_has_its_turn(monkeypatch):
    """The infeed, which reads ahead for the next run, stops as it does after Ctrl-C in the run itself."""
    model = front.Model(repeat_count=2, gradient_accumulation_count=8)
    with front.session_of(model) as session:
        session.run(model.program, {model.rate: 0.01})
        alone = program_runs.Turns.alone

        def interrupting(*arguments, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(program_runs.Turns, "alone", interrupting)
        with pytest.raises(KeyboardInterrupt):
            session.run([model.initializer, {"program": model.program}], {model.rate: 0.01})
        monkeypatch.setattr(program_runs.Turns, "alone", alone)
        assert front.no_infeed_runs()
        assert session.update_count() == 2
        session.run(model.initializer)
        session.run(model.program, {model.rate: 0.01})
        assert session.update_count() == 4


def interrupted(mapping, path, after=None):
    """tests.support.interrupted, with SIGINT after so many seconds: the process, its output and errors."""
    process = begin("-m", "tests.support.interrupted", mapping, UPDATES, path)
    if after is not None:
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
    return process, *process.communicate(timeout=400)


def states_after(mapping, counts):
    """Variables and losses of training without interrupts, by the number of updates."""
    training = Training(2, device_mapping=[int(ipu) for ipu in mapping])
    found = {}
    with front.session_of(training, seed=3) as session:
        losses = []
        for count in range(1, max(counts) + 1):
            losses += list(training.run(session, 1))
            if count in counts:
                found[count] = session.variables | {"losses": np.array(losses)}
    return found


def assert_as_after(expected, path):
    """A file of tests.support.interrupted is as training without interrupts."""
    found = dict(np.load(path))
    wanted = expected[int(found.pop("count"))]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.thorough
def test_ctrl_c_in_the_first_compilation(tmp_path):
    process = begin("-m", "tests.support.interrupted", "01", UPDATES, tmp_path / "found.npz")
    while process.stdout.readline() != "trains\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert output.splitlines() == ["interrupted in train", "trains", "done"]
    assert_as_after(states_after("01", [UPDATES, UPDATES + 1]), tmp_path / "found.npz")


@pytest.mark.soak
@pytest.mark.parametrize("mapping", ["01", "00"])
def test_interrupted_at_random_moments(mapping, tmp_path):
    """From the first line of a program to its end: it ends by it, or goes on exactly."""
    expected = states_after(mapping, [UPDATES, UPDATES + 1])
    begun = time.monotonic()
    interrupted(mapping, tmp_path / "warm.npz")
    seconds = time.monotonic() - begun
    generator = random.Random(INTERRUPTS)  # noqa: S311  # of moments
    moments = [seconds * generator.random() for _ in range(INTERRUPTS // 2)]

    def run(number):
        path = tmp_path / f"{number}.npz"
        process, out, errors = interrupted(mapping, path, moments[number])
        told = f"after {moments[number]} s: {process.returncode} {out}{errors}"
        if process.returncode != 0 and "begins" not in out:
            return True  # Python and jaxlib, while they start, tell it as they like: jaxlib by ImportError
        if process.returncode == -signal.SIGINT:
            return "interrupted in" not in out or told
        if process.returncode != 0 or "done" not in out:
            return told
        try:
            assert_as_after(expected, path)
        except AssertionError as error:
            return f"{told}{error}"
        return True

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(len(moments))))
    faults = [result for result in results if result is not True]
    assert not faults, "\n\n".join(faults)
