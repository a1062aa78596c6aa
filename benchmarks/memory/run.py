"""Live activation bytes of each schedule and stage, as the executor holds them, against the formula.

    python -m benchmarks.memory.run [--json FILE]

A stage of N holds, per micro-batch in flight, what its backward reads; in flight are 2(N-i)-1 micro-batches
with Grouped, N-i with Interleaved and one with Sequential, for stage i. The bytes are those of the arrays
that the executor has between its dispatches, at their peak. No figure is a time.
"""

from __future__ import annotations

from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

NUM_STAGES, NUM_MICRO_BATCHES = 4, 16
PLANS = ("one by one", "chunks of 2")
MOST_DIFFERENCE = 0.05


def main() -> None:
    args = harness.make_parser(__doc__).parse_args()
    import jax

    jax.config.update("jax_num_cpu_devices", NUM_STAGES)
    rows = []
    for schedule in ("grouped", "interleaved", "sequential"):
        for plan in PLANS:
            rows.append(measure(schedule, plan))
    harness.report(rows, args.json)


def measure(schedule: str, plan: str) -> Row:
    """The stage where the executor's peak is furthest from the formula."""
    import jax
    import optax

    from benchmarks import models
    from ipu_pipeline import engine
    from ipu_pipeline.engine.execution.runner import PlanRunner
    from ipu_pipeline.engine.inspect import LiveBytes

    model = models.make_mlp(64, 32, 8, NUM_STAGES)
    chunk_size = 2 if plan == "chunks of 2" else 1
    pipeline = engine.Pipeline(
        [engine.Stage(f, p) for f, p in zip(model.stages, model.parameters, strict=True)],
        num_micro_batches=NUM_MICRO_BATCHES,
        optimizer=optax.sgd(models.RATE),
        schedule=schedule,
        dispatch_plan=engine.Chunking(chunk_size),
    )
    micro_batches = model.micro_batches(NUM_MICRO_BATCHES)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    executor: Any = pipeline.prepare()
    assert isinstance(executor, PlanRunner)
    measured = LiveBytes(executor)
    jax.block_until_ready(pipeline.step(state, micro_batches)[0])
    worst, text = 1.0, ""
    for stage, memory in enumerate(engine.planning.plan_memory(pipeline)[:-1]):
        depth = NUM_STAGES - stage
        in_flight = {"grouped": 2 * depth - 1, "interleaved": depth, "sequential": 1}[schedule]
        in_flight = min(in_flight, NUM_MICRO_BATCHES // chunk_size) * chunk_size
        ratio = measured.peaks[stage] / (in_flight * memory.num_held_bytes)
        if abs(ratio - 1) >= abs(worst - 1):
            worst, text = ratio, f"{in_flight} x {memory.num_held_bytes:,} B"
    case = f"{schedule}, {plan}: live bytes over formula, worst stage"
    return Row("memory", case, f"{worst:.3f}", text, abs(worst - 1), None, MOST_DIFFERENCE)


if __name__ == "__main__":
    main()
