"""The rendezvous of processes: finds which a run has and where, joins them, and leaves at the end."""

from __future__ import annotations

import hmac
import importlib.metadata
import ipaddress
import json
import logging
import math
import os
import platform
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine import processes
from ipu_pipeline.engine.processes import keep_one_free
from ipu_pipeline.ground import jax_processes
from ipu_pipeline.ground.errors import ProcessError
from ipu_pipeline.processes import coordinator
from ipu_pipeline.processes.launcher import (
    BIND_VARIABLE,
    COORDINATOR_VARIABLE,
    COUNT_VARIABLE,
    DEATH_VARIABLE,
    INDEX_VARIABLE,
    SECRET_VARIABLE,
    hear_failures,
)
from ipu_pipeline.processes.peer_watch import PeerWatch

# Finding the place of this process.

_VARIABLES = (COORDINATOR_VARIABLE, COUNT_VARIABLE, INDEX_VARIABLE)
_ARGUMENTS = ("coordinator_address", "num_processes", "process_id")
_OF_JAX = "JAX_COORDINATOR_ADDRESS"


@dataclass(frozen=True)
class Place:
    """The place of a process among the others."""

    coordinator: str  # where the coordinator listens, as "host:port"
    count: int  # the number of processes
    index: int  # this process's number, from 0
    local_devices: list[int] | None  # the accelerators of its machine that it takes; None for all


def is_in_environment() -> bool:
    """Whether the environment says which process this is."""
    return any(os.environ.get(name) for name in _VARIABLES)


def find_place(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: list[int] | None,
    seconds: int,
) -> Place:
    """Finds this process's place: from arguments, else the environment, else the cluster JAX recognises."""
    arguments = [coordinator_address, num_processes, process_id]
    values = [_check(name, value) for name, value in zip(_ARGUMENTS, arguments, strict=True)]
    if None in values:
        environment = [os.environ.get(name) or None for name in _VARIABLES]
        values = [
            value if value is not None or text is None else _read(name, text)
            for name, value, text in zip(_VARIABLES, values, environment, strict=True)
        ]
        if values[0] is None:
            values[0] = os.environ.get(_OF_JAX) or None
        if None in values:
            values, local_device_ids = _complete(values, local_device_ids, environment, seconds)
    address, count, index = values
    assert isinstance(address, str)
    assert isinstance(count, int)
    assert isinstance(index, int)
    split_address(address)
    if count < 1:
        raise ValueError(f"distributed.initialize: num_processes must be 1 or more; it is {count}.")
    if not 0 <= index < count:
        raise ValueError(
            f"distributed.initialize: process_id must be from 0 to {count - 1}, as there are {count} "
            f"processes; it is {index}."
        )
    return Place(address, count, index, local_device_ids)


def _complete(
    values: list[str | int | None],
    devices: list[int] | None,
    environment: list[str | None],
    seconds: int,
) -> tuple[list[str | int | None], list[int] | None]:
    """Completes the values by what JAX knows of the cluster."""
    missing = [number for number, value in enumerate(values) if value is None]
    names = " and ".join(f"{_ARGUMENTS[number]} ({_VARIABLES[number]})" for number in missing)
    if any(environment):
        set_ones = ", ".join(name for name, text in zip(_VARIABLES, environment, strict=True) if text)
        raise ValueError(
            f"distributed.initialize: {names} missing: the environment has only {set_ones}. Set all three "
            "variables, or none."
        )
    cluster = jax_processes.detect_cluster(seconds)
    full_values = [
        default if value is None else value for default, value in zip(cluster[:3], values, strict=True)
    ]
    if None in full_values:
        raise ValueError(
            f"distributed.initialize: {names} missing, and JAX recognises no cluster here (it knows SLURM, "
            "Open MPI, Kubernetes with its Python package, and Cloud TPU). Give them as arguments or by "
            "the environment; to try a program on this machine alone: ipu-pipeline launch -n 2 "
            "PROGRAM."
        )
    return full_values, cluster[3] if devices is None else devices


def _check(name: str, value: str | int | None) -> str | int | None:
    kind = str if name == "coordinator_address" else int
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        expected = 'a text like "10.0.0.1:1234"' if kind is str else "an integer"
        raise TypeError(f"distributed.initialize: {name} must be {expected}; it is {value!r}.")
    return value


def _read(name: str, text: str) -> str | int:
    if name == COORDINATOR_VARIABLE:
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"The environment variable {name} must be an integer; it is {text!r}.") from None


def split_address(address: str, name: str = "coordinator_address") -> tuple[str, int]:
    """Splits an address into host and port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or (":" in host and host[0] != "["):
        raise ValueError(
            f'distributed.initialize: {name} must be "host:port", as "10.0.0.1:1234" or "[fd00::1]:1234"; '
            f"it is {address!r}."
        )
    return host.strip("[]"), int(port)


def address_towards(host: str, port: int) -> str:
    """Finds the address of this machine by which it reaches a host; nothing is sent."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as towards:
            towards.connect(address)
            return str(ipaddress.ip_address(towards.getsockname()[0].partition("%")[0]))
    except OSError as error:
        raise ValueError(
            f"distributed.initialize: the coordinator's host {host!r} cannot be reached: {error}."
        ) from error


# Joining the others by JAX's distributed runtime.

STALL_VARIABLE = "IPU_PIPELINE_STALL_TIMEOUT"
_LEAST_SECONDS = 2.0
_LOOK = 0.02  # seconds
_MOST_SECONDS_TO_CONNECT = 5.0
_logger = logging.getLogger("ipu_pipeline")
_is_joined = False


def is_joined() -> bool:
    """Whether `join` was called."""
    return _is_joined


def join_by_environment() -> None:
    """Joins the processes that the environment names, if it names any and this has not been done."""
    if not _is_joined and is_in_environment() and not jax.distributed.is_initialized():
        join()


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    listen_address: str | None = None,
    death_timeout: float | None = None,
    stall_timeout: float | None = None,
    initialization_timeout: float = 300,
) -> None:
    """Joins the other processes; see `ipu_pipeline.distributed.initialize`."""
    global _is_joined
    arguments = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
        "local_device_ids": local_device_ids,
        "coordinator_bind_address": coordinator_bind_address,
        "listen_address": listen_address,
        "death_timeout": death_timeout,
        "stall_timeout": stall_timeout,
    }
    names = ", ".join(name for name, value in arguments.items() if value is not None)
    if _is_joined and names:
        raise RuntimeError(
            f"distributed.initialize: {names} cannot have an effect any more: this process has joined the "
            "others already, by this function, set_num_devices, IPUConfig.configure_ipu_system or a "
            "session's first run. Call initialize with them before that."
        )
    if _is_joined:
        return
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "distributed.initialize: this process has joined the others already, by "
            "jax.distributed.initialize. Call ipu_pipeline's in its place."
        )
    if jax_processes.backends_run():
        raise RuntimeError(
            "distributed.initialize must be called before JAX's backend starts, which it does when an "
            "array (jnp.float32(2), a module of Flax) or a random key is made, or with jax.devices(). Call "
            "it at the top of the program."
        )
    # Where this process is, and how long it waits.
    death_timeout = _read_seconds("death_timeout", DEATH_VARIABLE, death_timeout, 60.0)
    stall_timeout = _read_seconds("stall_timeout", STALL_VARIABLE, stall_timeout, death_timeout)
    patience = _read_seconds("initialization_timeout", "", initialization_timeout, 300.0)
    devices = None if local_device_ids is None else list(local_device_ids)
    place = find_place(
        coordinator_address, num_processes, process_id, devices, math.ceil(min(patience, 3600))
    )
    host, port = split_address(place.coordinator)
    bind_address = coordinator_bind_address or os.environ.get(BIND_VARIABLE)
    if bind_address is not None:
        split_address(bind_address, "coordinator_bind_address")
    local_address = _find_own_address(host, port, patience)
    own_address = listen_address or local_address
    if place.index == 0 and bind_address is None:
        bind_address = f"[{local_address}]:{port}" if ":" in local_address else f"{local_address}:{port}"
    # The others. JAX's own limit comes later, because JAX then aborts.
    heartbeat_timeout = math.ceil(death_timeout) + 60
    _initialize(place, bind_address, heartbeat_timeout, patience)
    _is_joined = True
    if place.count > 1:
        keep_one_free()
    if not jax_processes.listen_for_collectives(own_address):
        _logger.warning(
            "This JAX does not say where its collectives listen: it is where the host's name leads."
        )
    if place.count == 1:
        return
    store = jax_processes.key_value_store()
    if store is None:
        raise RuntimeError("This JAX does not let the processes tell each other anything. Use jax 0.10.")
    # Whether these are the processes of one job.
    claim, secret = _claim(store, place), os.environ.get(SECRET_VARIABLE, "")
    peers = processes.Peers(place.index, place.count, own_address, store)
    processes.set_current(peers)
    PeerWatch(peers, death_timeout, stall_timeout).start()
    try:
        deadline = time.monotonic() + patience
        claims = peers.agree("joining", _describe_versions(), deadline, claim)
        if secret:
            codes = peers.exchange("proving", _prove(secret, claims, place.index), deadline)
            for process, code in enumerate(codes):
                if not hmac.compare_digest(code, _prove(secret, claims, process)):
                    raise ValueError(
                        f"distributed.initialize: process {process} has another secret than process "
                        f"{place.index}. The environment variable {SECRET_VARIABLE} must be the same in "
                        "all processes of a job."
                    )
    except TimeoutError:  # process 0 ended before it said anything, and its coordinator is still there
        peers.fail(_describe_absence(place, patience))
        raise TimeoutError(peers.failure) from None


def _find_own_address(host: str, port: int, patience: float) -> str:
    """Finds the address of this machine by which it reaches a host, as soon as the host is known.

    Kubernetes knows the name of a pod only when the pod runs, which may be after this one.
    """
    deadline, is_told = time.monotonic() + patience, False
    while True:
        try:
            return address_towards(host, port)
        except ValueError as error:
            if time.monotonic() > deadline:
                raise
            if not is_told:
                _logger.warning("%s It is tried again for %g s (initialization_timeout).", error, patience)
            is_told = True
        time.sleep(min(1.0, patience / 4))


def _read_seconds(name: str, variable: str, argument: float | None, default: float) -> float:
    """Reads a time in seconds."""
    value: Any = argument if argument is not None else os.environ.get(variable) or default
    try:
        seconds = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds >= _LEAST_SECONDS:
        source = name if argument is not None or not variable else f"the environment variable {variable}"
        raise ValueError(
            f"distributed.initialize: {source} must be a number of seconds from {_LEAST_SECONDS:g}; it "
            f"is {value!r}."
        )
    return seconds


def _initialize(place: Place, bind_address: str | None, heartbeat_timeout: int, patience: float) -> None:
    """Calls JAX in a thread, because it would abort the process if the others did not come."""
    faults: list[BaseException] = []
    former_settings = {
        name: getattr(jax.config, name)
        for name in ("jax_enable_recoverability", "jax_enable_preemption_service")
    }

    def start_coordinator() -> _Coordinator:
        assert bind_address is not None
        return _Coordinator(bind_address, place.count, heartbeat_timeout)

    def initialize() -> None:
        try:
            if place.index:
                _await_coordinator(place, patience)
            with jax_processes.coordinated_elsewhere(start_coordinator):
                jax.distributed.initialize(
                    place.coordinator,
                    place.count,
                    place.index,
                    local_device_ids=place.local_devices,
                    cluster_detection_method="deactivate",
                    initialization_timeout=10**6,
                    heartbeat_timeout_seconds=heartbeat_timeout,
                    shutdown_timeout_seconds=heartbeat_timeout,
                    coordinator_bind_address=bind_address,
                )
        except BaseException as error:
            faults.append(error)

    # The others live on when one dies, until they have said what happened. JAX's preemption service would
    # take SIGTERM for itself, so that it could not stop a program.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        thread = threading.Thread(target=initialize, name="ipu-joining", daemon=True)
        thread.start()
        deadline = time.monotonic() + min(patience, threading.TIMEOUT_MAX)
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(min(0.5, max(0.0, deadline - time.monotonic())))  # so that Ctrl-C is heard
            for process, event in hear_failures().items():
                raise ProcessError(f"Process {process} {event}, before all processes had joined.")
    finally:
        for name, value in former_settings.items():
            jax.config.update(name, value)
    if thread.is_alive():
        raise TimeoutError(_describe_absence(place, patience))
    if faults:
        raise faults[0]


def _await_coordinator(place: Place, patience: float) -> None:
    """Waits until the coordinator listens: JAX tries again only a second after the first attempt."""
    host, port = split_address(place.coordinator)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), _MOST_SECONDS_TO_CONNECT).close()
            return
        except OSError:
            time.sleep(_LOOK)


def _describe_absence(place: Place, patience: float) -> str:
    return (
        f"distributed.initialize: the {place.count} processes of the run did not all come to "
        f"{place.coordinator} within {patience:g} s; this is process {place.index}. See whether all "
        "were started, with the same address and number, and whether this machine reaches the "
        "coordinator, which process 0 starts. initialization_timeout is how long to wait."
    )


class _Coordinator:
    """The program that serves the coordination, as JAX's handle of its service."""

    def __init__(self, address: str, count: int, heartbeat_timeout: int) -> None:
        """Starts the program."""
        settings = {
            "address": address,
            "count": count,
            "heartbeat_timeout": heartbeat_timeout,
            "service": jax_processes.coordination_service,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        self._process = subprocess.Popen(  # noqa: S603  # our own program
            [sys.executable, coordinator.__file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the processes of the run
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.stdout.close()
        self._process.wait()  # the program goes on, as an orphan
        answer = json.loads(line) if line else {"error": "it has ended"}
        if "error" in answer:
            raise RuntimeError(
                f"distributed.initialize: the coordinator cannot listen at {address}: {answer['error']}. "
                "Give an address of this machine with a port that is free."
            )

    def shutdown(self) -> None:
        """Says that this process no longer needs it. It ends when the others have left, too."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def _claim(store: processes.Store, place: Place) -> str:
    """Takes the number of this process, with a random text, which it returns."""
    claim = uuid.uuid4().hex
    try:
        store.key_value_set(f"ipu_pipeline/claimed/{place.index}", claim)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        raise ValueError(
            f"distributed.initialize: another process of the run at {place.coordinator} has process_id "
            f"{place.index} too. Each has a number of its own, from 0 to {place.count - 1}."
        ) from None
    return claim


def _prove(secret: str, claims: Sequence[str], process: int) -> str:
    """A code by which a process shows that it knows the job's secret, made anew for each start."""
    text = json.dumps([process, *claims])
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def _describe_versions() -> dict[str, str]:
    """The versions that must be the same in all processes."""
    versions = {"the version of Python": platform.python_version()}
    versions[f"the variable {SECRET_VARIABLE}"] = "set" if os.environ.get(SECRET_VARIABLE) else "not set"
    for name in ("jax", "jaxlib", "ipu_pipeline"):
        try:
            versions[f"the version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from its sources
            versions[f"the version of {name}"] = str(
                getattr(sys.modules.get(name), "__version__", "(unknown)")
            )
    for name in (
        "jax_enable_x64",
        "jax_default_prng_impl",
        "jax_threefry_partitionable",
        "jax_default_matmul_precision",
    ):
        versions[name] = str(getattr(jax.config, name))
    return versions
