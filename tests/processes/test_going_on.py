"""Jobs whose processes are killed at random moments go on with the run that they were in, bit by bit."""

import errno
import itertools
import os
import random
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.checkpointing import in_memory
from ipu_pipeline.processes.launcher import MEMORY_VARIABLE, RESTART_VARIABLE
from ipu_pipeline.tf1.session import session as session_module
from tests.support import engine_resumer, front, joined
from tests.support.killing import Job
from tests.support.resumable import Training
from tests.support.resumer import make_training

KILLS = int(os.environ.get("KILLS", "50"))
LAYOUTS = {  # processes, stages, replicas
    "4 stages in 2 processes": (2, 4, 1),
    "2 x 2 replicas in 4 processes": (4, 2, 2),
    "4 stages in 4 processes": (4, 4, 1),
    "2 x 4 replicas in 8 processes": (8, 4, 2),
}
RUNS = 40 * KILLS


@pytest.fixture(scope="module")
def uninterrupted():
    """The losses and variables of the same training in one process, without any failure."""

    def train(num_stages, num_replicas, runs):
        front.ipu_config(num_stages * num_replicas).configure_ipu_system()
        training = make_training(num_stages, num_replicas)
        with front.session_of(training, seed=3) as session:
            losses = [np.asarray(training.run(session, 1)) for _run in range(runs)]
            variables = session.variables
        ipu.config.reset_ipu_configuration()
        return losses, variables

    return train


def assert_same_losses(job, losses):
    found = job.losses()
    assert sorted(found) == list(range(len(losses)))
    for number, loss in enumerate(losses):
        assert found[number] == " ".join(float(one).hex() for one in np.ravel(loss)), f"run {number}"


def assert_same(job, expected):
    losses, variables = expected
    assert_same_losses(job, losses)
    own = job.variables()
    assert {name.replace("/", "|") for name in variables} == own.keys()
    for name, value in variables.items():
        np.testing.assert_array_equal(own[name.replace("/", "|")], value, err_msg=name)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_random_moments(layout, tmp_path, uninterrupted):
    """One or two at once, while they start, compile, run, write, or go on after the last kill."""
    generator = random.Random(KILLS)  # noqa: S311  # of moments
    num_processes, num_stages, num_replicas = LAYOUTS[layout]
    job = Job(tmp_path / "job", LAYOUTS[layout], RUNS, "--restarts", 10 * KILLS)
    kills = 0
    while kills < KILLS and job.is_alive():
        if kills % 3 == 2:  # wherever it is
            time.sleep(generator.uniform(0, 8))
        else:
            job.await_runs(generator.randrange(1, 5))
            time.sleep(generator.uniform(0, 0.05))
        num_victims = 2 if kills % 3 == 1 else 1
        kills += job.kill(generator.sample(range(num_processes), num_victims))
    job.await_end(120)
    assert kills == KILLS
    log = job.log.read_text()
    assert "was ended by SIGKILL" in log
    assert "training has gone on with run" in log
    # The run in which a process died is done again, and the one before if that was not written yet.
    assert job.num_runs() <= RUNS + 2 * KILLS
    assert_same(job, uninterrupted(num_stages, num_replicas, RUNS))


@pytest.mark.soak
def test_a_jax_program(tmp_path):
    """Its steps give their states away; the place in the data is kept beside the state."""
    layout = num_processes, num_stages, num_replicas = LAYOUTS["2 x 2 replicas in 4 processes"]
    generator = random.Random(num_replicas)  # noqa: S311  # of moments
    job = Job(tmp_path, layout, 120, "--restarts", 10, program="engine_resumer")
    for _kill in range(2):
        job.await_runs(generator.randrange(5, 20))
        time.sleep(generator.uniform(0, 0.05))
        assert job.kill([generator.randrange(num_processes)])
    job.await_end(120)
    assert "training has gone on with run" in job.log.read_text()
    assert job.num_runs() <= 120 + 2 * 2
    losses = []
    pipeline = engine_resumer.make_pipeline(num_stages, num_replicas)
    state = engine_resumer.train(pipeline, 120, lambda _step, found: losses.append(found), num_replicas)
    assert_same_losses(job, losses)
    found = engine.restore(tmp_path / "state", pipeline)
    for one, own in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        assert jax.numpy.array_equal(one, own)


@pytest.mark.soak
def test_a_poptorch_program(tmp_path):
    """Its processes keep buffers of their own replicas."""
    import torch  # here, as an extra

    from tests.support import poptorch_resumer

    calls = 30
    options = {"program": "poptorch_resumer", "OMP_NUM_THREADS": "1"}
    job = Job(tmp_path, (2, 2, 2), calls, "--restarts", 10, **options)
    job.await_runs(7, 120)
    assert job.kill([1])
    job.await_end(120)
    assert "training has gone on with run" in job.log.read_text()
    assert job.num_runs() <= calls + 2
    executor, optimizer = poptorch_resumer.make_model(2)
    losses = []
    poptorch_resumer.train(executor, optimizer, calls, lambda _call, found: losses.append(found.numpy()), 2)
    assert_same_losses(job, [loss.reshape(-1, 2)[:, 0] for loss in losses])  # of its first replica
    weights, state = torch.load(tmp_path / "state.pt")
    found, expected = dict(weights), dict(executor.state_dict())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    found, expected = map(jax.tree.leaves, (state, optimizer.state_dict()))
    for one, own in zip(found, expected, strict=True):
        assert torch.equal(one, own) if isinstance(own, torch.Tensor) else one == own


def go_on_after(tmp_path, uninterrupted, harm):
    """A job of two processes that is done some harm once, and what its launcher says."""
    job = Job(tmp_path / "job", (2, 4, 1), 40, "--restarts", 2)
    job.await_runs(8, 400)
    harm(job)
    job.await_end(400)
    assert job.num_runs() <= 40 + 2
    assert_same(job, uninterrupted(4, 1, 40))
    return [line for line in job.log.read_text().splitlines() if line.startswith("ipu-pipeline launch: ")]


@pytest.mark.thorough
def test_a_process_is_killed(tmp_path, uninterrupted):
    """The job goes on from memory, bit by bit, with the run in which it was."""
    options = ("--restarts", 2, "--death-timeout", 120)
    job = Job(tmp_path, (2, 4, 1), 20, *options, RESUMER_DIES="1 8 0")
    job.await_end(400)
    assert job.num_runs() <= 20 + 2
    assert_same(job, uninterrupted(4, 1, 20))
    assert "process 1 was ended by SIGKILL" in job.log.read_text()
    assert "training has gone on with run" in job.log.read_text()


@pytest.mark.soak
def test_the_coordinator_is_killed(tmp_path, uninterrupted):
    """JAX ends all processes then; the coordinator has the environment of process 0."""

    def kill_coordinator(job):
        def read(process, name):
            try:
                return (Path("/proc") / str(process) / name).read_bytes().split(b"\0")
            except OSError:  # it has ended, or is another user's
                return []

        first = read(job.children()[0], "environ")
        (secret,) = [value for value in first if value.startswith(b"IPU_PIPELINE_SECRET=")]
        (coordinator,) = [
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if secret in read(path.name, "environ")
            and b"coordinator.py" in b" ".join(read(path.name, "cmdline"))
        ]
        os.kill(coordinator, signal.SIGKILL)

    said = go_on_after(tmp_path, uninterrupted, kill_coordinator)
    assert any("was ended by SIGABRT" in line for line in said), said
    assert any("training has gone on with run" in line for line in said), said


@pytest.mark.soak
def test_a_process_that_is_stopped(tmp_path, uninterrupted):
    said = go_on_after(tmp_path, uninterrupted, lambda job: os.kill(job.children()[1], signal.SIGSTOP))
    assert any("no sign of it for" in line for line in said), said
    assert any("process 1 has not ended by itself" in line for line in said), said
    assert any("training has gone on with run" in line for line in said), said


def fail_to_write(directories, how):
    """Trains in two processes, the second of which cannot take or write its fourth checkpoint."""
    index = int(os.environ["IPU_PIPELINE_PROCESS_ID"])
    os.environ[MEMORY_VARIABLE] = directories[index]
    if how == "other variables":
        os.environ[RESTART_VARIABLE] = str(index)
    numbers = itertools.count()
    name = "parts_of" if how == "takes" else "flatten"  # each is called once for a checkpoint
    function = getattr(session_module if how == "takes" else in_memory, name)

    def failing(*given):
        if index == 1 and next(numbers) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*given)

    setattr(session_module if how == "takes" else in_memory, name, failing)
    front.ipu_config(2).configure_ipu_system()
    training = Training(2)
    with front.session_of(training, seed=3) as session:
        try:
            session.resume()
        except ValueError as error:
            return str(error)
        training.run(session, 8)
        left = [path.name.partition("-")[2] for path in Path(directories[index]).iterdir()]
        return session.update_count(), sorted(left)


@pytest.mark.parametrize(
    ("how", "is_shared"),
    [
        pytest.param("writes", False, marks=pytest.mark.thorough),
        pytest.param("writes", True, marks=pytest.mark.soak),
        pytest.param("takes", False, marks=pytest.mark.soak),
        pytest.param("other variables", True, marks=pytest.mark.soak),
    ],
)
def test_a_process_that_cannot_write_holds_up_nobody(how, is_shared, tmp_path):
    """Training goes on, on one machine and on two. The last checkpoint that both have stays."""
    directories = [tmp_path / "memory0", tmp_path / ("memory0" if is_shared else "memory1")]
    run = tmp_path / "run"
    run.mkdir()
    given = (list(map(str, directories)), how)
    started = joined.start(fail_to_write, 2, None, *given, directory=run, joins_itself=True)
    found = joined.finish(started, run, timeout=400)
    if how == "other variables":
        message = f"{RESTART_VARIABLE} must be the same in all processes of a run: 0 in process 0, 1 in"
        assert all(message in told for told in found), found
        return
    for updates, left in found:
        assert updates == 8
        assert {"2-0-0of2", "2-0-1of2"} <= set(left)  # on either machine
        assert not any(name.startswith("4-") for name in left)
