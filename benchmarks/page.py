"""The page docs/benchmarks.md: runs of the benchmarks in, Markdown out, and back.

The page holds one run of all benchmarks and, below it, later runs of a few of them. All text that is not
measured is here, so it stays when the page is written again. `read` and `write` are inverse functions; a
test checks that with the committed page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks import harness
from benchmarks.harness import Row

__all__ = ["Page", "Run", "add", "read", "write"]

INTRODUCTION = """\
# Benchmarks

`make bench` runs all benchmarks, in about a quarter of an hour, and writes this page. Run it on a machine
that has nothing else to do. The first time, it installs torch to compare with. To run a few benchmarks by
themselves and add their figures below the table:

    python -m benchmarks.run_all --short --only dispatch feeds --write docs/benchmarks.md

Do not edit this page: its text is in `benchmarks/page.py`, and its figures come from runs.

## How to read the tables

* **question**: the folder in `benchmarks`. Its page says what is measured, and how.
* **ours**, **other**: this library, and what it is compared with, if anything. Times are medians.
* **figure**: the number that the target is for. If it is a ratio, the two sides took turns, the ratio was
  taken round by round, and this is the median. So it is not exactly the quotient of the two columns before.
* **from..to**: the smallest and the largest figure of a round.
* **target**, **met**: the bound that was set beforehand, and whether the figure keeps to it. Rows without a
  target are there to explain the others.

Compare ratios, not times: on a shared virtual machine a time may vary by a factor of two from hour to hour,
and both sides of a round vary with it. [speed.md](speed.md#what-is-not-reached) explains the targets that
are missed.
"""
ALL = "## All benchmarks"
AGAIN = """\
## Measured again

These were measured by themselves after the run above, because the code that they measure had changed or
because the benchmark is new. Where a case is in both tables, its current figure is the one below.
"""
_NAMES = ("Command", "Machine", "Software", "Date", "Code")


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
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Page:
    """What is on the page.

    Attributes:
      everything: the run of all benchmarks.
      again: later runs of some of them, the newest last.
    """

    everything: Run
    again: tuple[Run, ...] = field(default=())

    @property
    def rows(self) -> dict[tuple[str, str], Row]:
        """The current row of each question and case."""
        return {(row.question, row.case): row for run in (self.everything, *self.again) for row in run.rows}


def add(page: Page, run: Run) -> Page:
    """The page with a later run of some benchmarks, whose rows replace those of earlier such runs."""
    cases = {(row.question, row.case) for row in run.rows}
    kept = [
        replace(old, rows=tuple(row for row in old.rows if (row.question, row.case) not in cases))
        for old in page.again
    ]
    return replace(page, again=(*(old for old in kept if old.rows), run))


def write(page: Page) -> str:
    """The text of the page."""
    parts = [INTRODUCTION, ALL + "\n", *_write_run(page.everything)]
    if page.again:
        parts.append(AGAIN)
    for run in page.again:
        questions = dict.fromkeys(row.question for row in run.rows)
        parts += [f"### {', '.join(questions)}\n", *_write_run(run)]
    return "\n".join(parts)


def read(text: str) -> Page:
    """The page of a text that `write` made; figures are as exact as they were written.

    Raises:
      ValueError: the text is not one that `write` could have made.
    """
    head = "".join(rf"\* {name}: (.+)\n" for name in _NAMES)
    runs = [
        Run(*found[:-1], tuple(map(_read_row, found[-1].splitlines()[2:])))
        for found in re.findall(rf"^{head}\n((?:\|.*\n)+)", text, re.MULTILINE)
    ]
    page = Page(runs[0], tuple(runs[1:])) if runs else None
    if page is None or write(page) != text:
        raise ValueError(
            "This is not a page as benchmarks/page.py writes it; `make bench` makes a new one."
        )
    return page


def _write_run(run: Run) -> list[str]:
    values: Sequence[str] = (run.command, run.machine, run.software, run.date, run.code)
    lines = [f"* {name}: {value}\n" for name, value in zip(_NAMES, values, strict=True)]
    return ["".join(lines), harness.format_table(run.rows) + "\n"]


def _read_row(line: str) -> Row:
    question, case, ours, other, figure, spread, bound, _met = (
        cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")
    )
    smallest, _, largest = spread.partition("..")
    sign, _, target = bound.partition(" ")
    return Row(
        question,
        case,
        ours,
        other,
        _read_number(figure),
        (_read_number(smallest), _read_number(largest)) if spread else None,
        _read_number(target) if bound else None,
        at_most=sign != "≥",
    )


def _read_number(text: str) -> float:
    return float(text.replace(",", ""))
