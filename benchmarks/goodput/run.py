"""How much of a job's time is training, if its processes die again and again.

    python -m benchmarks.goodput.run [--minutes 20] [--every 20] [--processes 8 2] [--kills 5] [--json FILE]

A job of stages that sleep, as in benchmarks/emulation, each in a process of its own, is started by
`ipu-pipeline launch --restarts`. One of them is killed at random moments. The figure is the goodput in the
launcher's last line. Afterwards the training is repeated with stages that do not sleep, in processes that
are not killed. Its losses must be equal to the last bit.

Then jobs of two processes are started in turn by the launcher and by `ray.train`, and a process of each is
killed: how much longer does it take on Ray until the next run is done?
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import ROOT, Row
from benchmarks.in_memory.run import Losses

MODULE = "benchmarks.goodput.run"
QUESTION = "goodput"
NUM_MICRO_BATCHES = 16
FORWARD_MS, BACKWARD_MS = 10.0, 20.0
WIDTH = 1024
LEAST = 0.9
MOST_ON_RAY = 2.0
MOST_WAIT = 120.0  # seconds, for the start and the end


def _make_data() -> Iterator[Any]:
    import numpy as np

    for number in itertools.count():
        yield np.random.default_rng(number).normal(1.0, 0.1, [2, WIDTH]).astype(np.float32)


def work(num_stages: int, folder: Path, num_runs: int | None) -> None:
    """Trains, as one of the processes. The process of the last stage writes a line of losses for each run.

    Args:
      num_stages: the number of stages, and of IPUs.
      folder: where the lines go.
      num_runs: the number of runs, in which stages do not sleep; None: trains until it is ended.
    """
    import jax.numpy as jnp
    import numpy as np

    import ipu_pipeline as ipu
    from benchmarks.emulation import sessions, stages

    times = (FORWARD_MS, BACKWARD_MS) if num_runs is None else (0.0, 0.0)

    def make_stage(number: int) -> Any:
        sleeping = stages.emulated_stage(*times)

        def stage(x: Any) -> Any:
            with ipu.variable_scope(f"stage{number}"):
                w = ipu.get_variable("w", [WIDTH], np.float32, initializer="ones")
            return ipu.layers.Dropout(0.01)(sleeping(w, x))

        return stage

    program, infeed, outfeed = sessions.compile_training(
        lambda: list(map(make_stage, range(num_stages))),
        num_stages,
        NUM_MICRO_BATCHES,
        _make_data,
        lambda y: jnp.mean((y - 2) ** 2),
        1e-3,
    )
    with ipu.Session(seed=1) as session:
        session.run(infeed.initializer)
        first = session.resume()
        for number in itertools.count(first) if num_runs is None else range(first, num_runs):
            session.run(program)
            losses = np.asarray(session.run(outfeed.dequeue()))
            if losses.size:  # it has the last stage
                with (folder / "losses").open("a") as stream:
                    stream.write(f"{number} {' '.join(loss.hex() for loss in losses.ravel().tolist())}\n")


def _read_losses(folder: Path) -> dict[int, str]:
    """Run -> its losses. A run that was done again must have the same ones."""
    found: dict[int, str] = {}
    for line in (folder / "losses").read_text().splitlines():
        number, losses = line.split(" ", 1)
        if found.setdefault(int(number), losses) != losses:
            raise RuntimeError(f"run {number} had other losses when it was done again")
    return found


def measure(num_processes: int, minutes: float, every: float) -> Row:
    """Runs the job for so long, with a death after so many seconds on average.

    Args:
      num_processes: its processes.
      minutes: how long.
      every: the seconds.
    """
    generator = random.Random(0)  # noqa: S311  # of moments
    launch = [sys.executable, "-m", "ipu_pipeline", "launch", "-n", str(num_processes)]
    side = ["--side", "work", "--processes", str(num_processes), "--folder"]
    with tempfile.TemporaryDirectory() as name:
        folder, undisturbed = Path(name) / "job", Path(name) / "undisturbed"
        folder.mkdir()
        undisturbed.mkdir()
        side = ["-m", MODULE, *side]
        with (Path(name) / "log").open("w") as log:
            command = [*launch, "--restarts", "1000000", *side, str(folder)]
            job = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            deaths = _kill(job, folder / "losses", minutes, every, generator)
        told = (Path(name) / "log").read_text()
        goodput = re.search(r"goodput (\S+): the runs took (\S+ s) of (\S+ s)", told)
        if goodput is None:
            raise RuntimeError(told[-4000:])
        waits = [float(seconds) for seconds in re.findall(r"gone on with run .*, (\S+) s after", told)]
        found = _read_losses(folder)
        again = [*launch, *side, str(undisturbed), "--runs", str(len(found))]
        subprocess.run(again, cwd=ROOT, check=True, capture_output=True)
        if found != _read_losses(undisturbed):
            raise RuntimeError("the losses are not those of a run without deaths")
    waits.sort()
    wait = f", on again after {waits[len(waits) // 2]:.1f} s (median)" if waits else ""
    case = (
        f"{num_processes} stages in {num_processes} processes: {minutes:.3g} min, {deaths} deaths{wait}; "
        f"{len(found)} runs with the same losses as without deaths"
    )
    return Row(QUESTION, case, goodput[2], goodput[3], float(goodput[1]), None, LEAST, at_most=False)


def _kill(
    job: subprocess.Popen[Any],
    losses: Path,
    minutes: float,
    every: float,
    generator: random.Random,
) -> int:
    """Kills one process after the other, and ends the job; how many it has killed."""
    try:
        begin = time.monotonic()
        while not losses.exists():
            if time.monotonic() > begin + MOST_WAIT or job.poll() is not None:
                raise RuntimeError("the job does not train")
            time.sleep(0.05)
        end, deaths = time.monotonic() + 60 * minutes, 0
        while (now := time.monotonic()) < end:
            time.sleep(min(generator.expovariate(1 / every), end - now))
            if time.monotonic() < end:
                children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
                if children:
                    os.kill(int(generator.choice(children)), signal.SIGKILL)
                    deaths += 1
        return deaths
    finally:
        job.terminate()
        job.wait(MOST_WAIT)


# The time from a kill to the next run.


def train_on_ray(folder: Path) -> None:
    """Trains in two processes until it is ended."""
    from ipu_pipeline import ray

    program = ray.program("tests/support/resumer.py", folder, 10**6, 4, 1)
    ray.train(program, 2, storage_path=folder, name="job", max_failures=-1)


def _find_on_launcher(job: subprocess.Popen[Any], _folder: str) -> list[int]:
    return list(map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()))


def _find_on_ray(_job: subprocess.Popen[Any], folder: str) -> list[int]:
    """The processes that train, of the cluster with this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            is_ours = f"RAY_TMPDIR={folder}\0".encode() in (path / "environ").read_bytes()
            if is_ours and b"RayTrainWorker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def _time_kill(
    command: Callable[[str], Sequence[str]], find: Callable[[Any, str], list[int]], victim: int
) -> float:
    """Seconds from the kill of a process of a new job to the end of the next run."""
    with tempfile.TemporaryDirectory(prefix="ray") as name:  # Ray's sockets need a short path
        losses = Losses(Path(name) / "losses")
        with (Path(name) / "log").open("w") as log:
            job = subprocess.Popen(
                command(name),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "RAY_TMPDIR": name, "RAY_ADDRESS": ""},
            )
        try:
            losses.await_more(20)
            begin = time.monotonic()
            os.kill(find(job, name)[victim], signal.SIGKILL)
            time.sleep(0.2)  # what had been computed is written
            losses.await_more(1)
            return time.monotonic() - begin
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(MOST_WAIT)


def measure_on_ray(num_kills: int) -> Row:
    """From a kill to the next run on Ray, against the launcher."""
    launch = [sys.executable, "-m", "ipu_pipeline", "launch", "-n", "2", "--restarts", "9"]
    training = [str(10**6), "4", "1"]
    found = []
    for number in range(num_kills):
        victim = number % 2
        on_ray = _time_kill(
            lambda folder: [sys.executable, "-m", MODULE, "--side", "ray", "--folder", folder],
            _find_on_ray,
            victim,
        )
        launched = _time_kill(
            lambda folder: [*launch, "-m", "tests.support.resumer", folder, *training],
            _find_on_launcher,
            victim,
        )
        found.append((on_ray, launched))
    ray, launcher = zip(*found, strict=True)
    case = "4 stages in 2 processes: from a kill to the next run on Ray, against ipu-pipeline launch"
    return harness.compare(QUESTION, case, ray, launcher, target=MOST_ON_RAY)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=20, help="seconds between deaths, on average")
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--kills", type=int, default=5, help="in jobs of two processes on Ray")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runs", type=int)
    args = parser.parse_args()
    if args.side == "ray":
        train_on_ray(args.folder)
        return
    if args.side is not None:
        work(args.processes[0], args.folder, args.runs)
        return
    minutes = 4 if args.short else args.minutes
    rows = [measure(number, minutes, args.every) for number in args.processes]
    rows.append(measure_on_ray(3 if args.short else args.kills))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
