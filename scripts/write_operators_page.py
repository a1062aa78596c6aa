"""Writes docs/poptorch_operators.md: how each operator of torch's own database does in `poptorch`.

    python scripts/write_operators_page.py [--outcomes FILE]    # ten minutes, on two cores

With `--outcomes` what is measured is kept in a JSON file, and what is there is not measured again.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "poptorch_operators.md"
NUM_SAMPLES = 2  # of each operator
GROUP = 16  # operators that are measured together

sys.path.insert(0, str(ROOT))

TEXT = """# torch's operators

torch ships a database of its operators with sample inputs, by which it tests itself
(`torch.testing._internal.common_methods_invocations.op_db`). This page is what {total} of them do in a
wrapped model: those that take float32, with the first two samples of each, values and, where torch has
them, gradients. Each is compared with torch: per result and per gradient, the 2-norm of the difference is
at most 1e-5 of torch's, or ours is as near to what torch computes in float64. {counts}

`python scripts/write_operators_page.py` writes this page.
`tests/poptorch/lowering/test_poptorch_operators.py` holds it: a share of the operators in each run.

"passed" with a gradient means that values and gradients were compared; "random numbers" that the operator
draws them, where streams differ from torch's; "refused" that a model with it raises an error that names it
and your line, before anything runs. `poptorch.register_lowering` gives an operation a function of JAX.

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
    """The page."""
    numbers = collections.Counter(kind for kind, _why, _has_gradient in outcomes.values())
    counts = ", ".join(f"{number} {kind}" for kind, number in numbers.most_common())
    lines = ["| operator | outcome | gradient | why |", "| --- | --- | --- | --- |"]
    for name, (kind, why, has_gradient) in sorted(outcomes.items()):
        lines.append(f"| `{name}` | {kind} | {'yes' if has_gradient else ''} | {why} |")
    return TEXT.format(total=len(outcomes), counts=f"They are: {counts}.") + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outcomes", type=Path, help="Where what is measured is kept.")
    args = parser.parse_args()
    from tests.support import operator_database

    PAGE.write_text(write(measure(list(operator_database.operators()), args.outcomes)))


if __name__ == "__main__":
    main()
