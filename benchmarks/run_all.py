"""Runs all benchmarks, one after another, and prints one table.

    python -m benchmarks.run_all [--short] [--json FILE] [--only dispatch feeds] [--write PAGE]

Each runs in its own process. If one fails, it is named at the end and the exit status is 1. The others are
in the printed table all the same, but nothing is written. `--write` adds the rows to data/benchmarks.csv
beside the page, and makes the page from the newest run of each benchmark there; `make bench` writes
docs/benchmarks.md.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks import harness, history, page
from benchmarks.harness import Row
from benchmarks.history import Run

BENCHMARKS = list(page.QUESTIONS)
_PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "torch")


def describe_run(is_short: bool, only: Sequence[str], rows: Sequence[Row]) -> Run:
    """The rows with what they were measured on and by."""
    model = platform.processor() or platform.machine()
    path = Path("/proc/cpuinfo")
    info = path.read_text() if path.exists() else ""
    if names := re.findall(r"^model name\s*: (.*)$", info, re.MULTILINE):
        model = names[0]
    virtual = ", a virtual machine" if re.search(r"^flags\s*:.*\bhypervisor\b", info, re.MULTILINE) else ""
    installed = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
    versions = [f"{package} {installed[package]}" for package in _PACKAGES if package in installed]
    command = ["python -m benchmarks.run_all"] + ["--short"] * is_short
    if set(only) != set(BENCHMARKS):
        command += ["--only", *only]
    return Run(
        command=" ".join(command),
        machine=f"{os.cpu_count()} cores, {model}{virtual}",
        software=f"{platform.system()}, Python {platform.python_version()}, {', '.join(versions)}",
        date=str(datetime.datetime.now(datetime.UTC).date()),
        code=_describe_code(),
        rows=tuple(rows),
    )


def _describe_code() -> str:
    """The commit that is checked out, if there is git and a repository."""
    git = shutil.which("git")
    if git is None:
        return "no commit"
    command = [git, "describe", "--always", "--dirty= with changes", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=harness.ROOT, check=False)
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "no commit"


def run(name: str, is_short: bool) -> list[Row] | None:
    """The rows of one benchmark; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{name}.run", "--json", str(path)]
        done = subprocess.run(
            command + ["--short"] * is_short, stdout=subprocess.DEVNULL, cwd=harness.ROOT, check=False
        )
        if done.returncode:
            return None
        return [Row(**row) for row in json.loads(path.read_text())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    parser.add_argument(
        "--write",
        type=Path,
        help="Add the rows to data/benchmarks.csv beside this page, and write the page of what is there.",
    )
    args = parser.parse_args(arguments)
    rows: list[Row] = []
    failed = []
    for name in args.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = run(name, args.short)
        if found is None:
            failed.append(name)
        else:
            rows += found
    measured = describe_run(args.short, args.only, rows)
    print(f"{measured.machine}; {measured.software}; {measured.date}; {measured.code}.\n")
    harness.report(rows, args.json)
    if failed:
        kept = f" {args.write} is left as it was." if args.write else ""
        sys.exit(f"These failed: {', '.join(failed)}.{kept}")
    if args.write:
        file = args.write.parent / "data" / "benchmarks.csv"
        history.append(history.rows_of(measured), file)
        args.write.write_text(page.write(history.read(file)))


if __name__ == "__main__":
    main()
