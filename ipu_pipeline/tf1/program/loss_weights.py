"""Losses that are weighted sums: gradients are divided by the weights of all micro-batches.

The weights are summed like gradients: a variable that is always 0, times the weight, is added to the loss.
So the variable's gradient is the weight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine import VariableSpec, get_variable
from ipu_pipeline.engine.fronts import LossScaled, Scope, opened
from ipu_pipeline.tf1.graph.internal_variables import LOSS_WEIGHTS

__all__ = ["at_least_float32_for_weights", "divide_by_weight", "weigh", "weight_name"]


def _is_weight(name: str) -> bool:
    return name.startswith(f"{LOSS_WEIGHTS}/")


def weigh(loss: Any, weight: Any) -> jax.Array:
    """Adds to the loss a term whose gradient is the loss's weight.

    Raises:
      ValueError: the weight is not a real scalar.
    """
    loss, weight = jnp.asarray(loss), jnp.asarray(weight)
    if weight.shape != () or not (
        jnp.issubdtype(weight.dtype, jnp.floating) or jnp.issubdtype(weight.dtype, jnp.integer)
    ):
        raise ValueError(
            "OptimizerFunctionOutput: loss_weight must be a scalar, an integer or floating-point number, "
            f"for example the number of tokens; it is {weight.dtype.name}{list(weight.shape)}."
        )
    dtype = _dtype_for(loss)
    with opened(Scope(reuse=True)):
        nothing = get_variable(weight_name(loss), (), dtype, 0.0)
    counted = nothing * jax.lax.stop_gradient(weight.astype(dtype))
    return loss + counted.astype(loss.dtype)


def weight_name(loss: Any) -> str:
    """The full name of the variable that counts the weights of a loss."""
    return f"{LOSS_WEIGHTS}/{_dtype_for(jnp.asarray(loss)).name}"


def _dtype_for(loss: jax.Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if loss.dtype == np.float64 else np.float32)


def divide_by_weight(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation divide accumulated gradients by the accumulated weight first."""
    wrapped = optax.with_extra_args_support(inner)
    is_scaled = isinstance(inner, LossScaled)  # then all gradients are scaled, the weight's too

    def without_weight(values: Any) -> Any:
        return None if values is None else {name: v for name, v in values.items() if not _is_weight(name)}

    def init(parameters: Any) -> Any:
        return wrapped.init(without_weight(parameters))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        (counter,) = filter(_is_weight, gradients)
        total = gradients[counter] / state.scale if is_scaled else gradients[counter]
        factor = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
        means = {
            name: (value * factor.astype(jnp.promote_types(value.dtype, factor.dtype))).astype(value.dtype)
            for name, value in without_weight(gradients).items()
        }
        changes, state = wrapped.update(means, state, without_weight(params), **extra)
        return {**changes, counter: jnp.zeros_like(total)}, state

    if not is_scaled:
        return optax.GradientTransformationExtraArgs(init, update)
    made = LossScaled(init, update)
    made.initial_scale = inner.initial_scale
    return made


def at_least_float32_for_weights(accumulator_dtype: Any) -> Any:
    """The dtype of accumulators; weights are accumulated in the dtype of their variable."""
    if accumulator_dtype is None:
        return None

    def find(spec: VariableSpec) -> Any:
        if _is_weight(spec.name):
            return None
        is_function = callable(accumulator_dtype) and not isinstance(accumulator_dtype, type)
        return accumulator_dtype(spec) if is_function else accumulator_dtype

    return find
