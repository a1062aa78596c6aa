"""What passes between this process and the launcher that started it, with others."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time

__all__ = [
    "BIND_VARIABLE",
    "CACHE_DIR_VARIABLE",
    "COORDINATOR_VARIABLE",
    "COUNT_VARIABLE",
    "DEATH_VARIABLE",
    "INDEX_VARIABLE",
    "LAUNCHER_VARIABLE",
    "MEMORY_EVERY_VARIABLE",
    "MEMORY_VARIABLE",
    "RESTART_VARIABLE",
    "SECRET_VARIABLE",
    "count_useful",
    "describe_socket",
    "hear_failures",
    "restart_number",
    "restore_useful",
    "runs_between_checkpoints",
    "tell_progress",
    "tell_results",
    "tell_resumed",
    "useful_seconds",
]

COORDINATOR_VARIABLE = "IPU_PIPELINE_COORDINATOR_ADDRESS"  # "host:port", where process 0 starts it
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # where it listens there
COUNT_VARIABLE = "IPU_PIPELINE_NUM_PROCESSES"
INDEX_VARIABLE = "IPU_PIPELINE_PROCESS_ID"
DEATH_VARIABLE = "IPU_PIPELINE_DEATH_TIMEOUT"  # in how many seconds a death is noticed
CACHE_DIR_VARIABLE = "IPU_PIPELINE_CACHE_DIR"  # where compiled programs are
LAUNCHER_VARIABLE = "IPU_PIPELINE_LAUNCHER_FD"  # number and inode of a socket, for lines both ways
MEMORY_VARIABLE = "IPU_PIPELINE_MEMORY_DIR"  # where in-memory checkpoints are
MEMORY_EVERY_VARIABLE = "IPU_PIPELINE_MEMORY_EVERY"  # how many runs there are from one to the next
RESTART_VARIABLE = "IPU_PIPELINE_RESTART"  # how often the job has been started again
SECRET_VARIABLE = "IPU_PIPELINE_SECRET"  # noqa: S105  # by which the processes of a job know each other

_TELL_EVERY = 0.2  # seconds


def restart_number() -> int:
    """How often the job has been started again; 0 without a launcher."""
    return _read_number(RESTART_VARIABLE, 0, 0)


def runs_between_checkpoints() -> int:
    """How many runs there are from one in-memory checkpoint to the next; 1 without a launcher."""
    return _read_number(MEMORY_EVERY_VARIABLE, 1, 1)


def _read_number(variable: str, default: int, least: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not (text.isdecimal() and int(text) >= least):
        raise ValueError(
            f"The environment variable {variable} must be a whole number from {least}; it is {text!r}."
        )
    return int(text)


@functools.cache  # once
def tell_results(process: int) -> None:
    """Says that a process has the results of a pipeline's last stage, if a launcher asks for that."""
    _tell(f"results {process}")


_told_at = -1.0
_useful = 0.0  # seconds


def tell_resumed(num_redone: int) -> None:
    """Says how many runs of a training are done again, if a launcher asks for that."""
    _tell(f"resumed {num_redone}")


def tell_progress(training: str, run: int, step: int) -> None:
    """Says how far a training has come, if a launcher asks for that; five times a second at most."""
    global _told_at
    now = time.monotonic()
    if now > _told_at + _TELL_EVERY:
        _told_at = now
        _tell(f"progress {training} {run} {step} {_useful:.6g}")


def count_useful(seconds: float) -> None:
    """Counts what a run took."""
    global _useful
    _useful += seconds


def restore_useful(seconds: float) -> None:
    """Goes on counting where an earlier process of the job was."""
    global _useful
    _useful = max(_useful, seconds)


def useful_seconds() -> float:
    """How many seconds the runs of trainings took, each counted once; also before restarts."""
    return _useful


_heard = b""


def hear_failures() -> dict[int, str]:
    """What a launcher has told so far of processes that failed: what happened to each, by its number.

    One thread calls it.
    """
    global _heard
    with contextlib.suppress(OSError):  # nothing was told; or the launcher is gone
        _heard += _launcher().recv(4096, socket.MSG_DONTWAIT)
    told = [line.decode().split(" ", 2) for line in _heard.split(b"\n")[:-1]]
    return {int(process): what for _failed, process, what in told}


def _tell(text: str) -> None:
    # The launcher is gone; or it has read nothing for long, as when its terminal is stopped.
    with contextlib.suppress(OSError):
        _launcher().send(f"{text}\n".encode(), socket.MSG_DONTWAIT)


_opening = threading.Lock()  # two objects of one socket would close it when one of them goes


@functools.cache
def _open(number: int, inode: int) -> socket.socket:
    if os.fstat(number).st_ino != inode:  # in a process that this one started, without its files
        raise OSError(f"{LAUNCHER_VARIABLE} names another file")
    return socket.socket(fileno=number)


def _launcher() -> socket.socket:
    """The launcher's socket."""
    number, _colon, inode = os.environ.get(LAUNCHER_VARIABLE, "").partition(":")
    if not (number.isdecimal() and inode.isdecimal()):
        raise OSError(f"{LAUNCHER_VARIABLE} is not set")
    with _opening:
        return _open(int(number), int(inode))


def describe_socket(of_process: socket.socket) -> str:
    """What `LAUNCHER_VARIABLE` says of a process's end of a pair of sockets."""
    return f"{of_process.fileno()}:{os.fstat(of_process.fileno()).st_ino}"
