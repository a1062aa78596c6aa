"""The program `ipu-pipeline`: its commands, and how they show what they found."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ipu_pipeline import __version__
from ipu_pipeline.ground.tables import align


def show(text: str) -> None:
    """Prints what a command was asked for. The program that reads it may stop reading, as `head` does."""
    try:
        print(text, flush=True)  # noqa: T201  # a program
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end


def open_page(page: Path) -> None:
    """Opens a page in a browser. If there is none, a line says how to see the page."""
    import webbrowser  # few commands open a page

    address = page.absolute().as_uri()
    if not webbrowser.open(address):
        print(f"There is no browser to open {address}: copy the file to where one is.", file=sys.stderr)  # noqa: T201


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Makes a table whose columns after the first `texts` are numbers."""
    return "\n".join(align([headings, *rows], range(texts, len(headings)), indent=""))


# Only the module of the command that was asked for is imported, so that each starts as fast as it can.

# Command -> (its module and function, what it does in a line). The function adds a description and
# arguments to the command's parser; `call` of what that parser returns runs the command.
_COMMANDS = {
    "new": ("setup_commands.add_new", "create a small project: a pipeline and its test"),
    "run": ("run_command.add", "run a script that imports poptorch"),
    "launch": ("launch_command.add", "run a program in several processes"),
    "profile": ("profile_command.add", "run a program and report where its time and memory go"),
    "report": ("report_command.add", "summarize a profile.json and rebuild its page"),
    "simulate": ("simulate_command.add", "predict the time of a step, and what would shorten it"),
    "schedule": ("schedule_command.add", "print the order of a schedule as a staircase"),
    "monitor": ("monitor_command.add", "list running pipelines"),
    "devices": ("setup_commands.add_devices", "list the devices that can be IPUs"),
    "doctor": ("setup_commands.add_doctor", "check what works on this machine, and what is missing"),
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
    for name, (place, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == chosen:
            module, _, function = place.partition(".")
            getattr(importlib.import_module(f"ipu_pipeline.command_line.{module}"), function)(command)
    if not arguments:
        parser.print_help()
        return 0
    parsed = parser.parse_args(arguments)
    status: int = parsed.call(parsed)
    return status
