"""Emulated devices: a step over the ideal of its schedule, for short and long programs.

    python -m benchmarks.emulation.run [--cases 4x10 8x0.5] [--rounds 7] [--json FILE]

A case is a number of stages and the milliseconds of a forward; a backward takes twice as long. Each stage
sleeps on a virtual device of its own, so the devices overlap as real ones do. A step has four micro-batches
per stage; with the sequential schedule, which has one in flight, one per stage.

The ideal is what the schedule takes if there is nothing but its programs, each as long as it takes alone: a
sleep is longer than what was asked for. The process that runs the steps times its programs, too, in turns
with them. torch.distributed.pipelining trains the same stages beside it, with the better of its schedules.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, torch_ranks
from benchmarks.emulation import values
from benchmarks.harness import Row, Side
from benchmarks.torch_ranks import SCHEDULES as TORCH_SCHEDULES
from benchmarks.torch_ranks import Training

MODULE = "benchmarks.emulation.run"
NUM_STAGES = (2, 4, 8)
TARGETS = {10.0: 1.03, 2.0: 1.06, 0.5: 1.20}  # milliseconds of a forward -> the most, in ideals
OURS = ("grouped", "interleaved", "sequential")
CHUNKED = "grouped in chunks of 4"  # a plan that is not the one that is chosen
SENT = {"grouped, sent in 1 ms": "grouped", "interleaved, sent in 1 ms": "interleaved"}
IDEALS = {CHUNKED: "grouped", **SENT}  # of single micro-batches, and without transfers
FURTHER = {"4x10": [CHUNKED], "4x2": list(SENT)}  # sides of some cases that show something by the way
NUM_BYTES = 8192
NUM_CALLS = 3  # of a program in a row, when it is timed


class Case(NamedTuple):
    """So many stages, and the milliseconds of a forward and a backward."""

    num_stages: int
    forward_ms: float

    @property
    def backward_ms(self) -> float:
        """Twice the forward."""
        return 2 * self.forward_ms

    def num_micro_batches(self, side: str) -> int:
        """Of a step."""
        return self.num_stages * (1 if side == "sequential" else 4)

    def name(self, side: str) -> str:
        """For tables."""
        times = f"({self.forward_ms:g} + {self.backward_ms:g}) ms"
        return f"{self.num_stages} stages, {self.num_micro_batches(side)} x {times}"


CASES = {f"{number}x{forward:g}": Case(number, forward) for number in NUM_STAGES for forward in TARGETS}


def serve(case: Case, side: str) -> None:
    """Trains a pipeline."""
    import jax

    from benchmarks.emulation import stages, timing
    from ipu_pipeline import engine

    transfer_ms = 1.0 if side in SENT else 0.0
    jax.config.update("jax_num_cpu_devices", stages.num_devices(case.num_stages, transfer_ms))
    pipeline, state, micro_batches = stages.make_pipeline(
        [case.forward_ms] * case.num_stages,
        [case.backward_ms] * case.num_stages,
        case.num_micro_batches(side),
        num_bytes=NUM_BYTES,
        transfer_ms=transfer_ms,
        collect_outputs=False,
        schedule="grouped" if side == CHUNKED else SENT.get(side, side),
        dispatch_plan=engine.Chunking(4) if side == CHUNKED else None,
    )
    placed = pipeline.place_micro_batches(micro_batches)

    def step() -> Any:
        nonlocal state
        state, outputs = pipeline.step(state, placed)
        return outputs

    told = [np.asarray(step().losses).tolist() for _ in range(2)]
    timer = timing.ProgramTimer(pipeline, state, placed)

    def run(num_steps: int) -> float | None:
        if num_steps == 0:
            return timing.ideal_seconds(pipeline, timer.run(NUM_CALLS))
        for _ in range(num_steps):
            jax.block_until_ready((step().collected, state))  # each ends first, as the ideal has it
        return None

    harness.serve_rounds(run, {"losses": told})


def make_training(name: str) -> Training:
    """The same stages for torch."""
    case = CASES[name]
    micro_batches = values.make_micro_batches(case.num_micro_batches("torch"), NUM_BYTES)
    num_turns = len(micro_batches) + case.num_stages - 1
    taken: list[float] = []

    def time_ideal(module: Any) -> float:
        import torch

        x = torch.tensor(micro_batches[0], requires_grad=True)
        for _ in range(NUM_CALLS):
            begin = time.perf_counter()
            y = module(x)
            y.backward(x.detach())
            taken.append(time.perf_counter() - begin)
            module.zero_grad()
        return num_turns * statistics.median(taken)

    return Training(
        case.num_stages,
        functools.partial(make_torch_stage, case),
        [(x, np.zeros_like(x)) for x in micro_batches],
        values.RATE,
        time_ideal,
    )


def make_torch_stage(case: Case, index: int) -> Any:
    """A stage as a torch module."""
    import torch

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            time.sleep(case.forward_ms / 1e3)
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            time.sleep(case.backward_ms / 1e3)
            x, w = ctx.saved_tensors
            return g * w, (g * x).sum(0)

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(values.make_parameters(case.num_stages)[index]))

        def forward(self, x: Any) -> Any:
            return Multiply.apply(x, self.w)

    return Stage()


class Ideal:
    """What a side's step would take if there were nothing but its programs, as a side of its own."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def run(self, num_steps: int) -> float:
        """Seconds per step, from what the programs took so far, and now once more."""
        del num_steps
        return self._side.ask_ideal()


def measure(name: str, num_rounds: int, seconds: float) -> list[Row]:
    """Compares each schedule with its ideal; steps and programs take turns."""
    case = CASES[name]
    ours = [*OURS, *FURTHER.get(name, [])]
    with harness.start_sides(MODULE, [*ours, *TORCH_SCHEDULES], "--cases", name) as sides:
        check_losses({side: found.facts["losses"] for side, found in sides.items()})
        ideals = {side: Ideal(sides[side]) for side in [*OURS, *TORCH_SCHEDULES]}
        turns = {**sides, **{f"{side}, ideal": ideal for side, ideal in ideals.items()}}
        taken = harness.take_turns(turns, num_rounds, seconds)
    better = min(TORCH_SCHEDULES, key=lambda side: statistics.median(taken[side]))
    labels = {side: side for side in ours} | {better: f"torch.distributed.pipelining, {better}"}
    return [
        harness.compare(
            "emulation",
            f"{case.name(side)}: {label}, against the ideal",
            taken[side],
            taken[f"{IDEALS.get(side, side)}, ideal"],
            TARGETS[case.forward_ms] if side in OURS else None,
        )
        for side, label in labels.items()
    ]


def check_losses(losses: dict[str, list[list[float]]]) -> None:
    """Raises unless all sides train the same; with fewer micro-batches, the first step of it."""
    first, second = losses["grouped"]
    for side, (own_first, own_second) in losses.items():
        np.testing.assert_allclose(own_first, first[: len(own_first)], rtol=1e-4, err_msg=side)
        if len(own_first) == len(first):
            np.testing.assert_allclose(own_second, second, rtol=1e-4, err_msg=side)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    if args.side in TORCH_SCHEDULES:
        torch_ranks.serve(make_training, args.cases, args.side)
        return
    if args.side is not None:
        serve(CASES[args.cases[0]], args.side)
        return
    num_rounds, seconds = (3, 0.3) if args.short else (args.rounds, 1.0)
    harness.report([row for name in args.cases for row in measure(name, num_rounds, seconds)], args.json)


if __name__ == "__main__":
    main()
