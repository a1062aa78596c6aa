"""What in-memory checkpoints cost while nothing fails, and how long it takes to go on after a death.

    python -m benchmarks.in_memory.run [--rounds 9] [--kills 5] [--json FILE]

The cost: four stages that sleep, as in benchmarks/emulation, in four processes, each with 12 MB of weights
and state of Adam. Runs of one weight update with a checkpoint before each, and runs without, take turns.

The time to go on: one of two processes that train a small model is killed again and again. What is reported
is the time from the kill to the end of the next run, beyond the time in which two processes that do nothing
else are started and joined, measured before.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import ROOT, Row

MODULE = "benchmarks.in_memory.run"
QUESTION = "in_memory"
NUM_STAGES, NUM_MICRO_BATCHES = 4, 16
FORWARD_MS, BACKWARD_MS = 10.0, 20.0
NUM_PARAMETERS = 2**20  # of a stage; with Adam's state, 12 MB
RUNS_PER_ROUND = 3
MOST_COST, MOST_SECONDS = 1.01, 3.0
MOST_WAIT = 120.0  # seconds, for any one thing


def _launch(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ipu_pipeline", "launch", *map(str, arguments)]
    return subprocess.Popen(command, text=True, cwd=ROOT, **options)


# What it costs.


def work(num_rounds: int) -> None:
    """One of the four processes; the last one prints the seconds of the runs of each round."""
    import jax.numpy as jnp
    import numpy as np

    import ipu_pipeline as ipu
    from benchmarks.emulation import sessions, stages

    sleeping = stages.emulated_stage(FORWARD_MS, BACKWARD_MS)
    x = np.ones([2, 1024], np.float32)

    def make_stage(number: int) -> Any:
        def stage(x: Any) -> Any:
            with ipu.variable_scope(f"stage{number}"):
                w = ipu.get_variable("w", [1024], np.float32, initializer="ones")
                rest = ipu.get_variable("rest", [NUM_PARAMETERS - 1024], np.float32, initializer="zeros")
            return sleeping(w, x) + jnp.sum(rest)

        return stage

    program, infeed, outfeed = sessions.compile_training(
        lambda: list(map(make_stage, range(NUM_STAGES))),
        NUM_STAGES,
        NUM_MICRO_BATCHES,
        lambda: itertools.repeat(x),
        jnp.mean,
        1e-6,
    )
    with ipu.Session() as keeping, ipu.Session() as other:
        keeping.run(infeed.initializer)
        assert keeping.resume() == 0
        for session in (keeping, other):
            session.run(program)
        for number in range(num_rounds):
            found = {}
            for name in ("with", "without") if number % 2 else ("without", "with"):
                session = keeping if name == "with" else other
                session.run(program)
                begin = time.perf_counter()
                for _run in range(RUNS_PER_ROUND):
                    session.run(program)
                found[name] = (time.perf_counter() - begin) / RUNS_PER_ROUND
                session.run(outfeed.dequeue())
            if os.environ["IPU_PIPELINE_PROCESS_ID"] == "0":
                sys.stderr.write(f"round {found['with']!r} {found['without']!r}\n")


def measure_cost(num_rounds: int) -> Row:
    """A run with a checkpoint before it, against one without."""
    work = ("-m", MODULE, "--side", "work", "--rounds", num_rounds)
    launched = _launch("-n", NUM_STAGES, "--restarts", 1, *work, stderr=subprocess.PIPE)
    _out, errors = launched.communicate(timeout=MOST_WAIT + 10 * num_rounds)
    found = re.findall(r"^\[0\] round (\S+) (\S+)$", errors, re.MULTILINE)
    if launched.returncode or len(found) != num_rounds:
        raise RuntimeError(errors)
    ours, other = zip(*(map(float, times) for times in found), strict=True)
    case = "4 stages in 4 processes, 16 x (10 + 20) ms, 12 MB each: with checkpoints, against without"
    return harness.compare(QUESTION, case, ours[1:], other[1:], target=MOST_COST)


# How long it takes to go on.


class Losses:
    """The lines that a job writes into a file, one for each run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def await_more(self, count: int) -> None:
        """Waits until so many more lines are there than now."""
        begin, deadline = self._count(), time.monotonic() + MOST_WAIT
        while self._count() < begin + count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing new in {self._path}")
            time.sleep(0.005)

    def _count(self) -> int:
        return self._path.read_text().count("\n") if self._path.exists() else 0


def _time_start() -> float:
    """Seconds until two processes are started and joined, and have their devices."""
    program = (
        "import ipu_pipeline, jax, time; ipu_pipeline.distributed.initialize(); jax.devices(); "
        "import sys; sys.stderr.write(f'ready {time.time()}\\n')"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        begin = time.time()
        launched = _launch("-n", 2, file.name, stderr=subprocess.PIPE)
        _out, errors = launched.communicate(timeout=MOST_WAIT)
    return max(map(float, re.findall(r"ready (\S+)", errors))) - begin


def _time_recovery(num_kills: int) -> list[float]:
    """Seconds from the kill of a process to the end of the next run."""
    whole = []
    with tempfile.TemporaryDirectory() as folder:
        losses = Losses(Path(folder) / "losses")
        program = ("-m", "tests.support.resumer", folder, 10**6, 4, 1)
        job = _launch("-n", 2, "--restarts", 10**6, *program, stderr=subprocess.DEVNULL)
        try:
            losses.await_more(20)
            for number in range(num_kills):
                losses.await_more(5)
                children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
                begin = time.monotonic()
                os.kill(int(children[number % 2]), signal.SIGKILL)
                time.sleep(0.2)  # what had been computed is written
                losses.await_more(1)
                whole.append(time.monotonic() - begin)
        finally:
            job.terminate()
            job.wait()
    return whole


def measure_recovery(num_kills: int) -> Row:
    """From the kill of a process to the end of the next run."""
    starts = [_time_start() for _kill in range(num_kills)]
    whole = _time_recovery(num_kills)
    beyond = [one - other for one, other in zip(whole, starts, strict=True)]
    return Row(
        QUESTION,
        "4 stages in 2 processes: from a kill to the next run, beyond the start of Python and JAX",
        f"{statistics.median(whole):.2f} s",
        f"{statistics.median(starts):.2f} s",
        statistics.median(beyond),
        (min(beyond), max(beyond)),
        MOST_SECONDS,
    )


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    if args.side is not None:
        work(args.rounds)
        return
    num_rounds, num_kills = (4, 3) if args.short else (args.rounds, args.kills)
    harness.report([measure_cost(num_rounds), measure_recovery(num_kills)], args.json)


if __name__ == "__main__":
    main()
