"""An optimizer that keeps an average of the weights in its state, to evaluate with."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ipu_pipeline.engine.fronts import LossScaled, describe_other_optimizer
from ipu_pipeline.ground.checks import is_number

__all__ = ["AveragedWeightsState", "with_averaged_weights"]


class AveragedWeightsState(NamedTuple):
    """The wrapped optimizer's state, and the averages, like the variables in at least float32."""

    inner: Any
    average: Any


def with_averaged_weights(
    inner: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also keeps an exponential moving average of the weights, in its state as `average`.

    The averages start as the weights. After each weight update they become `decay` times the old averages
    plus 1 - `decay` times the new weights, as in `tf.train.ExponentialMovingAverage`. The update itself is
    not changed. Use `Session.weights_of("average")` to evaluate with them.

    Example:
      >>> optimizer = ipu.optimizers.with_averaged_weights(optax.adamw(1e-3), decay=0.999)

    Args:
      inner: the optimizer.
      decay: at least 0, which keeps the last weights, and less than 1.

    Raises:
      TypeError: `inner` is not an `optax.GradientTransformation`.
      ValueError: `decay` is out of range.
    """
    if not isinstance(inner, optax.GradientTransformation) or isinstance(inner, LossScaled):
        raise TypeError(
            "with_averaged_weights: the optimizer must be an optax.GradientTransformation, for example "
            f"optax.sgd(0.01); got {describe_other_optimizer(inner)}. It goes inside of ipu.optimizers."
        )
    if not is_number(decay) or not 0 <= decay < 1:
        raise ValueError(f"with_averaged_weights: decay must be a number from 0 to below 1; got {decay!r}.")
    wrapped = optax.with_extra_args_support(inner)

    def init(params: Any) -> AveragedWeightsState:
        return AveragedWeightsState(wrapped.init(params), jax.tree.map(_widen, params))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        changes, inner_state = wrapped.update(gradients, state.inner, params, **extra)
        new = jax.tree.map(_widen, optax.apply_updates(params, changes))
        share = 1 - float(decay)
        average = jax.tree.map(lambda old, now: old + share * (now - old), state.average, new)
        return changes, AveragedWeightsState(inner_state, average)

    return optax.GradientTransformationExtraArgs(init, update)


def _widen(value: Any) -> jax.Array:
    return jnp.asarray(value, jnp.promote_types(value.dtype, jnp.float32))
