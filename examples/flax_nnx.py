"""Modules of Flax nnx in pipeline stages, as plain functions of their parameters.

Each stage is a module, split into its structure, which the stage function keeps, and its parameters, which
the pipeline trains. Needs the extra `flax`. docs/engine.md explains it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ipu_pipeline as ipu
from ipu_pipeline import datasets, engine


class Body(nnx.Module):
    """A residual block."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.linear1 = nnx.Linear(width, 2 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.linear2 = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes and returns activations, [image, width]."""
        hidden = nnx.relu(self.linear1(self.norm(x)))
        return x + self.linear2(self.dropout(hidden))


def make_modules(width: int, seed: int) -> list[nnx.Module]:
    """A module for each of four stages."""
    rngs = nnx.Rngs(seed)
    return [
        nnx.Linear(784, width, rngs=rngs),
        Body(width, rngs),
        Body(width, rngs),
        nnx.Linear(width, 10, rngs=rngs),
    ]


def is_key(leaf: jax.Array) -> bool:
    """Whether it is a random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def split(module: nnx.Module, is_training: bool) -> tuple[Callable[..., Any], Any]:
    """A module as a function of its parameters and of its inputs.

    Args:
      module: what else it keeps than parameters may only be the states of random streams.
      is_training: whether it drops.

    Returns:
      The function and the parameters at the start.
    """
    module = nnx.clone(module)  # train() and eval() change it
    if is_training:
        module.train()
    else:
        module.eval()
    graphdef, parameters, *others = nnx.split(module, nnx.Param, nnx.RngState, ...)
    random, rest = others
    if rest:
        raise ValueError(
            f"{type(module).__name__} keeps more than parameters: {', '.join(map(str, rest))}. What a call "
            "changes, such as batch statistics, would be lost: use ipu.layers.Flax, which keeps it."
        )
    streams, structure = jax.tree.flatten(random)  # keys, and how many were drawn from each

    def stage(parameters: Any, x: Any, labels: Any) -> Any:
        renewed = streams
        if (
            is_training and streams
        ):  # other keys in each micro-batch of each step, another one for each stream
            keys = jax.random.split(engine.next_rng_key(), len(streams))
            renewed = [key if is_key(old) else old for key, old in zip(keys, streams, strict=True)]
        merged = nnx.merge(graphdef, parameters, jax.tree.unflatten(structure, renewed))
        return merged(x), labels

    return stage, parameters


def make_pipeline(
    modules: list[nnx.Module], is_training: bool, num_micro_batches: int, **options: Any
) -> engine.Pipeline:
    """A pipeline that trains, given an optimizer, or that counts right answers."""
    functions, parameters = zip(*(split(module, is_training) for module in modules), strict=True)
    *before, last = functions

    def loss_stage(parameters: Any, x: Any, labels: Any) -> Any:
        logits, _labels = last(parameters, x, labels)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def count_stage(parameters: Any, x: Any, labels: Any) -> Any:
        logits, _labels = last(parameters, x, labels)
        return jnp.sum(jnp.argmax(logits, axis=-1) == labels)

    return engine.Pipeline(
        [*before, loss_stage if is_training else count_stage],
        parameters=parameters,
        num_micro_batches=num_micro_batches,
        **options,
    )


def main(steps: int = 60) -> list[nnx.Module]:
    """Trains on the embedded digits, and returns the trained modules."""
    ipu.set_num_devices(4)
    digits = datasets.load_digits()
    modules = make_modules(width=64, seed=0)
    trainer = make_pipeline(modules, True, 8, optimizer=optax.adam(2e-3))
    images = digits.train_images.reshape(-1, 784)
    micro_batches = iter(datasets.TrainingBatches(images, digits.train_labels, batch_size=32))
    state = trainer.init(jax.random.key(0), next(micro_batches))
    for step in range(1, steps + 1):
        state, outputs = trainer.step(state, micro_batches)
        if step % 20 == 0:
            print(f"Step {step}: loss {sum(map(float, outputs.losses)) / 8:.4f}")
    evaluator = make_pipeline(modules, False, 5)
    tested = digits.test_images.reshape(5, -1, 784), digits.test_labels.reshape(5, -1)
    _state, outputs = evaluator.step(state, list(zip(*tested, strict=True)))
    print(f"Test accuracy: {sum(map(int, outputs.outputs)) / tested[1].size:.4f}")
    for module, parameters in zip(modules, trainer.parameters(state), strict=True):
        nnx.update(module, parameters)  # from here on they are ordinary modules with trained weights
    return modules


if __name__ == "__main__":
    main()
