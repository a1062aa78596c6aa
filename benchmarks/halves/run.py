"""What two halves of a backward cost against the whole, over random stages.

    python -m benchmarks.halves.run [--short] [--seeds 0 17] [--json FILE]

A random stage is made of layers that people write: dense layers with several activations, normalisations,
attention, convolutions with batch normalisation, scans over layers, recurrent networks, checkpoints,
conditionals, tied weights, residual connections, dropout. It stands between two others in a pipeline, which
is traced with and without halves. Its programs (the backward B, input gradients I, weight gradients W) are
timed alone, B and I + W in turns, on one core; the gradients must be the same.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness
from benchmarks.harness import Row
from ipu_pipeline import engine, layers
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms, Value, ValueKind

MODULE = "benchmarks.halves.run"
NUM_STAGES = 200
MEDIAN, MOST = 1.01, 1.03
LEAST_SECONDS = 10e-3  # of a backward: shorter stages are made wider
# Otherwise glibc returns what is larger than 32 MiB to the kernel, and gets it again page by page, which
# may take half of a program's time: of the programs that have as much for their temporaries.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
NUM_CALLS = 3  # of the programs in a row
NUM_AGAIN = 4  # times that a stage above the target is measured again


class Built(NamedTuple):
    """A random stage: a function of the width of its values, and what it is called."""

    apply: Callable[[Any], Any]
    name: str
    shape: tuple[int, ...]


Layer = Callable[[str, Any], Any]


def weight(name: str, shape: tuple[int, ...]) -> Any:
    scale = 1 / np.sqrt(np.prod(shape[:-1]))
    return engine.get_variable(
        name, shape, initializer=lambda key, shape, dtype: scale * jax.random.normal(key, shape, dtype)
    )


def dense(activation: Callable[[Any], Any]) -> Layer:
    def layer(name: str, x: Any) -> Any:
        size = x.shape[-1]
        return activation(x @ weight(f"{name}/kernel", (size, size)) + weight(f"{name}/bias", (size,)))

    return layer


def residual(name: str, x: Any) -> Any:
    size = x.shape[-1]
    h = jax.nn.gelu(x @ weight(f"{name}/up", (size, 2 * size)))
    return x + h @ weight(f"{name}/down", (2 * size, size))


def norm(name: str, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    size = x.shape[-1]
    y = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return y * (1 + weight(f"{name}/scale", (size,))) + weight(f"{name}/shift", (size,))


def attention(name: str, x: Any) -> Any:
    rows, size = x.shape
    heads = 4
    q, k, v = (
        jnp.einsum("rs,shd->hrd", x, weight(f"{name}/{part}", (size, heads, size // heads)))
        for part in ("q", "k", "v")
    )
    scores = jax.nn.softmax(jnp.einsum("hrd,htd->hrt", q, k) / np.sqrt(size // heads).astype(np.float32))
    mixed = jnp.einsum("hrt,htd->rhd", scores, v).reshape(rows, size)
    return x + mixed @ weight(f"{name}/out", (size, size))


def scanned(name: str, x: Any) -> Any:
    size = x.shape[-1]
    kernels = weight(f"{name}/kernels", (3, size, size))
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, kernels)[0]


def recurrent(name: str, x: Any) -> Any:
    rows, size = x.shape
    w, u = (weight(f"{name}/{part}", (size, size)) for part in ("w", "u"))
    steps = x.reshape(8, rows // 8, size)

    def step(state: Any, row: Any) -> Any:
        state = jnp.tanh(row @ w + state @ u)
        return state, state

    return jax.lax.scan(step, jnp.zeros((rows // 8, size)), steps)[1].reshape(rows, size)


def checkpointed(name: str, x: Any) -> Any:
    size = x.shape[-1]
    w, u = (weight(f"{name}/{part}", (size, size)) for part in ("w", "u"))
    return jax.checkpoint(lambda w, u, x: jnp.tanh(jax.nn.silu(x @ w) @ u))(w, u, x)


def branching(name: str, x: Any) -> Any:
    size = x.shape[-1]
    w, u = (weight(f"{name}/{part}", (size, size)) for part in ("w", "u"))
    return jax.lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: jnp.sin(x @ u))


def tied(name: str, x: Any) -> Any:
    size = x.shape[-1]
    w = weight(f"{name}/kernel", (size, size))
    return jnp.tanh(x @ w) @ w.T


def dropped(name: str, x: Any) -> Any:
    return layers.Dropout(0.1, name=f"{name}/dropout")(x)


MATRICES: dict[str, Layer] = {
    "relu": dense(jax.nn.relu),
    "gelu": dense(jax.nn.gelu),
    "tanh": dense(jnp.tanh),
    "residual": residual,
    "norm": norm,
    "attention": attention,
    "scan": scanned,
    "recurrent": recurrent,
    "checkpoint": checkpointed,
    "branches": branching,
    "tied": tied,
    "dropout": dropped,
}


def convolution(name: str, x: Any, size: int = 3) -> Any:
    channels = x.shape[-1]
    kernel = weight(f"{name}/kernel", (size, size, channels, channels))
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(name: str, x: Any) -> Any:
    return layers.BatchNormalization(name=f"{name}/norm")(x)


IMAGES: dict[str, Layer] = {
    "conv": lambda name, x: jax.nn.relu(convolution(name, x)),
    "conv 1x1": lambda name, x: jax.nn.silu(convolution(name, x, 1)),
    "conv residual": lambda name, x: x + jnp.tanh(convolution(name, x)),
    "batch norm": batch_norm,
}


def build(seed: int, scale: int) -> Built:
    """A random stage; `scale` makes it wider."""
    rng = np.random.default_rng(seed)
    is_image = rng.random() < 0.2
    known = IMAGES if is_image else MATRICES
    kinds = [str(rng.choice(list(known))) for _ in range(rng.integers(2, 7))]
    if all(kind in ("norm", "dropout", "batch norm") for kind in kinds):
        kinds.append("conv" if is_image else "relu")
    size = int(rng.choice([8, 16, 24] if is_image else [64, 96, 128])) * scale
    shape = (8, 16, 16, size) if is_image else (int(rng.choice([128, 256])), size)

    def apply(x: Any) -> Any:
        for place, kind in enumerate(kinds):
            x = known[kind](f"layer{place}", x)
        return x

    return Built(apply, " ".join(kinds), shape)


def trace(built: Built, schedule: str) -> tuple[StagePrograms, Any]:
    """The programs of the stage between two others, and its shapes."""

    def first(x: Any) -> Any:
        return x * engine.get_variable("first", ())

    def stage(x: Any) -> Any:
        with engine.variable_scope("stage"):
            return built.apply(x)

    def last(x: Any) -> Any:
        return jnp.mean(x**2) * engine.get_variable("last", ())

    pipeline = engine.Pipeline(
        [first, stage, last],
        num_micro_batches=3,
        optimizer=optax.sgd(0.1),
        schedule=schedule,
    )
    pipeline.trace(jax.ShapeDtypeStruct(built.shape, "float32"))
    return pipeline.programs[1].on(jax.default_backend()), pipeline.traced.stages[1]


class Arguments:
    """Values for the arguments of a stage's programs."""

    def __init__(self, stage: Any) -> None:
        self._stage, self._known = stage, dict[Value, Any]()
        self._key = jax.random.key(0)

    def of(self, program: StageProgram) -> list[Any]:
        """The values of a program."""
        return [self._find(value) for value in program.arguments]

    def take(self, program: StageProgram, results: Sequence[Any]) -> None:
        """Keeps a program's results."""
        for values, result in zip(program.results, results, strict=True):
            self._known.update(dict.fromkeys(values, result))

    def _find(self, value: Value) -> Any:
        if value.kind is ValueKind.ACCUMULATOR:  # which the program destroys
            spec = self._stage.variables[value.index]
            return jnp.zeros(spec.shape, spec.dtype)
        if value not in self._known:
            self._known[value] = self._make(value)
        return self._known[value]

    def _make(self, value: Value) -> Any:
        if value.kind is ValueKind.KEY:
            return self._key
        if value.kind in (ValueKind.EXECUTION_COUNT, ValueKind.MICRO_BATCH, ValueKind.UPDATE_COUNT):
            return jnp.int32(1)
        rng = np.random.default_rng(value.index)
        if value.kind is ValueKind.VARIABLE:
            spec = self._stage.variables[value.index]
            size = 1 / np.sqrt(max(1, np.prod(spec.shape[:-1])))
            return jnp.asarray(rng.normal(size=spec.shape) * size, spec.dtype)
        aval = (
            self._stage.output_avals[value.index]
            if value.kind is ValueKind.COTANGENT
            else self._stage.input_vars[value.index].aval
        )
        return jnp.asarray(rng.normal(size=aval.shape), aval.dtype)


class Timed:
    """Programs that run one after the other."""

    def __init__(self, programs: Sequence[StageProgram], arguments: Arguments) -> None:
        self._arguments = arguments
        self._pairs = [
            (jax.jit(program.function, donate_argnums=tuple(range(program.num_accumulators))), program)
            for program in programs
        ]
        self.gradients: dict[Value, Any] = {}
        for jitted, program in self._pairs:
            results = jitted(*arguments.of(program))
            arguments.take(program, results)
            for values, result in zip(program.results, results, strict=True):
                for value in values:
                    if value.kind in (ValueKind.ACCUMULATOR, ValueKind.INPUT_COTANGENT):
                        self.gradients[value] = np.asarray(result)

    def run(self) -> float:
        """CPU seconds of all programs, one after another, as a step starts them: the host is ahead."""
        calls = [
            [(jitted, self._arguments.of(program)) for jitted, program in self._pairs]
            for _ in range(NUM_CALLS)
        ]
        jax.block_until_ready([arguments for call in calls for _jitted, arguments in call])
        begin = time.process_time()
        results = [jitted(*arguments) for call in calls for jitted, arguments in call]
        jax.block_until_ready(results)
        return (time.process_time() - begin) / NUM_CALLS


def measure(seed: int, num_rounds: int) -> tuple[str, float, float]:
    """The stage's name, the time of the whole backward, and the ratio of the halves to it."""
    for scale in (1, 2, 3, 4, 6, 8, 12):
        built = build(seed, scale)
        sides = []
        for schedule in ("interleaved", "zero_bubble"):
            programs, stage = trace(built, schedule)
            arguments = Arguments(stage)
            forward = programs.forward
            arguments.take(forward, jax.jit(forward.function)(*arguments.of(forward)))
            sides.append(Timed(programs.backwards, arguments))
        whole, halves = sides
        if min(whole.run() for _ in range(3)) >= LEAST_SECONDS:
            break
    assert whole.gradients.keys() == halves.gradients.keys()
    for value, expected in whole.gradients.items():
        difference = np.linalg.norm(halves.gradients[value] - expected)
        assert difference <= 1e-5 * np.linalg.norm(expected), (seed, built.name, value)

    taken = [(whole.run(), halves.run()) for _ in range(num_rounds)]
    ratio = statistics.median(b / a for a, b in taken)
    return built.name, statistics.median(a for a, _b in taken), ratio


def make_rows(found: Iterable[tuple[int, str, float, float]]) -> list[Row]:
    """Makes rows of each stage's number, name, the seconds of its backward, and the ratio of the halves."""
    found = sorted(found, key=lambda one: -one[-1])
    ratios = [ratio for *_others, ratio in found]
    return [
        Row(
            "halves",
            f"{len(found)} random stages, I + W against B: the median",
            "",
            "",
            statistics.median(ratios),
            (min(ratios), max(ratios)),
            MEDIAN,
        ),
        Row(
            "halves",
            f"{len(found)} random stages: how many take more than {MOST} of B",
            "",
            "",
            sum(ratio > MOST for ratio in ratios),
        ),
        *(
            Row(
                "halves",
                f"I + W against B: {name} (stage {seed})",
                f"{seconds * ratio * 1e3:.2f} ms",
                f"{seconds * 1e3:.2f} ms",
                ratio,
                None,
                MOST,
            )
            for seed, name, seconds, ratio in found[:5]
        ),
    ]


def main() -> None:
    if not _MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", MODULE, *sys.argv[1:]], {**os.environ, **_MALLOC})  # noqa: S606
    # Threads of one program would be as noisy as what is measured.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "BEHIND"), default=None)
    args = parser.parse_args()
    first, behind = args.seeds or (0, 20 if args.short else NUM_STAGES)
    found = []
    for seed in range(first, behind):
        measured = measure(seed, args.rounds)
        if measured[-1] > MOST:  # where memory lies alone takes some percent: compiled and allocated again
            again = [measured, *(measure(seed, args.rounds) for _ in range(NUM_AGAIN))]
            measured = sorted(again, key=lambda one: one[-1])[len(again) // 2]
        found.append((seed, *measured))
        print("  ".join(map(str, found[-1])), flush=True)
    harness.report(make_rows(found), args.json)


if __name__ == "__main__":
    main()
