"""All that was ever measured, as data: docs/data/benchmarks.csv, a row for each figure of each run.

`benchmarks.run_all --write` adds the rows of a run to the file beside the page that it writes, and makes
the page from the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.harness import Row

__all__ = ["FILE", "Measured", "Run", "append", "read", "rows_of"]

FILE = Path(__file__).parents[1] / "docs" / "data" / "benchmarks.csv"


@dataclass(frozen=True)
class Run:
    """Rows that were measured together.

    Attributes:
      command: what was run.
      machine: on which machine.
      software: the versions of what matters.
      date: when.
      code: the commit that was measured.
      rows: what came out.
    """

    command: str
    machine: str
    software: str
    date: str
    code: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Measured:
    """A figure of a run; see `harness.Row` and `Run`. Numbers are texts, as exact as they were written."""

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
    ours: str = ""  # empty, as the next three, in the oldest runs
    other: str = ""
    command: str = ""
    software: str = ""

    @property
    def run(self) -> tuple[str, str, str]:
        """The date, code and machine of the run that it is of."""
        return self.date, self.code, self.machine

    @property
    def row(self) -> Row:
        """The figure as it was measured."""
        spread = (float(self.smallest), float(self.largest)) if self.smallest else None
        target = float(self.target) if self.bound else None
        is_upper = self.bound != "at least"
        values = self.ours, self.other, float(self.figure)
        return Row(self.question, self.case, *values, spread, target, at_most=is_upper)


def rows_of(run: Run) -> list[Measured]:
    """The figures of a run."""
    found = []
    for row in run.rows:
        smallest, largest = ("", "") if row.spread is None else (f"{value:.4g}" for value in row.spread)
        bound = "" if row.target is None else "at most" if row.at_most else "at least"
        target = "" if row.target is None else f"{row.target:.10g}"
        measured = (row.question, row.case, f"{row.value:.10g}", smallest, largest, bound, target)
        both = row.ours, row.other
        found.append(Measured(run.date, run.code, run.machine, *measured, *both, run.command, run.software))
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
