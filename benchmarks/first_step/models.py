"""What is compiled: a GPT of flax.linen in four stages, and the variables of a convolution network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

__all__ = ["CASES", "Case", "Gpt", "make_optimizer"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A variant of the GPT.

    Attributes:
      dropout: the share of activations that are dropped.
      dtype: of the activations.
      tolerance: relative, of the losses of both sides; None where these draw other random numbers.
    """

    dropout: float = 0.0
    dtype: str = "float32"
    tolerance: float | None = 1e-5


CASES = {
    "float32": Case(),
    "dropout": Case(dropout=0.1, tolerance=None),
    "bfloat16": Case(dtype="bfloat16", tolerance=1e-2),
}
NUM_STAGES, BLOCKS_PER_STAGE, NUM_MICRO_BATCHES = 4, 2, 8
WIDTH, NUM_HEADS, LENGTH, VOCABULARY, BATCH_SIZE = 128, 4, 64, 512, 2


class Block(nn.Module):
    """A transformer block; x has the axes [sequence, position, width]."""

    case: Case
    is_training: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Attention and two dense layers, each with a norm before it."""
        case, is_silent = self.case, not self.is_training
        may_see = nn.make_causal_mask(jnp.ones(x.shape[:2], bool))
        hidden = nn.LayerNorm(dtype=case.dtype)(x)
        hidden = nn.MultiHeadDotProductAttention(
            NUM_HEADS, dtype=case.dtype, dropout_rate=case.dropout, deterministic=is_silent
        )(hidden, mask=may_see)
        x = x + nn.Dropout(case.dropout)(hidden, deterministic=is_silent)
        hidden = nn.LayerNorm(dtype=case.dtype)(x)
        hidden = nn.gelu(nn.Dense(4 * WIDTH, dtype=case.dtype)(hidden))
        hidden = nn.Dense(WIDTH, dtype=case.dtype)(hidden)
        return x + nn.Dropout(case.dropout)(hidden, deterministic=is_silent)


class Blocks(nn.Module):
    """The blocks of a stage."""

    case: Case

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Applies one block after another."""
        for _number in range(BLOCKS_PER_STAGE):
            x = Block(self.case)(x)
        return x


class Gpt:
    """The stages of a GPT whose first and last stage share the table of tokens.

    Attributes:
      stages: `f(next_key, parameters, x, targets)`; the last one returns the loss.
      parameters: of each stage, NumPy arrays; the first and the last have the same table.
      micro_batches: tokens and targets.
    """

    def __init__(self, name: str) -> None:
        """Makes the case of a name. Starts JAX."""
        case = CASES[name]
        blocks, norm = Blocks(case), nn.LayerNorm()
        x = jnp.zeros((BATCH_SIZE, LENGTH, WIDTH), case.dtype)
        random = np.random.default_rng(0)

        def normal(*shape: int) -> Any:
            return (0.02 * random.normal(size=shape)).astype(np.float32)

        shapes = jax.eval_shape(blocks.init, {"params": jax.random.key(0), "dropout": jax.random.key(0)}, x)

        def draw(path: Any, leaf: Any) -> Any:
            kind = jax.tree_util.keystr(path[-1:], simple=True)
            known = {"scale": np.ones, "bias": np.zeros}
            return known[kind](leaf.shape, np.float32) if kind in known else normal(*leaf.shape)

        self.parameters: list[Any] = [
            {"blocks": jax.tree_util.tree_map_with_path(draw, shapes)} for _stage in range(NUM_STAGES)
        ]
        table = normal(VOCABULARY, WIDTH)
        self.parameters[0] |= {"table": table, "positions": normal(LENGTH, WIDTH)}
        self.parameters[-1] |= {
            "table": table,
            "norm": {"params": {"scale": np.ones(WIDTH, np.float32), "bias": np.zeros(WIDTH, np.float32)}},
        }

        def apply(next_key: Callable[[], Any], parameters: Any, x: Any) -> Any:
            keys = {"dropout": next_key()} if case.dropout else {}
            return blocks.apply(parameters["blocks"], x, rngs=keys)

        def first(next_key: Callable[[], Any], parameters: Any, tokens: Any, targets: Any) -> Any:
            x = parameters["table"][tokens] + parameters["positions"]
            return apply(next_key, parameters, x.astype(case.dtype)), targets

        def middle(next_key: Callable[[], Any], parameters: Any, x: Any, targets: Any) -> Any:
            return apply(next_key, parameters, x), targets

        def last(next_key: Callable[[], Any], parameters: Any, x: Any, targets: Any) -> Any:
            x = norm.apply(parameters["norm"], apply(next_key, parameters, x))
            logits = x @ parameters["table"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        self.stages: Sequence[Callable[..., Any]] = [first, *[middle] * (NUM_STAGES - 2), last]
        tokens = random.integers(0, VOCABULARY, (NUM_MICRO_BATCHES, BATCH_SIZE, LENGTH + 1))
        self.micro_batches = [(own[:, :-1], own[:, 1:]) for own in tokens.astype(np.int32)]


def make_optimizer() -> Any:
    """AdamW after clipping, whose rate warms up and then falls as a cosine."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 10, 100)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
