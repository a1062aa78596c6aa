"""A GPT of flax.linen modules, and the stages that it is cut into.

Rotary positions (Su et al., "RoFormer", 2021), RMS normalization before both parts of a block, and one
table that embeds tokens and predicts them. Every block is an `engine.Shared` with a name of its own, so
that variables have the same names wherever the model is cut.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from ipu_pipeline import engine


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      words: tokens of the vocabulary.
      context: the most tokens of a conversation.
      layers: transformer blocks in all.
      width: of the activations.
      heads: of the attention; they divide the width.
    """

    words: int
    context: int = 128
    layers: int = 4
    width: int = 448
    heads: int = 7

    def __post_init__(self) -> None:
        """Checks the sizes."""
        for name, number in dataclasses.asdict(self).items():
            if number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}.")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"The width must be a multiple of twice the heads, {2 * self.heads}; got {self.width}."
            )


def rotate(x: jax.Array, position: Any) -> jax.Array:
    """Turns pairs of numbers by angles that grow with the position; x is [batch, length, heads, size]."""
    size = x.shape[-1]
    speeds = 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    places = (position + jnp.arange(x.shape[1])).astype(x.dtype)
    angles = places[:, None, None] * speeds
    first, second = jnp.split(x, 2, axis=-1)
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cosines - second * sines, first * sines + second * cosines], axis=-1)


class Block(nn.Module):
    """A transformer block: attention, then two layers of neurons, each added to what it is given."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, cache: Any = None, position: Any = 0) -> tuple[jax.Array, Any]:
        """Computes the block.

        Args:
          x: activations, float32 [batch, length, width].
          cache: None, or keys and values of earlier tokens, each float32 [batch, context, heads, size].
          position: the place of x's first token in its conversation, int32; 0 without a cache.

        Returns:
          The activations, and the keys and values: the cache's, with those of x at their positions.
        """
        width, heads = self.config.width, self.config.heads
        batch, length = x.shape[:2]
        dense = functools.partial(nn.Dense, use_bias=False, kernel_init=nn.initializers.normal(0.02))
        residual = nn.initializers.normal(0.02 / (2 * self.config.layers) ** 0.5)

        parts = dense(3 * width, name="attention_in")(nn.RMSNorm(name="attention_norm")(x))
        queries, keys, values = jnp.split(
            parts.reshape(batch, length, 3 * heads, width // heads), 3, axis=2
        )
        queries, keys = rotate(queries, position), rotate(keys, position)
        if cache is not None:
            keys = jax.lax.dynamic_update_slice_in_dim(cache[0], keys, position, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(cache[1], values, position, axis=1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / (width // heads) ** 0.5
        is_known = jnp.arange(keys.shape[1]) <= position + jnp.arange(length)[:, None]
        shares = jax.nn.softmax(jnp.where(is_known, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, values).reshape(batch, length, width)
        x = x + dense(width, kernel_init=residual, name="attention_out")(mixed)

        hidden = dense(4 * width, name="mlp_in")(nn.RMSNorm(name="mlp_norm")(x))
        x = x + dense(width, kernel_init=residual, name="mlp_out")(nn.gelu(hidden))
        return x, (keys, values)


def predict(parameters: Any, x: jax.Array) -> jax.Array:
    """Returns the logits of each position's next token, [..., words], of activations [..., width]."""
    x = nn.RMSNorm().apply({"params": {"scale": parameters["norm"]}}, x)
    return x @ parameters["tokens"].T


# Stages for training. Tokens and weights, which the last stage needs, travel through those before it.


def apply_blocks(config: Config, parameters: Any, x: jax.Array) -> jax.Array:
    """Computes a stage's blocks, one after another, on x [batch, length, width]."""
    for block in parameters["blocks"]:
        x, _cache = Block(config).apply({"params": block}, x)
    return x


def first_stage(config: Config, parameters: Any, tokens: jax.Array, weights: jax.Array) -> Any:
    """Takes a micro-batch: tokens int32 and weights float32, both [batch, length]."""
    return apply_blocks(config, parameters, parameters["tokens"][tokens]), tokens, weights


def middle_stage(
    config: Config, parameters: Any, x: jax.Array, tokens: jax.Array, weights: jax.Array
) -> Any:
    return apply_blocks(config, parameters, x), tokens, weights


def last_stage(config: Config, parameters: Any, x: jax.Array, tokens: jax.Array, weights: jax.Array) -> Any:
    """Returns the sum of the weighted losses and the sum of the weights."""
    logits = predict(parameters, apply_blocks(config, parameters, x))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return jnp.sum(losses * weights[:, 1:]), jnp.sum(weights[:, 1:])


def training_stages(config: Config, num_stages: int) -> list[Callable[..., Any]]:
    """Returns the functions of the stages, two or more, that end in a loss."""
    functions = [first_stage, *[middle_stage] * (num_stages - 2), last_stage]
    return [functools.partial(function, config) for function in functions]


# Stages that generate, for `engine.Generator`: some tokens of one conversation, and caches of those before.


def apply_cached(
    config: Config, numbers: Sequence[int], parameters: Any, x: jax.Array, position: Any
) -> Any:
    """Computes a stage's blocks on x [length, width], and adds keys and values to their caches."""
    shape = (config.context, config.heads, config.width // config.heads)
    x = x[None]
    for number, block in zip(numbers, parameters["blocks"], strict=True):
        with engine.variable_scope(f"cache{number}"):
            cache = [
                engine.get_variable(name, shape, initializer="zeros", trainable=False)[None]
                for name in ("keys", "values")
            ]
            x, (keys, values) = Block(config).apply({"params": block}, x, cache, position)
            engine.assign("keys", keys[0])
            engine.assign("values", values[0])
    return x[0]


def generating_stages(config: Config, num_stages: int) -> list[Callable[..., Any]]:
    """Returns the functions of the stages, two or more, that end in the logits of the last token given."""
    groups = divide_layers(config, num_stages)

    def first(numbers: Sequence[int], parameters: Any, tokens: jax.Array, position: Any) -> Any:
        return apply_cached(config, numbers, parameters, parameters["tokens"][tokens], position), position

    def middle(numbers: Sequence[int], parameters: Any, x: jax.Array, position: Any) -> Any:
        return apply_cached(config, numbers, parameters, x, position), position

    def last(numbers: Sequence[int], parameters: Any, x: jax.Array, position: Any) -> jax.Array:
        return predict(parameters, apply_cached(config, numbers, parameters, x, position)[-1])

    functions = [first, *[middle] * (num_stages - 2), last]
    return [functools.partial(function, group) for function, group in zip(functions, groups, strict=True)]


# Parameters.


def divide_layers(config: Config, num_stages: int) -> list[range]:
    """Returns the numbers of each stage's blocks: as many in each, where they can be divided so.

    Raises:
      ValueError: there are fewer than two stages, or more than layers.
    """
    if not 2 <= num_stages <= config.layers:
        raise ValueError(
            f"The number of stages must be from 2 to that of the layers, {config.layers}; got {num_stages}."
        )
    ends = [config.layers * number // num_stages for number in range(num_stages + 1)]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def init(config: Config, num_stages: int, key: jax.Array) -> list[Any]:
    """Returns a pytree for each stage: parameters, whose initial values do not depend on the stages."""
    keys = iter(jax.random.split(key, config.layers + 1))
    x = jnp.zeros((1, 2, config.width))
    init_block = jax.jit(lambda key: Block(config).init(key, x)["params"])
    tokens = engine.Shared("tokens", 0.02 * jax.random.normal(next(keys), (config.words, config.width)))
    blocks = [engine.Shared(f"block{number}", init_block(next(keys))) for number in range(config.layers)]
    stages: list[Any] = [
        {"blocks": [blocks[number] for number in group]} for group in divide_layers(config, num_stages)
    ]
    stages[0]["tokens"] = stages[-1]["tokens"] = tokens
    stages[-1]["norm"] = engine.Shared("norm", jnp.ones(config.width))
    return stages
