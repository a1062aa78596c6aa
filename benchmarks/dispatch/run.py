"""The host's cost of an action: microseconds of Python as stages and micro-batches become more.

    python -m benchmarks.dispatch.run [--json FILE]

Stages compute next to nothing (a scalar product), so XLA runs their programs within the thread that starts
them, and micro-batches take what the host takes. The time within `Pipeline.accumulate`, which is a step
without its weight update, is divided by the number of dispatches: a forward and a backward per stage and
micro-batch, one of both on the last stage. Programs handle one micro-batch each, so a dispatch is an
action. Every case is a process of its own.

Two cases are split: further rounds time the calls of jitted functions and of `placing.copy_to` within
`accumulate`; what is left is Python of the library. In the same process as many jitted functions of as many
arguments and results are called, and as many arrays copied, in bare loops: the least that jaxlib takes.

What is left is not all the library's: arrays of jaxlib are released in it, and Python waits for jaxlib's
threads. So in every case the same actions are followed once more with nothing of jaxlib in them: what would
call a program returns objects that are there already. That is the library's own. The last figure is the
time to make and check the largest schedule, which happens once.
"""

from __future__ import annotations

import functools
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
PARTS = {
    "calls": "of that, calls of jitted functions",
    "bare calls": "as many such calls in a bare loop",
    "copies": "of that, copies between devices",
    "bare copies": "as many copies in a bare loop",
    "rest": "of that, Python of the library, and releasing arrays",
    "update": "a weight update, not in that",
}
MOST_MICROSECONDS, MOST_OWN = 25.0, 8.0
FLATNESS = 1.2
MOST_SECONDS = 5.0
NUM_DISPATCHES = 20_000  # of a round, about


def measure_case(num_stages: int, num_micro_batches: int, num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of a dispatch, by round; where it is split, also of its parts and of a weight update."""
    import jax

    jax.config.update("jax_num_cpu_devices", num_stages)
    import numpy as np
    import optax

    from ipu_pipeline import engine
    from ipu_pipeline.engine.execution.runner import PlanRunner

    def multiply(w: Any, x: Any) -> Any:
        return w * x

    pipeline = engine.Pipeline(
        [engine.Stage(multiply, np.ones((), np.float32)) for _ in range(num_stages)],
        num_micro_batches=num_micro_batches,
        optimizer=optax.sgd(1e-3),
        donate=True,
        collect_outputs=False,
        dispatch_plan=engine.Chunking(),
    )
    x = np.ones((), np.float32)
    state = pipeline.init(jax.random.key(0), x)
    placed = pipeline.place_micro_batches([x] * num_micro_batches)
    executor = pipeline.prepare()
    assert isinstance(executor, PlanRunner)
    num_dispatches = (2 * num_stages - 1) * num_micro_batches
    num_steps = max(1, round(NUM_DISPATCHES / num_dispatches))
    clocks = Clocks()

    def run_step() -> None:
        nonlocal state
        taker = placed.taker(executor, num_micro_batches)
        pending = clocks.run("dispatch", pipeline.accumulate, state, taker, [])
        state = clocks.run("update", pipeline.update, state, pending).state
        jax.block_until_ready(state)

    def run_rounds(*steps: Callable[[], None]) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {}
        for number in range(num_rounds + 1):
            clocks.seconds.clear()
            for _ in range(num_steps):
                for step in steps:
                    step()
            if number:
                for name, seconds in clocks.seconds.items():
                    per_step = 1 if name == "update" else num_dispatches
                    taken.setdefault(name, []).append(seconds / num_steps / per_step * 1e6)
        return taken

    taken = run_rounds(run_step)
    if (num_stages, num_micro_batches) in SPLIT_CASES:
        plan = executor.find_plan(num_micro_batches)
        bare_loops = make_bare_loops(plan, clocks)
        for program in executor.maker.programs:
            if program.kind is not None:
                program.function = functools.partial(clocks.run, "calls", program.function)
        for group in dict.fromkeys(executor.placement.groups):
            group.__dict__["copy"] = functools.partial(
                clocks.run, "copies", group.copy
            )  # it is cached there
        executor.linker.forget()
        split = run_rounds(run_step, *bare_loops)
        columns = zip(split.pop("dispatch"), split["calls"], split["copies"], strict=True)
        taken |= split | {"rest": [dispatch - calls - copies for dispatch, calls, copies in columns]}
    follow = make_follower(executor, num_micro_batches)
    taken["own"] = [
        statistics.median(follow() for _ in range(num_steps)) / num_dispatches * 1e6
        for _ in range(num_rounds + 1)
    ][1:]
    return taken


def make_follower(executor: Any, num_micro_batches: int) -> Callable[[], float]:
    """Follows the instructions of a step without jaxlib. Returns a function that returns the seconds."""
    from ipu_pipeline.engine.plan.run import run

    plan = executor.find_plan(num_micro_batches)
    known: dict[int, Any] = {}

    def make(number: int) -> Callable[..., Any]:
        made = [object()] * number
        return known.setdefault(number, lambda *_arguments: made)

    blocks = {
        numbered: [
            (make(len(one.writes)), one.reads, one.writes, one.frees) for one in numbered.instructions
        ]
        for numbered in dict.fromkeys(plan.blocks)
    }
    linked = [blocks[numbered] for numbered in plan.blocks[: plan.num_kept]]

    def follow() -> float:
        registers = [object()] * len(plan.names)
        begin = time.perf_counter()
        run(iter(linked), registers)
        return time.perf_counter() - begin

    return follow


class Clocks:
    """The seconds that calls take, added up by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def run(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function on the clock of a name."""
        begin = time.perf_counter()
        result = function(*arguments)
        self.seconds[name] += time.perf_counter() - begin
        return result


def make_bare_loops(plan: Any, clocks: Clocks) -> tuple[Callable[[], None], Callable[[], None]]:
    """Loops that call and copy as often and as much as a step does; on the clocks as "bare ..."."""
    import jax
    import jax.numpy as jnp

    from ipu_pipeline.engine.devices.placement import copy_to
    from ipu_pipeline.engine.plan.plan import Op

    numbers = Counter(own.block for own in plan.blocks[: plan.num_kept])
    calls, copies = [], []
    instructions = [(block, one) for block in numbers for one in block.code]
    for block, one in instructions:
        if one.op is Op.RUN:
            group, num_donated = one.program.group, len(one.program.donated)
            arguments = jax.device_put([jnp.ones(())] * len(one.reads), group.replicated)

            def multiply(*values: Any, num_results: int = len(one.writes)) -> list[Any]:
                return [values[number % len(values)] * 2.0 for number in range(num_results)]

            function = jax.jit(multiply, donate_argnums=tuple(range(num_donated)))
            calls.append((function, arguments, num_donated, numbers[block]))
        elif one.op is Op.SEND:
            array = jax.device_put(jnp.ones(()), one.reads[0].group.replicated)
            copies.append(([array] * len(one.reads), one.group, numbers[block]))

    def call() -> None:
        for function, arguments, num_accumulators, number in calls:
            for _ in range(number):
                arguments[:num_accumulators] = function(*arguments)[:num_accumulators]

    def copy() -> None:
        for arrays, row, number in copies:
            for _ in range(number):
                copy_to(arrays, row)

    return functools.partial(clocks.run, "bare calls", call), functools.partial(
        clocks.run, "bare copies", copy
    )


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
    rows, medians, own = [], [], []
    for num_stages, num_micro_batches in SHORT_CASES if args.short else CASES:
        found = harness.run_module(MODULE, "--side", num_stages, num_micro_batches, 3 if args.short else 5)
        case = f"{num_stages} stages, {num_micro_batches} micro-batches"
        rows.append(make_row(f"{case}: an action", found["dispatch"], MOST_MICROSECONDS))
        rows.append(make_row(f"{case}: of that, the library's own", found["own"], MOST_OWN))
        medians.append(statistics.median(found["dispatch"]))
        own.append(statistics.median(found["own"]))
        if (num_stages, num_micro_batches) in SPLIT_CASES:
            rows += [make_row(f"{case}: {text}", found[name]) for name, text in PARTS.items()]
    for name, values in {"an action": medians, "the library's own": own}.items():
        flatness = max(values) / min(values)
        rows.append(
            Row("dispatch", f"{name}: largest against smallest median", "", "", flatness, None, FLATNESS)
        )
    seconds = harness.run_module(MODULE, "--side")
    name = "schedule of 64 stages, 4,096 micro-batches"
    rows.append(Row("dispatch", name, f"{seconds:.1f} s", "", seconds, None, MOST_SECONDS))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
