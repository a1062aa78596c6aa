"""The processes of one start of a job, from their start to the end of the last one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ipu_pipeline.launching.causes import Cause, count_memory_kills
from ipu_pipeline.launching.progress import Progress
from ipu_pipeline.launching.shown import Output, say
from ipu_pipeline.launching.variables import Start, hold_port
from ipu_pipeline.processes.launched import LAUNCHER_VARIABLE, describe_socket

__all__ = ["FORWARDED", "Group", "Settings"]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_TO_END_BY_THEMSELVES = 20.0  # seconds more than the time in which a death is noticed
_TO_END_WHEN_ASKED = 10.0  # seconds
_MOST_READS = 100


@dataclass(frozen=True)
class Settings:
    """How a job is run.

    Attributes:
      command: what each process runs.
      count: the number of processes.
      shows_all: whether all that they print is shown.
      death_timeout: within how many seconds of a death the others end by themselves.
      grace: how many seconds they have to end after a signal that was sent on to them.
      memory: a directory for in-memory checkpoints; None if they are not started again.
      memory_every: how many runs of a training there are from one to the next.
    """

    command: Sequence[str]
    count: int
    shows_all: bool
    death_timeout: float
    grace: float
    memory: Path | None
    memory_every: int


class Group:
    """The processes, from their start to the end of the last one.

    Attributes:
      cause: why the first one failed that did; None if none has.
      failed_at: when that was noticed, in seconds since the epoch.
      progress: how far trainings have come.
    """

    def __init__(
        self,
        settings: Settings,
        restart: int,
        on_progress: Callable[[int, int, int | None], None],
    ) -> None:
        """Starts them."""
        self.cause: Cause | None = None
        self.failed_at = 0.0
        self.progress = Progress(on_progress)
        self._settings = settings
        self._output = Output(settings.count, settings.shows_all)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._told: dict[int, bytes] = {}  # what has not come to the end of its line
        self._failed: set[int] = set()
        self._deadline = float("inf")
        self._next_signal = signal.SIGTERM
        self._memory_kills = count_memory_kills()
        self._selector = selectors.DefaultSelector()
        self._held = hold_port()  # another one for each start: the last coordinator may still have its own
        try:
            self._start(restart)
        except BaseException:
            self.kill()
            raise

    def _start(self, restart: int) -> None:
        count = self._settings.count
        coordinator = f"127.0.0.1:{self._held.getsockname()[1]}"
        num_cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        environment = {
            "PJRT_NPROC": str(max(1, num_cores // count)),  # else each takes all cores
            **os.environ,
            "PYTHONUNBUFFERED": "1",
        }
        settings = self._settings
        start = Start(
            restart,
            count,
            coordinator,
            settings.death_timeout,
            settings.memory_every,
            secrets.token_hex(),
        )
        memory = None if settings.memory is None else str(settings.memory)
        prepare = _make_preparation(os.getpid())
        for process in range(count):
            own, other = socket.socketpair()
            own.setblocking(False)
            self._sockets[process] = own
            self._selector.register(own, selectors.EVENT_READ, self._listener(process, own))
            start.describe_to(environment, process, memory)
            environment[LAUNCHER_VARIABLE] = describe_socket(other)
            started = subprocess.Popen(  # noqa: S603  # the user's own program
                self._settings.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                pass_fds=[other.fileno()],
                process_group=0,  # a terminal's Ctrl-C comes here only, and is sent on once
                preexec_fn=prepare,
            )
            other.close()
            self._processes[process] = started
            for stream, is_error in ((started.stdout, False), (started.stderr, True)):
                assert stream is not None
                self._selector.register(stream, selectors.EVENT_READ, self._reader(process, is_error))

    def _reader(self, process: int, is_error: bool) -> Callable[[int], None]:
        def read(file: int) -> None:
            text = os.read(file, 2**16)
            self._output.take(process, is_error, text)
            if not text:
                self._selector.unregister(file)

        return read

    def _listener(self, process: int, own: socket.socket) -> Callable[[int], None]:
        def listen(_file: int) -> None:
            text = b""
            with contextlib.suppress(OSError):  # it has ended, with something that it had not read
                text = own.recv(4096)
            if not text:
                self._selector.unregister(own)
            *lines, self._told[process] = (self._told.get(process, b"") + text).split(b"\n")
            for line in lines:
                self._hear(line.decode())

        return listen

    def _hear(self, line: str) -> None:
        """Takes what the library tells in a process."""
        if line.startswith("results "):
            self._output.know_results(int(line.split()[1]))
        else:
            self.progress.hear(line)

    def follow(self) -> None:
        """Waits until all have ended."""
        while self._alive():
            self._read(0.02)
            self._note_failures()
        end = time.monotonic() + 1.0  # something that they started may hold their pipes open
        while self._selector.get_map() and time.monotonic() < end and self._read(0.05):
            pass
        self._note_failures()
        self._output.end()

    def _read(self, seconds: float) -> bool:
        """Takes what they have written, or waits for it; whether there was something."""
        ready = self._selector.select(seconds)
        for key, _events in ready:
            key.data(key.fd)
        return bool(ready)

    def _note_failures(self) -> None:
        """Says which have failed, and ends those that do not end by themselves then."""
        for number, process in self._processes.items():
            if process.poll() and number not in self._failed:
                for _again in range(_MOST_READS):  # why it ended; others may go on writing
                    if not self._read(0):
                        break
                self._failed.add(number)
                cause = Cause(number, process.returncode)
                if self.cause is None:  # others end because of this one
                    was_memory = count_memory_kills() > self._memory_kills
                    last = self._output.last_errors.get(number, "")
                    self.cause = cause = Cause(number, process.returncode, last, was_memory)
                    self._tell_failure(cause)
                say(f"{cause}.")
        if time.monotonic() > self._deadline:
            if len(alive := self._alive()) == 1:
                say(f"process {alive[0]} has not ended by itself.")
            elif alive:
                say(f"processes {', '.join(map(str, alive))} have not ended by themselves.")
            self._send(self._next_signal)
            self._next_signal = signal.SIGKILL
            self._deadline = time.monotonic() + _TO_END_WHEN_ASKED

    def _alive(self) -> list[int]:
        return [number for number, process in self._processes.items() if process.poll() is None]

    def _tell_failure(self, cause: Cause) -> None:
        """Tells the processes which one has failed, and begins the time in which they end by themselves."""
        self.failed_at = time.time()
        for own in self._sockets.values():
            with contextlib.suppress(OSError):  # that process has ended, or does not listen
                own.send(f"failed {cause.process} {cause.what}\n".encode())
        patience = self._settings.death_timeout + _TO_END_BY_THEMSELVES
        self._deadline = min(self._deadline, time.monotonic() + patience)

    def ask_to_end(self, number: int) -> None:
        """Sends a signal on to all. Those that do not end in time are killed."""
        self._send(number)
        self._next_signal = signal.SIGKILL
        self._deadline = min(self._deadline, time.monotonic() + self._settings.grace)

    def _send(self, number: int) -> None:
        for process in self._alive():
            self._processes[process].send_signal(number)

    def kill(self) -> None:
        """Kills all that is left, and what they started and left behind."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
        for own in self._sockets.values():
            own.close()
        self._selector.close()
        self._held.close()


def _make_preparation(parent: int) -> Callable[[], None]:
    """What a process does before it runs the program: on Linux, see to it that it ends with this one."""
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it is gone already
            os._exit(1)

    return prepare
