"""Training on a Ray cluster: Ray starts the processes of a job on its nodes, and all again after a failure.

    from ipu_pipeline import ray

    ray.train(function, 2, storage_path="/shared/jobs", max_failures=3)

Needs Ray: `pip install 'ipu_pipeline[ray]'`. If no cluster runs, Ray starts one on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import runpy
import secrets
import signal
import socket
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipu_pipeline.launching.memory import DEFAULT_DIRECTORY, Memory, remove_left
from ipu_pipeline.launching.progress import Progress
from ipu_pipeline.processes.addresses import hold_port
from ipu_pipeline.processes.job_history import Failure, JobHistory
from ipu_pipeline.processes.launched import (
    CACHE_DIR_VARIABLE,
    LAUNCHER_VARIABLE,
    MEMORY_EVERY_VARIABLE,
    MEMORY_VARIABLE,
    RESTART_VARIABLE,
    SECRET_VARIABLE,
    describe_socket,
    useful_seconds,
)

try:
    import ray
    from ray import train as ray_train
    from ray.autoscaler.sdk import request_resources
    from ray.train import UserCallback
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ImportError(
        "ipu_pipeline.ray needs Ray Train 2.60 or newer: pip install 'ipu_pipeline[ray]'."
    ) from error

__all__ = ["Attempt", "program", "train"]

_logger = logging.getLogger("ipu_pipeline")
_SETTINGS = {  # which Ray reads from the environment; those of the user count
    "RAY_USAGE_STATS_ENABLED": "0",  # else Ray sends its authors statistics of the clusters that it starts
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # by default a failure is noticed after up to 2 s
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",  # not 60: then Ray sees how many nodes are left
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else Ray Train shows what is printed, and then Ray
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths are as in the program that calls `train`
}
_SECONDS_TO_COME = 600.0  # in which the resources of the least number of processes must be there
_SECONDS_TO_REMOVE = 10.0
_LOOK = 0.5  # seconds
_LONGEST_CAUSE = 100  # characters
_OF_FAILURES = "ray.train.v2._internal.execution.failure_handling.default"
_RESIZED = "the number of processes was changed"


@dataclass(frozen=True)
class Attempt:
    """What a process is told.

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

    It connects to the cluster of RAY_ADDRESS, or to the one that was started on this machine last; if there
    is none, it starts one here, and ends it in the end.

    After a failure, all processes are started again, at once. Programs that keep their state in memory,
    with `engine.InMemoryCheckpoints`, `Session.resume` or an estimator, then go on with the step that
    failed, as under `ipu-pipeline launch --restarts`. Another node has a copy of what a lost node had in
    memory.

    Ctrl-C ends all processes, and raises KeyboardInterrupt.

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
      max_failures: how many failures there may be in all; -1 for any number.
      memory_every: before every how many runs (or steps) the state is kept in memory, in /dev/shm of each
        node; None: never, so that training goes on from checkpoints on disk.
      death_timeout: after how many seconds a process that says nothing counts as dead.
      resize_every: after how many seconds without a failure it is seen whether there is room for more
        processes, up to the most; 60 by default.

    Returns:
      What the function returned in process 0.

    Raises:
      TypeError: an argument has another type.
      ValueError: an argument has another value.
      TimeoutError: the cluster has not had the resources of the least number of processes for ten minutes.
      ray.train.WorkerGroupError: a process has failed, and `max_failures` are exceeded;
        `worker_failures` has the error of each.
      KeyboardInterrupt: Ctrl-C.

    Warns:
      UserWarning: the cluster has several nodes, and whoever reaches its ports can run programs on them.
    """
    least, most = _check_counts(num_processes)
    resources = _check_resources(resources_per_process, use_gpu, ipus_per_process)
    _check_numbers(ipus_per_process, max_failures, memory_every, death_timeout, resize_every)
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
            f"ray.train: storage_path must be a directory that all nodes reach, such as one of NFS; got "
            f"{storage!r}. A function can save to a bucket itself."
        )
    name = f"ipu_pipeline-{secrets.token_hex(4)}" if name is None else name
    if not name or name != Path(name).name:
        raise ValueError(f"ray.train: name must be a file's name; got {name!r}.")
    job = _Job(
        label=f"ray-{secrets.token_hex(8)}-",
        begun=time.time(),
        num_devices=0 if use_gpu else most * ipus_per_process,
        has_memory=memory_every is not None,
        folder=str(Path.cwd()),
        variables={
            "IPU_PIPELINE_DEATH_TIMEOUT": f"{death_timeout:g}",
            MEMORY_EVERY_VARIABLE: str(memory_every or 1),
            SECRET_VARIABLE: secrets.token_hex(),
        },
    )
    of_processes = {
        "JAX_PLATFORMS": "cuda" if use_gpu else "cpu",
        "PJRT_NPROC": str(max(1, math.floor(resources["CPU"]))),
        "PYTHONUNBUFFERED": "1",
    }
    with _settings(_SETTINGS), _cluster(math.ceil(most * resources["CPU"])) as is_own:
        _await_resources(least, resources)
        _warn_of_open_ports()
        trainer = _Trainer(
            functools.partial(_run, function, Path(storage).absolute() / name),
            backend_config=job,
            scaling_config=ray_train.ScalingConfig(
                num_workers=num_processes,
                resources_per_worker=resources,
                use_gpu=use_gpu,
                elastic_resize_monitor_interval_s=60.0 if resize_every is None else resize_every,
            ),
            run_config=ray_train.RunConfig(
                name=name,
                storage_path=str(Path(storage).absolute()),
                failure_config=ray_train.FailureConfig(max_failures=max_failures),
                worker_runtime_env={"env_vars": of_processes},
                callbacks=[_Failures()],
            ),
        )
        try:
            value, number, useful = trainer.run(is_own)
        finally:
            if job.has_memory:
                _on_all_nodes(_remove_memory, job.label)
    if number and useful:
        seconds = time.time() - job.begun
        _logger.info(
            "goodput %.2f: the runs took %.1f s of %.1f s; the job was started again %d times.",
            min(1.0, useful / seconds),
            useful,
            seconds,
            number,
        )
    return value


def program(path: str | os.PathLike[str], *arguments: object) -> Callable[[Attempt], None]:
    """A function for `train` that runs a Python program, unchanged, as `python PATH ARGUMENTS` does.

    The program joins the processes as under `ipu-pipeline launch`: with IPUConfig.configure_ipu_system,
    `set_num_devices` or a session. It runs in the folder of the program that calls `train`.

    Args:
      path: of the program; all nodes have it there.
      *arguments: the program's; they become texts.

    Raises:
      FileNotFoundError: there is no such program here.
    """
    found = Path(path).absolute()
    if not found.is_file():
        raise FileNotFoundError(f"ray.program: there is no program {found}.")
    return functools.partial(_run_program, str(found), tuple(map(str, arguments)))


def _run_program(path: str, arguments: Sequence[str], _attempt: Attempt) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{path} ended with {end.code!r}.") from None


# Checks.


def _check_counts(num_processes: Any) -> tuple[int, int]:
    """The least and the most number of processes."""
    counts = num_processes if isinstance(num_processes, tuple) else (num_processes, num_processes)
    are_whole = all(isinstance(count, int) and not isinstance(count, bool) for count in counts)
    if len(counts) != 2 or not are_whole or not 1 <= counts[0] <= counts[1]:
        raise ValueError(
            "ray.train: num_processes must be a whole number from 1, or a tuple of the least and the most; "
            f"got {num_processes!r}."
        )
    return counts


def _check_resources(given: Any, use_gpu: bool, gpus: int) -> dict[str, float]:
    resources = {"CPU": 1.0, **(given or {})}
    for what, value in resources.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(
                f"ray.train: resources_per_process[{what!r}] must be a number above 0; got {value!r}."
            )
    for what, instead in (
        ("GPU", "Set use_gpu and ipus_per_process"),
        ("TPU", "Join the processes of TPUs by distributed.initialize"),
    ):
        if what in resources:
            raise ValueError(f"ray.train: resources_per_process cannot have {what!r}. {instead}.")
    return {**resources, "GPU": gpus} if use_gpu else resources


def _check_numbers(ipus: Any, failures: Any, every: Any, death: Any, resize: Any) -> None:
    for what, value, least in (
        ("ipus_per_process", ipus, 1),
        ("max_failures", failures, -1),
        ("memory_every", 1 if every is None else every, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"ray.train: {what} must be a whole number from {least}; got {value!r}.")
    for what, value, least in (
        ("death_timeout", death, 2),
        ("resize_every", 1 if resize is None else resize, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            raise ValueError(f"ray.train: {what} must be seconds from {least}; got {value!r}.")


# In the program that calls `train`.


@contextlib.contextmanager
def _settings(values: Mapping[str, str]) -> Iterator[None]:
    """Sets what Ray reads from the environment while it starts a cluster or a job."""
    own = {variable: value for variable, value in values.items() if variable not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for variable in own:
            os.environ.pop(variable, None)


@contextlib.contextmanager
def _cluster(num_cpus: int) -> Iterator[bool]:
    """Connects to a cluster, if the program has not; or starts one here, with so many CPUs at least.

    Gives whether it has started one.
    """
    if ray.is_initialized():
        yield False
        return
    is_own = False
    try:
        ray.init(address="auto")
    except ConnectionError:
        is_own = True
        ray.init(num_cpus=max(num_cpus, os.cpu_count() or 1), include_dashboard=False)
    try:
        # Nothing says that this machine is about to be taken away.
        with _settings({"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"} if is_own else {}):
            yield is_own
    finally:
        ray.shutdown()


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _await_resources(least: int, resources: Mapping[str, float]) -> None:
    """Waits until there is room for the least number of processes; an autoscaler is asked for it."""

    def count_room() -> int:
        has = [node["Resources"] for node in _nodes()]
        return sum(min(int(own.get(what, 0) // value) for what, value in resources.items()) for own in has)

    def describe() -> str:
        return f"{least} processes need {dict(resources)} each, and the cluster has room for {count_room()}"

    if count_room() >= least:
        return
    _logger.warning("%s. It is waited for %g s.", describe(), _SECONDS_TO_COME)
    request_resources(bundles=[dict(resources)] * least)
    deadline = time.monotonic() + _SECONDS_TO_COME
    try:
        while count_room() < least:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ray.train: {describe()}. Start more nodes, or ask for less with num_processes or "
                    "resources_per_process."
                )
            time.sleep(_LOOK)
    finally:
        request_resources(bundles=[])


def _warn_of_open_ports() -> None:
    if len(_nodes()) > 1 and os.environ.get("RAY_AUTH_MODE") != "token":
        warnings.warn(
            "The Ray cluster has several nodes and no token: whoever reaches one of its ports can run any "
            "program on all nodes, with your rights. Set RAY_AUTH_MODE=token on all nodes before `ray "
            "start`, with the token of `ray get-auth-token --generate`, or close the ports to others.",
            stacklevel=3,
        )


def _on_all_nodes(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function once on each node; what it raises there is lost."""
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    nodes = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in _nodes()]
    calls = [remote.options(scheduling_strategy=node).remote(*arguments) for node in nodes]
    ray.wait(calls, num_returns=len(calls), timeout=3 * _SECONDS_TO_REMOVE)


class _Trainer(DataParallelTrainer):
    """Ray's, which ends with KeyboardInterrupt after Ctrl-C."""

    _is_interrupted = False

    def run(self, is_own_cluster: bool) -> Any:
        """Returns what `_run` returned in process 0."""
        self._is_own_cluster = is_own_cluster
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT)
        try:
            return self.fit().return_value
        except BaseException:
            if self._is_interrupted:
                raise KeyboardInterrupt from None
            raise
        finally:
            if is_main:
                signal.signal(signal.SIGINT, before)

    def _create_default_callbacks(self) -> list[Any]:
        found = super()._create_default_callbacks()
        if self._is_own_cluster:  # what looks after a cluster that outlives the job; it needs a dashboard
            found = [one for one in found if type(one).__name__ != "PlacementGroupCleanerCallback"]
        return found

    def _register_sigint_handler(self, controller: Any) -> None:
        super()._register_sigint_handler(controller)
        of_ray: Any = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: Any) -> None:
            self._is_interrupted = True
            of_ray(number, frame)

        signal.signal(signal.SIGINT, interrupt)


# In Ray's controller.


@dataclass
class _Job(BackendConfig):
    label: str  # of its directories in memory
    begun: float  # seconds since the epoch
    num_devices: int  # virtual ones, of all processes; 0 with GPUs
    has_memory: bool
    folder: str  # of the program that called `train`
    variables: dict[str, str]

    @property
    def backend_cls(self) -> type[Backend]:
        return _Processes


_last_failure: tuple[float, str] | None = None  # when, and what happened


class _Failures(UserCallback):
    """Says and notes the failures of processes; a process has shown the traceback of its error."""

    def after_exception(
        self,
        run_context: Any,  # noqa: ARG002  # Ray's
        worker_exceptions: Mapping[int, BaseException],
    ) -> None:
        global _last_failure
        if _last_failure is not None:  # which others follow from
            return
        told = {process: _describe_error(error) for process, error in worker_exceptions.items()}
        process = next((one for one, what in told.items() if "ProcessError" not in what), min(told))
        what = f"process {process} {told[process]}"
        _last_failure = (time.time(), textwrap.shorten(what, _LONGEST_CAUSE, placeholder=" ..."))
        _logger.warning("%s.", what)


def _describe_error(error: BaseException) -> str:
    error = getattr(error, "_base_exc", error)  # Ray Train wraps what the function raises
    if isinstance(error, ray.exceptions.RayError) or "Health" in type(error).__name__:
        return "was lost"
    return f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Processes(Backend):
    """Tells the processes of each attempt where they meet."""

    def __init__(self) -> None:
        self._number = -1
        self._memories: dict[str, Any] = {}  # node -> what holds its directory

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        global _last_failure
        logging.getLogger(_OF_FAILURES).setLevel(logging.WARNING)  # it says all twice
        job = backend_config
        self._number += 1
        nodes = worker_group.execute(_describe_node)
        paths = self._make_memories(set(nodes), job.label) if job.has_memory else {}
        alone = len(set(nodes)) == 1  # on a machine, only its own processes reach them
        coordinator = worker_group.execute_single(0, _find_address, alone)
        failure, _last_failure = _last_failure, None
        if failure is None and self._number:
            failure = (time.time(), _RESIZED)
        ray.get(
            [
                worker_group.execute_single_async(
                    index,
                    _prepare,
                    job,
                    Attempt(self._number, index, len(nodes), Path()),
                    coordinator,
                    paths.get(node),
                    failure,
                    nodes.index(node) == index,
                )
                for index, node in enumerate(nodes)
            ]
        )

    def _make_memories(self, nodes: set[str], label: str) -> dict[str, str]:
        """A directory in memory of each node; none if one has none."""
        remote = ray.remote(num_cpus=0)(_NodeMemory)
        for node in nodes - self._memories.keys():
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            self._memories[node] = remote.options(scheduling_strategy=here).remote(label)
        paths = ray.get([self._memories[node].path.remote() for node in nodes])
        if None in paths:
            _logger.warning(
                "Nothing is kept in memory: %s cannot be used on all nodes. After a failure, training goes "
                "on from checkpoints on disk.",
                DEFAULT_DIRECTORY,
            )
            return {}
        return dict(zip(nodes, paths, strict=True))


class _NodeMemory:
    """Holds the lock of a directory in a node's memory, as long as the job lasts."""

    def __init__(self, label: str) -> None:
        self._memory: Memory | None = None
        with contextlib.suppress(OSError):
            remove_left(DEFAULT_DIRECTORY)
            self._memory = Memory(DEFAULT_DIRECTORY, label)

    def path(self) -> str | None:
        return None if self._memory is None else str(self._memory.path)


# On the nodes.


def _remove_memory(label: str) -> None:
    """Removes the directory of a job on this node, as soon as nobody holds it any more."""
    deadline = time.monotonic() + _SECONDS_TO_REMOVE
    while not remove_left(DEFAULT_DIRECTORY, label) and time.monotonic() < deadline:
        time.sleep(0.05)


def _describe_node() -> str:
    found: str = ray.get_runtime_context().get_node_id()
    return found


_held: socket.socket | None = None


def _find_address(is_alone: bool) -> str:
    """An address of this process at which the others reach its coordinator."""
    global _held
    host = "127.0.0.1" if is_alone else ray.util.get_node_ip_address()
    _held = hold_port(host)
    port = _held.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class _Given:
    """What a process is given before the function is called."""

    job: _Job
    attempt: Attempt
    memory: str | None
    failure: tuple[float, str] | None
    is_first: bool  # of its node


_given: _Given | None = None


def _prepare(
    job: _Job,
    attempt: Attempt,
    coordinator: str,
    memory: str | None,
    failure: tuple[float, str] | None,
    is_first: bool,
) -> None:
    global _given
    _given = _Given(job, attempt, memory, failure, is_first)
    os.environ.update(
        {
            **job.variables,
            "IPU_PIPELINE_COORDINATOR_ADDRESS": coordinator,
            "IPU_PIPELINE_NUM_PROCESSES": str(attempt.count),
            "IPU_PIPELINE_PROCESS_ID": str(attempt.index),
            RESTART_VARIABLE: str(attempt.number),
        }
    )
    logging.getLogger("jax").setLevel(logging.WARNING)  # Ray shows what JAX says of its service
    if memory is not None:
        os.environ[MEMORY_VARIABLE] = memory
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            os.environ.setdefault(CACHE_DIR_VARIABLE, f"{memory}/programs")
    with contextlib.suppress(OSError):  # it is not on this node
        os.chdir(job.folder)


def _run(function: Callable[[Attempt], Any], directory: Path) -> tuple[Any, int, float]:
    """Calls the function. Returns what it returned, the attempt, and the seconds of runs that counted."""
    import ipu_pipeline as ipu

    assert _given is not None
    if _given.memory is not None and _given.is_first:
        _write_history(_given, Path(_given.memory))
    ipu.distributed.initialize()
    if _given.job.num_devices:
        ipu.set_num_devices(_given.job.num_devices)
    directory.mkdir(parents=True, exist_ok=True)
    value = function(dataclasses.replace(_given.attempt, directory=directory))
    return value, _given.attempt.number, useful_seconds()


def _write_history(given: _Given, memory: Path) -> None:
    """Writes what has become of the job for the processes of this node, as a launcher does."""
    begun = JobHistory.of_environment() or JobHistory(given.job.begun)
    history = dataclasses.replace(begun, num_restarts=given.attempt.number)
    history.write(memory)
    failure = given.failure

    def go_on(run: int, step: int, num_redone: int | None) -> None:
        if failure is not None:
            at, what = failure
            history.after(Failure(what, at, run, step, num_redone, time.time() - at)).write(memory)

    own, other = socket.socketpair()
    other.setblocking(False)
    os.environ[LAUNCHER_VARIABLE] = describe_socket(other)
    other.detach()  # the library opens it by its number
    progress = Progress(go_on)

    def listen() -> None:
        with own.makefile() as lines:
            for line in lines:
                progress.hear(line)

    threading.Thread(target=listen, name="ipu-history", daemon=True).start()
