"""All stages on one device against the same model in plain JAX: time per training step.

    python -m benchmarks.single_program.run [--cases mlp64] [--rounds 9] [--json FILE]

A pipeline whose stages are all on one device is one compiled program, and so is the plain side, one jitted
`lax.scan` over the micro-batches and an update by SGD. The micro-batches of a step lie on the device
beforehand, losses are computed on both sides, and both wait for the device at the end of a round.
"""

from __future__ import annotations

from benchmarks import harness, models, training
from benchmarks.harness import Row

MODULE = "benchmarks.single_program.run"
CASES = ["mlp64", "mlp512", "transformer"]
TARGET = 1.03


def measure(case: str, num_rounds: int, seconds: float) -> Row:
    """Compares the two sides of one case."""
    taken = harness.run_agreeing_sides(MODULE, ["pipeline", "plain"], case, num_rounds, seconds)
    name = models.WORKLOADS[case].name
    return harness.compare("single_program", name, taken["pipeline"], taken["plain"], TARGET)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=list(models.WORKLOADS))
    args = parser.parse_args()
    if args.side == "plain":
        training.serve_plain(args.cases[0], unroll=1)
    elif args.side == "pipeline":
        training.serve_pipeline(args.cases[0], is_single_program=True)
    else:
        num_rounds, seconds = (5, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
        harness.report([measure(case, num_rounds, seconds) for case in args.cases or CASES], args.json)


if __name__ == "__main__":
    main()
