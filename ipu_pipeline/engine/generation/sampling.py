"""Sampling of tokens from logits: greedy, or drawn with a temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.checks import is_integer, is_number, require

# Top-p is the nucleus of Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.
# Filters are applied in the order of Hugging Face's transformers: temperature, top-k, top-p.

_ALL = 2**31 - 1  # top_k that keeps every word
_WHOLE = 2.0  # top_p that keeps every word, whatever rounding makes of a sum of probabilities


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The way in which a request's tokens are chosen.

    Example:
      >>> engine.Sampling(temperature=0.8, top_k=40)
      Sampling(temperature=0.8, top_k=40, top_p=None)

    Attributes:
      temperature: the divisor of the logits before a token is drawn, a finite number of at least 0. At 0
        nothing is drawn: the token is the word with the largest logit, the first of equal ones.
      top_k: tokens are drawn from this number of words with the largest logits, at least 1, and words whose
        logits equal the smallest of these. None: from all words.
      top_p: tokens are drawn from the most likely words that together have at least this probability, above
        0 and at most 1. None: from all words.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        if not is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"Sampling: temperature must be a finite number from 0 (greedy); got {self.temperature!r}."
            )
        rule = "Sampling: top_k must be an integer of at least 1, or None for all words"
        require(self.top_k is None or is_integer(self.top_k, 1), rule, self.top_k)
        rule = "Sampling: top_p must be a number above 0 and at most 1, or None for all words"
        require(self.top_p is None or (is_number(self.top_p) and 0 < self.top_p <= 1), rule, self.top_p)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                f"Sampling: top_k={self.top_k} and top_p={self.top_p} only matter where tokens are drawn, "
                "but temperature is 0, which is greedy. Set temperature=1.0, or leave them out."
            )


class SamplingArrays(NamedTuple):
    """The `Sampling` of one request, scalars, or of several, stacked."""

    temperature: Any  # float32
    top_k: Any  # int32
    top_p: Any  # float32

    @staticmethod
    def of(samplings: Sequence[Sampling | None]) -> SamplingArrays:
        """Makes arrays with an entry for each; None stands for a slot without a request."""
        of_slots = [sampling or Sampling() for sampling in samplings]
        return SamplingArrays(
            np.array([sampling.temperature for sampling in of_slots], np.float32),
            np.array([min(sampling.top_k or _ALL, _ALL) for sampling in of_slots], np.int32),
            np.array(
                [_WHOLE if sampling.top_p in (None, 1) else sampling.top_p for sampling in of_slots],
                np.float32,
            ),
        )


def choose(logits: jax.Array, sampling: SamplingArrays | None, key: jax.Array) -> jax.Array:
    """Chooses a token.

    Returns:
      The token, an int32 scalar.
    """
    greedy = jnp.argmax(logits).astype(jnp.int32)
    if sampling is None:
        return greedy
    temperature, top_k, top_p = map(jnp.asarray, sampling)
    scaled = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, jnp.float32(1))
    ordered = jnp.sort(scaled, descending=True)
    smallest = ordered[jnp.minimum(top_k, len(ordered)) - 1]
    likely = jax.nn.softmax(jnp.where(ordered >= smallest, ordered, -jnp.inf))
    # A word is kept if the likelier ones have less than top_p; the first always is.
    num_kept = jnp.maximum(jnp.sum(jnp.cumsum(likely) - likely < top_p), 1)
    smallest = jnp.maximum(smallest, ordered[num_kept - 1])
    drawn = jax.random.categorical(key, jnp.where(scaled >= smallest, scaled, -jnp.inf))
    return jnp.where(temperature > 0, drawn.astype(jnp.int32), greedy)
