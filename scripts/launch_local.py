"""Starts a program several times on this machine, as processes that run it together, to try that.

    python scripts/launch_local.py -n 2 answers/step3_pipelining.py
    python scripts/launch_local.py -n 2 -m package.program

The program stays as it is: `IPUConfig.configure_ipu_system` joins the processes, and the IPUs that it
selects are spread over them. The processes listen on the loopback address only, have the cores divided
among them, and read nothing from the terminal.

What the program prints is shown once: from the process that has the results, which is that of the last
stage of the first pipeline that runs. Until one runs nobody knows which process that is, so what is
printed is held back. If the program ends before, what all have printed alike is shown once, and else each
line with the number of its process. What goes to the standard error is shown at once, with the number.

Ctrl-C, SIGTERM and SIGHUP reach all processes. When one fails, the others have as long as they need to
notice it and say how far they had come (see docs/distributed.md), and are then ended. The status is that
of the first that failed, or 128 more than the signal that ended it; 0 if none did.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
MOST_HELD = 100_000  # lines
TO_END_BY_THEMSELVES = 20.0  # seconds more than the time in which a death is noticed
TO_END_WHEN_ASKED = 10.0  # seconds
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOISE = re.compile(rb"\[Gloo\] Rank |.*connected peer ranks is")  # of a library, on the standard output


class Output:
    """What the processes print, and which of them is shown."""

    def __init__(self, count: int, shows_all: bool) -> None:
        self.count = count
        self.shown: int | None = None  # the process that has the results
        self.shows_all = shows_all
        self.held: list[tuple[int, bytes]] = []
        self.started: dict[tuple[int, bool], bytes] = {}  # lines without an end as yet

    def take(self, process: int, is_error: bool, text: bytes) -> None:
        """What a process has written; empty at the end."""
        key = (process, is_error)
        lines = (self.started.pop(key, b"") + text).splitlines(keepends=True)
        if text and lines and not lines[-1].endswith((b"\n", b"\r")):
            self.started[key] = lines.pop()
        for line in lines:
            if is_error:
                write(2, number(process, line))
            elif not NOISE.match(line):
                self.add(process, line)

    def add(self, process: int, line: bytes) -> None:
        """A line on the standard output."""
        if self.shows_all:
            write(1, number(process, line))
        elif self.shown is None:
            self.held.append((process, line))
            if len(self.held) > MOST_HELD:
                self.shows_all = True
                self.end()
        elif self.shown == process:
            write(1, line)

    def know_results(self, process: int) -> None:
        """A process has the results of a pipeline."""
        if self.shows_all or self.shown == process:
            return
        if self.shown is not None:
            say(f"process {process} has results too; what it prints is shown with --all only.")
            return
        self.shown = process
        for held, line in self.held:
            if held == process:
                write(1, line)
        self.held = []

    def end(self) -> None:
        """No pipeline will run any more, or nobody waits for it."""
        alike = {b"".join(line for held, line in self.held if held == p) for p in range(self.count)}
        if len(alike) == 1:
            write(1, alike.pop())
        else:
            for process, line in self.held:
                write(1, number(process, line))
        self.held = []


def number(process: int, line: bytes) -> bytes:
    return b"[%d] %s" % (process, line if line.endswith((b"\n", b"\r")) else line + b"\n")


def write(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]


def say(what: str) -> None:
    with contextlib.suppress(OSError):
        write(2, f"launch_local: {what}\n".encode())


class Run:
    """The processes, from their start to the end of the last one."""

    def __init__(self, count: int, command: list[str], shows_all: bool, death_timeout: float) -> None:
        self.output = Output(count, shows_all)
        self.patience = death_timeout + TO_END_BY_THEMSELVES
        self.processes: list[subprocess.Popen[bytes]] = []
        self.told = b""
        self.failed: list[int] = []  # in the order in which they did
        self.status = 0
        self.deadline = float("inf")
        self.next_signal = signal.SIGTERM
        self.selector = selectors.DefaultSelector()
        self.start(count, command, death_timeout)

    def start(self, count: int, command: list[str], death_timeout: float) -> None:
        """Starts them."""
        reads, writes = os.pipe()
        self.held = hold_port()
        port = self.held.getsockname()[1]
        num_cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        environment = {
            "PJRT_NPROC": str(max(1, num_cores // count)),  # else each takes all cores
            **os.environ,
            "IPU_PIPELINE_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
            "IPU_PIPELINE_NUM_PROCESSES": str(count),
            "IPU_PIPELINE_DEATH_TIMEOUT": f"{death_timeout:g}",
            "IPU_PIPELINE_LAUNCHER_FD": str(writes),
            "PYTHONUNBUFFERED": "1",
        }
        self.selector.register(reads, selectors.EVENT_READ, self.hear)
        prepare = make_preparation(os.getpid())
        for process in range(count):
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, "IPU_PIPELINE_PROCESS_ID": str(process)},
                pass_fds=[writes],
                process_group=0,  # a terminal's Ctrl-C comes here only, and is sent on once
                preexec_fn=prepare,
            )
            self.processes.append(started)
            for stream, is_error in ((started.stdout, False), (started.stderr, True)):
                self.selector.register(stream, selectors.EVENT_READ, self.reader(process, is_error))
        os.close(writes)

    def reader(self, process: int, is_error: bool) -> Callable[[int], None]:
        """What is called when a process has written something."""

        def read(file: int) -> None:
            text = os.read(file, 2**16)
            self.output.take(process, is_error, text)
            if not text:
                self.selector.unregister(file)

        return read

    def hear(self, file: int) -> None:
        """What the library tells in the processes."""
        text = os.read(file, 4096)
        if not text:
            self.selector.unregister(file)
        *lines, self.told = (self.told + text).split(b"\n")
        for line in lines:
            if line.startswith(b"results "):
                self.output.know_results(int(line.split()[1]))

    def follow(self) -> int:
        """Until all have ended; returns the status."""
        while any(process.poll() is None for process in self.processes):
            self.read(0.05)
            self.note_failures()
        self.note_failures()
        end = time.monotonic() + 1.0  # something that they started may hold their pipes open
        while self.selector.get_map() and time.monotonic() < end and self.read(0.05):
            pass
        self.output.end()
        return self.status

    def read(self, seconds: float) -> bool:
        """Takes what they have written, or waits for it; whether there was something."""
        ready = self.selector.select(seconds)
        for key, _events in ready:
            key.data(key.fd)
        return bool(ready)

    def note_failures(self) -> None:
        """Says which have failed, and ends those that do not end by themselves then."""
        for number, process in enumerate(self.processes):
            if process.poll() and number not in self.failed:
                code = process.returncode
                self.failed.append(number)
                say(f"process {number} {describe(code)}.")
                if not self.status:
                    self.status = code if code > 0 else 128 - code
                    self.deadline = time.monotonic() + self.patience
        if time.monotonic() > self.deadline:
            alive = [n for n, process in enumerate(self.processes) if process.poll() is None]
            if alive:
                numbers = ", ".join(map(str, alive))
                if len(alive) == 1:
                    say(f"process {numbers} has not ended by itself.")
                else:
                    say(f"processes {numbers} have not ended by themselves.")
            self.send(self.next_signal)
            self.next_signal = signal.SIGKILL
            self.deadline = time.monotonic() + TO_END_WHEN_ASKED

    def send(self, signal_number: int) -> None:
        """Sends all a signal."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal_number)

    def kill(self) -> None:
        """All that is left, and what they started and left behind."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.held.close()


def describe(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def hold_port() -> socket.socket:
    """Holds a free port: the coordinator can listen there, and no other program gets it before that."""
    held = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind(("127.0.0.1", 0))
    return held


def make_preparation(parent: int) -> Callable[[], None]:
    """What a process does before it runs the program: on Linux, see to it that it ends with this one."""
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it is gone already
            os._exit(1)

    return prepare


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--num-processes", type=int, required=True, help="How many processes.")
    parser.add_argument(
        "--all", action="store_true", help="Show what all processes print, each line with the number."
    )
    parser.add_argument(
        "--death-timeout",
        type=float,
        default=float(os.environ.get("IPU_PIPELINE_DEATH_TIMEOUT") or 60),
        metavar="SECONDS",
        help="Within how many seconds of the death of a process the others end; 60 by default.",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="A module, in place of PROGRAM."
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="A Python program, and its arguments.")
    args = parser.parse_args()
    if args.num_processes < 1:
        parser.error(f"-n must be 1 or more; it is {args.num_processes}.")
    if not args.death_timeout >= 2:
        parser.error(f"--death-timeout must be 2 or more; it is {args.death_timeout:g}.")
    command = args.program if args.module is None else ["-m", *args.module]
    if command in ([], ["-m"]):
        parser.error("the program is missing.")
    if args.module is None and not os.path.exists(command[0]):
        parser.error(f"there is no program {command[0]}.")
    # A signal that comes while processes are being started is for them too.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    run = Run(args.num_processes, [sys.executable, *command], args.all, args.death_timeout)
    for forwarded in FORWARDED:
        signal.signal(forwarded, lambda received, _frame: run.send(received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        return run.follow()
    except BrokenPipeError:  # nobody reads what is shown
        return 128 + signal.SIGPIPE
    finally:
        run.kill()


if __name__ == "__main__":
    sys.exit(main())
