"""Jobs on a Ray cluster: Ray Train starts the processes, and here they learn where they meet."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import secrets
import signal
import socket
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import train as ray_train
from ray.autoscaler.sdk import request_resources
from ray.train import UserCallback
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ipu_pipeline.processes.launcher import (
    DEFAULT_DIRECTORY,
    LAUNCHER_VARIABLE,
    Failure,
    JobHistory,
    Memory,
    Progress,
    Start,
    describe_socket,
    hold_port,
    remove_left,
    useful_seconds,
)

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
_ENDING = (signal.SIGINT, signal.SIGTERM)
_LOOK = 0.5  # seconds
_LONGEST_CAUSE = 100  # characters
_OF_FAILURES = "ray.train.v2._internal.execution.failure_handling.default"
_RESIZED = "the number of processes was changed"


def run(
    function: Callable[[int, int, int, Path], Any],
    directory: Path,
    num_processes: int | tuple[int, int],
    resources: Mapping[str, float],
    *,
    num_devices: int,  # virtual ones of all processes; 0 with GPUs
    max_failures: int,
    memory_every: int | None,
    death_timeout: float,
    resize_every: float,
) -> Any:
    """Runs a job, by the arguments that `ipu_pipeline.ray.train` has checked."""
    least, most = num_processes if isinstance(num_processes, tuple) else (num_processes, num_processes)
    job = _Job(
        label=f"ray-{secrets.token_hex(8)}-",
        begun=time.time(),
        num_devices=num_devices,
        has_memory=memory_every is not None,
        folder=str(Path.cwd()),
        start=Start(0, most, "", death_timeout, memory_every or 1, secrets.token_hex()),
    )
    of_processes = {
        "JAX_PLATFORMS": "cpu" if num_devices else "cuda,cpu",  # some of the library's computes on the CPU
        "PJRT_NPROC": os.environ.get("PJRT_NPROC", str(max(1, math.floor(resources["CPU"])))),
        "PYTHONUNBUFFERED": "1",
    }
    with _kept_signals(), _settings(_SETTINGS), _cluster(math.ceil(most * resources["CPU"])) as is_own:
        _await_resources(least, resources, 0.0 if is_own else _SECONDS_TO_COME)
        _warn_of_open_ports()
        trainer = _Trainer(
            functools.partial(_run, function, directory),
            backend_config=job,
            scaling_config=ray_train.ScalingConfig(
                num_workers=num_processes,
                resources_per_worker=dict(resources),
                use_gpu="GPU" in resources,
                elastic_resize_monitor_interval_s=resize_every,
            ),
            run_config=ray_train.RunConfig(
                name=directory.name,
                storage_path=str(directory.parent),
                failure_config=ray_train.FailureConfig(max_failures=max_failures),
                worker_runtime_env={"env_vars": of_processes},
                callbacks=[_Failures()],
            ),
        )
        try:
            value, number, useful = trainer.run(is_own)
        finally:
            if job.has_memory:  # Ray ends actors without asking them, so _NodeMemory cannot do it
                _on_all_nodes(_remove_memory, job.label)
    if job.has_memory and (goodput := JobHistory(job.begun, number).describe_goodput(useful)):
        _logger.warning(goodput)
    return value


@contextlib.contextmanager
def _settings(values: Mapping[str, str]) -> Iterator[None]:
    """Sets what Ray reads from the environment while it starts a cluster or a job."""
    new_values = {variable: value for variable, value in values.items() if variable not in os.environ}
    os.environ.update(new_values)
    try:
        yield
    finally:
        for variable in new_values:
            os.environ.pop(variable, None)


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Gives signals back to their handlers: Ray has its own."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        for number in _ENDING if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, before[number])


@contextlib.contextmanager
def _cluster(num_cpus: int) -> Iterator[bool]:
    """Connects to a cluster, if the program has not; or starts one here, with so many CPUs at least.

    Yields whether it has started one.
    """
    if ray.is_initialized():
        yield False
        return
    is_own = True
    try:  # address="auto" would also find clusters that other programs have started for themselves
        ray.init(num_cpus=max(num_cpus, os.cpu_count() or 1), include_dashboard=False)
    except ValueError:  # one that was started by `ray start`, or of RAY_ADDRESS, has its own CPUs
        is_own = False
        ray.init()
    try:
        # Nothing says that this machine is about to be taken away.
        with _settings({"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"} if is_own else {}):
            yield is_own
    finally:
        ray.shutdown()


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _await_resources(least: int, resources: Mapping[str, float], seconds: float) -> None:
    """Waits until there is room for the least number of processes; an autoscaler is asked for it."""

    def count_room() -> int:
        totals = [node["Resources"] for node in _nodes()]
        return sum(
            min(int(total.get(resource, 0) / value + 1e-6) for resource, value in resources.items())
            for total in totals
        )

    def describe() -> str:
        return f"{least} processes need {dict(resources)} each, and the cluster has room for {count_room()}"

    if count_room() >= least:
        return
    if seconds:
        _logger.warning("%s. It is waited for %g s.", describe(), seconds)
    request_resources(bundles=[dict(resources)] * least)
    deadline = time.monotonic() + seconds
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
    if len(_nodes()) > 1 and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        warnings.warn(
            "The Ray cluster has several nodes and no token: anyone who can reach its ports can run "
            "programs on all nodes as you. Set RAY_AUTH_MODE=token on all nodes before `ray start`, with "
            "the token of `ray get-auth-token --generate`, or close the ports to others.",
            stacklevel=4,
        )


def _on_all_nodes(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function once on each node; what it raises there is lost."""
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    nodes = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in _nodes()]
    calls = [remote.options(scheduling_strategy=node).remote(*arguments) for node in nodes]
    ray.wait(calls, num_returns=len(calls), timeout=3 * _SECONDS_TO_REMOVE)


class _Trainer(DataParallelTrainer):
    """Ray's trainer, which ends with KeyboardInterrupt after Ctrl-C, and with SystemExit after SIGTERM.

    Not JaxTrainer, which joins processes by JAX alone: this ends all of them where one dies.
    """

    _interrupted_by = 0

    def run(self, is_own_cluster: bool) -> Any:
        """Returns what `_run` returned in process 0."""
        self._is_own_cluster = is_own_cluster
        try:
            with _kept_signals():
                return self.fit().return_value
        except BaseException:
            if self._interrupted_by == signal.SIGTERM:
                raise SystemExit(128 + signal.SIGTERM) from None
            if self._interrupted_by:
                raise KeyboardInterrupt from None
            raise

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        if self._is_own_cluster:  # what looks after a cluster that outlives the job; it needs a dashboard
            callbacks = [c for c in callbacks if type(c).__name__ != "PlacementGroupCleanerCallback"]
        return callbacks

    def _register_sigint_handler(self, controller: Any) -> None:
        super()._register_sigint_handler(controller)
        of_ray: Any = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: Any) -> None:
            self._interrupted_by = self._interrupted_by or number
            of_ray(number, frame)

        for number in _ENDING:  # Ray would abort this process at SIGTERM, and leave what is in memory
            signal.signal(number, interrupt)


# In Ray's controller.


@dataclass
class _Job(BackendConfig):
    label: str  # of its directories in memory
    begun: float  # seconds since the epoch
    num_devices: int  # virtual ones, of all processes; 0 with GPUs
    has_memory: bool
    folder: str  # of the program that called `train`
    start: Start  # the first one, before it is known where

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
        descriptions = {process: _describe_error(error) for process, error in worker_exceptions.items()}
        causes = [process for process, text in descriptions.items() if "ProcessError" not in text]
        process = causes[0] if causes else min(descriptions)
        text = f"process {process} {descriptions[process]}"
        _last_failure = (time.time(), textwrap.shorten(text, _LONGEST_CAUSE, placeholder=" ..."))
        _logger.warning("%s.", text)


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
        start = dataclasses.replace(
            job.start, restart=self._number, count=len(nodes), coordinator=coordinator
        )
        prepared = []
        for index, node in enumerate(nodes):
            is_first = nodes.index(node) == index
            assignment = _Assignment(job, start, index, paths.get(node), failure, is_first)
            prepared.append(worker_group.execute_single_async(index, _prepare, assignment))
        ray.get(prepared)

    def _make_memories(self, nodes: set[str], label: str) -> dict[str, str]:
        """Makes a directory in memory of each node. Returns no paths if that fails on any node."""
        # Where it is killed, the node gets another one; the nodes beside have copies of what it had.
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_NodeMemory)
        for node in nodes - self._memories.keys():
            placement = NodeAffinitySchedulingStrategy(node, soft=False)
            self._memories[node] = remote.options(scheduling_strategy=placement).remote(label)
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
    """Removes the directory of a job on this node once nobody holds its lock."""
    deadline = time.monotonic() + _SECONDS_TO_REMOVE
    while not remove_left(DEFAULT_DIRECTORY, label) and time.monotonic() < deadline:
        time.sleep(0.05)


def _describe_node() -> str:
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


_port_socket: socket.socket | None = None


def _find_address(is_alone: bool) -> str:
    """An address of this process at which the others reach its coordinator."""
    global _port_socket
    host = "127.0.0.1" if is_alone else ray.util.get_node_ip_address()
    _port_socket = hold_port(host)
    port = _port_socket.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class _Assignment:
    """The facts that a process gets before the function is called."""

    job: _Job
    start: Start
    index: int
    memory: str | None  # a directory in its node's memory
    failure: tuple[float, str] | None  # after which it is started: when, and what
    is_first: bool  # of its node


_assignment: _Assignment | None = None


def _prepare(assignment: _Assignment) -> None:
    global _assignment
    _assignment = assignment
    assignment.start.describe_to(os.environ, assignment.index, assignment.memory)
    logging.getLogger("jax").setLevel(logging.WARNING)  # Ray shows what JAX says of its service
    with contextlib.suppress(OSError):  # it is not on this node
        os.chdir(assignment.job.folder)


def _run(function: Callable[[int, int, int, Path], Any], directory: Path) -> tuple[Any, int, float]:
    """Calls the function. Returns what it returned, the attempt, and the seconds of runs that counted."""
    import ipu_pipeline as ipu

    assert _assignment is not None
    if _assignment.memory is not None and _assignment.is_first:
        _keep_history(_assignment, Path(_assignment.memory))
    ipu.distributed.initialize()
    if _assignment.job.num_devices:
        ipu.set_num_devices(_assignment.job.num_devices)
    directory.mkdir(parents=True, exist_ok=True)
    start, index = _assignment.start, _assignment.index
    value = function(start.restart, index, start.count, directory)
    return None if index else value, start.restart, useful_seconds()


def _keep_history(assignment: _Assignment, memory: Path) -> None:
    """Writes what becomes of the job for the processes of this node, as a launcher does."""
    previous = JobHistory.of_environment() or JobHistory(assignment.job.begun)
    history = dataclasses.replace(previous, num_restarts=assignment.start.restart)
    history.write(memory)
    if assignment.failure is None:
        return
    at, event = assignment.failure

    def note(run: int, step: int, num_redone: int | None) -> None:
        history.after(Failure(event, at, run, step, num_redone, time.time() - at)).write(memory)

    channel, process_channel = socket.socketpair()
    os.environ[LAUNCHER_VARIABLE] = describe_socket(process_channel)
    process_channel.detach()  # the library opens it by its number
    progress = Progress(note)

    def listen() -> None:
        with channel.makefile() as lines:
            for line in lines:
                progress.hear(line)

    threading.Thread(target=listen, name="ipu-history", daemon=True).start()
