"""Loss scaling: the backward starts from a scale in place of 1, so that small float16 gradients are kept.

The scale is a leaf of the optimizer's state. The gradients that an update gets are too large by this
factor. The update divides them, and leaves everything as it was if one of them is not finite.
Source: Micikevicius et al., Mixed Precision Training, section 3.2 (arXiv:1710.03740).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ipu_pipeline.engine.programs.accumulation import count_dtype

__all__ = ["LossScale", "LossScaleState", "LossScaled", "scale_loss", "wrap"]


class LossScale(NamedTuple):
    """The position of the scale among the leaves of the optimizer's state, and the first scale."""

    leaf: int
    initial: float


class LossScaleState(NamedTuple):
    """The state of an optimizer with loss scaling.

    Attributes:
      scale: float32 scalar.
      num_good: int32 scalar, updates with finite gradients since the scale was last changed.
      inner: the state of the optimizer within.
    """

    scale: Any
    num_good: Any
    inner: Any


class LossScaled(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # Optax has no annotations
    """An optimizer whose gradients are `LossScaleState.scale` times too large.

    Attributes:
      initial_scale: the first scale.
    """

    initial_scale: float


def scale_loss(
    transformation: optax.GradientTransformation,
    initial_scale: float,
    dynamic: bool,
    growth_interval: int,
    factor: float,
) -> LossScaled:
    """Makes a transformation for gradients of a scaled loss. It runs in at least 32 bits."""
    inner = optax.with_extra_args_support(transformation)

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(count_dtype(leaf.dtype)), tree)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(jnp.float32(initial_scale), jnp.int32(0), inner.init(widen(params)))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        scale, num_good, before = state
        gradients = jax.tree.map(lambda leaf: leaf / scale.astype(leaf.dtype), widen(gradients))
        finite = jnp.bool_(True)
        for leaf in jax.tree.leaves(gradients):
            finite &= jnp.all(jnp.isfinite(leaf))
        params = None if params is None else widen(params)
        changes, after = inner.update(gradients, before, params, **extra)
        changes = jax.tree.map(lambda leaf: jnp.where(finite, leaf, jnp.zeros_like(leaf)), changes)
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        if dynamic:
            num_good = num_good + 1
            grown = scale * jnp.float32(factor)
            grows = (num_good >= growth_interval) & jnp.isfinite(grown)
            shrunk = jnp.maximum(scale / jnp.float32(factor), jnp.minimum(scale, jnp.float32(1)))
            scale = jnp.where(finite, jnp.where(grows, grown, scale), shrunk)
            num_good = jnp.where(finite & ~grows, num_good, 0)
        return changes, LossScaleState(scale, num_good, after)

    made = LossScaled(init, update)
    made.initial_scale = initial_scale
    return made


def wrap(inner: optax.GradientTransformation, init: Any, update: Any) -> Any:
    """A transformation of these functions, which is loss scaled if the one within is."""
    if not isinstance(inner, LossScaled):
        return optax.GradientTransformationExtraArgs(init, update)
    made = LossScaled(init, update)
    made.initial_scale = inner.initial_scale
    return made
