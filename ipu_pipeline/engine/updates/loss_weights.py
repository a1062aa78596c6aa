"""Losses that are weighted sums: gradients are divided by the weights of all micro-batches.

The weights are summed like gradients: a variable that is always 0, times the weight, is added to the loss.
So the variable's gradient is the weight, and it is accumulated wherever gradients are, under every schedule
and reduction. The user's optimizer sees the other variables only, with their gradients divided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine.tracing.scopes import Scope, opened
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stages import check_signature
from ipu_pipeline.engine.tracing.variables import get_variable
from ipu_pipeline.engine.updates.loss_scaling import LossScaled, wrap
from ipu_pipeline.ground.shapes import as_loss

__all__ = [
    "check_not_mapped",
    "divide_by_weight",
    "is_loss_weight",
    "weigh",
    "with_weight",
    "without_weights",
]

_SCOPE = "_loss_weight"  # of the variables whose gradients are the weights


def is_loss_weight(name: str) -> bool:
    """Whether a full name is that of a variable whose gradient is the weight of a loss."""
    return name.startswith(f"{_SCOPE}/")


def without_weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by full name, without those of such variables."""
    return {name: value for name, value in values.items() if not is_loss_weight(name)}


def with_weight(loss: Callable[..., Any], loss_weight: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose weight is what another function of the same arguments returns."""

    def weighted(*args: Any, **kwargs: Any) -> Any:
        check_signature(loss_weight, (args, kwargs), "what the last stage returns", "loss_weight")
        return weigh(loss(*args, **kwargs), loss_weight(*args, **kwargs), "loss_weight")

    return weighted


def weigh(loss: Any, weight: Any, what: str) -> jax.Array:
    """Adds to the loss a term whose gradient is the loss's weight."""
    loss, weight = as_loss(loss, "The loss"), jnp.asarray(weight)
    if weight.shape != () or not (
        jnp.issubdtype(weight.dtype, jnp.floating) or jnp.issubdtype(weight.dtype, jnp.integer)
    ):
        raise ValueError(
            f"{what} must be a scalar, an integer or floating-point number, for example the number of "
            f"tokens; it is {weight.dtype.name}{list(weight.shape)}."
        )
    dtype = np.dtype(np.float64 if loss.dtype == np.float64 else np.float32)
    with opened(Scope(reuse=True)):
        nothing = get_variable(f"{_SCOPE}/{dtype.name}", (), dtype, 0.0)
    counted = nothing * jax.lax.stop_gradient(weight.astype(dtype))
    weighed: jax.Array = loss + counted.astype(loss.dtype)
    return weighed


def divide_by_weight(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation divide accumulated gradients by the accumulated weight first."""
    wrapped = optax.with_extra_args_support(inner)
    is_scaled = isinstance(inner, LossScaled)  # then all gradients are scaled, the weight's too

    def init(parameters: Any) -> Any:
        return wrapped.init(without_weights(parameters))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        (counter,) = filter(is_loss_weight, gradients)
        total = gradients[counter] / state.scale if is_scaled else gradients[counter]
        factor = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
        means = {
            name: (value * factor.astype(jnp.promote_types(value.dtype, factor.dtype))).astype(value.dtype)
            for name, value in without_weights(gradients).items()
        }
        params = None if params is None else without_weights(params)
        changes, state = wrapped.update(means, state, params, **extra)
        return {**changes, counter: jnp.zeros_like(total)}, state

    return wrap(inner, init, update)


def check_not_mapped(trained: Collection[VariableSpec]) -> None:
    """Raises a ValueError if gradients that a function maps would be divided by weights."""
    if any(is_loss_weight(spec.name) for spec in trained):
        raise ValueError(
            "loss_weight and a gradient map cannot be combined: gradients are mapped before they are "
            "accumulated, and divided by the weights afterwards."
        )
