"""Shows what commands have found: plain tables on a terminal, pages in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

__all__ = ["format_table", "open_page", "show"]


def show(text: str) -> None:
    """Prints what a command was asked for. The program that reads it may stop reading, as `head` does."""
    try:
        print(text, flush=True)  # noqa: T201  # a program
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end


def open_page(page: Path) -> None:
    """Opens a page in a browser. If there is none, a line says how to see the page."""
    address = page.absolute().as_uri()
    if not webbrowser.open(address):
        print(f"There is no browser to open {address}: copy the file to where one is.", file=sys.stderr)  # noqa: T201


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table whose columns are as wide as they need to be."""
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]

    def format_line(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(map(format_line, lines))
