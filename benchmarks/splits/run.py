"""Does a split that was found take as long as predicted, and less than others? Are plans of dispatch good?

    python -m benchmarks.splits.run [--short] [--json FILE]

Layers become stages by `engine.auto_stages`. Steps of the split found, of the even one by the number of
layers and, where there are few, of all others run in turns, in one process per case. Emulated layers sleep,
so their devices do not share cores (see benchmarks/emulation); a sixth of them takes several times as long.
The tutorial's compute on the CPU, whose cores all stages share.

Six models that are one function (`models`) become 2, 4 and 8 stages by `engine.split`. What is chosen runs
on the CPU, whose cores all stages share. What is best with a device for each stage runs on emulated ones,
whose stages sleep for as long as they were measured to take. The other side is what a person makes, as for
torch.distributed.pipelining: the same number of blocks in each stage.

The last rows compare the dispatch plan that a pipeline chooses, by measuring its programs, with one
micro-batch per program.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.splits.run"
EMULATED, SHARED = 0.05, 0.15  # how far a step may be from its prediction
MOST_OF_BEST, MOST_OF_EVEN, MOST_OF_ALONE = 1.03, 1.03, 1.03
NUM_ROUNDS = 3
ROUND_SECONDS = 0.2
NUM_BYTES = 8192  # of an emulated micro-batch


class Case(NamedTuple):
    """Layers that become stages.

    Attributes:
      kind: "emulated" or "tutorial".
      num_layers: how many layers there are.
      num_stages: how many stages they become.
      count: micro-batches of a step.
      schedule: the schedule.
      mapping: the IPU of each stage; None: its own.
      runs_all: whether all splits are measured.
    """

    kind: str
    num_layers: int
    num_stages: int
    count: int
    schedule: str = "interleaved"
    mapping: Sequence[int] | None = None
    runs_all: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        on = "" if self.mapping is None else f" on {len(set(self.mapping))} devices"
        return f"{self.kind}, {self.num_layers} layers in {self.num_stages} stages{on}, {self.schedule}"


CASES = {
    "emulated 2": Case("emulated", 6, 2, 8, runs_all=True),
    "emulated 4": Case("emulated", 6, 4, 16, runs_all=True),
    "emulated 8": Case("emulated", 24, 8, 32),
    "emulated grouped": Case("emulated", 12, 4, 16, "grouped"),
    "emulated halves": Case("emulated", 12, 4, 16, "zero_bubble"),
    "emulated looped": Case("emulated", 16, 4, 16, "looped", (0, 1, 0, 1)),
    "emulated v": Case("emulated", 16, 4, 16, "zero_bubble_v", (0, 1, 1, 0)),
    "tutorial 2": Case("tutorial", 7, 2, 16, "grouped", runs_all=True),
    "tutorial 4": Case("tutorial", 7, 4, 16, "grouped"),
}
SHORT_CASES = ["emulated 2", "emulated 8", "tutorial 2"]
NUM_STAGES = (2, 4, 8)  # of the models; the tutorial's has seven layers
SHORT_MODELS = ["mlp 4", "unet 2"]
LONGEST = 0.01  # seconds: of the longest emulated stage, to which all are scaled
PLANS = ["mlp 32", "mlp 128", "mlp 512", "emulated 0.2", "emulated 2"]  # width, or milliseconds
SHORT_PLANS = ["mlp 32", "emulated 0.2"]


class Layers(NamedTuple):
    """Layers, the parameters of each, and the micro-batches of a step."""

    functions: Sequence[Callable[..., Any]]
    parameters: Sequence[Any]
    micro_batches: Sequence[Any]


def make_emulated(milliseconds: Sequence[float], count: int) -> Layers:
    """Layers that sleep, twice as long backwards."""
    from benchmarks.emulation import stages, values

    functions: list[Callable[..., Any]] = [stages.emulated_stage(own, 2 * own) for own in milliseconds]
    last = functions.pop()
    functions.append(lambda w, x: (last(w, x) ** 2).mean())
    parameters = values.make_parameters(len(functions))
    return Layers(functions, parameters, values.make_micro_batches(count, NUM_BYTES))


def make_dense(widths: Sequence[int], batch_size: int, count: int) -> Layers:
    """Dense layers with relu between vectors of these widths; mean-square loss."""
    import jax

    rng = np.random.default_rng(0)

    def dense(w: Any, x: Any) -> Any:
        return jax.nn.relu(x @ w)

    def last(w: Any, x: Any) -> Any:
        return ((x @ w) ** 2).mean()

    parameters = [
        (rng.normal(size=pair) / np.sqrt(pair[0])).astype(np.float32) for pair in itertools.pairwise(widths)
    ]
    functions = [dense] * (len(parameters) - 1) + [last]
    data = [rng.normal(size=(batch_size, widths[0])).astype(np.float32) for _ in range(count)]
    return Layers(functions, parameters, data)


def make_layers(case: Case) -> Layers:
    """The layers of a case."""
    if case.kind == "emulated":
        rng = np.random.default_rng(case.num_layers)
        milliseconds = rng.choice([1.0, 2.0, 3.0], case.num_layers)
        milliseconds[:: max(1, case.num_layers // 2)] = 8.0
        return make_emulated(milliseconds, case.count)
    widths = [784, 784, 256, 128, 64, 32, 10, 10]
    found = make_dense(widths, 32, case.count)
    return found._replace(
        functions=[lambda w, x: x + w, *found.functions[1:]],
        parameters=[np.zeros(784, np.float32), *found.parameters[1:]],
    )


def make_steps(pipelines: Sequence[Any], data: Sequence[Any]) -> list[Callable[[], None]]:
    """A function of each pipeline that runs a step and waits for it."""
    import jax

    def make(pipeline: Any) -> Callable[[], None]:
        state = pipeline.init(jax.random.key(0), data[0])
        placed = pipeline.place_micro_batches(data)

        def step() -> None:
            nonlocal state
            state, outputs = pipeline.step(state, placed)
            jax.block_until_ready((state, outputs.losses))

        step()
        return step

    return [make(pipeline) for pipeline in pipelines]


def time_in_turns(steps: Sequence[Callable[[], None]]) -> list[list[float]]:
    """Seconds of a step of each, by round; a round has steps for a fifth of a second, at least one."""
    begin = time.perf_counter()
    steps[0]()
    number = max(1, round(ROUND_SECONDS / (time.perf_counter() - begin)))
    taken: list[list[float]] = [[] for _ in steps]
    for turn in range(NUM_ROUNDS + 1):
        order = list(zip(steps, taken, strict=True))
        for step, own in order if turn % 2 else reversed(order):
            begin = time.perf_counter()
            for _ in range(number):
                step()
            if turn:
                own.append((time.perf_counter() - begin) / number)
    return taken


def measure_case(name: str) -> dict[str, Any]:
    """What the splits of a case take: predicted, measured, and how long it took to find one."""
    import jax
    import optax

    case = CASES[name]
    jax.config.update("jax_num_cpu_devices", 1 + case.num_stages)
    from ipu_pipeline import engine

    layers = make_layers(case)
    options = {
        "num_micro_batches": case.count,
        "optimizer": optax.sgd(1e-3),
        "schedule": case.schedule,
        "device_mapping": case.mapping,
    }
    parameters = layers.parameters

    def find() -> Any:
        return engine.auto_stages(
            layers.functions, case.num_stages, layers.micro_batches[0], parameters=parameters, **options
        )

    find()  # measures
    begin = time.perf_counter()
    stages = find()
    seconds = time.perf_counter() - begin
    table = stages.table

    def join(sizes: Sequence[int]) -> Any:
        """The pipeline of any split."""
        ends = list(itertools.accumulate(sizes))
        found = []
        for end, size in zip(ends, sizes, strict=True):
            group = range(end - size, end)
            own = [layers.functions[layer] for layer in group]

            def stage(weights: Any, x: Any, own: Any = own) -> Any:
                for function, w in zip(own, weights, strict=True):
                    x = function(w, x)
                return x

            found.append(engine.Stage(stage, [parameters[layer] for layer in group]))
        return engine.Pipeline(found, **options)

    sizes = [tuple(map(len, row.groups)) for row in table.rows[:2]]
    others = []
    if case.runs_all:
        cuts = itertools.combinations(range(1, case.num_layers), case.num_stages - 1)
        ends = [(0, *own, case.num_layers) for own in cuts]
        others = [tuple(b - a for a, b in itertools.pairwise(own)) for own in ends]
    pipelines = [engine.Pipeline(stages, **options), *(join(own) for own in (*sizes[1:], *others))]
    taken = time_in_turns(make_steps(pipelines, layers.micro_batches))
    predicted = [row.shared_seconds or row.step_seconds for row in table.rows[:2]]
    return {"predicted": predicted, "taken": taken, "seconds": seconds, "num_rows": len(sizes)}


def measure_model(name: str) -> dict[str, Any]:
    """What a model's split takes on the CPU and on emulated devices, and what one by hand takes."""
    import jax
    import optax

    from benchmarks.splits.models import MODELS

    kind, number = name.split()
    num_stages = int(number)
    jax.config.update("jax_num_cpu_devices", 1 + num_stages)
    from ipu_pipeline import engine

    model = MODELS[kind]()
    data = model.micro_batches(max(8, 2 * num_stages))
    options = {
        "num_micro_batches": len(data),
        "optimizer": optax.sgd(1e-3),
        "schedule": "interleaved",
    }
    parameters = list(model.parameters)

    def find() -> Any:
        return engine.split(model.whole, num_stages, data[0], parameters=parameters, **options)

    begin = time.perf_counter()
    find()
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    stages = find()
    seconds = time.perf_counter() - begin
    functions, own = model.by_hand(num_stages)
    ours = engine.Pipeline(stages, **options)
    by_hand = engine.Pipeline(functions, parameters=own, **options)
    taken = time_in_turns(make_steps([ours, by_hand], data))
    row = min(stages.table.rows, key=lambda row: row.step_seconds)  # what is best on devices of their own
    costs = engine.planning.measure_scenario(by_hand).costs
    longest = max(*row.forward_seconds, *row.backward_seconds, *costs.forward, *costs.backward)
    scale = LONGEST / longest
    emulated, predicted = [], []
    for forward, backward in (
        (row.forward_seconds, row.backward_seconds),
        (costs.forward, costs.backward),
    ):
        layers, simulated = emulate(forward, backward, scale, len(data))
        predicted.append(simulated)
        emulated.append(engine.Pipeline(layers.functions, parameters=layers.parameters, **options))
        micro_batches = layers.micro_batches
    return {
        "predicted": stages.table.rows[0].shared_seconds,
        "taken": taken,
        "first": first,
        "seconds": seconds,
        "emulated_predicted": predicted[0],
        "emulated": time_in_turns(make_steps(emulated, micro_batches)),
        "num_parts": len(stages.table.layers),
    }


def emulate(
    forward: Sequence[float], backward: Sequence[float], scale: float, count: int
) -> tuple[Layers, float]:
    """Stages that sleep as long as some take, and how long a step of them should take."""
    from benchmarks.emulation import stages, values
    from ipu_pipeline import engine
    from ipu_pipeline.engine.planning.dispatch_plans import HOST_SECONDS

    times = [(1e3 * scale * own, 1e3 * scale * other) for own, other in zip(forward, backward, strict=True)]
    total = sum(times.pop())  # the last stage's programs are one
    functions: list[Callable[..., Any]] = [stages.emulated_stage(*pair) for pair in times]
    last = stages.emulated_stage(total / 3, 2 * total / 3)
    functions.append(lambda w, x: (last(w, x) ** 2).mean())
    made = Layers(
        functions, values.make_parameters(len(functions)), values.make_micro_batches(count, NUM_BYTES)
    )
    costs = engine.Costs.of(
        len(functions),
        forward=[scale * own for own in forward],
        backward=[scale * own for own in backward],
        host=HOST_SECONDS,
    )
    return made, engine.simulate(engine.Scenario(costs, "interleaved", count)).free_running.step_time


def measure_plan(name: str) -> dict[str, Any]:
    """Steps with the plan that is chosen, and one by one."""
    import jax
    import optax

    jax.config.update("jax_num_cpu_devices", 4)
    from ipu_pipeline import engine

    kind, size = name.split()
    count = 32
    if kind == "emulated":
        layers = make_emulated([float(size)] * 4, count)
    else:
        layers = make_dense([int(size)] * 5, 32, count)
    options = {"num_micro_batches": count, "optimizer": optax.sgd(1e-3)}

    def make(**more: Any) -> Any:
        return engine.Pipeline(layers.functions, parameters=layers.parameters, **options, **more)

    pipelines = [make(), make(dispatch_plan=engine.Chunking())]
    taken = time_in_turns(make_steps(pipelines, layers.micro_batches))
    return {"taken": taken}


def make_rows(case: Case, found: dict[str, Any]) -> list[Row]:
    """The rows of a case."""
    taken, predicted = found["taken"], found["predicted"]
    medians = [statistics.median(own) for own in taken]
    bound = EMULATED if case.kind == "emulated" else SHARED
    ratios = [measured / predicted[0] for measured in taken[0]]
    ours = f"{medians[0] * 1e3:.1f} ms"
    rows = [
        Row(
            "splits",
            f"{case.name}: measured against predicted",
            ours,
            f"{predicted[0] * 1e3:.1f} ms",
            statistics.median(ratios),
            (min(ratios), max(ratios)),
            1 + bound,
        )
    ]
    if found["num_rows"] > 1:
        rows.append(
            harness.compare(
                "splits", f"{case.name}: against the even split", taken[0], taken[1], MOST_OF_EVEN
            )
        )
    others = range(found["num_rows"], len(taken))
    if others:
        best = min(others, key=medians.__getitem__)
        text = f"{case.name}: against the best of {len(others)} splits"
        rows.append(harness.compare("splits", text, taken[0], taken[best], MOST_OF_BEST))
    text = f"{case.name}: to find it, once layers are measured"
    rows.append(Row("splits", text, f"{found['seconds']:.1f} s", "", found["seconds"], None, 10.0))
    return rows


def list_models(names: Iterable[str]) -> list[str]:
    """The names of models, with numbers of stages."""
    return [
        f"{name} {number}" for name in names for number in NUM_STAGES if (name, number) != ("tutorial", 8)
    ]


def make_model_rows(name: str, found: dict[str, Any]) -> list[Row]:
    """The rows of a model."""
    kind, number = name.split()
    what = f"{kind} in {number} stages"
    taken, emulated = found["taken"], found["emulated"]
    rows = []
    for own, predicted, bound, where in (
        (emulated, found["emulated_predicted"], EMULATED, "emulated"),
        (taken, found["predicted"], SHARED, "CPU"),
    ):
        ratios = [measured / predicted for measured in own[0]]
        rows.append(
            Row(
                "splits",
                f"{what}, {where}: measured against predicted",
                f"{statistics.median(own[0]) * 1e3:.1f} ms",
                f"{predicted * 1e3:.1f} ms",
                statistics.median(ratios),
                (min(ratios), max(ratios)),
                1 + bound,
            )
        )
        text = f"{what}, {where}: against equally many blocks per stage"
        rows.append(harness.compare("splits", text, own[0], own[1], MOST_OF_EVEN))
    text = f"{what}: to find it, once its parts are measured"
    rows.append(Row("splits", text, f"{found['seconds']:.1f} s", "", found["seconds"], None, 10.0))
    return rows


def main() -> None:
    runs = {"--case": measure_case, "--model": measure_model, "--plan": measure_plan}
    if asked := [option for option in runs if option in sys.argv]:
        place, run = 1 + sys.argv.index(asked[0]), runs[asked[0]]
        with tempfile.TemporaryDirectory() as folder:  # nothing is known from earlier runs
            os.environ["XDG_CACHE_HOME"] = folder
            print(json.dumps(run(sys.argv[place])))
        return
    args = harness.make_parser(__doc__).parse_args()
    rows = []
    for name in SHORT_CASES if args.short else CASES:
        rows += make_rows(CASES[name], harness.run_module(MODULE, "--case", name))
        print(*rows[-4:], sep="\n", flush=True)
    from benchmarks.splits.models import MODELS

    for name in SHORT_MODELS if args.short else list_models(MODELS):
        rows += make_model_rows(name, harness.run_module(MODULE, "--model", name))
        print(*rows[-5:], sep="\n", flush=True)
    for name in SHORT_PLANS if args.short else PLANS:
        found = harness.run_module(MODULE, "--plan", name)
        kind, size = name.split()
        what = f"stages of {size} ms" if kind == "emulated" else f"dense layers of {size}"
        text = f"the chosen plan against one by one: {what}"
        rows.append(harness.compare("splits", text, *found["taken"], MOST_OF_ALONE))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
