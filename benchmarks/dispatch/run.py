"""The host's cost of an action: microseconds of Python as stages and micro-batches become more.

    python -m benchmarks.dispatch.run [--json FILE]

Stages compute next to nothing (a scalar product), so XLA runs their programs within the thread that starts
them, and a step takes what the host takes. A step's time, weight update included, is divided by the number
of
dispatches: a forward and a backward per stage and micro-batch, one of both on the last stage. Every case is
a process of its own; programs handle one micro-batch each and nothing is fused, so a dispatch is an action.
The last figure is the time to make and check the largest schedule, which happens once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.dispatch.run"
CASES = [(2, 16), (2, 256), (2, 4096), (8, 16), (8, 256), (64, 16), (64, 256), (64, 4096)]
SHORT_CASES = [(2, 16), (2, 4096), (64, 16)]
MOST_MICROSECONDS = 25.0
FLATNESS = 1.2
MOST_SECONDS = 5.0


def measure_case(num_stages: int, num_micro_batches: int, num_rounds: int) -> list[float]:
    """Microseconds per dispatch, by round."""
    import jax

    jax.config.update("jax_num_cpu_devices", num_stages)
    import numpy as np
    import optax

    from ipu_pipeline import engine

    def multiply(w: Any, x: Any) -> Any:
        return w * x

    pipeline = engine.Pipeline(
        [engine.Stage(multiply, np.ones((), np.float32)) for _ in range(num_stages)],
        num_micro_batches=num_micro_batches,
        loss=lambda loss: loss,
        optimizer=optax.sgd(1e-3),
        donate=True,
        collect_outputs=False,
        dispatch_plan=engine.DispatchPlan(),
    )
    x = np.ones((), np.float32)
    state = pipeline.init(jax.random.key(0), x)
    placed = pipeline.place_micro_batches([x] * num_micro_batches)
    num_dispatches = (2 * num_stages - 1) * num_micro_batches
    num_steps = max(1, round(20_000 / num_dispatches))
    taken = []
    for number in range(num_rounds + 1):
        begin = time.perf_counter()
        for _ in range(num_steps):
            state, _outputs = pipeline.step(state, placed)
        seconds = time.perf_counter() - begin
        jax.block_until_ready(state)
        if number:
            taken.append(seconds / num_steps / num_dispatches * 1e6)
    return taken


def measure_schedule() -> float:
    """Seconds to make and check the largest schedule."""
    from ipu_pipeline.engine import schedules

    begin = time.perf_counter()
    schedules.timetable("grouped", 64, 4096, tuple(range(64)), True)
    return time.perf_counter() - begin


def run_case(*arguments: Any) -> Any:
    """What a process of this module prints last."""
    command = [sys.executable, "-m", MODULE, "--side", *map(str, arguments)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if "--side" in sys.argv:
        arguments = sys.argv[sys.argv.index("--side") + 1 :]
        numbers = [int(argument) for argument in arguments]
        print(json.dumps(measure_case(*numbers) if numbers else measure_schedule()))
        return
    args = harness.make_parser(__doc__).parse_args()
    taken: dict[tuple[int, int], list[float]] = {}
    for case in SHORT_CASES if args.short else CASES:
        taken[case] = run_case(*case, 3 if args.short else 5)
    rows = [
        Row(
            "dispatch",
            f"{stages} stages, {micro_batches} micro-batches, an action",
            f"{statistics.median(found):.1f} us",
            "",
            statistics.median(found),
            (min(found), max(found)),
            MOST_MICROSECONDS,
        )
        for (stages, micro_batches), found in taken.items()
    ]
    medians = [statistics.median(found) for found in taken.values()]
    ratio = max(medians) / min(medians)
    rows.append(Row("dispatch", "largest against smallest of these", "", "", ratio, None, FLATNESS))
    seconds = run_case()
    name = "schedule of 64 stages, 4,096 micro-batches"
    rows.append(Row("dispatch", name, f"{seconds:.1f} s", "", seconds, None, MOST_SECONDS))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
