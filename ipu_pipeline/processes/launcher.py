"""Between a launcher and the processes of its job: variables, lines both ways, memory, history."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

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
    """The number of restarts of the job; 0 without a launcher."""
    return _read_number(RESTART_VARIABLE, 0, 0)


def runs_between_checkpoints() -> int:
    """The number of runs from one in-memory checkpoint to the next; 1 without a launcher."""
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
    """The seconds that the runs of trainings took, each counted once; also before restarts."""
    return _useful


_received = b""


def hear_failures() -> dict[int, str]:
    """The processes that have failed, as the launcher has told: what happened to each, by its number.

    One thread calls it.
    """
    global _received
    with contextlib.suppress(OSError):  # nothing was told; or the launcher is gone
        _received += _launcher().recv(4096, socket.MSG_DONTWAIT)
    messages = [line.decode().split(" ", 2) for line in _received.split(b"\n")[:-1]]
    return {int(process): event for _failed, process, event in messages}


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
    """The value of `LAUNCHER_VARIABLE` for a process's end of a pair of sockets."""
    return f"{of_process.fileno()}:{os.fstat(of_process.fileno()).st_ino}"


# The start of a process, by any launcher.


@dataclass(frozen=True)
class Start:
    """One of the starts of a job.

    Attributes:
      restart: how often the job has been started again.
      count: how many processes there are.
      coordinator: "host:port" where process 0 starts the coordinator.
      death_timeout: in how many seconds a death is noticed.
      memory_every: how many runs of a training there are from one in-memory checkpoint to the next.
      secret: by which the processes know each other.
    """

    restart: int
    count: int
    coordinator: str
    death_timeout: float
    memory_every: int
    secret: str = field(repr=False)

    def describe_to(self, environment: MutableMapping[str, str], index: int, memory: str | None) -> None:
        """Sets the variables of a process, with the directory in memory of its machine, if there is one."""
        environment.update(
            {
                COORDINATOR_VARIABLE: self.coordinator,
                BIND_VARIABLE: self.coordinator,
                COUNT_VARIABLE: str(self.count),
                INDEX_VARIABLE: str(index),
                DEATH_VARIABLE: f"{self.death_timeout:g}",
                RESTART_VARIABLE: str(self.restart),
                SECRET_VARIABLE: self.secret,
                MEMORY_EVERY_VARIABLE: str(self.memory_every),
            }
        )
        environment.pop(MEMORY_VARIABLE, None)  # another launcher's
        if memory is not None:
            environment[MEMORY_VARIABLE] = memory
            if "JAX_COMPILATION_CACHE_DIR" not in environment:
                environment.setdefault(CACHE_DIR_VARIABLE, f"{memory}/programs")


def hold_port(address: str = "127.0.0.1") -> socket.socket:
    """Holds a free port: the coordinator can listen there, and no other program gets it before that."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    port_socket = socket.socket(family)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        port_socket.setsockopt(socket.SOL_SOCKET, option, 1)
    port_socket.bind((address, 0))
    return port_socket


# The directory in memory where the processes of a job keep their state.

DEFAULT_DIRECTORY = Path("/dev/shm")  # noqa: S108  # a file system in memory, on every Linux
_MEMORY_PREFIX, _LOCK_FILE = "ipu_pipeline-launch-", "lock"


class Memory:
    """A directory that only this user can open, and that a lock shows to be in use.

    Attributes:
      path: its path.
    """

    def __init__(self, parent: Path, label: str = "") -> None:
        """Makes the directory, and holds its lock."""
        hidden_path = Path(tempfile.mkdtemp(prefix=f".{_MEMORY_PREFIX}{label}", dir=parent)).absolute()
        self._lock = os.open(hidden_path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under this name others would remove it if it were not locked.
        self.path = hidden_path.rename(hidden_path.with_name(hidden_path.name.removeprefix(".")))

    def close(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left(parent: Path, label: str = "") -> bool:
    """Removes the directories that killed launchers of this user have left behind.

    A launcher that is still running holds the lock of its directory.

    Returns:
      Whether none is left.
    """
    for path in parent.glob(f"{_MEMORY_PREFIX}{label}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or being removed by somebody else
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
    return not any(parent.glob(f"{_MEMORY_PREFIX}{label}*"))


# The launcher's side of `tell_progress` and `tell_resumed`.


class Progress:
    """The progress of the trainings of a job.

    Attributes:
      useful: how many seconds of runs of trainings are known, each run counted once.
      furthest: the names of trainings -> the furthest global step that each is known to have reached.
    """

    def __init__(self, on_first: Callable[[int, int, int | None], None]) -> None:
        """Begins without any training."""
        self.useful = 0.0
        self.furthest: dict[str, int] = {}
        self._on_first = on_first
        self._num_redone: int | None = None

    def hear(self, line: str) -> None:
        """Takes a line about a training."""
        kind, *values = line.split()
        if kind == "resumed":
            self._num_redone = max(self._num_redone or 0, int(values[0]))
        elif kind == "progress":
            training, run, step, useful = values
            self.useful = max(self.useful, float(useful))
            if not self.furthest:
                self._on_first(int(run), int(step), self._num_redone)
            self.furthest[training] = max(self.furthest.get(training, -1), int(step))


# The failures of a job whose processes are started again, and its goodput.

_HISTORY_FILE = "job.json"
_MOST_FAILURES = 20


@dataclass(frozen=True)
class Failure:
    """A failure after which training has gone on.

    Attributes:
      what: what happened, such as "process 1 was ended by SIGKILL".
      at: when it was noticed, in seconds since the epoch.
      run: the number of the run of a training with which it has gone on.
      step: the global step after that run.
      num_redone: how many runs were done a second time; None if that is not known.
      seconds: from the failure to the end of that run.
    """

    what: str
    at: float
    run: int
    step: int
    num_redone: int | None
    seconds: float

    def __str__(self) -> str:
        runs = "run was" if self.num_redone == 1 else "runs were"
        again = "" if self.num_redone is None else f"; {self.num_redone} {runs} done again"
        return (
            f"training has gone on with run {self.run} (to step {self.step}), {self.seconds:.1f} s after "
            f"{self.what}{again}"
        )


@dataclass(frozen=True)
class JobHistory:
    """A job so far, which its launcher writes, and its processes read.

    Attributes:
      begun: when the launcher began, in seconds since the epoch.
      num_restarts: how often the processes have been started again.
      failures: the last ones after which training has gone on.
    """

    begun: float
    num_restarts: int = 0
    failures: tuple[Failure, ...] = ()

    def after(self, failure: Failure) -> JobHistory:
        """The history with another failure."""
        return dataclasses.replace(self, failures=(*self.failures, failure)[-_MOST_FAILURES:])

    def write(self, directory: Path) -> None:
        """Writes it to the directory of the job's memory, if that has room."""
        temporary = directory / f".{_HISTORY_FILE}"
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(dataclasses.asdict(self)))
            temporary.rename(directory / _HISTORY_FILE)

    @classmethod
    def of_environment(cls) -> JobHistory | None:
        """Reads the history of this process's job; None without a launcher that starts it again."""
        try:
            fields = json.loads((Path(os.environ[MEMORY_VARIABLE]) / _HISTORY_FILE).read_text())
            failures = tuple(Failure(**failure) for failure in fields["failures"])
            return cls(float(fields["begun"]), int(fields["num_restarts"]), failures)
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def goodput(self, useful: float) -> float | None:
        """The part of the job's time until now that its runs took; None if no run is known."""
        return min(1.0, useful / max(time.time() - self.begun, 1e-9)) if useful else None

    def describe_times(self) -> str:
        """The number of restarts in words."""
        return "once" if self.num_restarts == 1 else f"{self.num_restarts} times"

    def describe_goodput(self, useful: float) -> str:
        """The goodput at the end of a job that was started again, in words; else empty."""
        goodput = self.goodput(useful)
        if goodput is None or not self.num_restarts:
            return ""
        return (
            f"goodput {goodput:.2f}: the runs took {useful:.1f} s of {time.time() - self.begun:.1f} s; the "
            f"job was started again {self.describe_times()}."
        )

    def describe(self) -> str:
        """Describes it in sentences; empty if nothing has failed."""
        if not self.num_restarts:
            return ""
        last = f" The last time, {self.failures[-1]}." if self.failures else ""
        return f"The job has been started again {self.describe_times()}.{last}"
