"""What recording a trace costs: time per training step while `reports.capture` records, and without.

    python -m benchmarks.tracing.run [--rounds 15] [--json FILE]

A multilayer perceptron is trained on two virtual devices, and on one: 256 wide, and 64 wide, whose step
is little but dispatches. What is written at the end of a recording is not in the time. Where nothing is
recorded, a step asks three times whether somebody watches.
"""

from __future__ import annotations

import contextlib
import tempfile
import timeit

import numpy as np

from benchmarks import harness, models
from benchmarks.harness import Row

MODULE = "benchmarks.tracing.run"
SIDES = ["recording", "not recording"]
CASES = [("mlp256", 2), ("mlp256", 1), ("mlp64", 2)]
ASKED_PER_STEP = 3  # by the pipeline, the runner, and the weight update
LARGE = 100_000_000  # actions: all of them are recorded


def serve(side: str, case: str, num_devices: int) -> None:
    """Trains, and records it or not."""
    import jax

    jax.config.update("jax_num_cpu_devices", num_devices)
    import optax

    import ipu_pipeline as ipu
    from ipu_pipeline import engine

    workload = models.WORKLOADS[case]
    model = workload.make()
    pipeline = engine.Pipeline(
        [
            engine.Stage(stage, parameters)
            for stage, parameters in zip(model.stages, model.parameters, strict=True)
        ],
        num_micro_batches=workload.num_micro_batches,
        optimizer=optax.sgd(models.RATE),
        device_mapping=[number % num_devices for number in range(workload.num_stages)],
        donate=True,
        collect_outputs=False,
    )
    micro_batches = model.micro_batches(workload.num_micro_batches)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    placed = pipeline.place_micro_batches(micro_batches)
    told = []

    def run(num_steps: int) -> None:
        nonlocal state
        for _ in range(num_steps):
            state, outputs = pipeline.step(state, placed)
        jax.block_until_ready((state, [part.loss for part in outputs.collected]))
        told.append(np.mean(outputs.losses).item())

    run(1)
    run(1)
    with contextlib.ExitStack() as stack:
        if side == SIDES[0]:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(ipu.reports.capture(directory, max_actions=LARGE))
        harness.serve_rounds(run, {"losses": told[:2]})


def measure(case: str, num_devices: int, num_rounds: int, seconds: float) -> Row:
    """Compares the two sides, which take turns."""
    taken = harness.run_agreeing_sides(MODULE, SIDES, f"{case}:{num_devices}", num_rounds, seconds)
    where = "one device" if num_devices == 1 else f"{num_devices} devices"
    name = f"{models.WORKLOADS[case].name}, on {where}"
    return harness.compare("tracing", name, taken[SIDES[0]], taken[SIDES[1]])


def measure_asking(recorded: Row) -> Row:
    """What a step spends on asking whether somebody watches, against a step that nobody watches."""
    from ipu_pipeline.engine import watching

    number = 100_000
    once = min(timeit.repeat(watching.current, number=number, repeat=5)) / number
    step = float(recorded.other.split()[0]) * 1e-3
    asked = ASKED_PER_STEP * once
    return Row(
        "tracing",
        "nothing is recorded: asking who watches, against a step of the last case",
        f"{asked * 1e6:.2f} us",
        recorded.other,
        1.0 + asked / step,
        target=1.001,
    )


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="+")
    args = parser.parse_args()
    if args.side is not None:
        case, num_devices = args.cases[0].split(":")
        serve(args.side, case, int(num_devices))
        return
    num_rounds, seconds = (5, 0.4) if args.short else (args.rounds, harness.ROUND_SECONDS / 2)
    rows = [measure(*case, num_rounds, seconds) for case in CASES]
    harness.report([*rows, measure_asking(rows[-1])], args.json)


if __name__ == "__main__":
    main()
