"""Tutorial step 1 against the same loop written by hand in plain JAX: samples per second.

    python benchmarks/loop_against_scan/run.py [--rounds 9] [--steps 20]

Each side is a process of its own with one CPU device. The sides take turns, a round of steps each, so that
what else the machine does hits both. A step is 160 micro-batches of 32 images and 10 weight updates; its
batches come from the same iterator, are stacked on the host and sent to the device, and its losses are
fetched. Two rounds of each side are dropped as warm-up.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_UPDATES, NUM_ACCUMULATED, BATCH_SIZE = 10, 16, 32
NUM_MICRO_BATCHES = NUM_UPDATES * NUM_ACCUMULATED
SIZES = (784, 256, 128, 64, 32, 10)
RATE = 0.01


def batches() -> Iterator[tuple[Any, Any]]:
    from ipu_pipeline import datasets

    digits = datasets.load_digits()
    return iter(datasets.TrainingBatches(digits.train_images, digits.train_labels, BATCH_SIZE))


def make_plain_step() -> Callable[[], Any]:
    """The training step by hand: a scan over weight updates of a scan over micro-batches."""
    import functools

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

    return step


def make_library_step() -> Callable[[], Any]:
    """The training step of tutorial step 1, recorded from the program itself."""
    import runpy

    from ipu_pipeline import tutorial_support

    found: list[Callable[[], Any]] = []

    class Stop(Exception):  # noqa: N818  # not an error: it leaves the program with its session open
        pass

    def train(run_step: Callable[[], Any], *_rest: Any) -> None:
        found.append(run_step)
        serve(run_step)
        raise Stop

    tutorial_support.train = train
    program = Path(__file__).resolve().parents[2] / "tutorial" / "step1_single_ipu.py"
    sys.argv = [str(program), "--dataset", "digits"]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except Stop:
        sys.exit(0)
    raise AssertionError("the program did not train")


def serve(step: Callable[[], Any]) -> None:
    """Runs as many steps as each line of the standard input says, and prints the seconds they took."""
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            losses = step()
        seconds = time.perf_counter() - begin
        assert np.size(losses) == NUM_MICRO_BATCHES
        print(f"took {seconds}", flush=True)


def start(side: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--side", side]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_round(process: subprocess.Popen[str], steps: int) -> float:
    """Seconds for a round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("took "):
            return float(line.split()[1])
    raise RuntimeError("a side ended")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="Steps per round.")
    parser.add_argument("--side", choices=["library", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side == "library":
        make_library_step()
    elif args.side == "plain":
        serve(make_plain_step())
    else:
        sides = {"library": start("library"), "plain": start("plain")}
        examples = args.steps * NUM_MICRO_BATCHES * BATCH_SIZE
        ratios = []
        for number in range(args.rounds + 2):
            order = ["library", "plain"] if number % 2 else ["plain", "library"]
            seconds = {side: run_round(sides[side], args.steps) for side in order}
            if number >= 2:
                speed = {side: examples / seconds[side] for side in sides}
                ratios.append(speed["library"] / speed["plain"])
                print(
                    f"round {number - 1}: library {speed['library']:,.0f} samples/s, plain JAX "
                    f"{speed['plain']:,.0f} samples/s, ratio {ratios[-1]:.3f}",
                    flush=True,
                )
        for process in sides.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)
        print(f"median ratio {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
