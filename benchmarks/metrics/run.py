"""What metrics cost: time per training step with them, and without.

    python -m benchmarks.metrics.run [--rounds 15] [--json FILE]

A multilayer perceptron, 256 wide, is trained on two virtual devices, and on one. With metrics, its
optimizer reports the norms of gradients and updates and the learning rate, the first stage one of its
values, and the last the loss, which are all read at the end of a round.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import harness, models
from benchmarks.harness import Row

MODULE = "benchmarks.metrics.run"
CASE, TARGET = "mlp256", 1.01
SIDES = ["with metrics", "without"]
DEVICES = [2, 1]


def serve(side: str, num_devices: int) -> None:
    """Trains, and reports metrics or none."""
    import jax

    jax.config.update("jax_num_cpu_devices", num_devices)
    import optax

    from ipu_pipeline import engine

    has_metrics = side == SIDES[0]
    workload = models.WORKLOADS[CASE]
    model = workload.make()

    def first(parameters: Any, x: Any, target: Any) -> Any:
        if has_metrics:
            engine.metric("first", x[0, 0])
        return model.stages[0](parameters, x, target)

    def report_loss(loss: Any) -> Any:
        if has_metrics:
            engine.metric("loss", loss)
        return loss

    optimizer: Any = optax.sgd(models.RATE)
    if has_metrics:
        optimizer = engine.with_metrics(optimizer, models.RATE)
    pipeline = engine.Pipeline(
        [
            engine.Stage(stage, parameters)
            for stage, parameters in zip([first, *model.stages[1:]], model.parameters, strict=True)
        ],
        num_micro_batches=workload.num_micro_batches,
        loss=report_loss,
        optimizer=optimizer,
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
        steps = []
        for _ in range(num_steps):
            state, outputs = pipeline.step(state, placed)
            steps.append(outputs)
        jax.block_until_ready((state, [part.loss for part in steps[-1].collected]))
        if has_metrics:
            read = [outputs.metrics for outputs in steps]
            assert all(np.isfinite(metrics["gradient_norm"]) for metrics in read)
            np.testing.assert_allclose(read[-1]["loss"], np.mean(steps[-1].losses), rtol=1e-5)
        told.append(np.mean(steps[-1].losses).item())

    run(1)
    run(1)
    harness.serve_rounds(run, {"losses": told[:2]})


def measure(num_devices: int, num_rounds: int, seconds: float) -> Row:
    """Compares the two sides, which take turns."""
    taken = harness.run_agreeing_sides(MODULE, SIDES, str(num_devices), num_rounds, seconds)
    where = "one device" if num_devices == 1 else f"{num_devices} devices"
    name = f"{models.WORKLOADS[CASE].name}, on {where}"
    return harness.compare("metrics", name, taken["with metrics"], taken["without"], TARGET)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="+")
    args = parser.parse_args()
    if args.side is not None:
        serve(args.side, int(args.cases[0]))
        return
    num_rounds, seconds = (7, 0.6) if args.short else (args.rounds, harness.ROUND_SECONDS)
    harness.report([measure(number, num_rounds, seconds) for number in DEVICES], args.json)


if __name__ == "__main__":
    main()
