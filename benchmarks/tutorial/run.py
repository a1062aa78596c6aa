"""Tutorial steps 1 and 4 against the same loop written by hand in plain JAX: samples per second.

    python -m benchmarks.tutorial.run [--rounds 9] [--json FILE]

Step 1 is one device, step 4 with `--splits dense128` a pipeline of two stages. A training step is 160
micro-batches of 32 images, and 10 weight updates; its batches come from the same iterator, are stacked on
the host by the side that needs that, and its losses are fetched.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import harness

MODULE = "benchmarks.tutorial.run"
NUM_UPDATES, NUM_ACCUMULATED, BATCH_SIZE = 10, 16, 32
NUM_MICRO_BATCHES = NUM_UPDATES * NUM_ACCUMULATED
SIZES = (784, 256, 128, 64, 32, 10)
RATE = 0.01
PROGRAMS = {
    "step1": ["tutorial/step1_single_ipu.py"],
    "pipeline": ["answers/step4_configurable_stages.py", "--splits", "dense128"],
}


def batches() -> Iterator[tuple[Any, Any]]:
    from ipu_pipeline import datasets

    digits = datasets.load_digits()
    return iter(datasets.TrainingBatches(digits.train_images, digits.train_labels, BATCH_SIZE))


def serve_plain() -> None:
    """The training step by hand: a scan over weight updates of a scan over micro-batches."""
    import jax
    import jax.numpy as jnp
    import optax

    initializer = jax.nn.initializers.glorot_uniform()
    keys = jax.random.split(jax.random.key(0), len(SIZES) - 1)
    parameters = [
        (initializer(key, (before, after)), jnp.zeros(after))
        for key, before, after in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]

    def loss(parameters: Any, images: Any, labels: Any) -> Any:
        x = images.reshape(images.shape[0], -1)
        for kernel, bias in parameters[:-1]:
            x = jax.nn.relu(x @ kernel + bias)
        logits = x @ parameters[-1][0] + parameters[-1][1]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def accumulate(parameters: Any, total: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, *batch)
        return jax.tree.map(jnp.add, total, gradient), value

    def update(parameters: Any, group: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        total, values = jax.lax.scan(functools.partial(accumulate, parameters), zeros, group)
        return jax.tree.map(lambda p, g: p - RATE * g, parameters, total), values

    train = jax.jit(lambda parameters, groups: jax.lax.scan(update, parameters, groups), donate_argnums=0)
    source = batches()

    def step() -> Any:
        nonlocal parameters
        parts = zip(*(next(source) for _ in range(NUM_MICRO_BATCHES)), strict=True)
        images, labels = (np.stack(part) for part in parts)
        groups = tuple(
            part.reshape(NUM_UPDATES, NUM_ACCUMULATED, *part.shape[1:]) for part in (images, labels)
        )
        parameters, values = train(parameters, groups)
        return np.asarray(values)

    harness.serve(step, _check_losses, {})


def serve_program(side: str) -> None:
    """The training step of a program of the tutorial, recorded from the program itself."""
    from ipu_pipeline import tutorial_support

    served = []

    class Stop(Exception):  # noqa: N818  # not an error: it leaves the program with its session open
        pass

    def train(run_step: Callable[[], Any], *_rest: Any) -> None:
        served.append(run_step)
        harness.serve(run_step, _check_losses, {})
        raise Stop

    tutorial_support.train = train
    program, *arguments = PROGRAMS[side]
    path = harness.ROOT / program
    sys.argv = [str(path), "--dataset", "digits", *arguments]
    with contextlib.suppress(Stop):
        runpy.run_path(str(path), run_name="__main__")
    if not served:
        raise AssertionError("the program did not train")


def _check_losses(losses: Any) -> None:
    assert np.size(losses) == NUM_MICRO_BATCHES


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.side == "plain":
        serve_plain()
    elif args.side:
        serve_program(args.side)
    else:
        num_rounds, seconds = (3, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
        with harness.start_sides(MODULE, ["step1", "pipeline", "plain"]) as sides:
            taken = harness.take_turns(sides, num_rounds, seconds)
        rows = [
            harness.compare("tutorial", case, taken[ours], taken[other], target, is_speed=True)
            for case, ours, other, target in (
                ("step 1, speed against plain JAX", "step1", "plain", 0.97),
                ("two stages, speed against plain JAX", "pipeline", "plain", None),
                ("two stages, speed against step 1", "pipeline", "step1", 0.9),
            )
        ]
        harness.report(rows, args.json)


if __name__ == "__main__":
    main()
