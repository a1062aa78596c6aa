"""TensorFlow 1's decays of learning rates, as functions of the global step.

Each function takes a step: a number, a traced scalar, or `get_global_step()`. If the global step has no
value yet, as in a `model_fn`, the result is computed where it is used. As an Optax schedule, write `lambda
step: exponential_decay(0.1, step, 1000, 0.96)`. The formulas are from the documentation of `tf.train` in
TensorFlow 1.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.tf1.graph.symbols import waits_for_step

__all__ = [
    "cosine_decay",
    "exponential_decay",
    "inverse_time_decay",
    "natural_exp_decay",
    "piecewise_constant",
    "polynomial_decay",
]


@waits_for_step
def exponential_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns `learning_rate * decay_rate**(global_step / decay_steps)`.

    Example:
      >>> ipu.optimizers.tf1.exponential_decay(0.1, 2000, decay_steps=1000, decay_rate=0.5)
      Array(0.025, dtype=float32)

    Args:
      learning_rate: the rate at the first step.
      global_step: the number of steps so far.
      decay_steps: the number of steps in which the rate is multiplied by `decay_rate` once.
      decay_rate: the factor.
      staircase: whether the quotient is rounded down.
      name: has no effect.

    Returns:
      A floating-point scalar.
    """
    del name
    return learning_rate * jnp.power(decay_rate, _quotient(global_step, decay_steps, staircase))


@waits_for_step
def natural_exp_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns `learning_rate * exp(-decay_rate * global_step / decay_steps)`.

    The arguments are those of `exponential_decay`.

    Example:
      >>> ipu.optimizers.tf1.natural_exp_decay(0.1, 1000, decay_steps=1000, decay_rate=1.0)
      Array(0.03678795, dtype=float32)
    """
    del name
    return learning_rate * jnp.exp(-decay_rate * _quotient(global_step, decay_steps, staircase))


@waits_for_step
def inverse_time_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns `learning_rate / (1 + decay_rate * global_step / decay_steps)`.

    The arguments are those of `exponential_decay`.

    Example:
      >>> ipu.optimizers.tf1.inverse_time_decay(0.1, 1000, decay_steps=1000, decay_rate=1.0)
      Array(0.05, dtype=float32)
    """
    del name
    return learning_rate / (1 + decay_rate * _quotient(global_step, decay_steps, staircase))


@waits_for_step
def polynomial_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    end_learning_rate: Any = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Decays `learning_rate` to `end_learning_rate` in `decay_steps`, along `(1 - share)**power`.

    Example:
      >>> ipu.optimizers.tf1.polynomial_decay(0.1, 500, decay_steps=1000, end_learning_rate=0.0)
      Array(0.05, dtype=float32)

    Args:
      learning_rate: the rate at the first step.
      global_step: the number of steps so far.
      decay_steps: the number of steps of the decay.
      end_learning_rate: the rate after the decay.
      power: the exponent; 1 is a straight line.
      cycle: whether `decay_steps` is stretched to the next multiple instead of ending the decay.
      name: has no effect.

    Returns:
      A floating-point scalar.
    """
    del name
    step, steps = jnp.asarray(global_step, float), jnp.asarray(decay_steps, float)
    if cycle:
        steps = steps * jnp.maximum(1.0, jnp.ceil(step / steps))
    share = jnp.minimum(step, steps) / steps
    return (learning_rate - end_learning_rate) * (1 - share) ** power + end_learning_rate


@waits_for_step
def cosine_decay(
    learning_rate: Any, global_step: Any, decay_steps: Any, alpha: float = 0.0, name: str | None = None
) -> jax.Array:
    """Decays `learning_rate` to `alpha * learning_rate` in `decay_steps`, along half a cosine.

    Example:
      >>> ipu.optimizers.tf1.cosine_decay(0.1, 500, decay_steps=1000)
      Array(0.05, dtype=float32)
    """
    del name
    share = jnp.minimum(jnp.asarray(global_step, float), decay_steps) / decay_steps
    return learning_rate * ((1 - alpha) * 0.5 * (1 + jnp.cos(math.pi * share)) + alpha)


@waits_for_step
def piecewise_constant(
    x: Any, boundaries: Sequence[Any], values: Sequence[Any], name: str | None = None
) -> jax.Array:
    """Returns `values[0]` up to and including `boundaries[0]`, then `values[1]`, and so on.

    Example:
      >>> ipu.optimizers.tf1.piecewise_constant(150, boundaries=[100, 200], values=[0.1, 0.01, 0.001])
      Array(0.01, dtype=float32)

    Args:
      x: the number of steps so far.
      boundaries: steps in increasing order.
      values: the values, one more than boundaries.
      name: has no effect.

    Raises:
      ValueError: the number of values is wrong.
    """
    del name
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"piecewise_constant: values must be one more than boundaries; got {len(values)} and "
            f"{len(boundaries)}."
        )
    number = sum((jnp.asarray(x > boundary, jnp.int32) for boundary in boundaries), jnp.int32(0))
    return jnp.asarray(values)[number]


def _quotient(step: Any, steps: Any, staircase: bool) -> jax.Array:
    quotient = jnp.asarray(step, float) / steps
    return jnp.floor(quotient) if staircase else quotient
