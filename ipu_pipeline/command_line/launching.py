"""Starts a program several times on this machine, as processes that run it together."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ipu_pipeline.command_line.running import add_script
from ipu_pipeline.launching.group import FORWARDED, Group, Settings
from ipu_pipeline.launching.memory import DEFAULT_DIRECTORY, Memory, remove_left
from ipu_pipeline.launching.restarts import Restarts
from ipu_pipeline.launching.shown import say

__all__ = ["add"]

_DESCRIPTION = """\
Starts a Python program several times on this machine, as processes that run it together.

The program stays as it is: IPUConfig.configure_ipu_system joins the processes, and the IPUs that it selects
are spread over them. The processes listen on the loopback address only, have the cores divided among them,
and read nothing from the terminal.

What the program prints is shown once: from the process that has the results, which is that of the last
stage of the first pipeline that runs. Output is held back until that process is known. If the program ends
first, output that is the same in all processes is shown once, and otherwise each line with the number of
its process. What goes to the standard error is shown at once, with the number.

When a process fails, a line says which one and how. The others have as long as they need to notice it and
say how far they had come, and are then ended. With --restarts all are then started again, with the number
of the restart in IPU_PIPELINE_RESTART. An estimator, and a program that calls Session.resume, goes on with
the step in which the process failed, from what all have kept in memory; others go on from the last
checkpoint that they load.

Ctrl-C, SIGTERM and SIGHUP are sent on to all processes, and end the job. The status is that of the process
that failed first, or 128 more than the signal that ended it; 0 if none did.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "ipu-pipeline launch -n N [options] [-m] SCRIPT [ARGS ...]"
    parser.add_argument(
        "-n", "--num-processes", type=int, required=True, metavar="N", help="how many processes"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="after how many failures of one cause the job is started again, 0 by default. A run of ten "
        "minutes or more begins to count anew",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        dest="shows_all",
        help="show what all processes print, each line with the number",
    )
    parser.add_argument(
        "--death-timeout",
        type=float,
        default=os.environ.get("IPU_PIPELINE_DEATH_TIMEOUT") or 60.0,  # a text is checked like an argument
        metavar="SECONDS",
        help="within how many seconds of the death of a process the others end; 60 by default",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long the processes have to end, and to write a checkpoint, after a signal that was sent "
        "on to them; 600 by default",
    )
    parser.add_argument(
        "--memory-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="a directory of a file system in memory, in which processes keep their state if they are to "
        f"be started again; {DEFAULT_DIRECTORY} by default",
    )
    parser.add_argument(
        "--memory-every",
        type=int,
        default=1,
        metavar="N",
        help="keep the state before each N-th run of a training; 1 by default. With more, less is written, "
        "and more runs are done again after a failure",
    )
    add_script(parser)
    parser.set_defaults(call=lambda parsed: _launch(parser, parsed))


def _launch(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    for option, value, least in (
        ("-n", parsed.num_processes, 1),
        ("--restarts", parsed.restarts, 0),
        ("--death-timeout", parsed.death_timeout, 2),
        ("--grace", parsed.grace, 0),
        ("--memory-every", parsed.memory_every, 1),
    ):
        if not value >= least:
            parser.error(f"{option} must be {least} or more; it is {value:g}.")
    if not parsed.is_module and not os.path.exists(parsed.script):
        parser.error(f"there is no program {parsed.script}.")
    script = ["-m", parsed.script] if parsed.is_module else [parsed.script]
    command = [sys.executable, *script, *parsed.arguments]
    memory = _make_memory(parser, parsed.memory_dir) if parsed.restarts else None
    settings = Settings(
        command,
        parsed.num_processes,
        parsed.shows_all,
        parsed.death_timeout,
        parsed.grace,
        None if memory is None else memory.path,
        parsed.memory_every,
    )
    try:
        return _Job(settings, Restarts(parsed.restarts)).run()
    except BrokenPipeError:  # the reader of our output is gone
        return 128 + signal.SIGPIPE
    finally:
        if memory is not None:
            memory.close()


def _make_memory(parser: argparse.ArgumentParser, given: Path | None) -> Memory | None:
    parent = DEFAULT_DIRECTORY if given is None else given
    try:
        remove_left(parent)
        return Memory(parent)
    except OSError as error:
        if given is not None:
            parser.error(f"--memory-dir: nothing can be written to {given}: {error.strerror}.")
        say(
            f"nothing is kept in memory: {DEFAULT_DIRECTORY} cannot be used ({error.strerror}). After a "
            "failure, training goes on from checkpoints on disk. --memory-dir names another directory."
        )
        return None


class _Job:
    """The starts of a job, one after another until one of them is the last."""

    def __init__(self, settings: Settings, restarts: Restarts) -> None:
        self._settings = settings
        self._restarts = restarts
        self._group: Group | None = None
        self._asked = 0  # the signal that asked all to end
        self._is_asked = threading.Event()

    def run(self) -> int:
        """Returns the status."""
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._send_on)
        failed_at = None
        furthest: dict[str, int] = {}  # as in `Group`, in all starts so far
        while True:
            begun = time.monotonic()
            # A signal that comes while processes are being started is for them too.
            signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
            group = None
            try:
                if self._is_asked.is_set():
                    return self._status_of_signal()
                group = self._group = Group(self._settings, self._restarts.count, failed_at)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
                group.follow()
            finally:
                self._group = None
                if group is not None:
                    group.kill()
            cause, failed_at = group.cause, group.failed_at
            if cause is None or self._is_asked.is_set():
                return 0 if cause is None else cause.status
            has_progressed = any(step > furthest.get(name, -1) for name, step in group.furthest.items())
            furthest |= {name: max(step, furthest.get(name, -1)) for name, step in group.furthest.items()}
            delay = self._restarts.after(cause, time.monotonic() - begun, has_progressed)
            if delay is None:
                if self._restarts.count:
                    say(f"given up after {self._restarts.count} restarts.")
                return cause.status
            when = f"in {delay:g} s" if delay else "at once"
            say(f"{self._restarts.describe(cause)}, {when}.")
            if self._is_asked.wait(delay):
                return self._status_of_signal()

    def _status_of_signal(self) -> int:
        return 128 + self._asked

    def _send_on(self, number: int, _frame: object) -> None:
        self._asked = number
        self._is_asked.set()
        if self._group is not None:
            self._group.ask_to_end(number)
