"""The features of this library, SpectraX and torch.distributed.pipelining: a table whose cells are run.

    python -m benchmarks.features.run [--python spectrax=PYTHON] [--only CHECK] [--write docs/comparison.md]

Each check is a process of its own, with a time limit, run by the Python that has the library: this one,
unless `--python` names another, as SpectraX wants older packages than the others. Columns of libraries that
are not installed stay as they are on the page.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks import harness
from benchmarks.features.values import WORKS, WORKS_WITH, Verdict
from benchmarks.harness import Row

MOST_SECONDS = 300  # of a check
FEATURES = {
    "documented_form": "The form of its documentation, four equal stages",
    "lengths_in_turn": "Another length of micro-batches in the next step",
    "lengths_mixed": "Micro-batches of several lengths in one step",
    "fewer_micro_batches": "Fewer micro-batches than stages",
    "smaller_last": "A smaller last micro-batch",
    "losses_per_token": "Losses per token: gradients of the mean over a step's tokens",
    "schedules_by_name": "Schedules by name: GPipe, 1F1B, interleaved, zero bubble",
    "own_schedule": "A schedule of your own",
    "tied_weights": "Weights tied across stages",
    "another_split": "A state goes on with another split",
    "generation": "Generation through the stages, with caches",
    "continuous_batching": "Continuous batching of requests",
    "stage_meshes": "Meshes in stages: collectives and constraints over a stage's devices",
    "nan_origin": "Where a nan comes from: stage, micro-batch, line",
    "own_check": "Checks of your own in a stage",
    "hang": "A step that hangs says who waits",
    "debugger": "A debugger in a stage, op by op",
    "first_step": "The first step's time (4 stages of one small matrix, 4 micro-batches)",
    "split_advice": "Advice on splits, by measurements",
    "cannot_trace": "An error for what cannot be traced: stage and line",
}


@dataclass(frozen=True)
class Library:
    """A column.

    Attributes:
      title: its heading.
      module: the module in this folder that has a function for each check.
      package: the distribution, by which its version is found.
    """

    title: str
    module: str
    package: str


LIBRARIES = {
    "engine": Library("`ipu_pipeline.engine`", "on_engine", "ipu_pipeline"),
    "spectrax": Library("SpectraX", "on_spectrax", "spectrax-lib"),
    "torch": Library("torch.distributed.pipelining", "on_torch", "torch"),
}
_BEGIN, _END = "<!-- The table begins. -->\n", "<!-- The table ends. -->\n"


def serve(library: str, check: str | None) -> None:
    """Runs a check, or tells the version and the checks, and prints JSON."""
    known = LIBRARIES[library]
    if check is None:
        try:
            told = {"version": metadata.version(known.package)}
        except metadata.PackageNotFoundError:
            told = {}
        print(json.dumps(told))
        return
    function = getattr(importlib.import_module(f"benchmarks.features.{known.module}"), check, None)
    verdict = None if function is None else function()
    print("verdict " + json.dumps(None if verdict is None else dataclasses.asdict(verdict)))


def ask(python: str, library: str, *arguments: str) -> str:
    """What `serve` prints in a process of its own.

    Raises:
      RuntimeError: it failed, or took too long.
    """
    command = [python, "-m", "benchmarks.features.run", "--side", library, *arguments]
    environment = {**os.environ, "LOGGING_LEVEL_ED": "WARNING", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=harness.ROOT,
                env=environment,
                timeout=MOST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{library} {arguments}: took more than {MOST_SECONDS} s.") from None
        if done.returncode:
            errors.seek(0)
            raise RuntimeError(f"{library} {arguments}: {errors.read()[-1500:]}")
    return done.stdout


def run_check(python: str, library: str, check: str) -> Verdict | None:
    """The verdict of a check; None if the library has no such check."""
    (line,) = re.findall(r"^verdict (.*)$", ask(python, library, "--check", check), re.MULTILINE)
    found = json.loads(line)
    return None if found is None else Verdict(**found)


def format_cell(verdict: Verdict | None) -> str:
    """A cell of the table."""
    if verdict is None:
        return ""
    note = verdict.note.replace("|", "\\|").replace("<", "&lt;")
    return f"**{verdict.kind}** {note}" if verdict.kind == WORKS_WITH else f"**{verdict.kind}**: {note}"


def read_cells(text: str) -> dict[str, dict[str, str]]:
    """The cells of the page's table, by library and check; empty ones where it has none."""
    table = text.partition(_BEGIN)[2].partition(_END)[0]
    names = {title: name for name, title in FEATURES.items()}
    cells: dict[str, dict[str, str]] = {library: {} for library in LIBRARIES}
    for line in table.splitlines():
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(row) == len(LIBRARIES) + 1 and row[0] in names:
            for library, cell in zip(LIBRARIES, row[1:], strict=True):
                cells[library][names[row[0]]] = cell
    return cells


def write_table(text: str, cells: Mapping[str, Mapping[str, str]], versions: Mapping[str, str]) -> str:
    """The page with a table of these cells, and the versions in its headings.

    Raises:
      ValueError: the page has no place for the table.
    """
    if _BEGIN not in text or _END not in text:
        raise ValueError(f"The page needs the lines {_BEGIN.strip()!r} and {_END.strip()!r}.")
    heads = [f"{known.title} {versions.get(name, '')}".strip() for name, known in LIBRARIES.items()]
    lines = [f"| feature | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for check, title in FEATURES.items():
        row = [cells[library].get(check, "") for library in LIBRARIES]
        lines.append(f"| {title} | {' | '.join(row)} |")
    before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
    return before + _BEGIN + "\n".join(lines) + "\n" + _END + after


def read_versions(text: str) -> dict[str, str]:
    """The versions in the headings of the page's table."""
    head = next((line for line in text.splitlines() if line.startswith("| feature |")), "")
    cells = [cell.strip() for cell in head.split("|")[2:-1]]
    found = zip(LIBRARIES.items(), cells, strict=False)
    return {name: cell.removeprefix(known.title).strip() for (name, known), cell in found}


def count(library: str, cells: Mapping[str, Mapping[str, str]]) -> Row:
    """A row for the page of all benchmarks: how many of the features work as they are, here and there."""

    def works(library: str) -> int:
        return sum(cell.startswith(f"**{WORKS}**") for cell in cells[library].values())

    case = f"of {len(FEATURES)} features, those that work as they are; other: {LIBRARIES[library].title}"
    return Row("features", case, str(works("engine")), str(works(library)), float(works("engine")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--check", choices=list(FEATURES), help="Of --side: run this one.")
    parser.add_argument("--only", nargs="+", choices=list(FEATURES), default=list(FEATURES))
    parser.add_argument("--python", nargs="+", default=[], metavar="LIBRARY=PYTHON")
    parser.add_argument("--write", type=Path, help="Write the table into this page.")
    args = parser.parse_args(arguments)
    if args.side is not None:
        serve(args.side, args.check)
        return
    pythons = dict.fromkeys(LIBRARIES, sys.executable)
    for given in args.python:
        library, sign, python = given.partition("=")
        if library not in LIBRARIES or not sign:
            parser.error(f"--python must be one of {', '.join(LIBRARIES)}, =, and a Python; got {given!r}.")
        pythons[library] = python
    text = args.write.read_text() if args.write else ""
    cells, versions = read_cells(text), read_versions(text)
    failed, rows = [], []
    date = datetime.datetime.now(datetime.UTC).date()
    for library, python in pythons.items():
        version = json.loads(ask(python, library)).get("version")
        if version is None:
            print(f"{library} is not installed.", file=sys.stderr)
            continue
        versions[library] = f"{version}, {date}"
        for check in args.only:
            try:
                cells[library][check] = format_cell(run_check(python, library, check))
            except RuntimeError as error:
                failed.append(str(error))
                continue
            print(f"{library} {check}: {cells[library][check]}", file=sys.stderr, flush=True)
        if library != "engine":
            rows.append(count(library, cells))
    harness.report(rows, args.json)
    if failed:
        sys.exit("These failed, and the page is left as it was:\n" + "\n".join(failed))
    if args.write:
        args.write.write_text(write_table(text, cells, versions))


if __name__ == "__main__":
    main()
