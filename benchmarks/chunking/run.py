"""The number of micro-batches per program that is chosen, against all others: time per step.

    python -m benchmarks.chunking.run [--cases mlp256 tutorial-2] [--rounds 20] [--busy 4] [--json FILE]

A case is a process that makes a pipeline with the plan that is chosen, which times steps anew, and one with
each other size. They take turns, in another order in each round. The figure is the median time of a step as
it was chosen over that of the best size. `--busy` runs so many endless loops beside. Emulated devices sleep
(benchmarks/emulation).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.chunking.run"
TARGET, BUSY_TARGET = 1.03, 1.10
MOST_SECONDS = 60.0  # of the rounds of a case, if there are three
SECONDS = 0.03  # of the steps in a row of a plan, about
SIZES = (1, 2, 4, 8, 16)


class Case(NamedTuple):
    """What is trained: a model, its stages and micro-batches, and what else it needs."""

    model: str
    num_stages: int
    num_micro_batches: int = 16
    detail: Any = None

    @property
    def name(self) -> str:
        """For tables."""
        own = self.model if self.detail is None else f"{self.model} {self.detail}"
        return f"{own}, {self.num_stages} stages, {self.num_micro_batches} micro-batches"


CASES = {
    "mlp64": Case("MLP", 2, detail="64 wide, 4 layers"),
    "mlp64-8": Case("MLP", 8, detail="64 wide, 8 layers"),
    "mlp256": Case("MLP", 2, detail="256 wide, 4 layers"),
    "mlp512": Case("MLP", 2, detail="512 wide, 4 layers"),
    "mlp512-4": Case("MLP", 4, detail="512 wide, 8 layers"),
    "mlp1024": Case("MLP", 2, detail="1024 wide, 4 layers"),
    "tutorial-2": Case("tutorial's model", 2),
    "tutorial-4": Case("tutorial's model", 4),
    "recurrent": Case("recurrent net", 4),
    "convolutional": Case("convolutional net", 4),
    "transformer": Case("transformer", 4),
    "transformer-8": Case("transformer", 8),
    "poptorch": Case("PopTorch's MNIST", 4),
    "emulated-10": Case("emulated devices", 4, detail="of 10 ms"),
    "emulated-2": Case("emulated devices", 8, 32, "of 2 ms"),
    "emulated-0.5": Case("emulated devices", 4, detail="of 0.5 ms"),
}
SHORT_CASES = ["mlp64", "mlp256", "mlp512-4", "tutorial-2", "convolutional", "transformer", "emulated-2"]
_BATCH_SIZES = {64: 32, 256: 32, 512: 64, 1024: 128}  # of MLPs, by their width


def make_model(case: Case) -> Any:
    """A model of `benchmarks.models`, or one like these."""
    import jax
    import jax.numpy as jnp

    from benchmarks import models

    if case.model == "convolutional net":
        return models.make_convolutional_net(case.num_stages)
    if case.model == "transformer":
        return models.make_transformer(case.num_stages)
    if case.model == "MLP":
        width, num_layers = (int(word) for word in case.detail.split() if word.isdigit())
        return models.make_mlp(width, _BATCH_SIZES[width], num_layers, case.num_stages)
    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)

    if case.model == "recurrent net":

        def apply(p: Any, x: Any) -> Any:
            def cell(h: Any, part: Any) -> Any:
                h = jnp.tanh(h @ p[0] + part @ p[1])
                return h, h

            return jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[1]

        parameters: list[Any] = [(array(32, 32), array(32, 32))] * case.num_stages
        x = array(50, 16, 32)
    else:  # the layers of the tutorial

        def apply(p: Any, x: Any) -> Any:
            for kernel, bias in p:
                x = jax.nn.relu(x @ kernel + bias)
            return x

        sizes = (784, 256, 128, 64, 32, 10)
        layers = [(array(a, b), np.zeros(b, np.float32)) for a, b in itertools.pairwise(sizes)]
        cuts = {2: (0, 2, 5), 4: (0, 1, 2, 3, 5)}[case.num_stages]
        parameters = [layers[begin:end] for begin, end in itertools.pairwise(cuts)]
        x = array(32, 784)

    def stage(p: Any, x: Any, target: Any) -> Any:
        return apply(p, x), target

    def last(p: Any, x: Any, target: Any) -> Any:
        return jnp.mean((apply(p, x) - target) ** 2)

    shape = x.shape if case.model == "recurrent net" else (32, 10)
    stages = [stage] * (case.num_stages - 1) + [last]
    return models.Model(stages, parameters, x, np.zeros(shape, np.float32))


def make_step(case: Case, size: int | None) -> tuple[Callable[[], Any], str]:
    """A step with programs of so many micro-batches, or as it is chosen, and the plan in words."""
    import jax
    import optax

    from benchmarks import models
    from ipu_pipeline import engine

    plan = None if size is None else engine.Chunking(size)
    if case.model.startswith("PopTorch"):
        return make_poptorch_call(case, plan)
    options: dict[str, Any] = {"donate": True, "collect_outputs": False, "dispatch_plan": plan}
    if case.model == "emulated devices":
        from benchmarks.emulation import stages

        forward = float(case.detail.split()[1])
        times = [forward] * case.num_stages, [2 * forward] * case.num_stages
        pipeline, state, micro_batches = stages.make_pipeline(*times, case.num_micro_batches, **options)
    else:
        model = make_model(case)
        pipeline = engine.Pipeline(
            model.stages,
            parameters=model.parameters,
            num_micro_batches=case.num_micro_batches,
            optimizer=optax.sgd(models.RATE),
            **options,
        )
        micro_batches = model.micro_batches(case.num_micro_batches)
        state = pipeline.init(jax.random.key(0), micro_batches[0])
    placed = pipeline.place_micro_batches(micro_batches)

    def step() -> Any:
        nonlocal state
        state, outputs = pipeline.step(state, placed)
        return state, outputs.collected

    jax.block_until_ready(step())
    return step, str(pipeline.dispatch_plan)


def make_poptorch_call(case: Case, plan: Any) -> tuple[Callable[[], Any], str]:
    """A call of a training model, which has no option for the plan."""
    from unittest import mock

    import torch

    import ipu_pipeline.poptorch as poptorch
    from benchmarks.poptorch import models
    from ipu_pipeline.engine import pipeline as engine_pipeline

    plans = []
    choose = engine_pipeline.choose_by_steps

    def chosen(*arguments: Any) -> Any:
        plans.append(choose(*arguments) if plan is None else plan)
        return plans[-1]

    torch.set_num_threads(1)
    torch.manual_seed(0)
    known = models.CASES["mnist_cnn"]
    model = models.make_model(known)
    for number, stage in enumerate(model.stages):
        poptorch.BeginBlock(stage, ipu_id=number)
    options = poptorch.Options().deviceIterations(4)
    options.Training.gradientAccumulation(case.num_micro_batches)
    options.showCompilationProgressBar(False)
    training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=1e-3))
    inputs, labels = models.make_data(known)
    number = 4 * case.num_micro_batches * known.batch_size
    repeats = -(-number // len(inputs))
    inputs, labels = (torch.cat([part] * repeats)[:number] for part in (inputs, labels))
    with mock.patch.object(engine_pipeline, "choose_by_steps", chosen):
        training(inputs, labels)
    return lambda: training(inputs, labels), str(plans[-1])


def measure(name: str, num_rounds: int) -> dict[str, Any]:
    """The plan in words, the size of its chunks, and the medians of the seconds of a step by size."""
    import jax

    case = CASES[name]
    jax.config.update("jax_num_cpu_devices", case.num_stages)
    with tempfile.TemporaryDirectory() as folder:  # what earlier runs chose does not count
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_enable_compilation_cache", False)
        steps: dict[str, Callable[[], Any]] = {}
        steps["chosen"], plan = make_step(case, None)
    for size in SIZES:
        if case.num_micro_batches % size == 0:
            steps[str(size)], _plan = make_step(case, size)
    begin = time.perf_counter()
    jax.block_until_ready(steps["chosen"]())
    in_a_row = max(2, round(SECONDS / (time.perf_counter() - begin)))
    taken: dict[str, list[float]] = {own: [] for own in steps}
    rng = np.random.default_rng(0)
    last = time.perf_counter() + MOST_SECONDS
    for number in range(num_rounds):
        if number > 2 and time.perf_counter() > last:
            break
        for own in rng.permutation(list(steps)).tolist():
            jax.block_until_ready(steps[own]())
            begin = time.perf_counter()
            for _step in range(in_a_row):
                arrays = steps[own]()
            jax.block_until_ready(arrays)
            taken[own].append((time.perf_counter() - begin) / in_a_row)
    chosen = str(size_of(plan))
    taken[chosen] += taken.pop("chosen")  # the same programs, compiled twice
    medians = {own: statistics.median(seconds) for own, seconds in taken.items()}
    return {"plan": plan, "chosen": chosen, "medians": medians}


def size_of(plan: str) -> int:
    """The size that a plan in words begins with."""
    word = plan.split()[0]
    return 1 if word == "one" else int(word)


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Runs so many processes beside that do nothing but keep a core busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _loop in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def make_row(case: Case, found: dict[str, Any], target: float, beside: str) -> Row:
    """A row: the chosen plan against the best size."""
    medians, chosen = found["medians"], found["chosen"]
    best = min(medians, key=medians.__getitem__)
    others = dict.fromkeys([best, "1"])
    return Row(
        "chunking",
        case.name + beside,
        f"{chosen} a program: {medians[chosen] * 1e3:.2f} ms",
        ", ".join(f"{size}: {medians[size] * 1e3:.2f} ms" for size in others),
        medians[chosen] / medians[best],
        None,
        target,
    )


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--busy", type=int, default=0)
    args = parser.parse_args()
    num_rounds = args.rounds or (10 if args.short else 20)
    if args.side:
        print(json.dumps(measure(args.side, num_rounds)))
        return
    names = args.cases or (SHORT_CASES if args.short else list(CASES))
    rows = []
    beside = f", beside {args.busy} busy loops" if args.busy else ""
    run = functools.partial(harness.run_module, MODULE, "--rounds", num_rounds, "--side")
    with busy(args.busy):
        for name in names:
            found = run(name)
            print(f"{name}: {found['plan']}", file=sys.stderr, flush=True)
            rows.append(make_row(CASES[name], found, BUSY_TARGET if args.busy else TARGET, beside))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
