"""All that was ever measured, as data: docs/data/benchmarks.csv, a row for each figure of each run.

`benchmarks.run_all --write` adds the rows of a run to the file beside the page that it writes. The page
docs/benchmarks_history.md shows them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.page import Run

__all__ = ["FILE", "Measured", "append", "read", "rows_of"]

FILE = Path(__file__).parents[1] / "docs" / "data" / "benchmarks.csv"


@dataclass(frozen=True)
class Measured:
    """A figure of a run; see `harness.Row`. Numbers are texts, as exact as they were written."""

    date: str
    code: str
    machine: str
    question: str
    case: str
    figure: str
    smallest: str  # empty, as the next, if it was measured once
    largest: str
    bound: str  # "at most", "at least" or, without a target, empty
    target: str


def rows_of(run: Run) -> list[Measured]:
    """The figures of a run."""
    found = []
    for row in run.rows:
        smallest, largest = ("", "") if row.spread is None else (f"{value:.4g}" for value in row.spread)
        bound = "" if row.target is None else "at most" if row.at_most else "at least"
        target = "" if row.target is None else f"{row.target:.4g}"
        where = (run.date, run.code, run.machine)
        found.append(
            Measured(*where, row.question, row.case, f"{row.value:.4g}", smallest, largest, bound, target)
        )
    return found


def read(file: Path = FILE) -> list[Measured]:
    """All rows, the oldest first."""
    with file.open(newline="", encoding="utf-8") as text:
        return [Measured(**row) for row in csv.DictReader(text)]


def append(rows: Iterable[Measured], file: Path = FILE) -> None:
    """Adds the rows that are not there yet."""
    known = read(file) if file.exists() else []
    file.parent.mkdir(exist_ok=True)
    everything = dict.fromkeys([*known, *rows])
    names = [field.name for field in fields(Measured)]
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in everything)
