"""What the layers of `rnn_ops` share: arguments, variables, shapes, and checks of lengths and scores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import get_variable
from ipu_pipeline.engine.fronts import find_initializer
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.ground.warned import warn_once
from ipu_pipeline.tf1.layers.arguments import (
    ActivationFunction,
    check_flag,
    check_positive_integer,
    find_activation,
)
from ipu_pipeline.tf1.layers.recurrent_base import Recurrent, check_is_without_effect

__all__ = ["Popnn"]


class Popnn(Recurrent):
    """A recurrent layer with the variables `kernel` and `biases`, as in Graphcore's TensorFlow 1."""

    num_gates: int
    takes_bias_initializer = True

    def __init__(
        self,
        num_units: int,
        dtype: Any,
        partials_dtype: Any,
        seed: int | None,
        weights_initializer: Any,
        bias_initializer: Any,
        activation: ActivationFunction,
        recurrent_activation: ActivationFunction,
        return_state: bool,
        name: str | None,
        param_dtype: Any,
        **for_poplar: Any,
    ) -> None:
        """Checks the shared arguments, which `rnn_ops.PopnnLSTM` describes."""
        super().__init__(name, dtype, param_dtype)
        layer = type(self).__name__
        self._units = check_positive_integer(layer, "num_units", num_units)
        self._activation = find_activation(activation)
        self._recurrent_activation = find_activation(recurrent_activation)
        self._return_state = check_flag(layer, "return_state", return_state)
        self._weights_initializer = find_initializer(weights_initializer)
        if weights_initializer is None:
            self._weights_initializer = (
                find_initializer("glorot_uniform") if seed is None else _seeded(layer, seed)
            )
        self._bias_initializer = 0.0 if bias_initializer is None else find_initializer(bias_initializer)
        if bias_initializer is not None and not self.takes_bias_initializer:
            warn_once(
                f"{layer}.bias_initializer",
                f"{layer}: bias_initializer has no effect, as in Graphcore's: the biases of the gates "
                "start from 1, and those of the candidate from 0.",
            )
        self._input_size: int | None = None
        for argument, value in {**for_poplar, "partials_dtype": partials_dtype}.items():
            check_is_without_effect(layer, argument, value)

    @property
    def num_layers(self) -> int:
        """Always 1."""
        return 1

    @property
    def num_units(self) -> int:
        """The size of the state, and of the last axis of the outputs."""
        return self._units

    @property
    def input_size(self) -> int:
        """The number of input features.

        Raises:
          ValueError: it is not known before the first call or `build`.
        """
        if self._input_size is None:
            raise ValueError(
                f"{type(self).__name__}: input_size is not known yet. Call the layer, or "
                "build(input_shape), first."
            )
        return self._input_size

    @property
    def canonical_weight_shape(self) -> list[int]:
        """The shape of `kernel`; needs `input_size`."""
        return [self.input_size + self._units, self.num_gates * self._units]

    @property
    def canonical_bias_shapes(self) -> list[int]:
        """The shape of `biases`."""
        return [self.num_gates, self._units]

    @property
    def kernel(self) -> jax.Array:
        """The variable `kernel` in the function that is being traced, for example to penalize it."""
        with self._own_scope():
            return self._get_kernel()

    @property
    def biases(self) -> jax.Array:
        """The biases in the function that is being traced, in the shape `canonical_bias_shapes`."""
        with self._own_scope():
            return self._get_biases()

    def build(self, input_shape: Any) -> None:
        """Creates the variables before the layer is called, in a function that is being traced.

        Args:
          input_shape: [time, batch, features]; time and batch may be None.

        Raises:
          ValueError: the shape has another rank, `features` is not a positive integer, or the layer was
            built for another number of features.
          RuntimeError: nothing is being traced.
        """
        with self._own_scope():
            shape = tuple(input_shape) if isinstance(input_shape, (tuple, list)) else ()
            features = shape[-1] if len(shape) == 3 else None
            if not is_integer(features, 1):
                raise ValueError(
                    f"{self._full_name()}: input_shape must be [time, batch, features] with a positive "
                    f"integer for features; got {input_shape!r}."
                )
            self._set_input_size(int(features))
            self._get_kernel()
            self._get_biases()

    def _call(self, inputs: Any, **options: Any) -> Any:
        return super().__call__(inputs, **options)

    def _set_input_size(self, features: int) -> None:
        if self._input_size not in (None, features):
            raise ValueError(
                f"{self._full_name()}: inputs must have {self._input_size} features, for which the layer "
                f"was built; got {features}. Use another layer for them."
            )
        self._input_size = features

    def _get_kernel(self) -> jax.Array:
        shape = tuple(self.canonical_weight_shape)
        return get_variable("kernel", shape, self.param_dtype, self._weights_initializer)

    def _get_biases(self) -> jax.Array:
        shape = tuple(self.canonical_bias_shapes)
        return get_variable("biases", shape, self.param_dtype, self._bias_initializer)

    def _prepare(
        self, inputs: jax.Array, training: bool, time_major: bool = True
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The inputs as [time, batch, features], and the rows of `kernel` for them and for the state."""
        check_flag(type(self).__name__, "training", training)
        check_flag(type(self).__name__, "time_major", time_major)
        inputs = self._as_sequence(inputs, "time, batch" if time_major else "batch, time")
        self._set_input_size(inputs.shape[-1])
        kernel = self._get_kernel()
        rows = kernel[: self.input_size], kernel[self.input_size :]
        return (inputs if time_major else jnp.swapaxes(inputs, 0, 1), *rows)

    def _as_lengths(self, seq_len: Any, inputs: jax.Array) -> jax.Array:
        """The number of steps of each example; inputs are [time, batch, features]."""
        time, batch, _features = inputs.shape
        if seq_len is None:
            raise TypeError(f"{self._full_name()}: seq_len must be integers of shape {(batch,)}; got None.")
        lengths = jnp.asarray(seq_len)
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise TypeError(f"{self._full_name()}: seq_len must be integers; got {lengths.dtype.name}.")
        if lengths.shape != (batch,):
            raise ValueError(
                f"{self._full_name()}: seq_len must have shape {(batch,)}, one length per example; got "
                f"{lengths.shape}."
            )
        if isinstance(seq_len, np.ndarray) and not ((seq_len >= 0) & (seq_len <= time)).all():
            raise ValueError(
                f"{self._full_name()}: seq_len must be from 0 to {time}, the number of steps; got "
                f"{seq_len.tolist()}."
            )
        return lengths

    def _as_attention(self, attention_score: Any, inputs: jax.Array, time_major: bool) -> jax.Array:
        """The scores as [time, batch]; inputs are [time, batch, features]."""
        time, batch, _features = inputs.shape
        shape, axes = ((time, batch), "[time, batch]") if time_major else ((batch, time), "[batch, time]")
        if attention_score is None:
            raise TypeError(
                f"{self._full_name()}: attention_score must be an array of shape {shape}; got None."
            )
        attention = jnp.asarray(attention_score)
        if not jnp.issubdtype(attention.dtype, jnp.floating):
            raise TypeError(
                f"{self._full_name()}: attention_score must have floating-point numbers; got "
                f"{attention.dtype.name}."
            )
        if attention.shape != shape:
            raise ValueError(
                f"{self._full_name()}: attention_score must have shape {shape}, {axes} since "
                f"{time_major=}; got {attention.shape}."
            )
        return attention if time_major else attention.T


def _seeded(layer: str, seed: Any) -> Any:
    """Glorot uniform with a seed of its own."""
    if not is_integer(seed):
        raise TypeError(f"{layer}: seed must be an integer or None; got {seed!r}.")
    number = int(seed) % 2**32

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key  # it depends on the session's seed
        return find_initializer("glorot_uniform")(jax.random.key(number), shape, dtype)

    return initialize
