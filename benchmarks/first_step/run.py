"""What the first step of a GPT takes, against plain JAX: elapsed seconds, and processor seconds.

    python -m benchmarks.first_step.run [--rounds 5] [--cases float32 dropout bfloat16] [--json FILE]

A GPT of flax.linen in four stages, two blocks each, with AdamW and a clipped norm: in float32, with
dropout, and with activations in bfloat16. "Blocks apart" is the same model in six stages on the same four
devices: the blocks are in stages of their own, which are equal. Plain JAX is a loop over the micro-batches
that calls a jitted function, which adds the gradients of the whole model to those before, and a jitted
update by Optax. Each measurement is a process of its own with nothing cached on disk. The clocks start when
JAX's backend is up, once with initial values that are there already, once before they are made. They end
with the first step.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from benchmarks import harness

MODULE = "benchmarks.first_step.run"
CASES = ["float32", "dropout", "bfloat16"]
NUM_STAGES, NUM_BLOCKS = 4, 2  # blocks of a stage
COUNT, SIZE, LENGTH = 4, 4, 64  # micro-batches of a step, texts of a micro-batch, tokens of a text
VOCABULARY, WIDTH, HEADS = 256, 128, 4
RATE, MOST_NORM, DROPOUT = 1e-3, 1.0, 0.1
MOST_RATIO = 1.2


def make_modules(case: str, is_apart: bool = False) -> list[Any]:
    """The modules of the stages; with `is_apart`, blocks are apart from what is before and behind."""
    import jax.numpy as jnp
    from flax import linen

    dtype = jnp.bfloat16 if case == "bfloat16" else jnp.float32
    rate = DROPOUT if case == "dropout" else 0.0

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            attention = linen.MultiHeadDotProductAttention(
                HEADS, dtype=dtype, dropout_rate=rate, deterministic=not rate
            )
            mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + attention(linen.LayerNorm(dtype=dtype)(x), mask=mask)
            hidden = linen.gelu(linen.Dense(4 * WIDTH, dtype=dtype)(linen.LayerNorm(dtype=dtype)(x)))
            hidden = linen.Dense(WIDTH, dtype=dtype)(hidden)
            return x + linen.Dropout(rate, deterministic=not rate)(hidden)

    class Stage(linen.Module):
        is_first: bool = False
        is_last: bool = False
        num_blocks: int = NUM_BLOCKS

        @linen.compact
        def __call__(self, x: Any) -> Any:
            if self.is_first:
                positions = linen.Embed(LENGTH, WIDTH, dtype=dtype)(jnp.arange(LENGTH))
                x = linen.Embed(VOCABULARY, WIDTH, dtype=dtype)(x) + positions
            for _block in range(self.num_blocks):
                x = Block()(x)
            if self.is_last:
                x = linen.LayerNorm(dtype=dtype)(x)
                x = linen.Dense(VOCABULARY, dtype=dtype)(x).astype(jnp.float32)
            return x

    if is_apart:
        blocks = [Stage() for _stage in range(NUM_STAGES)]
        return [Stage(is_first=True, num_blocks=0), *blocks, Stage(is_last=True, num_blocks=0)]
    middle = [Stage() for _stage in range(NUM_STAGES - 2)]
    return [Stage(is_first=True), *middle, Stage(is_last=True)]


def make_micro_batches() -> list[tuple[Any, Any]]:
    """Tokens and those that follow them, for each micro-batch of a step."""
    texts = np.random.default_rng(0).integers(0, VOCABULARY, (COUNT, SIZE, LENGTH + 1)).astype(np.int32)
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def make_initial(modules: list[Any], key: Any, tokens: Any) -> list[Any]:
    """The parameters of each module, made by one jitted function."""
    import jax

    @jax.jit
    def make(key: Any, x: Any) -> list[Any]:
        made = []
        for number, module in enumerate(modules):
            own = jax.random.fold_in(key, number)
            x, variables = module.init_with_output({"params": own, "dropout": own}, x)
            made.append(variables["params"])
        return made

    made: list[Any] = make(key, tokens)
    return made


def take_apart(parameters: list[Any]) -> list[Any]:
    """The parameters of the modules whose blocks are apart."""
    blocks = [{name: own for name, own in part.items() if "Block" in name} for part in parameters]
    rest = [{name: own for name, own in part.items() if "Block" not in name} for part in parameters]
    return [rest[0], *blocks, rest[-1]]


def make_optimizer() -> Any:
    import optax

    return optax.chain(optax.clip_by_global_norm(MOST_NORM), optax.adamw(RATE))


def make_pipeline(case: str, modules: list[Any], parameters: list[Any] | None) -> Any:
    """The pipeline; without parameters, its stages make their own."""
    import optax

    from ipu_pipeline import engine

    draws = case == "dropout"

    def make_stage(module: Any) -> Any:
        if parameters is None:
            from ipu_pipeline import layers

            return lambda x, targets: (layers.Flax(module)(x), targets)

        def stage(own: Any, x: Any, targets: Any) -> Any:
            rngs = {"dropout": engine.next_rng_key()} if draws else {}
            return module.apply({"params": own}, x, rngs=rngs), targets

        return stage

    def compute_loss(logits: Any, targets: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return engine.Pipeline(
        [make_stage(module) for module in modules],
        parameters=parameters,
        num_micro_batches=COUNT,
        loss=compute_loss,
        optimizer=make_optimizer(),
        device_mapping=None if len(modules) == NUM_STAGES else [0, *range(NUM_STAGES), NUM_STAGES - 1],
        donate=True,
        collect_outputs=False,
    )


def run_pipeline(case: str, modules: list[Any], parameters: list[Any] | None, key: Any) -> list[float]:
    """Trains a step. Returns the losses."""
    import jax

    micro_batches = make_micro_batches()
    pipeline = make_pipeline(case, modules, parameters)
    state = pipeline.init(key, micro_batches[0])
    state, outputs = pipeline.step(state, micro_batches)
    jax.block_until_ready(state)
    return np.asarray(outputs.losses).tolist()


def run_plain(case: str, modules: list[Any], parameters: list[Any] | None, key: Any) -> list[float]:
    """Likewise in plain JAX, on one device."""
    import functools

    import jax
    import jax.numpy as jnp
    import optax

    micro_batches = make_micro_batches()
    if parameters is None:
        parameters = make_initial(modules, key, micro_batches[0][0])
    optimizer = make_optimizer()

    def compute_loss(parameters: Any, key: Any, x: Any, targets: Any) -> Any:
        for number, (module, own) in enumerate(zip(modules, parameters, strict=True)):
            rngs = {"dropout": jax.random.fold_in(key, number)} if case == "dropout" else {}
            x = module.apply({"params": own}, x, rngs=rngs)
        return optax.softmax_cross_entropy_with_integer_labels(x, targets).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def accumulate(total: Any, parameters: Any, key: Any, number: Any, x: Any, targets: Any) -> Any:
        own = jax.random.fold_in(key, number)
        loss, gradients = jax.value_and_grad(compute_loss)(parameters, own, x, targets)
        return jax.tree.map(jnp.add, total, gradients), loss

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def update(total: Any, state: Any, parameters: Any) -> Any:
        mean = jax.tree.map(lambda g: g / COUNT, total)
        changes, state = optimizer.update(mean, state, parameters)
        return state, optax.apply_updates(parameters, changes)

    zeros = jax.jit(lambda own: jax.tree.map(jnp.zeros_like, own))
    state = jax.jit(optimizer.init)(parameters)
    total, losses = zeros(parameters), []
    for number, micro_batch in enumerate(micro_batches):
        total, loss = accumulate(total, parameters, key, number, *micro_batch)
        losses.append(loss)
    jax.block_until_ready(update(total, state, parameters))
    return np.asarray(losses).tolist()


def measure_side(side: str, case: str, with_initial: bool) -> dict[str, Any]:
    """The seconds of one first step, of the clock and of the processor, and its losses."""
    import jax
    import optax  # noqa: F401  - what both sides import is not timed
    from flax import linen  # noqa: F401

    if side != "plain":
        from ipu_pipeline import engine

        assert engine.Pipeline  # what is imported is not timed on this side, either
        jax.config.update("jax_num_cpu_devices", NUM_STAGES)
    modules, parameters = make_modules(case), None
    key = jax.block_until_ready(jax.random.key(0))
    if not with_initial:
        parameters = jax.block_until_ready(make_initial(modules, key, make_micro_batches()[0][0]))
    if side == "apart":
        modules = make_modules(case, is_apart=True)
        parameters = None if parameters is None else take_apart(parameters)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    losses = (run_plain if side == "plain" else run_pipeline)(case, modules, parameters, key)
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu_begin,
        "losses": losses,
    }


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--initial", action="store_true", help="Used with --side: initial values, too.")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure_side(args.side, args.cases[0], args.initial)))
        return
    rows = []
    for case in args.cases:
        for with_initial in (False,) if args.short else (False, True):
            options = ["--cases", case, *(["--initial"] if with_initial else [])]
            found: dict[str, list[Any]] = {"pipeline": [], "apart": [], "plain": []}
            for number in range(2 if args.short else args.rounds):
                for side in list(found) if number % 2 else list(reversed(found)):
                    found[side].append(harness.run_module(MODULE, "--side", side, *options))
            if not with_initial:  # else the initial values have other keys
                check_losses(case, [found[side][0]["losses"] for side in found])
            for side, how in (("pipeline", ""), ("apart", ", blocks apart")):
                for unit, what in (("cpu_seconds", "processor time"), ("seconds", "elapsed time")):
                    own, other = ([facts[unit] for facts in found[name]] for name in (side, "plain"))
                    name = f"{case}, {what}{', initial values too' if with_initial else ''}{how}"
                    rows.append(harness.compare("first_step", name, own, other, MOST_RATIO))
    harness.report(rows, args.json)


def check_losses(case: str, losses: list[list[float]]) -> None:
    """Fails if the sides do not train the same. With dropout, they have different masks."""
    tolerance = {"float32": 1e-5, "dropout": 0.1, "bfloat16": 1e-2}[case]
    for found in losses[:-1]:
        np.testing.assert_allclose(found, losses[-1], rtol=tolerance)


if __name__ == "__main__":
    main()
