"""A job on this machine: its processes, what they print, why they end, and restarts."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ipu_pipeline.ground.host import count_cores
from ipu_pipeline.processes.launcher import (
    LAUNCHER_VARIABLE,
    Failure,
    JobHistory,
    Progress,
    Start,
    describe_socket,
    hold_port,
)

# Why a process has ended, and whether another start follows.

_VMSTAT = Path("/proc/vmstat")
_HEALTHY_SECONDS = 600.0  # a run that lasted as long was no failure of the start
_MOST_DELAY = 60.0


@dataclass(frozen=True)
class Cause:
    """The end of the process that was the first to fail.

    Attributes:
      process: its number.
      code: its exit code, or the negative number of the signal that ended it.
      last_error: the last line that it wrote on the standard error, or the beginning of a long one; empty
        if it wrote nothing.
      was_memory: whether the kernel has ended processes meanwhile for lack of memory.
    """

    process: int
    code: int
    last_error: str = ""
    was_memory: bool = False

    @property
    def status(self) -> int:
        """The exit status that tells of it: 128 more than the number of a signal."""
        return self.code if self.code > 0 else 128 - self.code

    @property
    def kind(self) -> str:
        """The text that other ends of the same cause share: without the process, and without numbers."""
        return f"{self._how()} {re.sub(r'[0-9]+', '#', self._why())}"

    @property
    def what(self) -> str:
        """The description of the end, without the process's number."""
        return f"{self._how()}{self._why()}"

    def __str__(self) -> str:
        return f"process {self.process} {self.what}"

    def _how(self) -> str:
        if self.code >= 0:
            return f"ended with status {self.code}"
        try:
            return f"was ended by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was ended by signal {-self.code}"

    def _why(self) -> str:
        if self.code == -signal.SIGKILL:
            return (
                ", probably for lack of memory: the kernel has ended processes for that" * self.was_memory
            )
        # A process that a signal ends seldom has written why.
        return f": {self.last_error.rstrip('.')}" if self.code > 0 and self.last_error else ""


def count_memory_kills() -> int:
    """The number of processes that the kernel has ended for lack of memory; 0 if it does not say."""
    try:
        match = re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


class Restarts:
    """Counts the starts after failures of one cause, and gives up after so many.

    Attributes:
      most: after how many failures of one cause there is no other start.
      count: how often the job has been started again.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self.most = most
        self._of_kinds: collections.Counter[str] = collections.Counter()
        self._idle: collections.Counter[str] = collections.Counter()  # failures since the last progress

    def after(self, cause: Cause, seconds: float, has_progressed: bool = False) -> float | None:
        """Counts a failure.

        Returns:
          How many seconds to wait before the next start: 0 after progress, else 1, 2, 4 and so on up to 60.
          None: there is no other start.
        """
        if seconds >= _HEALTHY_SECONDS:
            self._of_kinds.clear()
            self._idle.clear()
        if self._of_kinds[cause.kind] >= self.most:
            return None
        self._of_kinds[cause.kind] += 1
        self.count += 1
        if has_progressed:
            self._idle.clear()
            return 0.0
        self._idle[cause.kind] += 1
        return min(_MOST_DELAY, 2.0 ** (self._idle[cause.kind] - 1))

    def describe(self, cause: Cause) -> str:
        """Describes the next start."""
        return f"restart {self._of_kinds[cause.kind]} of at most {self.most} for this cause"


# What the processes print.

_MOST_PENDING_BYTES = 16 * 2**20
_LONGEST = 200  # characters of a last error
_NOISE = re.compile(rb"\[Gloo\] Rank |.*connected peer ranks is")  # of a library, on the standard output


class Output:
    """Shows what the processes print.

    What they write on the standard output is shown of the process that has the results, and held back until
    that is known; what they write on the standard error is shown at once, with the number of the process.

    Attributes:
      last_errors: the beginning of the last line that each process wrote on the standard error. Lines that
        are empty, or indented, as those that follow the first one of an error, do not count.
    """

    def __init__(self, num_processes: int, shows_all: bool) -> None:
        self.last_errors: dict[int, str] = {}
        self._num_processes = num_processes
        self._results_process: int | None = None  # the process that has the results
        self._shows_all = shows_all
        self._pending_lines: list[tuple[int, bytes]] = []
        self._num_pending_bytes = 0
        self._started: dict[tuple[int, bool], bytes] = {}  # lines without an end as yet

    def take(self, process: int, is_error: bool, text: bytes) -> None:
        """Takes what a process has written; empty at the end."""
        key = (process, is_error)
        lines = (self._started.pop(key, b"") + text).splitlines(keepends=True)
        if text and lines and not lines[-1].endswith((b"\n", b"\r")):
            self._started[key] = lines.pop()
        for line in lines:
            if is_error:
                if line.strip() and not line[:1].isspace():
                    self.last_errors[process] = line.decode(errors="replace").strip()[:_LONGEST]
                _write(2, _number(process, line))
            elif not _NOISE.match(line):
                self._add(process, line)

    def _add(self, process: int, line: bytes) -> None:
        if self._shows_all:
            _write(1, _number(process, line))
        elif self._results_process is None:
            self._pending_lines.append((process, line))
            self._num_pending_bytes += len(line)
            if self._num_pending_bytes > _MOST_PENDING_BYTES:
                self._shows_all = True
                self.end()
        elif self._results_process == process:
            _write(1, line)

    def know_results(self, process: int) -> None:
        """Notes that a process has the results of a pipeline."""
        if self._shows_all or self._results_process == process:
            return
        if self._results_process is not None:
            say(f"process {process} has results too; what it prints is shown with --all only.")
            return
        self._results_process = process
        for source, line in self._pending_lines:
            if source == process:
                _write(1, line)
        self._pending_lines = []

    def end(self) -> None:
        """Shows the lines that are still held back, since no process can be chosen any more."""
        outputs = {
            b"".join(line for source, line in self._pending_lines if source == p)
            for p in range(self._num_processes)
        }
        if len(outputs) == 1:
            _write(1, outputs.pop())
        else:
            for process, line in self._pending_lines:
                _write(1, _number(process, line))
        self._pending_lines = []


def say(message: str) -> None:
    """Writes a line of the launcher's own on the standard error."""
    with contextlib.suppress(OSError):
        _write(2, f"ipu-pipeline launch: {message}\n".encode())


def _number(process: int, line: bytes) -> bytes:
    return b"[%d] %s" % (process, line if line.endswith((b"\n", b"\r")) else line + b"\n")


def _write(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]


# The processes of one start.

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_TO_END_BY_THEMSELVES = 20.0  # seconds more than the time in which a death is noticed
_TO_END_WHEN_ASKED = 10.0  # seconds
_MOST_READS = 100


@dataclass(frozen=True)
class Settings:
    """Settings of a job.

    Attributes:
      command: what each process runs.
      count: the number of processes.
      shows_all: whether all that they print is shown.
      death_timeout: within how many seconds of a death the others end by themselves.
      grace: how many seconds they have to end after a signal that was sent on to them.
      memory: a directory for in-memory checkpoints; None if the processes are not started again.
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
        """Starts the processes."""
        self.cause: Cause | None = None
        self.failed_at = 0.0
        self.progress = Progress(on_progress)
        self._settings = settings
        self._output = Output(settings.count, settings.shows_all)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._partial: dict[int, bytes] = {}  # what has not come to the end of its line
        self._failed: set[int] = set()
        self._deadline = float("inf")
        self._next_signal = signal.SIGTERM
        self._memory_kills = count_memory_kills()
        self._selector = selectors.DefaultSelector()
        # Another port for each start: the last coordinator may still have its own.
        self._port_socket = hold_port()
        try:
            self._start(restart)
        except BaseException:
            self.kill()
            raise

    def _start(self, restart: int) -> None:
        count = self._settings.count
        coordinator = f"127.0.0.1:{self._port_socket.getsockname()[1]}"
        environment = {
            "PJRT_NPROC": str(max(1, count_cores() // count)),  # else each takes all cores
            **os.environ,
            "PYTHONUNBUFFERED": "1",
        }
        settings, secret = self._settings, secrets.token_hex()
        start = Start(restart, count, coordinator, settings.death_timeout, settings.memory_every, secret)
        memory = None if settings.memory is None else str(settings.memory)
        prepare = _make_preparation(os.getpid())
        for process in range(count):
            channel, process_channel = socket.socketpair()
            channel.setblocking(False)
            self._sockets[process] = channel
            self._selector.register(channel, selectors.EVENT_READ, self._listener(process, channel))
            start.describe_to(environment, process, memory)
            environment[LAUNCHER_VARIABLE] = describe_socket(process_channel)
            child = subprocess.Popen(  # noqa: S603  # the user's own program
                settings.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                pass_fds=[process_channel.fileno()],
                process_group=0,  # a terminal's Ctrl-C comes here only, and is sent on once
                preexec_fn=prepare,
            )
            process_channel.close()
            self._processes[process] = child
            for stream, is_error in ((child.stdout, False), (child.stderr, True)):
                assert stream is not None
                self._selector.register(stream, selectors.EVENT_READ, self._reader(process, is_error))

    def _reader(self, process: int, is_error: bool) -> Callable[[int], None]:
        def read(file: int) -> None:
            text = os.read(file, 2**16)
            self._output.take(process, is_error, text)
            if not text:
                self._selector.unregister(file)

        return read

    def _listener(self, process: int, channel: socket.socket) -> Callable[[int], None]:
        def listen(_file: int) -> None:
            text = b""
            with contextlib.suppress(OSError):  # it has ended, with something that it had not read
                text = channel.recv(4096)
            if not text:
                self._selector.unregister(channel)
            *lines, self._partial[process] = (self._partial.get(process, b"") + text).split(b"\n")
            for line in lines:
                self._hear(line.decode())

        return listen

    def _hear(self, line: str) -> None:
        """Takes a line that the library has sent from a process."""
        if line.startswith("results "):
            self._output.know_results(int(line.split()[1]))
        else:
            self.progress.hear(line)

    def follow(self) -> None:
        """Waits until all processes have ended."""
        while self._alive():
            self._read(0.02)
            self._note_failures()
        end = time.monotonic() + 1.0  # something that they started may hold their pipes open
        while self._selector.get_map() and time.monotonic() < end and self._read(0.05):
            pass
        self._note_failures()
        self._output.end()

    def _read(self, seconds: float) -> bool:
        """Takes what the processes have written, or waits for it. Returns whether there was something."""
        ready = self._selector.select(seconds)
        for key, _events in ready:
            key.data(key.fd)
        return bool(ready)

    def _note_failures(self) -> None:
        """Says which processes have failed, and ends those that do not end by themselves then."""
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
        for channel in self._sockets.values():
            with contextlib.suppress(OSError):  # that process has ended, or does not listen
                channel.send(f"failed {cause.process} {cause.what}\n".encode())
        patience = self._settings.death_timeout + _TO_END_BY_THEMSELVES
        self._deadline = min(self._deadline, time.monotonic() + patience)

    def ask_to_end(self, number: int) -> None:
        """Sends a signal on to all processes. Those that do not end in time are killed."""
        self._send(number)
        self._next_signal = signal.SIGKILL
        self._deadline = min(self._deadline, time.monotonic() + self._settings.grace)

    def _send(self, number: int) -> None:
        for process in self._alive():
            self._processes[process].send_signal(number)

    def kill(self) -> None:
        """Kills the processes that are left, and those that they started and left behind."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
        for channel in self._sockets.values():
            channel.close()
        self._selector.close()
        self._port_socket.close()


def _make_preparation(parent: int) -> Callable[[], None]:
    """Makes what a process does before it runs the program: on Linux, it asks to end with this one."""
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it is gone already
            os._exit(1)

    return prepare


# The job: all of its processes are started again after a failure, until it is over.

_LOOK = 0.05  # seconds between two looks whether a signal has come
_LONGEST_CAUSE = 100  # characters


class Job:
    """Runs a job's processes, from the first start to the last."""

    def __init__(self, settings: Settings, restarts: Restarts) -> None:
        """Starts nothing yet."""
        self._settings = settings
        self._restarts = restarts
        self._history = JobHistory(time.time())
        self._furthest: dict[str, int] = {}  # as of `Progress`, in all starts
        self._useful = 0.0  # as of `Progress`
        self._failure: tuple[float, str] | None = None  # after which no run is done: when, and what
        self._group: Group | None = None  # while processes run
        self._signal = 0  # the first one that asked this launcher to end

    def run(self) -> int:
        """Runs the job. Returns the status."""
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda number, _frame: self._end_by(number))
        status = None
        while status is None:
            status = self._run_once()
        if goodput := self._history.describe_goodput(self._useful):
            say(goodput)
        return status

    def _run_once(self) -> int | None:
        """Runs the processes until all have ended. Returns the job's status; None: all start again."""
        start_time = time.monotonic()
        with _blocked_signals():  # one that comes while processes are being started is for them too
            if self._signal:
                return 128 + self._signal
            self._history = dataclasses.replace(self._history, num_restarts=self._restarts.count)
            self._write_history()
            group = self._group = Group(self._settings, self._restarts.count, self._note_progress)
        try:
            group.follow()
        finally:
            self._group = None
            group.kill()
        self._useful = max(self._useful, group.progress.useful)
        return 0 if group.cause is None else self._decide(group, group.cause, time.monotonic() - start_time)

    def _decide(self, group: Group, cause: Cause, seconds: float) -> int | None:
        """Returns the job's status after a failure, or waits until it is time for another start."""
        self._failure = group.failed_at, textwrap.shorten(str(cause), _LONGEST_CAUSE, placeholder=" ...")
        furthest = group.progress.furthest
        has_progressed = any(step > self._furthest.get(name, -1) for name, step in furthest.items())
        for name, step in furthest.items():
            self._furthest[name] = max(step, self._furthest.get(name, -1))
        if self._signal:
            return cause.status
        delay = self._restarts.after(cause, seconds, has_progressed)
        if delay is None:
            if count := self._restarts.count:
                say(f"given up after {count} restart{'s' * (count > 1)}.")
            return cause.status
        say(f"{self._restarts.describe(cause)}, {f'in {delay:g} s' if delay else 'at once'}.")
        # Not with an Event: where a signal's handler sets it, the main thread may have its lock.
        end = time.monotonic() + delay
        while time.monotonic() < end and not self._signal:
            time.sleep(_LOOK)
        return None

    def _note_progress(self, run: int, step: int, num_redone: int | None) -> None:
        """Says and writes that training has gone on after a failure."""
        if self._failure is not None:
            (at, event), self._failure = self._failure, None
            failure = Failure(event, at, run, step, num_redone, time.time() - at)
            self._history = self._history.after(failure)
            self._write_history()
            say(f"{failure}.")

    def _write_history(self) -> None:
        if self._settings.memory is not None:
            self._history.write(self._settings.memory)

    def _end_by(self, number: int) -> None:
        """Ends the processes, and then this launcher, by a signal."""
        self._signal = self._signal or number
        if self._group is not None:
            self._group.ask_to_end(number)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Lets the signals that are forwarded wait, for a `with` block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
