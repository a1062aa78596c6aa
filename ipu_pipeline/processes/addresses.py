"""Finds a run's processes and where they are: from arguments, the environment, or what JAX recognises."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

from ipu_pipeline.ground import jax_processes
from ipu_pipeline.processes.launched import COORDINATOR_VARIABLE, COUNT_VARIABLE, INDEX_VARIABLE

__all__ = [
    "Place",
    "address_towards",
    "find_place",
    "is_in_environment",
    "split_address",
]

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
    given = [coordinator_address, num_processes, process_id]
    found = [_check(name, value) for name, value in zip(_ARGUMENTS, given, strict=True)]
    if None in found:
        environment = [os.environ.get(name) or None for name in _VARIABLES]
        found = [
            value if value is not None or text is None else _read(name, text)
            for name, value, text in zip(_VARIABLES, found, environment, strict=True)
        ]
        if found[0] is None:
            found[0] = os.environ.get(_OF_JAX) or None
        if None in found:
            found, local_device_ids = _complete(found, local_device_ids, environment, seconds)
    address, count, index = found
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
    found: list[str | int | None],
    devices: list[int] | None,
    environment: list[str | None],
    seconds: int,
) -> tuple[list[str | int | None], list[int] | None]:
    """Completes what was found by what JAX knows of the cluster."""
    missing = [number for number, value in enumerate(found) if value is None]
    names = " and ".join(f"{_ARGUMENTS[number]} ({_VARIABLES[number]})" for number in missing)
    if any(environment):
        set_ones = ", ".join(name for name, text in zip(_VARIABLES, environment, strict=True) if text)
        raise ValueError(
            f"distributed.initialize: {names} missing: the environment has only {set_ones}. Set all three "
            "variables, or none."
        )
    detected = jax_processes.detect_cluster(seconds)
    completed = [
        known if value is None else value for known, value in zip(detected[:3], found, strict=True)
    ]
    if None in completed:
        raise ValueError(
            f"distributed.initialize: {names} missing, and JAX recognises no cluster here (it knows SLURM, "
            "Open MPI, Kubernetes with its Python package, and Cloud TPU). Give them as arguments or by "
            "the environment; to try a program on this machine alone: ipu-pipeline launch -n 2 "
            "PROGRAM."
        )
    return completed, detected[3] if devices is None else devices


def _check(name: str, value: str | int | None) -> str | int | None:
    kind = str if name == "coordinator_address" else int
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        wanted = 'a text like "10.0.0.1:1234"' if kind is str else "an integer"
        raise TypeError(f"distributed.initialize: {name} must be {wanted}; it is {value!r}.")
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
