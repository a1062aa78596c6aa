"""Training on a Ray cluster: Ray starts the processes of a job on its nodes, and all again after a failure.

    from ipu_pipeline import ray

    ray.train(function, 2, storage_path="/shared/jobs", max_failures=3)

Needs Ray: `pip install 'ipu_pipeline[ray]'`. If no cluster runs, Ray starts one on this machine.
"""

from __future__ import annotations

import functools
import os
import runpy
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Attempt", "program", "train"]


@dataclass(frozen=True)
class Attempt:
    """One process of an attempt, as `train` describes it to the function.

    Attributes:
      number: how often all processes have been started again, from 0.
      index: the number of this process, from 0.
      count: how many processes there are in this attempt.
      directory: `storage_path`/`name`, for checkpoints; all processes reach it.
    """

    number: int
    index: int
    count: int
    directory: Path


def train(
    function: Callable[[Attempt], Any],
    num_processes: int | tuple[int, int],
    *,
    storage_path: str | os.PathLike[str],
    name: str | None = None,
    ipus_per_process: int = 1,
    resources_per_process: Mapping[str, float] | None = None,
    use_gpu: bool = False,
    max_failures: int = 0,
    memory_every: int | None = 1,
    death_timeout: float = 60.0,
    resize_every: float | None = None,
) -> Any:
    """Runs a function in processes on the nodes of a Ray cluster, which have joined each other.

    It connects to the cluster of RAY_ADDRESS, or to the one that `ray start` has started on this machine;
    if there is none, it starts one here, and ends it in the end.

    After a failure, all processes are started again, at once. Programs that keep their state in memory,
    with `engine.InMemoryCheckpoints`, `Session.resume` or an estimator, then go on with the step that
    failed, as under `ipu-pipeline launch --restarts`. Another node has a copy of what a lost node had in
    memory.

    Ctrl-C ends all processes and raises KeyboardInterrupt. SIGTERM ends them and raises SystemExit.

    Args:
      function: called in each process with its `Attempt`, as the last thing before which it may import JAX.
        Ray sends it to the nodes, with what it refers to in the program that calls `train`.
      num_processes: the number of processes; or the least and the most, if training may go on with fewer
        when nodes are lost, and with more when some come.
      storage_path: a directory that all nodes reach.
      name: of the job, below `storage_path`. A job with the name of an earlier one finds the checkpoints in
        `Attempt.directory`. By default a new name.
      ipus_per_process: the GPUs of each process; without GPUs its virtual devices on the CPU. If there are
        fewer processes than the most, they share the virtual devices of all.
      resources_per_process: Ray's resources for each, such as {"CPU": 4}; one CPU by default. A process
        computes on so many cores.
      use_gpu: whether processes have GPUs, each its own.
      max_failures: how many failures there may be in all; -1 for any number. Nodes that Ray says will be
        taken away, and failures while processes start, do not count.
      memory_every: before every how many runs (or steps) the state is kept in memory, in /dev/shm of each
        node; None: never, so that training goes on from checkpoints on disk.
      death_timeout: after how many seconds a process that says nothing counts as dead.
      resize_every: after how many seconds without a failure it is seen whether there is room for more
        processes, up to the most; 60 by default.

    Returns:
      What the function returned in process 0. Ray sends it by pickle: return numbers or NumPy's arrays.

    Raises:
      ImportError: Ray is not installed.
      TypeError: `function` is not callable.
      ValueError: another argument has a wrong value.
      TimeoutError: the cluster has not had the resources of the least number of processes for ten minutes;
        this machine does not have them, if the cluster was started here.
      ray.train.WorkerGroupError: a process has failed, and `max_failures` are exceeded;
        `worker_failures` has the error of each.
      ray.train.ControllerError: the job cannot begin, as where the function cannot be unpickled on a node.
      KeyboardInterrupt: Ctrl-C.
      SystemExit: SIGTERM.

    Warns:
      UserWarning: the cluster has several nodes, and whoever reaches its ports can run programs on them.
    """
    most = _check_counts(num_processes)[1]
    _check_number("ipus_per_process", ipus_per_process, 1)
    resources = _check_resources(resources_per_process, use_gpu, ipus_per_process)
    _check_number("max_failures", max_failures, -1)
    _check_number("memory_every", 1 if memory_every is None else memory_every, 1)
    _check_number("death_timeout", death_timeout, 2, float)
    _check_number("resize_every", 0 if resize_every is None else resize_every, 0, float)
    if resize_every is not None and not isinstance(num_processes, tuple):
        raise ValueError(
            "ray.train: resize_every has an effect with a least and a most number of processes only."
        )
    if not callable(function):
        raise TypeError(
            f"ray.train: function must be callable, such as ray.program('train.py'); got {function!r}."
        )
    storage = os.fspath(storage_path)
    if "://" in storage:
        raise ValueError(
            "ray.train: storage_path must be a directory that all nodes reach, such as one of NFS; got "
            f"{storage!r}. A function can save to a bucket itself."
        )
    name = f"ipu_pipeline-{secrets.token_hex(4)}" if name is None else name
    if name in ("", "..") or name != Path(name).name:
        raise ValueError(f"ray.train: name must be a file's name; got {name!r}.")
    try:
        from ipu_pipeline.launching import ray_job
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ImportError("ray.train needs Ray Train: pip install 'ipu_pipeline[ray]'.") from error
    return ray_job.run(
        functools.partial(_call, function),
        Path(storage).absolute() / name,
        num_processes,
        resources,
        num_devices=0 if use_gpu else most * ipus_per_process,
        max_failures=max_failures,
        memory_every=memory_every,
        death_timeout=death_timeout,
        resize_every=60.0 if resize_every is None else resize_every,
    )


def _call(function: Callable[[Attempt], Any], *fields: Any) -> Any:
    return function(Attempt(*fields))


def program(path: str | os.PathLike[str], *arguments: object) -> Callable[[Attempt], None]:
    """A function for `train` that runs a Python program, unchanged, as `python PATH ARGUMENTS` does.

    The processes have joined each other before: `distributed.initialize`, if the program calls it, takes no
    arguments there. It runs in the folder of the program that calls `train`, and not in the main thread of
    its process, so that it cannot set handlers of signals.

    Args:
      path: of the program; all nodes have it there.
      *arguments: the program's; they become texts.

    Raises:
      FileNotFoundError: there is no such program here.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise FileNotFoundError(f"ray.program: there is no program {file}.")
    return functools.partial(_run_program, str(file), tuple(map(str, arguments)))


def _run_program(path: str, arguments: Sequence[str], _attempt: Attempt) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{path} ended with {end.code!r}.") from None


def _check_counts(num_processes: Any) -> tuple[int, int]:
    """The least and the most number of processes."""
    counts = num_processes if isinstance(num_processes, tuple) else (num_processes, num_processes)
    if (
        len(counts) != 2
        or not all(type(count) is int for count in counts)
        or not 1 <= counts[0] <= counts[1]
    ):
        raise ValueError(
            "ray.train: num_processes must be a whole number from 1, or a tuple of the least and the most; "
            f"got {num_processes!r}."
        )
    return counts


def _check_resources(extra: Mapping[str, float] | None, use_gpu: bool, num_gpus: int) -> dict[str, float]:
    """Ray's resources of a process."""
    resources = {"CPU": 1.0, **(extra or {})}
    for name, instead in (
        ("GPU", "Set use_gpu and ipus_per_process"),
        ("TPU", "Join the processes of TPUs by distributed.initialize"),
    ):
        if name in resources:
            raise ValueError(f"ray.train: resources_per_process cannot have {name!r}. {instead}.")
    for name, value in resources.items():
        _check_number(f"resources_per_process[{name!r}]", value, 1e-3, float)
    return {**resources, "GPU": num_gpus} if use_gpu else resources


def _check_number(name: str, value: Any, least: float, kind: type = int) -> None:
    if type(value) not in {int, kind} or not value >= least:
        number = "a whole number" if kind is int else "a number"
        raise ValueError(f"ray.train: {name} must be {number} from {least:g}; got {value!r}.")
