"""The program `ipu-pipeline`, and what its first argument can be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ipu_pipeline.command_line import running

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
      arguments: those after its name; None: of this process.

    Returns:
      The exit status.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="ipu-pipeline", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script that imports poptorch",
        description="Runs a Python script. `import poptorch` finds ipu_pipeline.poptorch there, and in the "
        "processes that it starts.",
        usage="ipu-pipeline run [-h] [-m] SCRIPT [ARGS ...]",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", metavar="SCRIPT", help="a file; its arguments follow")
    # What follows the script is the script's, whatever it is.
    place = next((n for n, word in enumerate(given[1:], 1) if not word.startswith("-")), len(given))
    parsed = parser.parse_args(given[: place + 1])
    return running.run(parsed.script, given[place + 1 :], parsed.is_module)
