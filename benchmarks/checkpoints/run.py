"""How long a checkpoint holds training up: the call that starts it, and steps with and without saving.

    python -m benchmarks.checkpoints.run [--rounds 7] [--json FILE]

An MLP of 512 x 512 layers over two IPUs, trained with Adam, so that the state is three times the weights.
The call is timed while nothing else is being written. Rounds of 20 steps then take turns, without a
checkpoint and with one that begins at the fifth step.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row

WIDTH, BATCH_SIZE, MICRO_BATCHES, STEPS = 512, 64, 16, 20
CASES = {"8 layers": 8, "32 layers": 32}
MOST_MILLISECONDS = 5.0


def make_training(num_layers: int) -> tuple[Any, Any]:
    """A program and its infeed."""
    import jax
    import optax

    import ipu_pipeline as ipu

    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(BATCH_SIZE, WIDTH)).astype(np.float32) for _number in range(8)]

    def layers(x: Any, numbers: range) -> Any:
        for number in numbers:
            with ipu.variable_scope(f"layer{number}"):
                x = ipu.layers.Dense(WIDTH, activation=jax.nn.relu)(x)
        return x

    half = num_layers // 2
    infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(
        lambda: (batches[number % 8] for number in itertools.count())
    )

    def optimizer_function(loss: Any) -> Any:
        return ipu.pipelining_ops.OptimizerFunctionOutput(optax.adam(1e-3), loss)

    def model() -> Any:
        return ipu.pipelining_ops.pipeline(
            [lambda x: layers(x, range(half)), lambda x: (layers(x, range(half, num_layers)) ** 2).mean()],
            gradient_accumulation_count=MICRO_BATCHES,
            infeed_queue=infeed_queue,
            outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
            optimizer_function=optimizer_function,
            outfeed_loss=True,
        )

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        return ipu.ipu_compiler.compile(model), infeed_queue


def measure(case: str, rounds: int) -> list[Row]:
    """The rows of one size."""
    import ipu_pipeline as ipu
    from ipu_pipeline.checkpointing.checkpoint_directories import CheckpointSeries

    program, infeed_queue = make_training(CASES[case])
    with ipu.Session() as session, tempfile.TemporaryDirectory() as folder:
        series = CheckpointSeries(folder, max_to_keep=2)
        session.run(infeed_queue.initializer)
        session.run(program)
        number = 0

        def save() -> float:
            nonlocal number
            number += 1
            begin = time.perf_counter()
            series.start_saving(number, session.take_snapshot())
            return time.perf_counter() - begin

        calls: list[float] = []
        sides: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(rounds + 1):
            for saves in (False, True) if turn % 2 else (True, False):
                begin = time.perf_counter()
                for step in range(STEPS):
                    session.run(program)
                    if saves and step == 4:
                        seconds = save()
                if turn:
                    sides[saves].append((time.perf_counter() - begin) / STEPS)
                    if saves:
                        calls.append(seconds * 1e3)
                series.wait()
        num_bytes = 3 * sum(value.nbytes for value in session.variables.values())
    name = f"{case}, {num_bytes / 2**20:.0f} MiB of state"
    call = statistics.median(calls)
    return [
        Row(
            "checkpoints",
            f"{name}: the call that starts saving",
            f"{call:.2f} ms",
            "",
            call,
            (min(calls), max(calls)),
            MOST_MILLISECONDS,
        ),
        harness.compare(
            "checkpoints", f"{name}: a step of {STEPS} with a save, against none", sides[True], sides[False]
        ),
    ]


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    rounds = 3 if args.short else args.rounds
    harness.report([row for case in CASES for row in measure(case, rounds)], args.json)


if __name__ == "__main__":
    main()
