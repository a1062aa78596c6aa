"""The processes of a job, from their start to the end of the last one."""

from __future__ import annotations

import contextlib
import ctypes
import os
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
from ipu_pipeline.launching.shown import Output, say
from ipu_pipeline.processes.launched import (
    CACHE_DIR_VARIABLE,
    LAUNCHER_VARIABLE,
    MEMORY_EVERY_VARIABLE,
    MEMORY_VARIABLE,
    RESTART_VARIABLE,
)

__all__ = ["FORWARDED", "Group", "Settings", "hold_port"]

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
    memory: Path | None = None
    memory_every: int = 1


class Group:
    """The processes, from their start to the end of the last one.

    Attributes:
      cause: why the first one failed that did; None if none has.
      failed_at: when it did, by `time.monotonic`.
      furthest: the names of trainings -> the furthest global step that each is known to have reached.
    """

    def __init__(self, settings: Settings, restart: int, failed_at: float | None = None) -> None:
        """Starts them.

        Args:
          settings: how they are run.
          restart: how often the job has been started again.
          failed_at: when a process failed in the start before; None in the first start.
        """
        self.cause: Cause | None = None
        self.failed_at = 0.0
        self.furthest: dict[str, int] = {}
        self._failed_before = failed_at
        self._settings = settings
        self._output = Output(settings.count, settings.shows_all)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._told = b""
        self._failed: list[int] = []  # in the order in which they did
        self._deadline = float("inf")
        self._next_signal = signal.SIGTERM
        self._memory_kills = count_memory_kills()
        self._selector = selectors.DefaultSelector()
        self._held = hold_port()
        self._start(restart)

    def _start(self, restart: int) -> None:
        count = self._settings.count
        reads, writes = os.pipe()
        port = self._held.getsockname()[1]
        num_cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        environment = {
            "PJRT_NPROC": str(max(1, num_cores // count)),  # else each takes all cores
            **os.environ,
            "IPU_PIPELINE_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
            "IPU_PIPELINE_NUM_PROCESSES": str(count),
            "IPU_PIPELINE_DEATH_TIMEOUT": f"{self._settings.death_timeout:g}",
            RESTART_VARIABLE: str(restart),
            LAUNCHER_VARIABLE: str(writes),
            "PYTHONUNBUFFERED": "1",
        }
        environment.pop(MEMORY_VARIABLE, None)  # another launcher's
        if self._settings.memory is not None:
            environment[MEMORY_VARIABLE] = str(self._settings.memory)
            environment[MEMORY_EVERY_VARIABLE] = str(self._settings.memory_every)
            if "JAX_COMPILATION_CACHE_DIR" not in environment:
                environment.setdefault(CACHE_DIR_VARIABLE, str(self._settings.memory / "programs"))
        self._selector.register(reads, selectors.EVENT_READ, self._hear)
        prepare = _make_preparation(os.getpid())
        for process in range(count):
            started = subprocess.Popen(  # noqa: S603  # the user's own program
                self._settings.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, "IPU_PIPELINE_PROCESS_ID": str(process)},
                pass_fds=[writes],
                process_group=0,  # a terminal's Ctrl-C comes here only, and is sent on once
                preexec_fn=prepare,
            )
            self._processes.append(started)
            for stream, is_error in ((started.stdout, False), (started.stderr, True)):
                assert stream is not None
                self._selector.register(stream, selectors.EVENT_READ, self._reader(process, is_error))
        os.close(writes)

    def _reader(self, process: int, is_error: bool) -> Callable[[int], None]:
        def read(file: int) -> None:
            text = os.read(file, 2**16)
            self._output.take(process, is_error, text)
            if not text:
                self._selector.unregister(file)

        return read

    def _hear(self, file: int) -> None:
        """Takes what the library tells in the processes."""
        text = os.read(file, 4096)
        if not text:
            self._selector.unregister(file)
        *lines, self._told = (self._told + text).split(b"\n")
        for line in lines:
            if line.startswith(b"results "):
                self._output.know_results(int(line.split()[1]))
            elif line.startswith(b"progress "):
                training, run, step = line.decode().split()[1:]
                if not self.furthest and self._failed_before is not None:
                    seconds = time.monotonic() - self._failed_before
                    say(f"training has gone on with run {run}, {seconds:.1f} s later.")
                self.furthest[training] = max(self.furthest.get(training, -1), int(step))

    def follow(self) -> None:
        """Waits until all have ended."""
        while any(process.poll() is None for process in self._processes):
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
        for number, process in enumerate(self._processes):
            if process.poll() and number not in self._failed:
                for _again in range(_MOST_READS):  # why it ended; others may go on writing
                    if not self._read(0):
                        break
                self._failed.append(number)
                cause = Cause(number, process.returncode)
                if self.cause is None:  # others end because of this one
                    self.failed_at = time.monotonic()
                    was_memory = count_memory_kills() > self._memory_kills
                    last = self._output.last_errors.get(number, "")
                    self.cause = cause = Cause(number, process.returncode, last, was_memory)
                    patience = self._settings.death_timeout + _TO_END_BY_THEMSELVES
                    self._deadline = min(self._deadline, time.monotonic() + patience)
                say(str(cause))
        if time.monotonic() > self._deadline:
            alive = [n for n, process in enumerate(self._processes) if process.poll() is None]
            if alive:
                numbers = ", ".join(map(str, alive))
                if len(alive) == 1:
                    say(f"process {numbers} has not ended by itself.")
                else:
                    say(f"processes {numbers} have not ended by themselves.")
            self._send(self._next_signal)
            self._next_signal = signal.SIGKILL
            self._deadline = time.monotonic() + _TO_END_WHEN_ASKED

    def ask_to_end(self, number: int) -> None:
        """Sends a signal on to all. Those that do not end in time are killed."""
        self._send(number)
        self._next_signal = signal.SIGKILL
        self._deadline = min(self._deadline, time.monotonic() + self._settings.grace)

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """Kills all that is left, and what they started and left behind."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
        self._selector.close()
        self._held.close()


def hold_port() -> socket.socket:
    """Holds a free port: the coordinator can listen there, and no other program gets it before that."""
    held = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind(("127.0.0.1", 0))
    return held


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
