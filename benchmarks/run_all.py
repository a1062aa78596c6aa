"""Runs all benchmarks, one after another, and prints one table.

    python -m benchmarks.run_all [--short] [--json FILE] [--only dispatch feeds]

Each is a process of its own. One that fails is named at the end, and the exit status is then 1; the others
are in the table all the same.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Row

BENCHMARKS = [
    "against_plain_jax",
    "single_program",
    "against_torch_pipelining",
    "dispatch",
    "compile",
    "feeds",
    "checkpoints",
    "tutorial",
    "memory",
    "recomputation_memory",
]


def describe_machine() -> str:
    """The machine and the versions, in a sentence."""
    model = platform.processor() or platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        names = [
            line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    versions = [f"{package} {metadata.version(package)}" for package in ("jax", "jaxlib", "optax", "torch")]
    return (
        f"{os.cpu_count()} cores, {model}; {platform.system()}, Python {platform.python_version()}, "
        f"{', '.join(versions)}; {datetime.datetime.now(datetime.UTC).date()}."
    )


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


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    args = parser.parse_args()
    rows: list[Row] = []
    failed = []
    for name in args.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = run(name, args.short)
        if found is None:
            failed.append(name)
        else:
            rows += found
    print(describe_machine() + "\n")
    harness.report(rows, args.json)
    if failed:
        sys.exit(f"These failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
