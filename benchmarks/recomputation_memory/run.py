"""What recomputation saves: bytes that stages hold, and temporary memory of a pipeline on one device.

    python -m benchmarks.recomputation_memory.run [--json FILE]

The model has 24 dense layers of 64 units in four stages, with a checkpoint in the middle of each; a
micro-batch has 512 examples, a step has 8 of them. The first table is the estimate of memory, which the
tests compare with the runner's buffers. The second is XLA's own figure for the temporary memory of the
one program that a pipeline on one device is. No figure is a time or depends on the machine's load.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness
from benchmarks.harness import Row
from ipu_pipeline import engine

NUM_STAGES, NUM_LAYERS, WIDTH, BATCH_SIZE, NUM_MICRO_BATCHES = 4, 6, 64, 512, 8
MODES = [None, "recompute_then_backpropagate", "recompute_and_backpropagate_interleaved"]


def make_stage(index: int) -> Any:
    def stage(x: Any, labels: Any) -> Any:
        for layer in range(NUM_LAYERS):
            with engine.variable_scope(f"stage{index}/layer{layer}"):
                x = jnp.tanh(x @ engine.get_variable("kernel", (WIDTH, WIDTH)))
            if layer == NUM_LAYERS // 2 - 1:
                x = engine.recomputation_checkpoint(x)
        if index < NUM_STAGES - 1:
            return x, labels
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x, labels))

    return stage


def make_pipeline(mode: str | None, schedule: str, mapping: list[int]) -> engine.Pipeline:
    return engine.Pipeline(
        [make_stage(index) for index in range(NUM_STAGES)],
        num_micro_batches=NUM_MICRO_BATCHES,
        optimizer=optax.sgd(0.01),
        schedule=schedule,
        device_mapping=mapping,
        dispatch_plan=None if len(set(mapping)) == 1 else engine.Chunking(),
        recompute=mode,
    )


def temporary_bytes(mode: str | None, micro_batch: Any) -> int:
    """XLA's temporary memory of all four stages as one program."""
    pipeline = make_pipeline(mode, "grouped", [0] * NUM_STAGES)
    state = pipeline.init(jax.random.key(0), micro_batch)
    pipeline.step(state, [micro_batch] * NUM_MICRO_BATCHES)
    (memory,) = engine.planning.plan_ipu_memory(pipeline)
    assert memory.num_temporary_bytes is not None
    return memory.num_temporary_bytes


def make_row(case: str, mode: str, size: float, size_without: float) -> Row:
    """A row of what is needed with a mode, and without recomputation."""
    ours, other = f"{size / 1024:,.0f} KiB", f"{size_without / 1024:,.0f} KiB"
    return Row("recomputation_memory", f"{case}, {mode}", ours, other, size / size_without)


def main() -> None:
    args = harness.make_parser(__doc__).parse_args()
    rng = np.random.default_rng(0)
    micro_batch = (rng.normal(size=(BATCH_SIZE, WIDTH)).astype("float32"), np.zeros(BATCH_SIZE, "int32"))
    rows = []
    print("KiB that stages 0 to 3 hold between forwards and backwards (micro-batches in flight)")
    for schedule in ("grouped", "interleaved", "sequential"):
        held: dict[str | None, float] = {}
        for mode in MODES:
            pipeline = make_pipeline(mode, schedule, list(range(NUM_STAGES)))
            pipeline.trace(micro_batch)
            plans = engine.planning.plan_memory(pipeline)
            held[mode] = plans[0].num_live_bytes
            cells = [f"{plan.num_live_bytes / 1024:,.0f} ({plan.in_flight})" for plan in plans]
            print(f"  {schedule:11} {mode or 'no recomputation':39} {', '.join(cells)}")
            if mode is not None:
                rows.append(make_row(f"stage 0, {schedule}", mode, held[mode], held[None]))
    print("temporary KiB of everything as one program on one device")
    temporary: dict[str | None, float] = {}
    for mode in MODES:
        temporary[mode] = temporary_bytes(mode, micro_batch)
        print(f"  {mode or 'no recomputation':39} {temporary[mode] / 1024:,.0f}")
        if mode is not None:
            rows.append(make_row("one program", mode, temporary[mode], temporary[None]))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
