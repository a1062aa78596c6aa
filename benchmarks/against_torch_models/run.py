"""Models that people train, by poptorch and by plain torch on the same cores: time per call, and the first.

    python -m benchmarks.against_torch_models.run [--cases resnet18 bert] [--rounds 5] [--json FILE]

A training call does a weight update of all its micro-batches by SGD with momentum and returns their losses;
one for inference returns what the model finds for each of them. The model is on one IPU, or in four stages
on four, which share the cores. The first call is that of a new process, with nothing cached: of a wrapped
model, and of the same training step with the model compiled by `torch.compile`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.against_torch_models.run"
QUESTION = "against_torch_models"
CASES = ["resnet18", "mobilenet", "convnext", "mnist_cnn", "bert", "bert12", "gpt2", "lstm"]
ONLY_FIRST = ["bert12"]  # its calls are those of two layers, six times
SHORT_CASES = ["resnet18", "mnist_cnn", "bert"]
RATE, MOMENTUM = 0.01, 0.9
TOLERANCE = 1e-4  # of the first losses, relative
MOST_ON_ONE, MOST_CONVOLUTIONAL, MOST_IN_FOUR, MOST_FIRST = 1.2, 1.0, 1.3, 1.0
NUM_STAGES = 4


def wrap(name: str, num_stages: int, trains: bool) -> Any:
    """The wrapped model, and what to call it with."""
    import torch

    import ipu_pipeline.poptorch as poptorch
    from benchmarks.against_torch_models import models

    torch.set_num_threads(1)
    case = models.CASES[name]
    model = case.make_model()
    if num_stages > 1:
        for number, place in enumerate(case.begins):
            poptorch.BeginBlock(model.get_submodule(place), ipu_id=number + 1)
    options = poptorch.Options().showCompilationProgressBar(False)
    if not trains:
        options.deviceIterations(case.gradient_accumulation)
        return poptorch.inferenceModel(model.eval(), options), case.make_data()[:1]
    options.Training.gradientAccumulation(case.gradient_accumulation)
    options.outputMode(poptorch.OutputMode.All)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return poptorch.trainingModel(model, options, optimizer), case.make_data()


def make_torch_step(name: str, trains: bool, is_compiled: bool = False) -> Any:
    """A call of plain torch; gives the losses, or a number of each thing that was found."""
    import torch

    from benchmarks.against_torch_models import models

    case = models.CASES[name]
    model = case.make_model()
    model.train(trains)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    parts = list(zip(*(tensor.split(case.batch_size) for tensor in case.make_data()), strict=True))
    run = torch.compile(model) if is_compiled else model

    def train() -> list[float]:
        losses = []
        optimizer.zero_grad()
        for inputs, labels in parts:
            loss = run(inputs, labels)
            (loss / case.gradient_accumulation).backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).tolist()

    def infer() -> Any:
        with torch.inference_mode():
            return torch.cat([run(inputs) for inputs, _labels in parts])

    return train if trains else infer


def summarize(found: Any) -> list[float]:
    """A few numbers of what a call returned, which all sides must agree on."""
    return found if isinstance(found, list) else found.double().abs().flatten(1).mean(1).tolist()


def serve(side: str, name: str) -> None:
    """A side: "ours-1-train", "torch-train" and so on."""
    who, *stages, kind = side.split("-")
    trains = kind == "train"
    if who == "torch":
        step = make_torch_step(name, trains)
        harness.serve(step, lambda _found: None, {"losses": summarize(step())})
        return
    import jax

    wrapped, given = wrap(name, int(stages[0]), trains)
    harness.serve(
        lambda: wrapped(*given),
        lambda _found: jax.block_until_ready(jax.live_arrays()),
        {"losses": summarize(wrapped(*given).tolist() if trains else wrapped(*given))},
    )


def time_first(side: str, name: str) -> dict[str, Any]:
    """Seconds of the first training call of a new process, from a model that is there; and of a second."""
    import torch

    if side == "first-torch":
        import torch._inductor  # what imports take is not counted on either side

        step = make_torch_step(name, trains=True, is_compiled=True)
    else:
        import jax

        wrapped, given = wrap(name, int(side.removeprefix("first-")), trains=True)
        jax.config.update("jax_num_cpu_devices", NUM_STAGES)
        jax.devices()

        def step() -> Any:
            return wrapped(*given).tolist()

    del torch
    begin, cpu_begin = time.perf_counter(), time.process_time()
    losses = step()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
    begin = time.perf_counter()
    step()
    return {"seconds": seconds, "cpu": cpu, "second": time.perf_counter() - begin, "losses": losses}


def measure(name: str, num_rounds: int, seconds: float) -> list[Row]:
    """Compares training and inference, on one IPU and on four, with torch's."""
    from benchmarks.against_torch_models import models

    case, rows = models.CASES[name], []
    for kind, what in (("train", "training"), ("infer", "inference")):
        sides = [f"ours-1-{kind}", f"ours-{NUM_STAGES}-{kind}", f"torch-{kind}"]
        taken = harness.run_agreeing_sides(MODULE, sides, name, num_rounds, seconds, TOLERANCE)
        on_one = MOST_CONVOLUTIONAL if case.is_convolutional else MOST_ON_ONE
        for side, text, most in (
            (sides[0], "one device", on_one),
            (sides[1], f"{NUM_STAGES} stages", MOST_IN_FOUR),
        ):
            title = f"{case.name}: {what}, {text}"
            rows.append(harness.compare(QUESTION, title, taken[side], taken[sides[2]], most))
    return rows


def measure_first(name: str, num_rounds: int) -> list[Row]:
    """Compares first calls, each in a process of its own, with no caches of torch's."""
    from benchmarks.against_torch_models import models

    found: dict[str, list[float]] = {"first-1": [], f"first-{NUM_STAGES}": [], "first-torch": []}
    for _ in range(num_rounds):
        for side, seconds in found.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
                told = harness.run_module(MODULE, "--side", side, "--cases", name)
            seconds.append(told["seconds"])
    return [
        harness.compare(
            QUESTION,
            f"{models.CASES[name].name}: first call, {text}, against torch.compile",
            found[side],
            found["first-torch"],
            MOST_FIRST,
        )
        for side, text in (("first-1", "one device"), (f"first-{NUM_STAGES}", f"{NUM_STAGES} stages"))
    ]


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--only", choices=["calls", "first"], help="Only one of the two parts.")
    args = parser.parse_args()
    if args.side and args.side.startswith("first"):
        print(json.dumps(time_first(args.side, args.cases[0])))
        return
    if args.side:
        serve(args.side, args.cases[0])
        return
    num_rounds, seconds = (3, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
    rows: list[Row] = []
    for name in args.cases or (SHORT_CASES if args.short else CASES):
        print(f"{name} ...", file=sys.stderr, flush=True)
        if args.only != "first" and name not in ONLY_FIRST:
            rows += measure(name, num_rounds, seconds)
        if args.only != "calls":
            rows += measure_first(name, 1 if args.short else max(1, num_rounds // 2))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
