"""What recurrent layers share, those of `layers` and those of `rnn_ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.warned import warn_once
from ipu_pipeline.tf1.layers import policies
from ipu_pipeline.tf1.layers.arguments import argument
from ipu_pipeline.tf1.layers.base import Layer

__all__ = ["Recurrent", "check_is_without_effect", "without_effect"]


def without_effect(meaning: str) -> Any:
    """An argument that was for Poplar. Who gives it is told, once, that it has no effect."""
    return argument(meaning, check_is_without_effect, default=None, attribute="")


def check_is_without_effect(layer: str, argument: str, value: Any) -> None:
    """Warns, once per argument, if something is given for it."""
    reason = "it was for Poplar's libraries, and XLA compiles here"
    if argument == "partials_dtype":
        reason = "products of matrices are summed in float32, or in float64 if the layer computes in it"
        value = None if policies.check_dtype(layer, argument, value) == np.float32 else value
    if value not in (None, {}):
        warn_once(f"{layer}.{argument}", f"{layer}: {argument} has no effect: {reason}.")


class Recurrent(Layer):
    """What recurrent layers share: the number of units, activations, and checks of inputs and states."""

    _units: int
    _recurrent_activation: Callable[[Any], Any]

    def _as_sequence(self, inputs: jax.Array, layout: str) -> jax.Array:
        """The inputs in the layer's dtype, if they have three axes."""
        inputs = self._as_own_dtype(inputs)
        if inputs.ndim != 3:
            raise ValueError(
                f"{self._full_name()} needs inputs of rank 3, [{layout}, features]; got shape "
                f"{inputs.shape}."
            )
        return inputs

    def _as_state(self, value: Any, batch: int, name: str = "initial_state") -> jax.Array:
        """A state in the layer's dtype, [batch, units]; zeros for None."""
        shape = (batch, self._units)
        if value is None:
            return jnp.zeros(shape, self.dtype)
        if isinstance(value, (tuple, list, dict)):
            raise TypeError(
                f"{self._full_name()}: {name} must be an array of shape {shape}; got a "
                f"{type(value).__name__}."
            )
        state = jnp.asarray(value)
        if not jnp.issubdtype(state.dtype, jnp.floating):
            raise TypeError(
                f"{self._full_name()}: {name} must have floating-point numbers; got {state.dtype.name}."
            )
        if state.shape != shape:
            raise ValueError(
                f"{self._full_name()}: {name} must have shape {shape}, [batch, units]; got {state.shape}."
            )
        return self._cast(state)
