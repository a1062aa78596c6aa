"""Jobs on Ray clusters, compared bit by bit with a process that nothing disturbs."""

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import ray

from ipu_pipeline import engine
from ipu_pipeline.errors import ProcessError
from ipu_pipeline.launching import ray_job as launching
from tests.support import engine_resumer, on_ray
from tests.support.programs import ESTIMATOR, ROOT, Started, environment, run, wait_for

pytestmark = pytest.mark.thorough
TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="module")
def undisturbed():
    """The losses of each step, and the state after the last one, of so many stages and steps."""
    found = {}

    def train(num_stages, steps):
        if (num_stages, steps) not in found:
            losses = []
            state = on_ray.train(num_stages, steps, lambda _step, loss: losses.append(np.ravel(loss)))
            found[num_stages, steps] = (losses, state)
        return found[num_stages, steps]

    return train


def assert_same(directory, expected, num_stages, most_again=0):
    """The losses of all steps, of which a few may have been done again, and the state at the end."""
    losses, state = expected
    lines = (directory / "losses").read_text().splitlines()
    for line in lines:
        step, told = line.split(" ", 1)
        assert told == " ".join(float(one).hex() for one in losses[int(step)]), step
    assert {int(line.split()[0]) for line in lines} == set(range(len(losses)))
    assert len(lines) <= len(losses) + most_again
    pipeline = engine_resumer.make_pipeline(num_stages, 1)
    pipeline.init(jax.random.key(3), next(iter(on_ray.Batches())))
    own = engine.restore(directory / "state", pipeline)
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(state), strict=True):
        assert jax.numpy.array_equal(one, other)


class Driver:
    """A program that calls `ray.train`, with a cluster of its own."""

    def __init__(self, storage, *scenarios, **variables):
        self.log = storage / f"log of {scenarios[0]}"
        self.folder = tempfile.mkdtemp(
            prefix="ray", dir="/tmp"
        )  # of Ray's sockets, whose paths must be short
        own = {
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": "",
            "RAY_TMPDIR": self.folder,
            "RAY_AUTH_MODE": "disabled",
        }
        with self.log.open("w") as log:
            self.process = Started(
                [sys.executable, "-m", "tests.support.on_ray", str(storage), *scenarios],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**environment(as_tests=True), **own, **variables},
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.process.kill()
        for pid in self.find_processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder)

    def find_processes(self, *names):
        """The numbers of all processes of its cluster, which have its folder, or of those with a name."""
        folder = f"RAY_TMPDIR={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                is_own = folder in (path / "environ").read_bytes().split(b"\0")
                command = (path / "cmdline").read_bytes().decode()
                if is_own and (not names or any(name in command for name in names)):
                    found.append(int(path.name))
        return [pid for pid in found if pid != self.process.pid]

    def wait_for(self, condition, seconds=300):
        def holds():
            assert self.process.poll() is None, self.log.read_text()[-8000:]
            return condition()

        wait_for(holds, seconds)

    def await_attempt(self, directory, number, count=2):
        """The numbers of an attempt's processes by their indices, after ten of its steps."""

        def there():
            return [one for one in on_ray.read_notes(directory) if one["number"] == number]

        self.wait_for(lambda: len(there()) == count)
        before = on_ray.num_steps(directory)
        self.wait_for(lambda: on_ray.num_steps(directory) >= before + 10)
        return {one["index"]: one["pid"] for one in there()}

    def finish(self):
        try:
            assert self.process.wait(300) == 0, self.log.read_text()[-8000:]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log.read_text()[-8000:]) from None
        return self.log.read_text()


def find_memory(directory):
    """The directories in memory that a job has left; other jobs of this machine may have some."""
    return [one["memory"] for one in on_ray.read_notes(directory) if Path(one["memory"]).exists()]


def test_processes_are_killed_and_stopped(tmp_path, undisturbed):
    """Kill -9 of each of two at random moments, and SIGSTOP; of three without memory; a user's error."""
    generator = random.Random(3)  # noqa: S311  # of moments
    with Driver(tmp_path, "memory", "disk", "wrong") as driver:
        for number, victim in enumerate(generator.sample(range(2), 2)):
            processes = driver.await_attempt(tmp_path / "memory", number)
            time.sleep(generator.uniform(0, 0.3))
            os.kill(processes[victim], signal.SIGKILL)
        os.kill(driver.await_attempt(tmp_path / "memory", 2)[1], signal.SIGSTOP)
        os.kill(driver.await_attempt(tmp_path / "disk", 0, count=3)[0], signal.SIGKILL)
        log = driver.finish()
    assert_same(tmp_path / "memory", undisturbed(2, on_ray.STEPS), 2, most_again=3 * 2)
    assert_same(tmp_path / "disk", undisturbed(3, on_ray.STEPS), 3, most_again=5)
    told = "The job has been started again 3 times. The last time, training has gone on with run"
    assert [(tmp_path / "memory" / f"history {index}").read_text()[: len(told)] for index in (0, 1)] == [
        told
    ] * 2
    assert re.search(r"goodput 0\.\d+: .* the job was started again 3 times", log)
    assert "wrong: {1: 'a mistake of the user'}" in log
    assert len(on_ray.read_notes(tmp_path / "wrong")) == 2  # it was tried once
    assert not find_memory(tmp_path / "memory")


def test_a_node_is_lost_with_its_memory_and_another_one_comes(tmp_path, undisturbed):
    """Without checkpoints on disk; the nodes have a token."""
    with Driver(tmp_path, "nodes", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as driver:
        log = driver.finish()
    assert_same(tmp_path / "nodes", undisturbed(2, 60), 2, most_again=2 * 2)
    assert [one["count"] for one in on_ray.read_notes(tmp_path / "nodes")] == [2, 2, 1, 2, 2]
    assert "no token" not in log


def test_an_unchanged_program_of_tensorflows_interface(tmp_path):
    """A process is killed while it trains, without a checkpoint on disk."""
    with Driver(tmp_path, "program") as driver:
        metrics = tmp_path / "model" / "metrics.jsonl"
        driver.wait_for(lambda: metrics.exists() and len(read_losses(metrics.parent)) > 20)
        os.kill(driver.find_processes("RayTrainWorker")[-1], signal.SIGKILL)
        log = driver.finish()
    assert "restored from memory" in log
    run(ESTIMATOR, *on_ray.PROGRAM, "--model-dir", tmp_path / "plain", as_tests=True)
    assert read_losses(tmp_path / "model") == read_losses(tmp_path / "plain")
    assert read_losses(tmp_path / "model" / "eval") == read_losses(tmp_path / "plain" / "eval") != {}


def read_losses(directory):
    """Step -> loss, as an estimator has written it."""
    text = (directory / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line["value"] for line in lines if line["name"] == "loss"}


def test_a_driver_is_killed_and_another_one_interrupted(tmp_path):
    """The second one goes on from disk, and removes what the first one had in memory. Nothing is left."""
    directory = tmp_path / "own"
    with Driver(tmp_path, "own") as driver:
        driver.await_attempt(directory, 0)
        driver.process.kill()  # agents of Ray's stay for a minute
        wait_for(lambda: not driver.find_processes("RayTrainWorker", "_NodeMemory", "coordinator.py"))
    before = on_ray.num_steps(directory)
    with Driver(tmp_path, "own") as driver:
        driver.wait_for(lambda: on_ray.num_steps(directory) > before + 10)
        assert len(set(find_memory(directory))) == 1
        os.killpg(driver.process.pid, signal.SIGINT)
        assert driver.process.wait(60) == -signal.SIGINT
        wait_for(lambda: not driver.find_processes())
    assert not find_memory(directory)
    first = int((directory / "losses").read_text().splitlines()[before].split()[0])
    assert before - 5 <= first <= before
    assert first % 5 == 0


def make_node(**resources):
    return {"Alive": True, "NodeID": "a", "Resources": resources}


def test_open_ports(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [make_node(), make_node()])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.warns(UserWarning, match="no token: anyone who can reach its ports can run programs"):
        launching._warn_of_open_ports()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    launching._warn_of_open_ports()


def test_a_cluster_that_never_has_room(monkeypatch, caplog):
    """Three processes of two CPUs on nodes of three and of two: there is room for two."""
    monkeypatch.setattr(ray, "nodes", lambda: [make_node(CPU=3.0), make_node(CPU=2.0)])
    asked = []
    monkeypatch.setattr(launching, "request_resources", lambda bundles: asked.append(bundles))
    launching._await_resources(2, {"CPU": 2.0}, 0.01)
    launching._await_resources(50, {"CPU": 0.1}, 0.01)
    with pytest.raises(TimeoutError, match="3 processes need {'CPU': 2.0} each, .* room for 2"):
        launching._await_resources(3, {"CPU": 2.0}, 0.01)
    assert asked == [[{"CPU": 2.0}] * 3, []]
    assert "It is waited for" in caplog.text


@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=str
)
def test_signals(number, end, monkeypatch):
    """Ray's handler ends the program with status 0, and has none for SIGTERM."""
    before = signal.getsignal(number)

    def fit(trainer):
        trainer._register_sigint_handler(None)
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr(
        launching.DataParallelTrainer,
        "_register_sigint_handler",
        lambda *_given: signal.signal(signal.SIGINT, lambda *_given: sys.exit(0)),
    )
    monkeypatch.setattr(launching._Trainer, "fit", fit)
    with pytest.raises(end) as caught:
        object.__new__(launching._Trainer).run(is_own_cluster=True)
    assert caught.type is KeyboardInterrupt or caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("is_there", [False, True])
def test_the_cluster(is_there, monkeypatch):
    """Not address="auto", which is any of this machine, also another job's."""
    calls = []

    def init(**given):
        calls.append(set(given))
        if is_there and given:
            raise ValueError("num_cpus must not be provided")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    with launching._cluster(2) as is_own:
        assert is_own is not is_there
    assert calls == [{"num_cpus", "include_dashboard"}, *([set()] if is_there else []), "shutdown"]


def test_the_failure_that_others_follow_from(monkeypatch, caplog):
    monkeypatch.setattr(launching, "_last_failure", None)
    lost = ray.exceptions.RayActorError()
    failures = launching._Failures()
    failures.after_exception(
        None, {0: ProcessError("Process 1 has ended."), 1: ValueError("no data\nat all")}
    )
    failures.after_exception(None, {0: lost})  # a later one
    assert launching._last_failure[1] == "process 1 raised ValueError: no data"
    assert "process 1 raised ValueError: no data." in caplog.text
    assert launching._describe_error(lost) == "was lost"
