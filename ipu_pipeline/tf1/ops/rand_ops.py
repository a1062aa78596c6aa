"""Random numbers, as Graphcore's `ipu.rand_ops` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.fronts import draw_key
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import is_number
from ipu_pipeline.ground.user_warnings import warn_once

__all__ = ["dropout"]

_OLDER_ORDER = " Older SDKs had the seed second and the rate third: pass them by name, rate= and seed=."


def dropout(
    x: Any,
    rate: float = 0.5,
    noise_shape: Sequence[int | None] | None = None,
    seed: Any = None,
    name: str | None = None,
    *,
    ref: bool = True,
    seed_modifier: int = 1,
) -> jax.Array:
    """Sets elements to 0 with the probability `rate`, and divides the others by `1 - rate`.

    It does so in every program: leave it out of programs that infer, or use `layers.Dropout`.

    Example:
      >>> ipu.rand_ops.dropout(np.ones(6, np.float32), rate=0.5, seed=3)
      Array([2., 0., 0., 2., ...], dtype=float32)

    Args:
      x: floating-point numbers.
      rate: from 0, less than 1.
      noise_shape: the shape of the draws, which are broadcast to the inputs: 1 where elements share a draw,
        None for the size of the inputs.
      seed: None: a key of the stage, another one for each micro-batch. Or one or two integers, traced or
        not: equal seeds give equal draws.
      name: the name of an operation in TensorFlow; not used here.
      ref: for IPUs; False warns.
      seed_modifier: from older SDKs: an integer other than 1 makes another seed of `seed`.

    Older SDKs had the positions (x, seed, rate, seed_modifier, noise_shape, name). A seed in the rate's
    position is an error.

    Returns:
      The shape and dtype of the inputs.

    Raises:
      RuntimeError: `seed` is None, and no stage is being traced.
      TypeError: the inputs are not floating-point numbers.
      ValueError: the rate, noise_shape or seed is not usable.
    """
    del name
    if not ref:
        warn_once("dropout.ref", "dropout: ref=False has no effect: it was for how IPUs draw numbers.")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"dropout: x must be floating-point numbers; got {x.dtype.name}.")
    if not is_number(rate) or not 0 <= rate < 1:
        raise ValueError(
            f"dropout: rate must be a number from 0 and less than 1; got {rate!r}.{_OLDER_ORDER}"
        )
    rate, shape = float(rate), x.shape
    if noise_shape is not None:
        if not isinstance(noise_shape, (Sequence, np.ndarray)):
            raise TypeError(f"dropout: noise_shape must be a list; got {noise_shape!r}.{_OLDER_ORDER}")
        sizes = tuple(noise_shape)
        if len(sizes) != x.ndim or any(
            size not in (None, 1, full_size) for size, full_size in zip(sizes, x.shape, strict=True)
        ):
            raise ValueError(
                f"dropout: noise_shape must have 1, None or the size of each axis of x; got "
                f"{noise_shape!r} for shape {x.shape}."
            )
        shape = tuple(
            full_size if size is None else size for size, full_size in zip(sizes, x.shape, strict=True)
        )
    if rate == 0:
        return x
    key = draw_key("ipu.rand_ops.dropout", " Or give it a `seed`.") if seed is None else _key_of(seed)
    if seed_modifier != 1:
        key = jax.random.fold_in(key, seed_modifier)
    is_kept = jax.random.bernoulli(key, 1 - rate, shape)
    return jnp.where(is_kept, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros_like(x))


def _key_of(seed: Any) -> jax.Array:
    numbers = jnp.atleast_1d(seed) if isinstance(seed, jax.Array) else np.atleast_1d(np.asarray(seed))
    if numbers.ndim != 1 or numbers.size > 2 or not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise ValueError(f"dropout: seed must be one or two integers; got {seed!r}.")
    key = jax.random.key(0)
    for index in range(numbers.size):
        low = numbers[index] & 0xFFFFFFFF if numbers.dtype.itemsize > 4 else numbers[index]
        key = jax.random.fold_in(key, low.astype(np.uint32))
    return key


explain_missing(__name__)
