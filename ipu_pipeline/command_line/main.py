"""The program `ipu-pipeline`: trains nothing itself, but runs, measures and describes programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ipu_pipeline.command_line import (
    devices,
    monitoring,
    profiling,
    reporting,
    running,
    scheduling,
    simulating,
)

__all__ = ["main"]

# Each has `add`, which adds the parser of a command; `call` of what that parser returns runs the command.
_COMMANDS = (running, profiling, reporting, simulating, scheduling, monitoring, devices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
      arguments: those after its name; None: of this process.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(prog="ipu-pipeline", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    parsed = parser.parse_args(arguments)
    status: int = parsed.call(parsed)
    return status
