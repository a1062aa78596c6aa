"""What the benchmarks share: sides that are processes of their own and take turns, and a table of results.

A side is a process because what one does (virtual devices, threads, allocators) must not slow the other. It
makes its step, then runs as many of them as each line of its standard input says and answers with the
seconds they took. Sides take turns, a round each, the order changing from round to round, so that whatever
else the machine does hits both; the ratio is taken round by round. A side that dies or does not answer ends
the benchmark with an error, and all of its processes with it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROUND_SECONDS = 1.0  # of a round, which decides how many steps it has
NUM_WARM_UPS = 2  # rounds that are dropped
MOST_SECONDS = 300.0  # that a side may take to start, or for a round
ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      question: the benchmark's folder.
      case: what was measured.
      ours: the library's figure, with its unit.
      other: what it is compared with.
      value: the number that the target is for.
      spread: the smallest and largest of it, where it was measured more than once.
      target: the bound on `value`; None where there is none.
      at_most: whether that is an upper bound.
    """

    question: str
    case: str
    ours: str
    other: str
    value: float
    spread: tuple[float, float] | None = None
    target: float | None = None
    at_most: bool = True

    @property
    def is_met(self) -> bool | None:
        """Whether the value keeps to the target; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def serve(step: Callable[[], Any], finish: Callable[[Any], Any], facts: Mapping[str, Any]) -> None:
    """Runs as many steps as each line of the standard input says, until it ends.

    Args:
      step: one step; it may return before its devices are done.
      finish: waits until the devices are done with what the last step returned, and all before.
      facts: what the other process is to know about this one.
    """
    finish(step())

    def run(number: int) -> None:
        for _ in range(number):
            result = step()
        finish(result)

    serve_rounds(run, facts)


def serve_rounds(run: Callable[[int], float | None], facts: Mapping[str, Any]) -> None:
    """Likewise, where `run` runs so many steps and waits for them.

    For 0 steps, which `Side.ask_ideal` asks for, it returns the ideal of one instead.
    """
    print("facts " + json.dumps(facts), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        found = run(int(line))
        print(f"took {time.perf_counter() - begin if found is None else found}", flush=True)


class Side:
    """A process that `serve`s."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        """Starts it.

        Args:
          module: what `python -m` runs.
          arguments: its command line.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # so that its own processes can be ended with it
        )

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What the process tells when it is ready, which this waits for."""
        facts: dict[str, Any] = json.loads(self._wait_for("facts "))
        return facts

    def run(self, num_steps: int) -> float:
        """Seconds per step."""
        return self._ask(num_steps) / num_steps

    def ask_ideal(self) -> float:
        """Seconds that a step takes if nothing costs anything but what the process times now."""
        return self._ask(0)

    def _ask(self, number: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return float(self._wait_for("took "))

    def close(self) -> None:
        """Lets the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def kill(self) -> None:
        """Ends the process, and those that it started, if there are any left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait_for(self, word: str) -> str:
        assert self._process.stdout is not None
        clock = threading.Timer(MOST_SECONDS, self.kill)
        clock.start()
        try:
            for line in self._process.stdout:
                if line.startswith(word):
                    return line[len(word) :]
        finally:
            clock.cancel()
        self.kill()
        raise RuntimeError(f"{self._process.args} died with {self._process.wait()}, or took too long.")


@contextlib.contextmanager
def start_sides(module: str, names: Sequence[str], *arguments: str) -> Iterator[dict[str, Side]]:
    """Sides of a module, each by `--side NAME`; ended in the end, whatever happens."""
    sides: dict[str, Side] = {}
    try:
        for name in names:
            sides[name] = Side(module, ["--side", name, *arguments])
        for side in sides.values():
            assert side.facts is not None  # all of them start at the same time
        yield sides
        for side in sides.values():
            side.close()
    finally:
        for side in sides.values():
            side.kill()


def run_module(module: str, *arguments: Any) -> Any:
    """What a process of a module prints last, as JSON."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=MOST_SECONDS
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_agreeing_sides(
    module: str, names: Sequence[str], case: str, num_rounds: int, seconds: float, tolerance: float = 1e-5
) -> dict[str, list[float]]:
    """`take_turns` of a module's sides, whose first losses must agree.

    Args:
      module: what `python -m` runs.
      names: of the sides.
      case: what they train.
      num_rounds: as for `take_turns`.
      seconds: likewise.
      tolerance: of the losses, relative.
    """
    with start_sides(module, names, "--cases", case) as sides:
        losses = [side.facts["losses"] for side in sides.values()]
        for found in losses[1:]:
            np.testing.assert_allclose(found, losses[0], rtol=tolerance)
        return take_turns(sides, num_rounds, seconds)


def take_turns(sides: Mapping[str, Any], num_rounds: int, seconds: float) -> dict[str, list[float]]:
    """Runs rounds of all sides in turn.

    Args:
      sides: by name; what has the method `run` of `Side`.
      num_rounds: how many are kept.
      seconds: how long each side's turn is, about.

    Returns:
      Seconds per step of each side, by round.
    """
    num_steps = {name: max(1, round(seconds / max(side.run(3), 1e-9))) for name, side in sides.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(num_rounds + NUM_WARM_UPS):
        for name in list(sides) if number % 2 else list(reversed(sides)):
            result = sides[name].run(num_steps[name])
            if number >= NUM_WARM_UPS:
                taken[name].append(result)
    return taken


def compare(
    question: str,
    case: str,
    ours: Sequence[float],
    other: Sequence[float],
    target: float | None = None,
    *,
    is_speed: bool = False,
) -> Row:
    """A row of two sides' seconds per step.

    Args:
      question: the benchmark's folder.
      case: what was measured.
      ours: the library's, by round.
      other: the other side's, of the same rounds.
      target: for the ratio.
      is_speed: whether the ratio is how many times faster we are, not how many times longer we take.
    """
    ratios = [b / a if is_speed else a / b for a, b in zip(ours, other, strict=True)]
    return Row(
        question,
        case,
        f"{statistics.median(ours) * 1e3:.2f} ms",
        f"{statistics.median(other) * 1e3:.2f} ms",
        statistics.median(ratios),
        (min(ratios), max(ratios)),
        target,
        at_most=not is_speed,
    )


def format_table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| question | case | ours | other | figure | from..to | target | met |", "| --- " * 8 + "|"]
    for row in rows:
        cells = [row.question, row.case, row.ours, row.other, *format_figure(row)]
        assert not any("|" in cell for cell in cells), cells
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_figure(row: Row) -> tuple[str, str, str, str]:
    """The figure, its spread, the target and whether it is met, as cells of a table."""
    spread = "" if row.spread is None else f"{_number(row.spread[0])}..{_number(row.spread[1])}"
    bound = "" if row.target is None else f"{'≤' if row.at_most else '≥'} {row.target:,.15g}"
    met = {None: "", True: "yes", False: "no"}[row.is_met]
    return _figure(row), spread, bound, met


def _figure(row: Row) -> str:
    """The value in as many digits as are needed to see whether the target is met, at least three."""
    for num_digits in range(3, 18):
        text = _number(row.value, num_digits)
        if dataclasses.replace(row, value=float(text.replace(",", ""))).is_met == row.is_met:
            break
    return text


def _number(value: float, num_digits: int = 3) -> str:
    text = f"{value:.{num_digits}g}"
    return f"{value:,.{num_digits - 3}f}" if abs(float(text)) >= 1000 else text


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="Fewer rounds and cases, as in `make bench`.")
    parser.add_argument("--json", type=Path, help="Write the rows into this file, too.")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser


def report(rows: Sequence[Row], path: Path | None) -> None:
    """Prints the rows, and writes them into a file if there is one."""
    print(format_table(rows), flush=True)
    if path is not None:
        path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
