"""A torch module by poptorch against the same model by `ipu.layers`, and against torch: time per call.

    python -m benchmarks.poptorch.run [--cases mnist_cnn mlp transformer] [--rounds 7] [--json FILE]

A call trains on all micro-batches of several weight updates, by AdamW, and returns all outputs and losses.
The last rows are what a call costs the host beyond a step of the engine, with a model that computes next to
nothing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.poptorch.run"
QUESTION = "poptorch"
CASES = ["mnist_cnn", "mlp", "transformer"]
MOST_OF_LAYERS = 1.05
MOST_MICROSECONDS = 300.0
TOLERANCE = 1e-4  # of the losses, relative
NUM_CALLS = 200  # of a round for the host's overhead
NUM_STAGES, BATCH_SIZE = 4, 2  # of the model for it


def serve_poptorch(name: str) -> None:
    """The torch module, a block a stage, by `poptorch.trainingModel`."""
    import jax
    import torch

    import ipu_pipeline.poptorch as poptorch
    from benchmarks.poptorch import models

    torch.set_num_threads(1)
    case = models.CASES[name]
    model = models.make_model(case)
    for number, stage in enumerate(model.stages):
        poptorch.BeginBlock(stage, ipu_id=number)
    options = poptorch.Options().deviceIterations(case.device_iterations)
    options.Training.gradientAccumulation(case.gradient_accumulation)
    options.outputMode(poptorch.OutputMode.All).showCompilationProgressBar(False)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=models.RATE, weight_decay=models.WEIGHT_DECAY)
    training = poptorch.trainingModel(model, options, optimizer)
    inputs, labels = models.make_data(case)
    told = training(inputs, labels)[1].tolist()
    harness.serve(
        lambda: training(inputs, labels),
        lambda _outputs: jax.block_until_ready(jax.live_arrays()),
        {"losses": told},
    )


def serve_layers(name: str) -> None:
    """The same by `ipu.layers` and `pipelining_ops.pipeline`, with the same weights."""
    import jax
    import optax
    import torch

    import ipu_pipeline as ipu
    from benchmarks.poptorch import layers_models, models

    torch.set_num_threads(1)
    case = models.CASES[name]
    weights = {key: value.numpy() for key, value in models.make_model(case).state_dict().items()}
    inputs, labels = map(layers_models.as_array, models.make_data(case))
    starts = range(0, len(inputs), case.batch_size)
    parts = [(inputs[at : at + case.batch_size], labels[at : at + case.batch_size]) for at in starts]
    infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: itertools.cycle(parts))
    outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def optimizer_function(loss: Any, _logits: Any) -> ipu.pipelining_ops.OptimizerFunctionOutput:
        optimizer = optax.adamw(models.RATE, weight_decay=models.WEIGHT_DECAY)
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    def train() -> Any:
        return ipu.pipelining_ops.pipeline(
            layers_models.STAGES[name](weights),
            gradient_accumulation_count=case.gradient_accumulation,
            repeat_count=case.device_iterations,
            infeed_queue=infeed_queue,
            outfeed_queue=outfeed_queue,
            optimizer_function=optimizer_function,
            reduction_method="mean",
        )

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        compiled = ipu.ipu_compiler.compile(train)
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    outfeed_op = outfeed_queue.dequeue()
    with ipu.Session() as session:
        session.run(infeed_queue.initializer)

        def step() -> Any:
            session.run(compiled)
            return session.run(outfeed_op)

        told = step()[0].tolist()
        harness.serve(step, lambda _outputs: jax.block_until_ready(jax.live_arrays()), {"losses": told})


def serve_torch(name: str, is_compiled: bool) -> None:
    """A loop of plain torch, with as many threads as torch takes by default."""
    import torch

    from benchmarks.poptorch import models

    case = models.CASES[name]
    model = models.make_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.RATE, weight_decay=models.WEIGHT_DECAY)
    parts = list(zip(*(tensor.split(case.batch_size) for tensor in models.make_data(case)), strict=True))
    run = torch.compile(model) if is_compiled else model

    def step() -> Any:
        outputs = []
        for first in range(0, len(parts), case.gradient_accumulation):
            optimizer.zero_grad()
            for inputs, labels in parts[first : first + case.gradient_accumulation]:
                logits, loss = run(inputs, labels)
                (loss / case.gradient_accumulation).backward()
                outputs.append((logits.detach(), loss.detach()))
            optimizer.step()
        return outputs

    told = [loss.item() for _logits, loss in step()]
    harness.serve(step, lambda _outputs: None, {"losses": told})


def measure(name: str, num_rounds: int, seconds: float) -> list[Row]:
    """Compares poptorch with each of the others."""
    sides = {"layers": "against ipu.layers", "torch": "against torch"}
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler:
        sides["compiled"] = "against torch.compile"
    else:
        print("There is no C++ compiler for torch.compile; its rows are left out.", file=sys.stderr)
    taken = harness.run_agreeing_sides(MODULE, ["poptorch", *sides], name, num_rounds, seconds, TOLERANCE)
    from benchmarks.poptorch import models

    return [
        harness.compare(
            QUESTION,
            f"{models.CASES[name].name}: {text}",
            taken["poptorch"],
            taken[side],
            MOST_OF_LAYERS if side == "layers" else None,
        )
        for side, text in sides.items()
    ]


def measure_overhead(num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call and of the engine's steps, medians by round; they take turns, one each.

    The engine runs the pipeline that the call runs, on the same micro-batches, and gets all outputs to the
    host as the call does. It has the micro-batches as arrays, which a step puts on their devices, or there
    already.
    """
    import numpy as np
    import torch

    import ipu_pipeline.poptorch as poptorch

    torch.set_num_threads(1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(NUM_STAGES)])

        def forward(self, x: Any, labels: Any) -> Any:
            for number, layer in enumerate(self.layers):
                with poptorch.Block(ipu_id=number):
                    x = layer(x)
            return x, torch.nn.functional.cross_entropy(x, labels)

    model = Model()
    options = poptorch.Options().outputMode(poptorch.OutputMode.All).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(NUM_STAGES)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=1e-3)
    training = poptorch.trainingModel(model, options, optimizer)
    x = torch.randn(NUM_STAGES * BATCH_SIZE, 4)
    labels = torch.zeros(NUM_STAGES * BATCH_SIZE, dtype=torch.long)
    training(x, labels)
    compiled = training._compiled  # noqa: SLF001  # the engine's pipeline is nobody else's business
    assert compiled is not None
    pipeline = compiled.pipeline
    arrays = (x.numpy().reshape(NUM_STAGES, -1, 4), labels.numpy().astype(np.int32).reshape(NUM_STAGES, -1))
    micro_batches = list(zip(*arrays, strict=True))
    placed = pipeline.place_micro_batches(micro_batches)

    def step(given: Any) -> None:
        compiled.state, outputs = pipeline.step(compiled.state, given)
        for part in outputs.collected:
            for leaf in part.outputs:
                np.asarray(leaf)

    runs: dict[str, Callable[[], Any]] = {
        "call": lambda: training(x, labels),
        "step": lambda: step(micro_batches),
        "placed": lambda: step(placed),
    }
    taken: dict[str, list[float]] = {key: [] for key in runs}
    for number in range(num_rounds + 1):
        seconds: dict[str, list[float]] = {key: [] for key in runs}
        for turn in range(NUM_CALLS):
            for key in list(runs) if turn % 2 else list(reversed(runs)):
                begin = time.perf_counter()
                runs[key]()
                seconds[key].append(time.perf_counter() - begin)
        if number:
            for key, found in seconds.items():
                taken[key].append(statistics.median(found) * 1e6)
    return taken


def make_overhead_rows(taken: dict[str, list[float]]) -> list[Row]:
    """What a call takes beyond the engine's steps."""
    rows = []
    for key, text, target in (
        ("step", "a step of the engine", MOST_MICROSECONDS),
        ("placed", "one with micro-batches on their devices", None),
    ):
        beyond = [call - step for call, step in zip(taken["call"], taken[key], strict=True)]
        ours, other = (f"{statistics.median(taken[side]):.0f} us" for side in ("call", key))
        value, spread = statistics.median(beyond), (min(beyond), max(beyond))
        rows.append(Row(QUESTION, f"a call beyond {text}, us", ours, other, value, spread, target))
    return rows


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    args = parser.parse_args()
    if args.side == "poptorch":
        serve_poptorch(args.cases[0])
    elif args.side == "layers":
        serve_layers(args.cases[0])
    elif args.side == "overhead":
        import json

        print(json.dumps(measure_overhead(args.rounds)))
    elif args.side:
        serve_torch(args.cases[0], args.side == "compiled")
    else:
        num_rounds, seconds = (3, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
        rows = [row for name in args.cases for row in measure(name, num_rounds, seconds)]
        taken = harness.run_module(MODULE, "--side", "overhead", "--rounds", num_rounds)
        harness.report([*rows, *make_overhead_rows(taken)], args.json)


if __name__ == "__main__":
    main()
