"""Writes tests/poptorch/lowering/operators.toml: how each operator of torch's database does in `poptorch`.

    python scripts/write_operator_outcomes.py [--measured FILE]    # ten minutes, on two cores

With `--measured`, outcomes are kept in a JSON file, and operators that it has are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_SAMPLES = 2  # of each operator
GROUP = 16  # operators that are measured together

sys.path.insert(0, str(ROOT))

TEXT = """\
# How {total} operators of torch's database do in a wrapped model, with two samples each, in float32.
# `gradient`: whether gradients were compared besides values. Written by scripts/write_operator_outcomes.py.
"""


def measure(names: list[str], path: Path | None) -> dict[str, Any]:
    """Outcomes by the operators' names."""
    from tests.support import operator_database

    kept: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    left = [name for name in names if name not in kept]
    for start in range(0, len(left), GROUP):
        found = operator_database.measure(left[start : start + GROUP], NUM_SAMPLES)
        kept |= {name: dataclasses.astuple(outcome) for name, outcome in found.items()}
        if path is not None:
            path.write_text(json.dumps(kept, indent=0))
        print(f"{min(start + GROUP, len(left))} of {len(left)}", file=sys.stderr, flush=True)
    return {name: kept[name] for name in names}


def write(outcomes: dict[str, Any]) -> str:
    """The file: the names of the operators that have an outcome in common."""
    names: dict[tuple[str, str, bool], list[str]] = {}
    for name, (kind, why, has_gradient) in sorted(outcomes.items()):
        names.setdefault((kind, why, bool(has_gradient)), []).append(name)
    parts = [TEXT.format(total=len(outcomes))]
    for (kind, why, has_gradient), some in sorted(names.items()):
        lines = textwrap.fill(" ".join(some), 110, break_long_words=False, break_on_hyphens=False)
        head = f"kind = {json.dumps(kind)}\nwhy = {json.dumps(why)}\ngradient = {json.dumps(has_gradient)}"
        parts.append(f'\n[[outcomes]]\n{head}\noperators = """\n{lines}\n"""\n')
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, help="A file that keeps the outcomes measured so far.")
    args = parser.parse_args()
    from tests.support import operator_database

    names = list(operator_database.operators())
    operator_database.OUTCOMES.write_text(write(measure(names, args.measured)))


if __name__ == "__main__":
    main()
