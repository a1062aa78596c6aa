"""A pipeline against the same model on one device in plain JAX: time per training step.

    python -m benchmarks.against_plain_jax.run [--cases mlp64 mlp256] [--rounds 9] [--json FILE]

The plain side is one jitted `lax.scan` over the micro-batches, which accumulates gradients, and an update
by SGD, on one device. The pipeline has each stage on a device of its own. The micro-batches of a step lie
on the devices beforehand, on both sides; losses are computed on both. Both wait for their devices at the
end of a round, not of a step.
"""

from __future__ import annotations

from benchmarks import harness, models, training
from benchmarks.harness import Row

MODULE = "benchmarks.against_plain_jax.run"


def measure(case: str, num_rounds: int, seconds: float) -> list[Row]:
    """Compares the sides of one case."""
    workload = models.WORKLOADS[case]
    others = ["plain", *(["unrolled"] if workload.unroll > 1 else [])]
    taken = harness.run_agreeing_sides(MODULE, ["pipeline", *others], case, num_rounds, seconds)
    rows = [("", "plain", workload.target), (", its scan unrolled by hand", "unrolled", None)]
    return [
        harness.compare("against_plain_jax", workload.name + what, taken["pipeline"], taken[other], target)
        for what, other, target in rows
        if other in taken
    ]


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=list(models.WORKLOADS))
    args = parser.parse_args()
    if args.side == "plain":
        training.serve_plain(args.cases[0], unroll=1)
    elif args.side == "unrolled":
        training.serve_plain(args.cases[0])
    elif args.side == "pipeline":
        training.serve_pipeline(args.cases[0])
    else:
        num_rounds, seconds = (5, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
        cases = args.cases or list(models.WORKLOADS)
        rows = [row for case in cases for row in measure(case, num_rounds, seconds)]
        harness.report(rows, args.json)


if __name__ == "__main__":
    main()
