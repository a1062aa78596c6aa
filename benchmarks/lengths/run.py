"""What micro-batches of several lengths cost: in buckets or padded to the longest, mixed or sorted.

    python -m benchmarks.lengths.run [--rounds 7] [--json FILE]

A language model of four stages (an embedding, two layers of attention, a projection) on texts of 16 to 256
tokens. All is timed in turns, in one process: steps of the texts in buckets, and of the same texts padded
to the longest; steps that mix two lengths, micro-batch by micro-batch, and the same micro-batches in steps
of one length each; a step of one length by a pipeline that takes one shape only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row

NUM_STAGES, COUNT, SIZE = 4, 8, 8  # stages, micro-batches of a step, texts of a micro-batch
VOCABULARY, WIDTH, HEADS = 512, 128, 4
LENGTHS = [32, 64, 128, 256]
MOST = 1.1


def make_model() -> tuple[list[Callable[..., Any]], list[Any]]:
    """The stages and their parameters."""
    import jax
    import jax.numpy as jnp
    import optax

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)

    def embed(p: Any, tokens: Any, mask: Any) -> Any:
        return p["table"][tokens], tokens, mask

    def block(p: Any, x: Any, tokens: Any, mask: Any) -> Any:
        rows, length, _width = x.shape
        q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(rows, length, 3, HEADS, -1), 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], tokens, mask

    def predict(p: Any, x: Any, tokens: Any, mask: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels((x @ p["w"])[:, :-1], tokens[:, 1:])
        return jnp.sum(losses * mask[:, 1:])

    layer = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    blocks = [{name: normal(*shape) for name, shape in layer.items()} for _layer in range(2)]
    parameters = [{"table": normal(VOCABULARY, WIDTH)}, *blocks, {"w": normal(WIDTH, VOCABULARY)}]
    return [embed, block, block, predict], parameters


def make_pipeline(micro_batch: Any, **options: Any) -> tuple[Any, Any]:
    """A pipeline and its state."""
    import jax
    import optax

    from ipu_pipeline import engine

    stages, parameters = make_model()
    pipeline = engine.Pipeline(
        stages,
        parameters=parameters,
        num_micro_batches=COUNT,
        optimizer=optax.adam(1e-3),
        schedule="1f1b",
        **options,
    )
    return pipeline, pipeline.init(jax.random.key(0), micro_batch)


def time_steps(pipeline: Any, state: Any, steps: Sequence[Any]) -> float:
    """The seconds that steps take, all from one state."""
    import jax

    begin = time.perf_counter()
    for step in steps:
        after, outputs = pipeline.step(state, step)
    jax.block_until_ready((after.variables, [part.loss for part in outputs.collected]))
    return time.perf_counter() - begin


def compare(cases: Sequence[tuple[Any, Any, Sequence[Any]]], num_rounds: int) -> list[list[float]]:
    """The seconds of each case, round by round, in turns, without the first rounds."""
    found: list[list[float]] = [[] for _case in cases]
    for number in range(num_rounds + harness.NUM_WARM_UPS):
        order = range(len(cases)) if number % 2 else reversed(range(len(cases)))
        for case in order:
            seconds = time_steps(*cases[case])
            if number >= harness.NUM_WARM_UPS:
                found[case].append(seconds)
    return found


def row(case: str, ours: Sequence[float], other: Sequence[float], factor: float, target: float) -> Row:
    ratios = [mine / (factor * theirs) for mine, theirs in zip(ours, other, strict=True)]
    seconds = [f"{statistics.median(values) * 1e3:.0f} ms" for values in (ours, other)]
    return Row("lengths", case, *seconds, statistics.median(ratios), (min(ratios), max(ratios)), target)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    num_rounds = 3 if args.short else args.rounds
    from ipu_pipeline import set_num_devices
    from ipu_pipeline.data.datasets import Buckets

    set_num_devices(NUM_STAGES)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 0.7, 4 * COUNT * SIZE), 16, max(LENGTHS)).astype(int)
    texts = [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]

    def make_steps(batches: Any) -> list[list[Any]]:
        listed = list(batches)
        return [listed[n : n + COUNT] for n in range(0, len(listed) // COUNT * COUNT, COUNT)]

    def count(steps: Sequence[Sequence[Any]]) -> int:
        return sum(mask.size for step in steps for _tokens, mask in step)

    buckets = make_steps(Buckets(texts, LENGTHS, SIZE))
    padded = make_steps(Buckets(texts, LENGTHS[-1:], SIZE))
    short, long = (next(iter(Buckets(texts, [n], SIZE, too_long="cut"))) for n in (64, 128))
    mixed, sorted_out = [[short, long] * (COUNT // 2)] * 2, [[short] * COUNT, [long] * COUNT]
    pipeline, state = make_pipeline(buckets[0][0])
    only, only_state = make_pipeline(long, max_shapes=1)
    cases = [
        (pipeline, state, buckets),
        (pipeline, state, padded),
        (pipeline, state, mixed),
        (pipeline, state, sorted_out),
        (pipeline, state, sorted_out[1:] * 2),
        (only, only_state, sorted_out[1:] * 2),
    ]
    found = compare(cases, num_rounds)
    # Steps of the same number of positions: what is left over of either is not counted.
    share = count(buckets) / count(padded)
    rows = [
        row(
            f"texts in buckets, per position, {share:.0%} of those when padded",
            found[0],
            found[1],
            share,
            MOST,
        ),
        row("two lengths in each step, against one each", found[2], found[3], 1.0, MOST),
        row("one length, after others, against max_shapes=1", found[4], found[5], 1.0, MOST),
    ]
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
