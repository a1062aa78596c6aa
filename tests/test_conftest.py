"""What `make test` leaves out of a test's cases, and what fails a test that leaves it behind."""

import gc
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch

from ipu_pipeline.processes import board
from ipu_pipeline.processes.launcher import JobHistory
from tests.conftest import cover, name_arguments
from tests.support import leaks


def test_every_value_of_each_argument_stays():
    cases = [
        {"schedule": schedule, "stages": stages, "optimizer": optimizer}
        for schedule, stages, optimizer in itertools.product("abc", "1234", "xy")
    ]
    kept = [cases[number] for number in sorted(cover(cases, 1))]
    assert len(kept) == 4
    for argument in cases[0]:
        assert {case[argument] for case in kept} == {case[argument] for case in cases}


def test_all_cases_with_one_argument_stay():
    assert cover([{"n": "1"}, {"n": "2"}, {"n": "3"}], 1) == {0, 1, 2}
    assert cover([{"n": "1"}, {"n": "1"}], 1) == {0}


def test_every_pair_of_values_stays():
    """And what was taken before counts."""
    cases = [dict(zip("abcd", values, strict=True)) for values in itertools.product("123", repeat=4)]
    begun = cover(cases, 1)
    kept = cover(cases, 2, begun)
    assert begun < kept
    assert len(kept) <= 15
    for first, second in itertools.combinations("abcd", 2):
        assert len({(cases[number][first], cases[number][second]) for number in kept}) == 9
    one = [{"n": "1"}, {"n": "2"}]
    assert cover(one, 2) == {0, 1}


def test_functions_are_values_like_others():
    cases = [
        name_arguments(SimpleNamespace(params={"number": number, "function": function}))
        for number, function in itertools.product((1, 2), (min, max, lambda: 0))
    ]
    assert len(cover(cases, 1)) == 3


def leave_a_thread(_patch, left):
    end = threading.Event()
    left.callback(end.set)
    threading.Thread(target=end.wait, name="of a test").start()


def leave_a_process(_patch, left):
    """It has ended, and nobody has waited for it."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    left.callback(process.wait)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def leave_a_file(_patch, left):
    descriptor, path = tempfile.mkstemp("of_a_test")
    left.callback(os.remove, path)
    os.close(descriptor)


def leave_a_handler(_patch, left):
    left.callback(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, signal.SIG_IGN))


def leave_an_alarm(_patch, left):
    left.callback(signal.alarm, 0)
    signal.alarm(1000)


def leave_a_log_handler(patch, _left):
    patch.setattr(logging.getLogger("ipu_pipeline"), "handlers", [logging.NullHandler()])


def leave_a_jax_option(_patch, left):
    jax.config.update("jax_enable_x64", True)
    left.callback(jax.config.update, "jax_enable_x64", False)


@pytest.mark.parametrize(
    ("leave", "told"),
    [
        (leave_a_thread, r"threads: <Thread\(of a test, started \d+\)> left"),
        (leave_a_process, r"child processes: \d+ left"),
        (leave_a_file, r"temporary files: \w+of_a_test left"),
        (lambda *_: (leaks.ROOT / "file").touch(), "files in the checkout: file left"),
        (lambda patch, _: patch.setenv("OF_A_TEST", "1"), "the environment: OF_A_TEST is '1'; it was .*"),
        (lambda patch, _: patch.delenv("PATH"), "the environment: PATH is 'not there'; it was .*"),
        (lambda patch, _: patch.chdir("/"), "the working directory is '/'; it was .*"),
        (leave_a_handler, "signal handlers: SIGUSR2 is .*SIG_IGN.*; it was .*"),
        (leave_an_alarm, "an alarm is True; it was False"),
        (leave_a_log_handler, r"logging: ipu_pipeline is .*NullHandler.*; it was .*"),
        (lambda *_: logging.disable(), "logging: disabled up to is 50; it was 0"),
        (leave_a_jax_option, "JAX's configuration: jax_enable_x64 is True; it was False"),
        (
            lambda patch, _: patch.setattr(board, "read_all", None),
            "the package: ipu_pipeline.processes.board: read_all bound to something else",
        ),
        (
            lambda patch, _: patch.setattr(board, "DIRECTORY_VARIABLE", "X"),
            "the package: ipu_pipeline.processes.board: DIRECTORY_VARIABLE bound to something else",
        ),
        (
            lambda patch, _: patch.setattr(JobHistory, "write", None),
            "the package: ipu_pipeline.processes.launcher.JobHistory: write bound to something else",
        ),
        (lambda *_: sys.argv.append("one more"), "sys: argv is .*'one more'.; it was .*"),
        (lambda *_: sys.path.append("nowhere"), "sys: path is .*'nowhere'.; it was .*"),
        (lambda patch, _: patch.setitem(sys.modules, "json", None), "modules: json is None; it was .*"),
        (lambda *_: np.seterr(over="raise"), "NumPy's error handling: over is 'raise'; it was 'warn'"),
        (lambda *_: gc.disable(), "garbage collection is .False, .*; it was .True, .*"),
        (lambda *_: torch.set_default_dtype(torch.float64), "torch's settings: dtype is .*64; it was .*32"),
    ],
)
def test_what_a_test_leaves_behind_is_told(leave, told, tmp_path, monkeypatch):
    monkeypatch.setattr(leaks, "JOIN_SECONDS", 0)
    monkeypatch.setattr(leaks, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = leaks.state()
    with ExitStack() as left:
        left.callback(logging.disable, logging.NOTSET)
        left.callback(gc.enable)
        left.callback(torch.set_default_dtype, torch.float32)
        left.enter_context(np.errstate())
        leave(monkeypatch, left)
        (line,) = leaks.differences(before)
    assert re.fullmatch(told, line)
