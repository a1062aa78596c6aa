"""Models that are one function, as people write them, and the cuts that a person would make.

By hand means what users of torch.distributed.pipelining write as `split_spec`: points before every so
many blocks, with what is before the first block in the first stage, and what is after the last one in the
last. Here these points are blocks by number; `Model.blocks` has the functions between them.
"""

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

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
      blocks: functions of their parameters and values, which return the next values; the last returns the
        loss. The first takes the micro-batch.
      parameters: of each block.
      x: inputs of a micro-batch.
      target: its targets.
    """

    blocks: Sequence[Callable[..., Any]]
    parameters: Sequence[Any]
    x: Any
    target: Any

    def whole(self, parameters: Sequence[Any], *values: Any) -> Any:
        """The model as one function."""
        for block, own in zip(self.blocks, parameters, strict=True):
            made = block(own, *values)
            values = made if isinstance(made, tuple) else (made,)
        return values[0]

    def by_hand(self, num_stages: int) -> tuple[list[Callable[..., Any]], list[Any]]:
        """Stages of as many blocks each, as far as that goes, and their parameters."""
        ends = [round(len(self.blocks) * stage / num_stages) for stage in range(num_stages + 1)]
        groups = [range(first, end) for first, end in itertools.pairwise(ends)]

        def stage(group: range, parameters: Sequence[Any], *values: Any) -> Any:
            for number, own in zip(group, parameters, strict=True):
                made = self.blocks[number](own, *values)
                values = made if isinstance(made, tuple) else (made,)
            return values if len(values) > 1 else values[0]

        stages = [functools.partial(stage, group) for group in groups]
        return stages, [[self.parameters[number] for number in group] for group in groups]

    def micro_batches(self, number: int) -> list[tuple[Any, Any]]:
        """So many different micro-batches."""
        return [(np.roll(self.x, shift, 0), np.roll(self.target, shift, 0)) for shift in range(number)]


_random = np.random.default_rng(0)


def _draw(*shape: int) -> np.ndarray[Any, Any]:
    fan = int(np.prod(shape[:-1]))
    return (_random.normal(size=shape) / np.sqrt(fan)).astype(np.float32)


def _images(batch: int, size: int, channels: int) -> np.ndarray[Any, Any]:
    return _random.normal(size=(batch, size, size, channels)).astype(np.float32)


def _classify(w: Any, x: Any, target: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, target).mean()


def make_mlp() -> Model:
    """Dense layers of uneven widths."""
    widths = [512, 256, 1024, 1024, 256, 128, 128, 1536, 1536, 128, 128, 512]

    def dense(w: Any, x: Any, target: Any) -> Any:
        return jax.nn.relu(x @ w), target

    parameters = [_draw(*pair) for pair in itertools.pairwise(widths)]
    blocks = [*[dense] * len(parameters), _classify]
    labels = _random.integers(0, 64, 64).astype(np.int32)
    return Model(blocks, [*parameters, _draw(512, 64)], _draw(64, 512) * 20, labels)


def _norm(gain: Any, x: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def _attend(w: Any, x: Any, num_heads: int) -> Any:
    *batch, length, width = x.shape

    def heads(value: Any) -> Any:
        return value.reshape(*batch, length, num_heads, width // num_heads).swapaxes(-2, -3)

    q, k, v = map(heads, jnp.split(x @ w["qkv"], 3, -1))
    scores = q @ k.swapaxes(-1, -2) * (width // num_heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return (jax.nn.softmax(scores) @ v).swapaxes(-2, -3).reshape(x.shape) @ w["out"]


def _block(w: Any, x: Any, target: Any) -> Any:
    x = x + _attend(w, _norm(w["first"], x), 4)
    return x + jax.nn.gelu(_norm(w["second"], x) @ w["up"]) @ w["down"], target


def _make_block(width: int, factor: int = 4) -> dict[str, Any]:
    return {
        "first": np.ones(width, np.float32),
        "second": np.ones(width, np.float32),
        "qkv": _draw(width, 3 * width),
        "out": _draw(width, width),
        "up": _draw(width, factor * width),
        "down": _draw(factor * width, width),
    }


def make_gpt() -> Model:
    """24 blocks, and a vocabulary of 50,000."""
    width, length, vocabulary = 128, 64, 50_000

    def embed(w: Any, ids: Any, target: Any) -> Any:
        return w["tokens"][ids] + w["places"], target

    embedding = {"tokens": _draw(vocabulary, width) * 15, "places": _draw(length, width)}
    blocks = [embed, *[_block] * 24, _classify]
    parameters = [embedding, *(_make_block(width) for _ in range(24)), _draw(width, vocabulary)]
    ids = _random.integers(0, vocabulary, (2, 4, length)).astype(np.int32)
    return Model(blocks, parameters, *ids)


def make_mixture() -> Model:
    """Twelve blocks, one of which has eight times as wide a layer: all its experts in one."""
    width = 128
    heavy = 4
    parameters = [_make_block(width, 64 if number == heavy else 8) for number in range(12)]
    blocks = [*[_block] * 12, _classify]
    x = _random.normal(size=(4, 64, width)).astype(np.float32)
    labels = _random.integers(0, 64, (4, 64)).astype(np.int32)
    return Model(blocks, [*parameters, _draw(width, 64)], x, labels)


def _conv(w: Any, x: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _batch_norm(w: Any, x: Any) -> Any:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * w[0] + w[1]


def _make_norm(channels: int) -> np.ndarray[Any, Any]:
    return np.stack([np.ones(channels, np.float32), np.zeros(channels, np.float32)])


def make_resnet() -> Model:
    """ResNet-50 on small images: a stem, sixteen bottleneck blocks, and a classifier."""

    def stem(w: Any, x: Any, target: Any) -> Any:
        return jax.nn.relu(_batch_norm(w["norm"], _conv(w["conv"], x))), target

    def bottleneck(stride: int, w: Any, x: Any, target: Any) -> Any:
        y = jax.nn.relu(_batch_norm(w["norm0"], _conv(w["conv0"], x)))
        y = jax.nn.relu(_batch_norm(w["norm1"], _conv(w["conv1"], y, stride)))
        y = _batch_norm(w["norm2"], _conv(w["conv2"], y))
        if "short" in w:
            x = _batch_norm(w["norm3"], _conv(w["short"], x, stride))
        return jax.nn.relu(x + y), target

    def classify(w: Any, x: Any, target: Any) -> Any:
        return _classify(w, x.mean((1, 2)), target)

    blocks: list[Callable[..., Any]] = [stem]
    parameters: list[Any] = [{"conv": _draw(3, 3, 3, 64), "norm": _make_norm(64)}]
    channels = 64
    for level, number in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**level
        for place in range(number):
            own = {
                "conv0": _draw(1, 1, channels, inner),
                "conv1": _draw(3, 3, inner, inner),
                "conv2": _draw(1, 1, inner, 4 * inner),
                **{f"norm{n}": _make_norm(c) for n, c in enumerate((inner, inner, 4 * inner))},
            }
            if place == 0:
                own |= {"short": _draw(1, 1, channels, 4 * inner), "norm3": _make_norm(4 * inner)}
            blocks.append(functools.partial(bottleneck, 2 if level and not place else 1))
            parameters.append(own)
            channels = 4 * inner
    labels = _random.integers(0, 100, 8).astype(np.int32)
    return Model([*blocks, classify], [*parameters, _draw(2048, 100)], _images(8, 32, 3), labels)


def make_unet() -> Model:
    """A U-Net of four levels: each step up reads what the step down of its level made."""

    def double(w: Any, x: Any) -> Any:
        return jax.nn.relu(_conv(w[1], jax.nn.relu(_conv(w[0], x))))

    def down(w: Any, x: Any, target: Any, *skips: Any) -> Any:
        x = double(w, x)
        pooled = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))
        return pooled, target, *skips, x

    def bottom(w: Any, x: Any, target: Any, *skips: Any) -> Any:
        return double(w, x), target, *skips

    def up(w: Any, x: Any, target: Any, *skips: Any) -> Any:
        x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        return double(w, jnp.concatenate([x, skips[-1]], -1)), target, *skips[:-1]

    def error(w: Any, x: Any, target: Any) -> Any:
        return ((_conv(w, x) - target) ** 2).mean()

    def pair(before: int, after: int) -> list[Any]:
        return [_draw(3, 3, before, after), _draw(3, 3, after, after)]

    widths = [16, 32, 64, 128]
    blocks = [*[down] * 4, bottom, *[up] * 4, error]
    parameters = [pair(a, b) for a, b in zip([3, *widths], widths, strict=False)]
    parameters += [pair(128, 256)]
    parameters += [
        pair(above + own, own) for above, own in zip([256, *widths[:0:-1]], widths[::-1], strict=True)
    ]
    return Model(blocks, [*parameters, _draw(1, 1, 16, 1)], _images(4, 64, 3), _images(4, 64, 1))


def make_tutorial() -> Model:
    """The tutorial's: pictures of digits, flattened, and six dense layers."""
    widths = [784, 256, 128, 64, 32, 10, 10]

    def add(w: Any, x: Any, target: Any) -> Any:
        return x + w, target

    def dense(w: Any, x: Any, target: Any) -> Any:
        return jax.nn.relu(x @ w), target

    parameters = [
        np.zeros(784, np.float32),
        *(_draw(*pair) for pair in itertools.pairwise(widths[:-1])),
    ]
    blocks = [add, *[dense] * (len(parameters) - 1), _classify]
    labels = _random.integers(0, 10, 32).astype(np.int32)
    return Model(blocks, [*parameters, _draw(10, 10)], _draw(32, 784) * 28, labels)


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": make_mlp,
    "gpt": make_gpt,
    "resnet50": make_resnet,
    "unet": make_unet,
    "mixture": make_mixture,
    "tutorial": make_tutorial,
}
