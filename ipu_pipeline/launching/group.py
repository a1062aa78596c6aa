"""The processes of a job on one node, from their start to the end of the last one."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
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
    SECRET_VARIABLE,
    STANDBY_VARIABLE,
    describe_socket,
)

__all__ = ["FORWARDED", "Group", "Settings", "Start"]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_TO_END_BY_THEMSELVES = 20.0  # seconds more than the time in which a death is noticed
_TO_END_WHEN_ASKED = 10.0  # seconds
_MOST_READS = 100
_MOST_HELD = 16 * 2**20  # bytes


@dataclass(frozen=True)
class Settings:
    """How a job is run on this node.

    Attributes:
      command: what each process runs.
      count: the number of processes here.
      shows_all: whether all that they print is shown.
      death_timeout: within how many seconds of a death the others end by themselves.
      grace: how many seconds they have to end after a signal that was sent on to them.
      secret: by which the job's processes know each other.
      memory: a directory for in-memory checkpoints; None if they are not started again.
      memory_every: how many runs of a training there are from one to the next.
      has_standby: whether processes for the next start are started in advance.
    """

    command: Sequence[str]
    count: int
    shows_all: bool
    death_timeout: float
    grace: float
    secret: str
    memory: Path | None = None
    memory_every: int = 1
    has_standby: bool = False


@dataclass(frozen=True)
class Start:
    """One of the starts of a job's processes.

    Attributes:
      restart: how often the job has been started again.
      coordinator: "host:port" where process 0 starts the coordinator.
      count: the number of processes on all nodes.
      first: the number of the first one on this node.
      has_memory: whether all nodes have a directory for in-memory checkpoints.
      is_whole: whether all nodes take part.
    """

    restart: int
    coordinator: str
    count: int
    first: int
    has_memory: bool
    is_whole: bool


class Group:
    """The processes, from their start to the end of the last one.

    Attributes:
      cause: why the first one failed that did; None if none has.
      furthest: the names of trainings -> the furthest global step that each is known to have reached.
      results: the number of the process that has the results; None if that is not known.
      useful: how many seconds of runs of trainings are known, each run counted once.
      start: which start it is; as long as they are on standby, without its coordinator.
    """

    def __init__(
        self,
        settings: Settings,
        start: Start,
        on_progress: Callable[[int, int, int | None], None],
        is_standby: bool = False,
    ) -> None:
        """Starts them.

        Args:
          settings: how they are run.
          start: which start it is.
          on_progress: is called when the first run of a training is done, with its number, the global step
            after it, and how many runs are done again, which may be unknown.
          is_standby: whether they are to wait for `begin` before they join each other. What they print is
            shown then.

        Raises:
          OSError: one cannot be started.
        """
        self.useful = 0.0
        self._num_redone: int | None = None
        self.cause: Cause | None = None
        self.furthest: dict[str, int] = {}
        self.results: int | None = None
        self._on_progress = on_progress
        self._settings = settings
        self._numbers = range(start.first, start.first + settings.count)
        self._output = Output(self._numbers, settings.shows_all)
        # What those on standby have printed: process, whether it is on the standard error, and the text.
        self._held: list[tuple[int, bool, bytes]] | None = [] if is_standby else None
        self._num_held = 0  # bytes
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._told: dict[int, bytes] = {}  # what has not come to the end of its line
        self._failed: list[int] = []  # in the order in which they did
        self._has_told = False  # that a process has failed
        self._deadline = float("inf")
        self._next_signal = signal.SIGTERM
        self._memory_kills = count_memory_kills()
        self._selector = selectors.DefaultSelector()
        self.start = start
        try:
            self._start(start, is_standby)
        except BaseException:
            self.kill()
            raise

    def look(self) -> Cause | None:
        """Takes what those on standby have printed, and says how the first one has ended that has."""
        ended = next((n for n, process in self._processes.items() if process.poll() is not None), None)
        for _again in range(1 if ended is None else _MOST_READS):
            if self._num_held > _MOST_HELD or not self._read(0):
                break
        if ended is None:
            return None
        self._show_held()
        return Cause(ended, self._processes[ended].returncode, self._output.last_errors.get(ended, ""))

    def _show_held(self) -> None:
        held, self._held, self._num_held = self._held or [], None, 0
        for process, is_error, text in held:
            self._output.take(process, is_error, text)

    def begin(self, start: Start) -> bool:
        """Lets those on standby take part in a start; False if it is not the one that they wait for."""
        if start != dataclasses.replace(self.start, coordinator=start.coordinator):
            return False
        self.start, self._memory_kills = start, count_memory_kills()
        self._show_held()
        told = f"{json.dumps(_coordinator_variables(start))}\n".encode()
        for own in self._sockets.values():
            with contextlib.suppress(OSError):  # that process has just ended
                own.send(told)
        return True

    def _start(self, start: Start, is_standby: bool) -> None:
        count = self._settings.count
        num_cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        environment = {
            "PJRT_NPROC": str(max(1, num_cores // count)),  # else each takes all cores
            **os.environ,
            **_coordinator_variables(start),
            "IPU_PIPELINE_NUM_PROCESSES": str(start.count),
            "IPU_PIPELINE_DEATH_TIMEOUT": f"{self._settings.death_timeout:g}",
            RESTART_VARIABLE: str(start.restart),
            SECRET_VARIABLE: self._settings.secret,
            "PYTHONUNBUFFERED": "1",
        }
        for variable in (MEMORY_VARIABLE, STANDBY_VARIABLE):  # another launcher's
            environment.pop(variable, None)
        if is_standby:
            environment[STANDBY_VARIABLE] = "1"
            for variable in _coordinator_variables(start):  # it is not known yet
                del environment[variable]
        if self._settings.memory is not None and start.has_memory:
            environment[MEMORY_VARIABLE] = str(self._settings.memory)
            environment[MEMORY_EVERY_VARIABLE] = str(self._settings.memory_every)
            if "JAX_COMPILATION_CACHE_DIR" not in environment:
                environment.setdefault(CACHE_DIR_VARIABLE, str(self._settings.memory / "programs"))
        prepare = _make_preparation(os.getpid())
        for process in self._numbers:
            own, other = socket.socketpair()
            own.setblocking(False)
            self._sockets[process] = own
            self._selector.register(own, selectors.EVENT_READ, self._listener(process, own))
            started = subprocess.Popen(  # noqa: S603  # the user's own program
                self._settings.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    **environment,
                    "IPU_PIPELINE_PROCESS_ID": str(process),
                    LAUNCHER_VARIABLE: describe_socket(other),
                },
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
            if self._held is None:
                self._output.take(process, is_error, text)
            else:
                self._held.append((process, is_error, text))
                self._num_held += len(text)
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
        kind, *values = line.split()
        if kind == "results":
            self.know_results(int(values[0]))
        elif kind == "resumed":
            self._num_redone = max(self._num_redone or 0, int(values[0]))
        elif kind == "progress":
            training, run, step, useful = values
            self.useful = max(self.useful, float(useful))
            if not self.furthest:
                self._on_progress(int(run), int(step), self._num_redone)
            self.furthest[training] = max(self.furthest.get(training, -1), int(step))

    def know_results(self, process: int) -> None:
        """Notes that a process has the results, which may be on another node."""
        self.results = process if self.results is None else self.results
        self._output.know_results(process)

    def know_failure(self, processes: Sequence[int], what: str) -> None:
        """Tells the processes of others that have failed, so that they end. Only the first time counts.

        Args:
          processes: the numbers of those.
          what: what happened to each, without its number.
        """
        if not self._has_told:  # what fails later follows from this
            self._has_told = True
            text = "".join(f"failed {process} {what}\n" for process in processes).encode()
            for own in self._sockets.values():
                with contextlib.suppress(OSError):  # that process has ended, or does not listen
                    own.send(text)
        self._await_ends()

    def follow(self, each_time: Callable[[], None] = lambda: None) -> None:
        """Waits until all have ended.

        Args:
          each_time: is called again and again meanwhile.
        """
        while self._alive():
            self._read(0.02)
            self._note_failures()
            each_time()
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
                self._failed.append(number)
                cause = Cause(number, process.returncode)
                if self.cause is None:  # others end because of this one
                    was_memory = count_memory_kills() > self._memory_kills
                    last = self._output.last_errors.get(number, "")
                    self.cause = cause = Cause(number, process.returncode, last, was_memory)
                    self.know_failure(cause.processes, cause.what)
                say(str(cause))
        if time.monotonic() > self._deadline:
            alive = self._alive()
            if alive:
                numbers = ", ".join(map(str, alive))
                if len(alive) == 1:
                    say(f"process {numbers} has not ended by itself.")
                else:
                    say(f"processes {numbers} have not ended by themselves.")
            self._send(self._next_signal)
            self._next_signal = signal.SIGKILL
            self._deadline = time.monotonic() + _TO_END_WHEN_ASKED

    def _alive(self) -> list[int]:
        return [number for number, process in self._processes.items() if process.poll() is None]

    def _await_ends(self) -> None:
        """Begins the time in which the processes end by themselves."""
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

    def dismiss(self, seconds: float) -> None:
        """Lets those on standby end by themselves where they wait for `begin`, and kills what is left."""
        for own in self._sockets.values():
            with contextlib.suppress(OSError):  # that process has ended
                own.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + seconds
        while self._alive() and time.monotonic() < end:
            time.sleep(0.02)
        self.kill()

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


def _coordinator_variables(start: Start) -> dict[str, str]:
    return {
        "IPU_PIPELINE_COORDINATOR_ADDRESS": start.coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": start.coordinator,
    }


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
