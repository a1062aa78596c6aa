"""The program `ipu-pipeline`: trains nothing itself, but makes, runs, measures and describes programs.

Only the module of the command that was asked for is imported, so that each starts as fast as it can.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]

# Command -> (its module, what it does in a line). A module has `add`, which adds a description and
# arguments to the command's parser; `call` of what that parser returns runs the command.
_COMMANDS = {
    "new": ("creating", "make a small project with a pipeline, a test and a report"),
    "run": ("running", "run a script that imports poptorch"),
    "launch": ("launching", "run a program in several processes of this machine"),
    "profile": ("profiling", "run a program, and write reports of where its time and memory go"),
    "report": ("reporting", "rebuild the page of a trace from its profile.json, and print a summary"),
    "simulate": ("simulating", "predict how long a step of a pipeline takes, and what would be better"),
    "schedule": ("scheduling", "show which IPU does what in which time-step"),
    "monitor": ("monitoring", "tell which programs run on this machine"),
    "devices": ("devices", "tell which devices can be IPUs"),
    "doctor": ("doctor", "tell what works on this machine, and what is missing for the rest"),
}
_DESCRIPTION = (
    "The program `ipu-pipeline`: trains nothing itself, but makes, runs, measures and describes programs."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="ipu-pipeline", description=_DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == chosen:
            importlib.import_module(f"ipu_pipeline.command_line.{module}").add(command)
    parsed = parser.parse_args(arguments)
    status: int = parsed.call(parsed)
    return status
