"""Compares pipelines on JAX's default device, such as a GPU, with a plain loop of `jax.grad` there.

    python scripts/check_accelerator.py

All stages are on one device, by `device_mapping`, so one is enough. For each case it prints the largest of
the 2-norms of differences, per leaf and relative to the loop's leaf: of the losses, and of the variables
after three updates by SGD with momentum, which have all gradients in them. Then a generator's tokens are
compared with those that the whole model chooses. It ends with status 1 if a norm is above 1e-5, or a token
differs. Products are computed in float32 (`jax_default_matmul_precision`); GPUs round their operands
otherwise.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline import engine
from ipu_pipeline.engine import reference

WIDTH, WORDS, SIZE, STAGES, COUNT, MOST = 64, 97, 4, 4, 6, 1e-5

Case = tuple[str, dict[str, Any], list[int], bool]


def embed(p: Any, tokens: Any) -> Any:
    return p["table"][tokens], tokens


def block(is_dropping: bool, p: Any, x: Any, tokens: Any) -> Any:
    heads = (*x.shape[:2], 4, -1)
    queries, keys, values = ((x @ p[name]).reshape(heads) for name in ("queries", "keys", "values"))
    mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True).reshape(x.shape)
    if is_dropping:
        mixed = mixed * jax.random.bernoulli(engine.next_rng_key(), 0.8, mixed.shape) / 0.8
    x = x + mixed
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"], tokens


def predict(p: Any, x: Any, tokens: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels((x @ p["words"])[:, :-1], tokens[:, 1:]).mean()


def make_parameters() -> list[Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)

    square = dict.fromkeys(("queries", "keys", "values"), (WIDTH, WIDTH))
    layer = square | {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [{name: normal(*shape) for name, shape in layer.items()} for _block in range(STAGES - 2)]
    return [{"table": normal(WORDS, WIDTH)}, *blocks, {"words": normal(WIDTH, WORDS)}]


def make_cases() -> Iterator[Case]:
    """A name, options of the pipeline, the lengths of the micro-batches, and whether there is dropout."""
    same, mixed = [32] * COUNT, [32, 16, 48] * (COUNT // 3)
    yield "one program", {}, same, False
    yield "dropout", {}, same, True
    yield "recomputation", {"recompute": "auto"}, same, True
    yield "lengths in one step", {}, mixed, False
    yield "schedule gpipe", {"schedule": "gpipe"}, same, False
    yield "clipping by the global norm", {"clips": True}, same, False


def find_difference(ours: Any, other: Any) -> float:
    """The largest difference of leaves, relative to the other's."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True)
    norm: Callable[[Any], Any] = np.linalg.norm
    return max(
        float(norm(np.ravel(a).astype(float) - np.ravel(b)) / max(float(norm(np.ravel(b))), 1e-30))
        for a, b in pairs
    )


def compare(options: dict[str, Any], lengths: list[int], is_dropping: bool) -> float:
    """The largest difference of a case."""
    options = dict(options)
    optimizer = optax.sgd(0.05, momentum=0.9)
    if options.pop("clips", False):
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optimizer)
    stages = [embed, *[functools.partial(block, is_dropping)] * (STAGES - 2), predict]
    pipeline = engine.Pipeline(
        stages,
        parameters=make_parameters(),
        num_micro_batches=COUNT,
        optimizer=optimizer,
        device_mapping=[0] * STAGES,
        **options,
    )
    rng = np.random.default_rng(1)

    def draw() -> list[Any]:
        return [rng.integers(0, WORDS, (SIZE, length)).astype(np.int32) for length in lengths]

    steps = [draw() for _step in range(3)]
    state = expected = pipeline.init(jax.random.key(0), steps[0][0])
    found = []
    for step in steps:
        traced = [pipeline.for_shapes(part).traced for part in step]
        state, outputs = pipeline.step(state, step)
        expected, plain = reference.step(traced, expected, step, optimizer=optimizer)
        found.append(find_difference(outputs.losses, plain.losses))
    return max(*found, find_difference(state.variables, expected.variables))


def generate() -> int:
    """How many of the tokens that a generator chooses a call of all tokens at once would not choose."""
    parameters = make_parameters()
    most = 64

    def first(p: Any, tokens: Any, position: Any) -> Any:
        return p["table"][tokens], position

    def middle(number: int, p: Any, x: Any, position: Any) -> Any:
        kept = []
        for name in ("keys", "values"):
            own = f"{name}{number}"
            known = engine.get_variable(own, (most, WIDTH), initializer="zeros", trainable=False)
            known = jax.lax.dynamic_update_slice(known, x @ p[name], (position, 0))
            engine.assign(own, known)
            kept.append(known.reshape(1, most, 4, -1))
        is_known = jnp.arange(most) <= position + jnp.arange(len(x))[:, None]
        queries = (x @ p["queries"]).reshape(1, len(x), 4, -1)
        mixed = jax.nn.dot_product_attention(queries, *kept, mask=is_known[None, None])
        x = x + mixed.reshape(x.shape)
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], position

    def last(p: Any, x: Any, _position: Any) -> Any:
        return x @ p["words"]

    generator = engine.Generator(
        [first, *(functools.partial(middle, number) for number in range(STAGES - 2)), last],
        parameters=parameters,
        max_length=most,
        device_mapping=[0] * STAGES,
        num_slots=4,
    )
    state = generator.pipeline.init(jax.random.key(0), (np.zeros(1, np.int32), np.int32(0)))
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, WORDS, length).astype(np.int32) for length in (5, 17, 1, 9, 30, 3)]
    wrong = 0
    for prompt, answer in zip(prompts, generator.generate(state, prompts, max_new_tokens=20), strict=True):
        tokens = np.concatenate([prompt, answer])[None]
        x = embed(parameters[0], tokens)
        for own in parameters[1:-1]:
            x = block(False, own, *x)
        chosen = np.argmax(x[0] @ parameters[-1]["words"], axis=-1)[0]
        wrong += int(np.sum(chosen[len(prompt) - 1 : -1] != answer))
    return wrong


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    worst = 0.0
    for name, options, lengths, is_dropping in make_cases():
        difference = compare(options, lengths, is_dropping)
        worst = max(worst, difference)
        print(f"{name}: {difference:.1e}", flush=True)
    wrong = generate()
    print(f"generation: {wrong} of {6 * 20} tokens differ", flush=True)
    sys.exit(int(worst > MOST or wrong > 0))


if __name__ == "__main__":
    main()
