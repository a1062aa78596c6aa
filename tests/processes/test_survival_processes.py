"""Processes that train together while one of them is killed: none hangs, and training goes on."""

import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing.checkpoints import CheckpointSeries
from tests.support.estimating import assert_same_variables, input_fn, make_estimator
from tests.support.joined import hold_port
from tests.support.programs import begin

KILLS = int(os.environ.get("KILLS", "1"))
STEPS, DEATH_TIMEOUT = 64 * KILLS, 6  # of which none is likely to take 64


def start(directory, num_processes, *options):
    """The processes, which train for `STEPS` together, or go on with that."""
    held = hold_port()
    address = f"127.0.0.1:{held.getsockname()[1]}"
    processes = []
    for number in range(num_processes):
        joining = {
            "IPU_PIPELINE_COORDINATOR_ADDRESS": address,
            "IPU_PIPELINE_NUM_PROCESSES": str(num_processes),
            "IPU_PIPELINE_PROCESS_ID": str(number),
            "IPU_PIPELINE_DEATH_TIMEOUT": str(DEATH_TIMEOUT),
            "PJRT_NPROC": "1",
        }
        program = ("-m", "tests.support.survivor", directory, STEPS, *options)
        processes.append(begin(*program, output=subprocess.DEVNULL, **joining))
    processes[0].held = held  # until the end
    return processes


def finish(processes, timeout):
    """What each wrote to the standard error; none of them is left, however this ends."""
    errors = [""] * len(processes)

    def read(number):
        errors[number] = processes[number].stderr.read()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(processes))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            errors[processes.index(process)] += "\nIT HANGS"
    for process, thread in zip(processes, threads, strict=True):
        thread.join(20)
        process.stderr.close()
    processes[0].held.close()
    assert not any("IT HANGS" in text for text in errors), "\n---\n".join(errors)
    return errors


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The estimator of one process that nobody killed."""
    estimator = make_estimator(tmp_path_factory.mktemp("uninterrupted"))
    estimator.train(input_fn, max_steps=STEPS)
    ipu.config.reset_ipu_configuration()
    return estimator


def go_on_alone(directory, uninterrupted):
    """Another number of processes, one, comes to the end, with the variables that it would have had."""
    estimator = make_estimator(directory)
    estimator.train(input_fn, max_steps=STEPS)
    assert_same_variables(estimator, uninterrupted)


def find_children(process):
    """The numbers by which the system knows the processes that it started, from the first one on."""
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@pytest.mark.thorough
def test_killed_at_random_moments_and_started_again(tmp_path, uninterrupted):
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
    ipu.config.reset_ipu_configuration()
    go_on_alone(tmp_path, uninterrupted)


@pytest.mark.thorough
def test_a_signal_to_one_ends_all_after_the_same_update(tmp_path, uninterrupted):
    processes = start(tmp_path, 2, "pause=0.05")
    while CheckpointSeries(tmp_path / "checkpoints").latest() is None:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[0].send_signal(signal.SIGTERM)
    errors = finish(processes, 120)
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, errors
    assert not any("Traceback" in text for text in errors), errors
    step = CheckpointSeries(tmp_path / "checkpoints").steps()[-1]
    assert all(f"at step {step}" in text for text in errors), errors
    go_on_alone(tmp_path, uninterrupted)
