"""A pipeline against torch.distributed.pipelining: time per training step.

    python -m benchmarks.against_torch_pipelining.run [--cases mlp64 mlp256] [--rounds 7] [--json FILE]

The other side is torch.distributed.pipelining with GPipe and with 1F1B, whichever is faster: gloo, a
process per stage with one thread each, plain SGD. Both sides train the same model on the same
micro-batches, which lie in memory beforehand, and compute the losses. A jitted scan of plain JAX on one
device, which is no pipeline, takes turns with them: where that is no faster either, the time is in the
matrix products of the two libraries.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

from benchmarks import harness, models, torch_ranks, training
from benchmarks.harness import Row
from benchmarks.torch_ranks import SCHEDULES, Training

MODULE = "benchmarks.against_torch_pipelining.run"
TARGETS = {"mlp64": 3.0, "mlp256": 2.0, "mlp512": 2.0, "mlp512-4": 2.0, "mlp1024": 2.0}


def make_torch_stage(model: Any, index: int) -> Any:
    """A stage of an MLP of `models` as a torch module."""
    import torch

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = model.parameters[index]
            self.kernels = torch.nn.ParameterList([torch.tensor(kernel) for kernel, _bias in layers])
            self.biases = torch.nn.ParameterList([torch.tensor(bias) for _kernel, bias in layers])

        def forward(self, x: Any) -> Any:
            for kernel, bias in zip(self.kernels, self.biases, strict=True):
                x = torch.relu(torch.addmm(bias, x, kernel))
            return x

    return Stage()


def make_training(case: str) -> Training:
    """A workload for torch."""
    workload = models.WORKLOADS[case]
    model = workload.make()
    return Training(
        workload.num_stages,
        functools.partial(make_torch_stage, model),
        model.micro_batches(workload.num_micro_batches),
        models.RATE,
    )


def measure(case: str, num_rounds: int, seconds: float) -> list[Row]:
    """Compares the pipeline with the better schedule of the other side, and plain JAX likewise."""
    sides = ["pipeline", *SCHEDULES, "plain"]
    taken = harness.run_agreeing_sides(MODULE, sides, case, num_rounds, seconds, tolerance=1e-4)
    better = min(SCHEDULES, key=lambda name: statistics.median(taken[name]))
    name = f"{models.WORKLOADS[case].name}, {better}"
    return [
        harness.compare(
            "against_torch_pipelining", named, taken[ours], taken[better], target, is_speed=True
        )
        for named, ours, target in (
            (name, "pipeline", TARGETS[case]),
            (f"{name}: plain JAX on one device against it", "plain", None),
        )
    ]


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(TARGETS))
    args = parser.parse_args()
    if args.side == "pipeline":
        training.serve_pipeline(args.cases[0])
    elif args.side == "plain":
        training.serve_plain(args.cases[0])
    elif args.side is not None:
        torch_ranks.serve(make_training, args.cases, args.side)
    else:
        num_rounds, seconds = (3, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
        rows = [measure(case, num_rounds, seconds) for case in args.cases or list(TARGETS)]
        harness.report([row for pair in rows for row in pair], args.json)


if __name__ == "__main__":
    main()
