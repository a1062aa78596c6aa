"""`ipu-pipeline launch`: runs a program in several processes of this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from ipu_pipeline.command_line.run_command import add_script
from ipu_pipeline.launching.local_job import Job, Restarts, Settings, say
from ipu_pipeline.processes.launcher import DEFAULT_DIRECTORY, Memory, remove_left

_DESCRIPTION = """\
Run a Python program in several processes of this machine.

The program needs no changes: IPUConfig.configure_ipu_system joins the processes and spreads the selected
IPUs over them. The processes divide the machine's cores among themselves, read nothing from the terminal,
and listen only on the loopback address.

The program's output is shown once, from the process that has the results: the one with the last stage of
the first pipeline that runs. Output is held back until that process is known. If the program ends before,
lines that are the same in all processes are shown once, and others with the number of their process.
Standard error is shown immediately, with the number.

If a process fails, a line names it and the failure. The others get the time to notice it and to say how far
they had come, and are then ended. With --restarts, all processes are then started again, with the number of
the restart in IPU_PIPELINE_RESTART. Estimators, and programs that call Session.resume, continue with the
step in which the process failed, from what all have kept in memory; other programs continue from the last
checkpoint that they load.

Ctrl-C, SIGTERM and SIGHUP are passed on to all processes and end the job. The exit status is that of the
first process that failed, or 128 plus the signal that ended it; 0 if none failed.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "ipu-pipeline launch -n N [options] [-m] SCRIPT [ARGS ...]"
    parser.add_argument(
        "-n",
        "--num-processes",
        type=int,
        required=True,
        metavar="N",
        help="number of processes",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="how many times to restart the job after failures of one cause; 0 by default. The count "
        "begins again after a run of ten minutes or more",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        dest="shows_all",
        help="show the output of all processes, each line with the number of its process",
    )
    parser.add_argument(
        "--death-timeout",
        type=float,
        default=os.environ.get("IPU_PIPELINE_DEATH_TIMEOUT") or 60.0,  # a text is checked like an argument
        metavar="SECONDS",
        help="how soon the others end after the death of a process; 60 by default",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long processes may take to write a checkpoint and end after a signal; 600 by default",
    )
    parser.add_argument(
        "--memory-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="a directory on a file system in memory, where processes keep their state for a restart; "
        f"{DEFAULT_DIRECTORY} by default",
    )
    parser.add_argument(
        "--memory-every",
        type=int,
        default=1,
        metavar="N",
        help="keep the state before every N-th run of training; 1 by default. A larger N writes less and "
        "repeats more runs after a failure",
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
        return Job(settings, Restarts(parsed.restarts)).run()
    except BrokenPipeError:  # the reader of our output is gone
        return 128 + signal.SIGPIPE
    finally:
        if memory is not None:
            memory.close()


def _make_memory(parser: argparse.ArgumentParser, directory: Path | None) -> Memory | None:
    parent = DEFAULT_DIRECTORY if directory is None else directory
    try:
        remove_left(parent)
        return Memory(parent)
    except OSError as error:
        if directory is not None:
            parser.error(f"--memory-dir: nothing can be written to {directory}: {error.strerror}.")
        say(
            f"nothing is kept in memory: {DEFAULT_DIRECTORY} cannot be used ({error.strerror}). After a "
            "failure, training goes on from checkpoints on disk. --memory-dir names another directory."
        )
        return None
