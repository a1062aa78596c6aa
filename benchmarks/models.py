"""The models that the benchmarks train, as stage functions of plain JAX. Nothing here knows the library."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

__all__ = ["WORKLOADS", "Workload", "make_plain_step"]

RATE = 1e-3


@dataclass(frozen=True)
class Model:
    """A model cut into stages.

    Attributes:
      stages: `f(parameters, x, target)`, which returns the next `x` and the target; the last one returns
        the loss.
      parameters: of each stage, NumPy arrays.
      x: a micro-batch's inputs.
      target: its targets.
    """

    stages: Sequence[Callable[..., Any]]
    parameters: Sequence[Any]
    x: Any
    target: Any

    def micro_batches(self, number: int) -> list[tuple[Any, Any]]:
        """So many different micro-batches."""
        return [(np.roll(self.x, shift, 0), np.roll(self.target, shift, 0)) for shift in range(number)]


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
      name: for tables.
      make: makes the model.
      num_stages: how many stages it is cut into.
      num_micro_batches: per weight update.
      target: the most that a step may take, in steps of plain JAX.
      unroll: how many micro-batches plain JAX unrolls its scan by. Gradients of convolutions are slow in
        the body of a loop on CPUs (see benchmarks/README.md), so there it has no loop.
      make_optimizer: makes an optimizer of Optax; None: the benchmarks' own is SGD.
    """

    name: str
    make: Callable[[], Model]
    num_stages: int
    num_micro_batches: int
    target: float
    unroll: int = 1
    make_optimizer: Callable[[], Any] | None = None


def make_mlp(width: int, batch_size: int, num_layers: int, num_stages: int) -> Model:
    """Dense layers with relu, and mean-square loss."""
    rng = np.random.default_rng(0)
    per_stage = num_layers // num_stages

    def layers(parameters: Any, x: Any) -> Any:
        for kernel, bias in parameters:
            x = jax.nn.relu(x @ kernel + bias)
        return x

    def stage(parameters: Any, x: Any, target: Any) -> Any:
        return layers(parameters, x), target

    def last(parameters: Any, x: Any, target: Any) -> Any:
        return jnp.mean((layers(parameters, x) - target) ** 2)

    def array(*shape: int, scale: float = 1.0) -> Any:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    parameters = [
        [(array(width, width, scale=(2 / width) ** 0.5), array(width, scale=0.1)) for _ in range(per_stage)]
        for _ in range(num_stages)
    ]
    stages = [stage] * (num_stages - 1) + [last]
    return Model(stages, parameters, array(batch_size, width), array(batch_size, width))


def make_convolutional_net(num_stages: int = 4, batch_size: int = 8, size: int = 16) -> Model:
    """Two 3x3 convolutions a stage, whose channels double where the image is halved; then ten classes."""
    rng = np.random.default_rng(0)
    channels = [3, 32, 64, 96, 128]

    def array(*shape: int) -> Any:
        fan_in = np.prod(shape[:-1])
        return (rng.normal(size=shape) * (2 / fan_in) ** 0.5).astype(np.float32)

    def convolve(x: Any, kernel: Any, stride: int) -> Any:
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", None, None, dimensions)

    def block(parameters: Any, x: Any) -> Any:
        x = jax.nn.relu(convolve(x, parameters["first"], 1))
        return jax.nn.relu(convolve(x, parameters["second"], 2))

    def stage(parameters: Any, x: Any, target: Any) -> Any:
        return block(parameters, x), target

    def last(parameters: Any, x: Any, target: Any) -> Any:
        logits = block(parameters, x).mean((1, 2)) @ parameters["dense"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], 1))

    parameters = []
    for before, after in itertools.pairwise(channels):
        parameters.append({"first": array(3, 3, before, after), "second": array(3, 3, after, after)})
    parameters[-1]["dense"] = array(channels[-1], 10)
    x = rng.normal(size=(batch_size, size, size, 3)).astype(np.float32)
    return Model([stage] * (num_stages - 1) + [last], parameters, x, rng.integers(0, 10, batch_size))


def make_transformer(
    num_stages: int = 4, batch_size: int = 2, length: int = 40, width: int = 128, num_blocks: int = 1
) -> Model:
    """Blocks of attention and two dense layers, with norms before them; mean-square loss."""
    rng = np.random.default_rng(0)
    num_heads = 4

    def norm(x: Any, scale: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * scale

    def block(parameters: Any, x: Any) -> Any:
        joined = norm(x, parameters["norm1"]) @ parameters["qkv"]
        split = joined.reshape(*x.shape[:2], 3, num_heads, width // num_heads)
        q, k, v = (split[:, :, place].transpose(0, 2, 1, 3) for place in range(3))
        weights = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) * (width // num_heads) ** -0.5)
        attended = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + attended @ parameters["out"]
        return x + jax.nn.gelu(norm(x, parameters["norm2"]) @ parameters["up"]) @ parameters["down"]

    def blocks(parameters: Any, x: Any) -> Any:
        for own in parameters:
            x = block(own, x)
        return x

    def stage(parameters: Any, x: Any, target: Any) -> Any:
        return blocks(parameters, x), target

    def last(parameters: Any, x: Any, target: Any) -> Any:
        return jnp.mean((blocks(parameters, x) - target) ** 2)

    def array(*shape: int) -> Any:
        return (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)

    parameters = [
        [
            {
                "norm1": np.ones(width, np.float32),
                "qkv": array(width, 3 * width),
                "out": array(width, width),
                "norm2": np.ones(width, np.float32),
                "up": array(width, 4 * width),
                "down": array(4 * width, width),
            }
            for _ in range(num_blocks)
        ]
        for _ in range(num_stages)
    ]
    x, target = rng.normal(size=(2, batch_size, length, width)).astype(np.float32)
    return Model([stage] * (num_stages - 1) + [last], parameters, x, target)


def _mlp(width: int, batch_size: int, num_layers: int, num_stages: int, target: float) -> Workload:
    name = f"MLP {width} wide, {num_layers} layers, {batch_size} x 16, {num_stages} stages"
    make = functools.partial(make_mlp, width, batch_size, num_layers, num_stages)
    return Workload(name, make, num_stages, 16, target)


WORKLOADS = {
    "mlp64": _mlp(64, 32, 4, 2, 1.4),
    "mlp256": _mlp(256, 32, 4, 2, 1.1),
    "mlp512": _mlp(512, 64, 4, 2, 1.0),
    "mlp512-4": _mlp(512, 64, 8, 4, 1.0),
    "mlp1024": _mlp(1024, 128, 4, 2, 1.0),
    "convolutional": Workload(
        "convolutional net, 8 x 16, 4 stages", make_convolutional_net, 4, 16, 1.15, 16
    ),
    "transformer": Workload("transformer, 2 x 16, 4 stages", make_transformer, 4, 16, 1.15),
    "gpt": Workload(
        "8 blocks, AdamW and a clipped norm, 4 stages",
        functools.partial(make_transformer, num_blocks=2),
        4,
        8,
        1.15,
        make_optimizer=lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)),
    ),
}


def make_plain_step(
    model: Model, num_micro_batches: int, unroll: int = 1, optimizer: Any = None
) -> tuple[Callable[..., Any], Any, Any]:
    """A training step by hand: one jitted scan that accumulates gradients, and an update.

    Args:
      model: the model.
      num_micro_batches: per step.
      unroll: of the scan.
      optimizer: of Optax; None: SGD by hand.

    Returns:
      The step, a function of the parameters (with an optimizer: a pair of these and its state) and the
      stacked micro-batches that returns the new ones and the losses; the parameters; and the micro-batches.
    """

    def loss(parameters: Any, x: Any, target: Any) -> Any:
        values = (x, target)
        for stage, own in zip(model.stages[:-1], parameters[:-1], strict=True):
            values = stage(own, *values)
        return model.stages[-1](parameters[-1], *values)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(before: Any, micro_batches: Any) -> Any:
        parameters, state = (before, None) if optimizer is None else before

        def accumulate(total: Any, micro_batch: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(parameters, *micro_batch)
            return jax.tree.map(jnp.add, total, gradient), value

        zeros = jax.tree.map(jnp.zeros_like, parameters)
        total, losses = jax.lax.scan(accumulate, zeros, micro_batches, unroll=unroll)
        mean = jax.tree.map(lambda g: g / num_micro_batches, total)
        if optimizer is None:
            return jax.tree.map(lambda p, g: p - RATE * g, parameters, mean), losses
        changes, state = optimizer.update(mean, state, parameters)
        return (optax.apply_updates(parameters, changes), state), losses

    stacked = [np.stack(part) for part in zip(*model.micro_batches(num_micro_batches), strict=True)]
    start = jax.device_put(model.parameters)
    if optimizer is not None:
        start = start, jax.jit(optimizer.init)(start)
    return step, start, jax.device_put(tuple(stacked))
