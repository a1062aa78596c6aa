"""The host's cost of an action: microseconds of Python as stages and micro-batches become more.

    python -m benchmarks.dispatch.run [--json FILE]

Stages compute next to nothing (a scalar product), so XLA runs their programs within the thread that starts
them, and micro-batches take what the host takes. The time within `Pipeline.accumulate`, which is a step
without its weight update, is divided by the number of dispatches: a forward and a backward per stage and
micro-batch, one of both on the last stage. Programs handle one micro-batch each and nothing is fused, so a
dispatch is an action. Every case is a process of its own.

Two cases are split: in the same process as many jitted functions of as many arguments and results are
called, and as many arrays are copied by `placement.copy_to`, in bare loops. What is left is Python of the
library. The last figure is the time to make and check the largest schedule, which happens once.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.dispatch.run"
CASES = [(2, 16), (2, 256), (2, 4096), (8, 16), (8, 256), (64, 16), (64, 256), (64, 4096)]
SHORT_CASES = [(2, 16), (2, 256), (2, 4096), (64, 16)]
SPLIT_CASES = [(2, 256), (64, 256)]
MOST_MICROSECONDS = 25.0
FLATNESS = 1.2
MOST_SECONDS = 5.0
NUM_DISPATCHES = 20_000  # of a round, about


def measure_case(num_stages: int, num_micro_batches: int, num_rounds: int) -> dict[str, list[float]]:
    """Microseconds, by round: of a dispatch, its bare calls and copies, and of a weight update."""
    import jax

    jax.config.update("jax_num_cpu_devices", num_stages)
    import numpy as np
    import optax

    from ipu_pipeline import engine
    from ipu_pipeline.engine.executor import Executor

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
    executor = pipeline.prepare()
    assert isinstance(executor, Executor)
    num_dispatches = (2 * num_stages - 1) * num_micro_batches
    num_steps = max(1, round(NUM_DISPATCHES / num_dispatches))
    call, copy = make_bare_loops(executor, pipeline.timetable(num_micro_batches))
    taken: dict[str, list[float]] = {"dispatch": [], "update": [], "calls": [], "copies": []}
    for number in range(num_rounds + 1):
        found = dict.fromkeys(taken, 0.0)
        for _ in range(num_steps):
            begin = time.perf_counter()
            pending = pipeline.accumulate(state, placed.taker(executor, num_micro_batches), [])
            end = time.perf_counter()
            state, _collected = pipeline.update(state, pending)
            found["update"] += time.perf_counter() - end
            found["dispatch"] += end - begin
            jax.block_until_ready(state)
            found["calls"] += call()
            found["copies"] += copy()
        if number:
            for name, seconds in found.items():
                per_step = 1 if name == "update" else num_dispatches
                taken[name].append(seconds / num_steps / per_step * 1e6)
    return taken


def make_bare_loops(executor: Any, timetable: Any) -> tuple[Callable[[], float], Callable[[], float]]:
    """Loops that call and copy as often and as much as a step does; they return the seconds they took."""
    import jax
    import jax.numpy as jnp

    from ipu_pipeline.engine import placement

    numbers = Counter(template.index for template, _chunks in executor.plan.dispatches(timetable))
    calls, copies = [], []
    for template in executor.plan.templates.values():
        arguments = jax.device_put([jnp.ones(())] * template.num_arguments, template.row.replicated)
        (part,) = template.parts
        moved = {result for _row, results, _slots in part.transfers for result in results}
        stored = {result for result, _slot in part.stores}
        num_results = len(template.accumulators) + len(moved | stored)

        def multiply(*values: Any, num_results: int = num_results) -> list[Any]:
            return [values[number % len(values)] * 2.0 for number in range(num_results)]

        function = jax.jit(multiply, donate_argnums=tuple(range(len(template.accumulators))))
        calls.append((function, arguments, len(template.accumulators), numbers[template.index]))
        for row, results, _slots in part.transfers:
            copies.append((arguments[-1:] * len(results), row, numbers[template.index]))

    def call() -> float:
        begin = time.perf_counter()
        for function, arguments, num_accumulators, number in calls:
            for _ in range(number):
                arguments[:num_accumulators] = function(*arguments)[:num_accumulators]
        return time.perf_counter() - begin

    def copy() -> float:
        begin = time.perf_counter()
        for arrays, row, number in copies:
            for _ in range(number):
                placement.copy_to(arrays, row)
        return time.perf_counter() - begin

    return call, copy


def measure_schedule() -> float:
    """Seconds to make and check the largest schedule."""
    from ipu_pipeline.engine import schedules

    begin = time.perf_counter()
    schedules.timetable("grouped", 64, 4096, tuple(range(64)), True)
    return time.perf_counter() - begin


def make_row(case: str, found: list[float], target: float | None = None) -> Row:
    """A row of microseconds."""
    median = statistics.median(found)
    return Row("dispatch", case, f"{median:.1f} us", "", median, (min(found), max(found)), target)


def main() -> None:
    if "--side" in sys.argv:
        numbers = [int(argument) for argument in sys.argv[sys.argv.index("--side") + 1 :]]
        print(json.dumps(measure_case(*numbers) if numbers else measure_schedule()))
        return
    args = harness.make_parser(__doc__).parse_args()
    rows, medians = [], []
    for num_stages, num_micro_batches in SHORT_CASES if args.short else CASES:
        found = harness.run_module(MODULE, "--side", num_stages, num_micro_batches, 3 if args.short else 5)
        case = f"{num_stages} stages, {num_micro_batches} micro-batches"
        rows.append(make_row(f"{case}: an action", found["dispatch"], MOST_MICROSECONDS))
        medians.append(statistics.median(found["dispatch"]))
        if (num_stages, num_micro_batches) in SPLIT_CASES:
            columns = zip(found["dispatch"], found["calls"], found["copies"], strict=True)
            rest = [dispatch - calls - copies for dispatch, calls, copies in columns]
            rows.append(make_row(f"{case}: of that, bare calls of jitted functions", found["calls"]))
            rows.append(make_row(f"{case}: of that, bare copies between devices", found["copies"]))
            rows.append(make_row(f"{case}: of that, what is left", rest))
            rows.append(make_row(f"{case}: a weight update, beside all of that", found["update"]))
    flatness = max(medians) / min(medians)
    rows.append(
        Row("dispatch", "an action: largest against smallest median", "", "", flatness, None, FLATNESS)
    )
    seconds = harness.run_module(MODULE, "--side")
    name = "schedule of 64 stages, 4,096 micro-batches"
    rows.append(Row("dispatch", name, f"{seconds:.1f} s", "", seconds, None, MOST_SECONDS))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
