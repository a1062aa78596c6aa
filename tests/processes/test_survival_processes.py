"""Processes that train together while one of them is killed: none hangs, and training goes on."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing.checkpoints import CheckpointSeries
from tests.support.estimating import assert_same_variables, input_fn, make_estimator
from tests.support.joined import hold_port
from tests.support.programs import begin

KILLS = int(os.environ.get("KILLS", "50"))
STEPS, DEATH_TIMEOUT = 64 * KILLS, 6  # of which none is likely to take 64
GUARD = 400  # seconds


def assert_goes_on_alone(directory, other, steps):
    """One process alone goes on, and has the variables that training without an end has."""
    found = []
    for folder in (directory, other):
        estimator = make_estimator(folder)
        estimator.train(input_fn, max_steps=steps)
        found.append(estimator)
        ipu.config.reset_ipu_configuration()
    assert_same_variables(*found)


def find_children(process):
    """The numbers by which the system knows the processes that it started, from the first one on."""
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@pytest.mark.soak
def test_killed_at_random_moments_and_started_again(tmp_path):
    """kill -9 of one process in the middle of steps: the other says why it ends, and training goes on."""
    generator = random.Random(KILLS)  # noqa: S311  # of moments
    launch = ("-m", "ipu_pipeline", "launch", "-n", 2, "--restarts", KILLS)
    program = ("-m", "tests.support.survivor", tmp_path, STEPS, "pause=0.1")
    launcher = begin(*launch, "--death-timeout", DEATH_TIMEOUT, *program, output=subprocess.DEVNULL)
    victims, saved, seen = [], None, []
    while len(victims) < KILLS:
        while (step := CheckpointSeries(tmp_path / "checkpoints").latest()) == saved:  # it trains
            assert launcher.poll() is None, launcher.stderr.read()
            time.sleep(0.01)
        time.sleep(0.5 * generator.random())
        children = find_children(launcher)
        if len(children) == 2 and not set(children) & set(seen):
            victims.append(generator.randrange(2))
            os.kill(int(children[victims[-1]]), signal.SIGKILL)
            seen += children
        saved = step
    _out, errors = launcher.communicate(timeout=60 * KILLS)
    assert launcher.returncode == 0, errors
    ends = re.findall(r"launch: process (\d) was ended by SIGKILL", errors)
    assert list(map(int, ends)) == victims, errors
    for victim in set(victims):
        assert re.search(rf"\[{1 - victim}\].*[Pp]rocess {victim} .*has died", errors), errors
    assert errors.count("the last action finished") >= KILLS
    assert len(re.findall(r"\[0\].*Training goes on from step", errors)) == KILLS
    assert_goes_on_alone(tmp_path, tmp_path / "whole", STEPS)


@pytest.mark.thorough
def test_a_signal_to_one_ends_all_after_the_same_update(tmp_path):
    num_processes, address = 2, hold_port()
    joining = {
        "IPU_PIPELINE_COORDINATOR_ADDRESS": f"127.0.0.1:{address.getsockname()[1]}",
        "IPU_PIPELINE_NUM_PROCESSES": str(num_processes),
        "PJRT_NPROC": "1",
    }
    program = ("-m", "tests.support.survivor", tmp_path, 4000, "pause=0.05")
    with address, contextlib.ExitStack() as left:
        processes = []
        for number in range(num_processes):
            log = left.enter_context((tmp_path / f"log{number}").open("w"))
            options = {
                "output": subprocess.DEVNULL,
                "error_output": log,
                "IPU_PIPELINE_PROCESS_ID": str(number),
            }
            processes.append(begin(*program, **options, **joining))
        while CheckpointSeries(tmp_path / "checkpoints").latest() is None:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.02)
        processes[0].send_signal(signal.SIGTERM)
        statuses = [process.wait(GUARD) for process in processes]
    errors = [(tmp_path / f"log{number}").read_text() for number in range(num_processes)]
    assert statuses == [128 + signal.SIGTERM] * 2, errors
    assert not any("Traceback" in text for text in errors), errors
    step = CheckpointSeries(tmp_path / "checkpoints").steps()[-1]
    assert all(f"at step {step}" in text for text in errors), errors
    assert_goes_on_alone(tmp_path, tmp_path / "whole", step + 8)
