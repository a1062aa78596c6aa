"""What recurrent layers share, those of `layers` and those of `rnn_ops`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.warned import warn_once
from ipu_pipeline.tf1.layers import policies
from ipu_pipeline.tf1.layers.base import ActivationFunction, Layer, check_positive_integer, find_activation

__all__ = ["Recurrent"]


class Recurrent(Layer):
    """What recurrent layers share: the number of units, activations, and checks of inputs and states."""

    def __init__(
        self,
        argument: str,
        units: int,
        activation: ActivationFunction,
        recurrent_activation: ActivationFunction,
        name: str | None,
        dtype: Any,
        param_dtype: Any,
        trainable: bool = True,
    ) -> None:
        """Checks the shared arguments; `argument` is the name of the one that gives the number of units."""
        super().__init__(name, dtype, param_dtype, trainable)
        self._units = check_positive_integer(type(self).__name__, argument, units)
        self._activation = find_activation(activation)
        self._recurrent_activation = find_activation(recurrent_activation)

    def _warn_of_poplar(self, partials_dtype: Any, **arguments: Any) -> None:
        """Warns, once per argument, that arguments for Poplar have no effect."""
        layer, reason = type(self).__name__, "it was for Poplar's libraries, and XLA compiles here"
        if policies.check_dtype(layer, "partials_dtype", partials_dtype) not in (None, np.float32):
            arguments["partials_dtype"] = partials_dtype
        for argument, value in arguments.items():
            if argument == "partials_dtype":
                reason = (
                    "products of matrices are summed in float32, or in float64 if the layer computes in it"
                )
            if value not in (None, {}):
                warn_once(f"{layer}.{argument}", f"{layer}: {argument} has no effect: {reason}.")

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
