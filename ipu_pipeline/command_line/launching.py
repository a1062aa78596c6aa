"""`ipu-pipeline launch`: runs a program in several processes, on this machine or on several."""

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
Run a Python program in several processes: on this machine or, with --nodes, on several machines, on each of
which you start this command.

The program needs no changes: IPUConfig.configure_ipu_system joins the processes and spreads the selected
IPUs over them. The processes divide the cores of a machine among themselves and read nothing from the
terminal. On one machine they listen only on the loopback address.

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

With several nodes, Ctrl-C on one node ends the job on all. SIGTERM and SIGHUP end one node; the others wait
for a replacement, as they do when a node is lost.
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
        help="number of processes on this node",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="number of nodes on which you start this; 1 by default. Then the next four have no effect",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="K",
        help="the number of this node, from 0; a replacement takes the number of the lost node",
    )
    parser.add_argument(
        "--meet-at",
        metavar="HOST:PORT",
        help="an address of node 0 with a free port, where the nodes meet. They recognize each other by "
        f"the secret in {SECRET_VARIABLE}",
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="how long to wait for other nodes at the start and after a loss; "
        f"{_DEFAULT_WAIT:g} by default",
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="continue without a lost node if there is no replacement after --wait. Its IPUs move to the "
        "other nodes, where replicas and stages share devices if there are too few. A node that comes "
        "later joins at once. Node 0 cannot be given up",
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
        "--standby",
        action="store_true",
        help="once training has begun, start the processes for the next restart in advance: they run the "
        "program up to the point where the processes join, and wait there",
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
