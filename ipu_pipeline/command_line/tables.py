"""Shows what commands have found: plain tables on a terminal, pages in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ipu_pipeline.ground.tables import align

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
    """Makes a table whose columns after the first `texts` are numbers."""
    return "\n".join(align([headings, *rows], range(texts, len(headings)), indent=""))
