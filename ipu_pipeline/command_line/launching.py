"""Starts a program several times, as processes that run it together, on this machine or on several."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import urllib.parse
from pathlib import Path

from ipu_pipeline.command_line.running import add_script
from ipu_pipeline.launching.agent import Agent
from ipu_pipeline.launching.group import Settings
from ipu_pipeline.launching.leader import Nodes
from ipu_pipeline.launching.memory import DEFAULT_DIRECTORY, Memory, remove_left
from ipu_pipeline.launching.shown import say
from ipu_pipeline.processes.launched import SECRET_VARIABLE

__all__ = ["add"]

_DEFAULT_WAIT = 600.0  # seconds
_LEAST_SECRET = 16  # characters
_DESCRIPTION = """\
Starts a Python program several times, as processes that run it together: on this machine, or, with --nodes,
on several machines on each of which this command is started.

The program stays as it is: IPUConfig.configure_ipu_system joins the processes, and the IPUs that it selects
are spread over them. The processes have the cores of a machine divided among them, and read nothing from
the terminal. On one machine they listen on the loopback address only.

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

With several nodes, Ctrl-C on one ends the job on all. SIGTERM and SIGHUP end one node, and the others wait
for another one in its place, as they do when a node is lost.
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
        help="how many processes on this node",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="on how many nodes this is started; 1 by default, with which the next four have no effect",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="K",
        help="the number of this node, from 0; a new one takes a lost one's",
    )
    parser.add_argument(
        "--meet-at",
        metavar="HOST:PORT",
        help="an address of node 0 and a free port, where the nodes meet. They know each other by the "
        f"secret in {SECRET_VARIABLE}",
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="how long the others are waited for, at the beginning and when a node is lost; "
        f"{_DEFAULT_WAIT:g} by default",
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="go on without a node that was lost if no other one has come in its place after --wait, with "
        "its IPUs on the others, which replicas and stages share if these have too few; a node that comes "
        "later is taken in at once. Node 0 is always waited for",
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
        "--standby",
        action="store_true",
        help="start the processes for the next start in advance, when training has begun: they import what "
        "the program imports, run it up to the point where the processes join, and wait there",
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
        ("--nodes", parsed.nodes, 1),
        ("--wait", _DEFAULT_WAIT if parsed.wait is None else parsed.wait, 1),
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
    nodes = _read_nodes(parser, parsed)
    if parsed.standby and not parsed.restarts:
        parser.error("--standby has an effect with --restarts only.")
    memory = _make_memory(parser, parsed.memory_dir) if parsed.restarts else None
    settings = Settings(
        command,
        parsed.num_processes,
        parsed.shows_all,
        parsed.death_timeout,
        parsed.grace,
        os.environ.get(SECRET_VARIABLE) or secrets.token_hex(),
        None if memory is None else memory.path,
        parsed.memory_every,
        parsed.standby,
    )
    try:
        with contextlib.closing(Agent(settings, nodes, parsed.restarts)) as agent:
            return agent.run()
    except BrokenPipeError:  # the reader of our output is gone
        return 128 + signal.SIGPIPE
    finally:
        if memory is not None:
            memory.close()


def _read_nodes(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> Nodes:
    """Which nodes there are, from the options."""
    if parsed.shrink and not parsed.restarts:
        parser.error("--shrink has an effect with --restarts only.")
    if parsed.nodes == 1 and not parsed.node_rank:  # scripts give the rest of the options all the same
        return Nodes()
    for option, given in (("--node-rank", parsed.node_rank), ("--meet-at", parsed.meet_at)):
        if given is None:
            parser.error(f"with --nodes {parsed.nodes}, {option} must be given.")
    if not 0 <= parsed.node_rank < parsed.nodes:
        parser.error(
            f"--node-rank must be from 0 to {parsed.nodes - 1}, as --nodes is {parsed.nodes}; it is "
            f"{parsed.node_rank}."
        )
    if len(os.environ.get(SECRET_VARIABLE, "")) < _LEAST_SECRET:
        parser.error(
            f"with --nodes {parsed.nodes}, the environment variable {SECRET_VARIABLE} must be the same "
            f"text of {_LEAST_SECRET} characters or more on all nodes, by which they know each other. "
            "`openssl rand -hex 16` makes one."
        )
    host, port = _read_address(parser, parsed.meet_at)
    wait = _DEFAULT_WAIT if parsed.wait is None else parsed.wait
    if host in ("0.0.0.0", "::"):  # noqa: S104  # which is refused
        parser.error("--meet-at must be the address of node 0 at which the other nodes reach it.")
    return Nodes(parsed.nodes, parsed.node_rank, (host, port), wait, parsed.shrink)


def _read_address(parser: argparse.ArgumentParser, text: str) -> tuple[str, int]:
    split = urllib.parse.urlsplit(f"//{text}")
    host, port = split.hostname, None
    with contextlib.suppress(ValueError):  # it has no such port
        port = split.port
    if not (host and port and text == split.netloc and "@" not in text):
        parser.error(f"--meet-at must be host:port, such as node0:1234; it is {text!r}.")
    return host, port


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
