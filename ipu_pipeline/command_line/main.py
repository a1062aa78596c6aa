"""The program `ipu-pipeline`: creates, runs, profiles and inspects pipelines.

Only the module of the command that was asked for is imported, so that each starts as fast as it can.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ipu_pipeline import __version__

__all__ = ["main"]

# Command -> (its module, what it does in a line). A module has `add`, which adds a description and
# arguments to the command's parser; `call` of what that parser returns runs the command.
_COMMANDS = {
    "new": ("creating", "create a small project: a pipeline and its test"),
    "run": ("running", "run a script that imports poptorch"),
    "launch": ("launching", "run a program in several processes"),
    "profile": ("profiling", "run a program and report where its time and memory go"),
    "report": ("reporting", "summarize a profile.json and rebuild its page"),
    "simulate": ("simulating", "predict the time of a step, and what would shorten it"),
    "schedule": ("scheduling", "print the order of a schedule as a staircase"),
    "monitor": ("monitoring", "list running pipelines"),
    "devices": ("devices", "list the devices that can be IPUs"),
    "doctor": ("doctor", "check what works on this machine, and what is missing"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="ipu-pipeline", description="Create, run, profile and inspect pipelines.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ipu_pipeline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == chosen:
            importlib.import_module(f"ipu_pipeline.command_line.{module}").add(command)
    if not arguments:
        parser.print_help()
        return 0
    parsed = parser.parse_args(arguments)
    status: int = parsed.call(parsed)
    return status
