"""Programs that call `ray.train`, of which tests kill processes.

python -m tests.support.on_ray STORAGE SCENARIO [SCENARIO ...]
"""

import functools
import itertools
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import ray

from ipu_pipeline import engine
from ipu_pipeline import ray as ipu_ray
from ipu_pipeline.processes.launcher import JobHistory
from tests.support import engine_resumer
from tests.support.resumable import MICRO_BATCHES, Batches

STEPS = 150
PAUSE = 0.02  # seconds between two steps, in which somebody kills
# Options of the estimator's program.
PROGRAM = ("--dataset", "digits", "--steps", 300, "--batch-size", 16, "--batches-to-accumulate", 4)
PROGRAM += ("--repeat-count", 2)
LONG = 3600.0  # seconds, before which it is ended


def train(num_stages, steps, report, directory=None, pause=0.0):
    """Trains with states in memory, and in a directory each five steps. Returns the state."""
    pipeline = engine_resumer.make_pipeline(num_stages, 1)
    data = Batches()
    state = pipeline.init(jax.random.key(3), next(iter(data)))
    if directory is not None and (saved := [int(path.name[2:]) for path in directory.glob("at*")]):
        state = engine.restore(directory / f"at{max(saved)}", pipeline)
    checkpoints = engine.InMemoryCheckpoints(pipeline)
    state = checkpoints.restore(state)
    batches = itertools.islice(data, MICRO_BATCHES * state.execution_count, None)
    for step in range(state.execution_count, steps):
        checkpoints.save(state)
        state, outputs = pipeline.step(state, batches)
        report(step, outputs.losses)
        if directory is not None and step % 5 == 4:
            engine.save(directory / f"at{step + 1}", state)
        time.sleep(pause)
    return state


def note(directory, **what):
    with (directory / "notes").open("a") as stream:
        stream.write(f"{json.dumps(what)}\n")


def read_notes(directory):
    path = directory / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def num_steps(directory):
    """How many steps have been reported."""
    path = directory / "losses"
    return path.read_text().count("\n") if path.exists() else 0


def work(attempt, num_stages, steps, has_disk, held_at):
    """A line for each step with its losses. Attempts are held at steps until they are ended."""
    note(
        attempt.directory,
        number=attempt.number,
        index=attempt.index,
        count=attempt.count,
        pid=os.getpid(),
        node=ray.get_runtime_context().get_node_id(),
        memory=os.environ.get("IPU_PIPELINE_MEMORY_DIR"),
    )

    def report(step, losses):
        if losses:  # it has the last stage
            text = " ".join(float(one).hex() for loss in losses for one in np.ravel(loss))
            with (attempt.directory / "losses").open("a") as stream:
                stream.write(f"{step} {text}\n")
        if step == held_at.get(attempt.number):
            time.sleep(LONG)

    state = train(num_stages, steps, report, attempt.directory if has_disk else None, PAUSE)
    engine.save(attempt.directory / "state", state)
    if history := JobHistory.of_environment():
        (attempt.directory / f"history {attempt.index}").write_text(history.describe())
    return state.update_count


def fail(attempt):
    note(attempt.directory, number=attempt.number)
    if attempt.index:
        raise ValueError("a mistake of the user")
    time.sleep(LONG)


def run(storage, name, count, num_stages=2, steps=STEPS, has_disk=False, held_at=None, **options):
    given = {"max_failures": 3, "death_timeout": 6, **options}
    what = {"num_stages": num_stages, "steps": steps, "has_disk": has_disk, "held_at": held_at or {}}
    function = functools.partial(work, **what)
    print(f"{name}: {ipu_ray.train(function, count, storage_path=storage, name=name, **given)}", flush=True)


def run_wrong(storage):
    try:
        ipu_ray.train(fail, 2, storage_path=storage, name="wrong")
    except ray.train.WorkerGroupError as error:
        failed = {process: str(one).splitlines()[-1] for process, one in error.worker_failures.items()}
        print("wrong:", failed, flush=True)


def run_program(storage):
    program = ipu_ray.program(
        "answers/ipu_pipeline_estimator.py", *PROGRAM, "--model-dir", storage / "model"
    )
    ipu_ray.train(program, 2, storage_path=storage, name="program", max_failures=1)


def run_nodes(storage):
    """Two nodes, one of which is lost with its memory, and comes again."""
    from ray.cluster_utils import Cluster

    directory = storage / "nodes"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)

    def train_elastically():
        run(storage, "nodes", (1, 2), steps=60, held_at={0: 20, 1: 40}, resize_every=2)

    def await_steps(count, number):
        """Waits for an attempt with so many processes to have come to where it is held, or to its end."""
        while not any((one["number"], one["count"]) == (number, count) for one in read_notes(directory)):
            time.sleep(0.05)
        while num_steps(directory) <= 20 * (number + 1) and training.is_alive():
            time.sleep(0.05)

    training = threading.Thread(target=train_elastically)
    training.start()
    await_steps(2, 0)
    lost = next(one for one in read_notes(directory) if one["node"] == second.node_id)
    cluster.remove_node(second, allow_graceful=False)
    shutil.rmtree(lost["memory"])
    await_steps(1, 1)
    second = cluster.add_node(num_cpus=1)
    training.join()
    ray.shutdown()
    for node in (second, cluster.head_node):
        cluster.remove_node(node, allow_graceful=False)


SCENARIOS = {
    "memory": lambda storage: run(storage, "memory", 2),
    "disk": lambda storage: run(storage, "disk", 3, num_stages=3, has_disk=True, memory_every=None),
    "own": lambda storage: run(storage, "own", 2, steps=10**6, has_disk=True),
    "wrong": run_wrong,
    "program": run_program,
    "nodes": run_nodes,
}


def main(storage, *names):
    if names[0] not in ("own", "nodes"):  # one cluster for all
        ray.init(num_cpus=3, include_dashboard=False)
    for name in names:
        SCENARIOS[name](storage)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
