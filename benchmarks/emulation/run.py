"""Stages of unknown cost: a step by the plan that is chosen, against the ideal and against one by one.

    python -m benchmarks.emulation.run [--rounds 9] [--json FILE]

Four stages, each on a virtual device of its own, sleep in a foreign function, 10 ms forwards and 20 ms
backwards, for 16 micro-batches. Sleeping takes no core, and with some further operations XLA starts the
programs asynchronously, so the devices overlap as real ones do. The ideal is what the schedule takes where
nothing else costs anything: (micro-batches + stages - 1) times a forward and a backward.

It compiles C++ with the headers that jaxlib has; without g++ it says so and measures nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.emulation.run"
NUM_STAGES, NUM_MICRO_BATCHES = 4, 16
FORWARD_MS, BACKWARD_MS = 10.0, 20.0
IDEAL = (NUM_MICRO_BATCHES + NUM_STAGES - 1) * (FORWARD_MS + BACKWARD_MS) / 1e3
SIDES = {"chosen": None, "one by one": 1, "chunks of 4": 4}  # micro-batches per program
MOST_OF_IDEAL = 1.05


def serve(side: str) -> None:
    """Trains by one of the plans."""
    import jax

    jax.config.update("jax_num_cpu_devices", NUM_STAGES)

    from benchmarks.emulation import stages
    from ipu_pipeline import engine

    chunk_size = SIDES[side]
    pipeline, state, micro_batches = stages.make_pipeline(
        [FORWARD_MS] * NUM_STAGES,
        [BACKWARD_MS] * NUM_STAGES,
        NUM_MICRO_BATCHES,
        collect_outputs=False,
        dispatch_plan=None if chunk_size is None else engine.DispatchPlan(chunk_size),
    )
    placed = pipeline.place_micro_batches(micro_batches)

    def step() -> Any:
        nonlocal state
        state, outputs = pipeline.step(state, placed)
        return outputs

    told = [np.asarray(step().losses).tolist() for _ in range(2)]

    def finish(outputs: Any) -> Any:
        return jax.block_until_ready((state, outputs.collected))

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            finish(step())  # each ends before the next one starts, as the ideal has it

    harness.serve_rounds(run, {"losses": told, "plan": str(pipeline.dispatch_plan)})


def measure(num_rounds: int, seconds: float) -> list[Row]:
    """Compares the plans, which take turns."""
    with harness.start_sides(MODULE, list(SIDES)) as sides:
        losses = [side.facts["losses"] for side in sides.values()]
        for found in losses[1:]:
            np.testing.assert_allclose(found, losses[0], rtol=1e-5)
        taken = harness.take_turns(sides, num_rounds, seconds)
    name = f"{NUM_STAGES} stages, {NUM_MICRO_BATCHES} x ({FORWARD_MS:.0f} + {BACKWARD_MS:.0f}) ms"
    others = {"the ideal": [IDEAL] * num_rounds, "one by one": taken["one by one"]}
    compared = [(side, "the ideal") for side in SIDES] + [("chosen", "one by one")]
    return [
        harness.compare(
            "emulation",
            f"{name}: {side}, against {other}",
            taken[side],
            others[other],
            MOST_OF_IDEAL if (side, other) == ("chosen", "the ideal") else None,
        )
        for side, other in compared
    ]


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.side is not None:
        serve(args.side)
        return
    from benchmarks.emulation import stages

    if stages.find_compiler() is None:
        print("There is no g++, so nothing was measured.", file=sys.stderr)
        harness.report([], args.json)
        return
    num_rounds, seconds = (5, 0.6) if args.short else (args.rounds, 2.4)
    harness.report(measure(num_rounds, seconds), args.json)


if __name__ == "__main__":
    main()
