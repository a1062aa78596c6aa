"""Layers without a window: Dense, Embedding, and those that have no variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import get_variable
from ipu_pipeline.engine.fronts import draw_key
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.tf1.layers.base import (
    ActivationFunction,
    Layer,
    check_flag,
    check_positive_integer,
    find_activation,
    find_initializer,
)

__all__ = ["Activation", "Dense", "Dropout", "Embedding", "Flatten"]


class Dense(Layer):
    """`activation(inputs @ kernel + bias)`, over the last axis."""

    kind = "dense"

    def __init__(
        self,
        units: int,
        activation: ActivationFunction = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        *,
        name: str | None = None,
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        """Describes the layer.

        Args:
          units: the size of the last axis of the outputs.
          activation: a function, or its name in Keras.
          use_bias: whether there is a `bias`.
          kernel_initializer: of `kernel`, [inputs, units]: a name in Keras, or as for `get_variable`.
          bias_initializer: of `bias`, [units].
          name: the scope of its variables.
          dtype: of the computation and the outputs; None: see `mixed_precision`, by default float32.
          param_dtype: of its variables; None: likewise, by default `dtype`.
          trainable: whether an optimizer trains its variables.

        Raises:
          TypeError: `use_bias` is neither True nor False.
          ValueError: `units` is not a positive integer; an activation or initializer is unknown.
        """
        super().__init__(name, dtype, param_dtype, trainable)
        self.units = check_positive_integer("Dense", "units", units)
        self.use_bias = check_flag("Dense", "use_bias", use_bias)
        self._activation = find_activation(activation)
        self._kernel_initializer = find_initializer(kernel_initializer)
        self._bias_initializer = find_initializer(bias_initializer)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        if inputs.ndim < 2:
            raise ValueError(
                f"{self._full_name()} needs inputs of rank 2 or more, [batch, ..., features]; "
                f"got shape {inputs.shape}."
            )
        shape = (inputs.shape[-1], self.units)
        outputs = inputs @ self._own_variable("kernel", shape, self._kernel_initializer)
        if self.use_bias:
            outputs = self._add_bias(outputs, self._bias_initializer)
        return self._activation(outputs)


class Embedding(Layer):
    """A row of `embeddings` for each integer.

    A number from `-input_dim` to -1 counts from the end. For a number outside of that the row is NaN, so
    that the loss shows it, and `embeddings` gets no gradient from it. Both are `jnp.take`'s behaviour, and
    Keras's on JAX; the values are not known when the program is compiled, so there is no error.
    """

    kind = "embedding"

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        *,
        name: str | None = None,
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        """Describes the layer.

        Args:
          input_dim: how many rows there are; inputs are below it.
          output_dim: the size of a row, and of the last axis of the outputs.
          embeddings_initializer: of `embeddings`, [input_dim, output_dim]: a name in Keras, or as for
            `get_variable`. "uniform" is from -0.05 to 0.05.
          name: the scope of its variables.
          dtype: of the outputs; None: see `mixed_precision`, by default float32. Rows are looked up, and
            then cast.
          param_dtype: of `embeddings`; None: likewise, by default `dtype`.
          trainable: whether an optimizer trains its variables.

        Raises:
          ValueError: a size is not a positive integer; the initializer is unknown.
        """
        super().__init__(name, dtype, param_dtype, trainable)
        self.input_dim = check_positive_integer("Embedding", "input_dim", input_dim)
        self.output_dim = check_positive_integer("Embedding", "output_dim", output_dim)
        self._embeddings_initializer = find_initializer(embeddings_initializer)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise TypeError(
                f"{self._full_name()} needs integer inputs; got {inputs.dtype.name}{list(inputs.shape)}."
            )
        if inputs.dtype.itemsize < 4:  # input_dim need not fit into a narrow dtype
            inputs = inputs.astype(jnp.int32)
        shape = (self.input_dim, self.output_dim)
        embeddings = get_variable("embeddings", shape, self.param_dtype, self._embeddings_initializer)
        return self._cast(jnp.take(embeddings, inputs, axis=0))


class Flatten(Layer):
    """[batch, ...] to [batch, features]."""

    kind = "flatten"

    def __init__(self, *, name: str | None = None) -> None:
        """Describes the layer; it has no variables and keeps the dtype."""
        super().__init__(name)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        if inputs.ndim == 0:
            raise ValueError("Flatten needs inputs with a batch axis; got a scalar.")
        return inputs.reshape((inputs.shape[0], math.prod(inputs.shape[1:])))


class Activation(Layer):
    """A function of the activations, by itself or by its name in Keras."""

    kind = "activation"

    def __init__(self, activation: ActivationFunction, *, name: str | None = None) -> None:
        """Describes the layer; it has no variables and keeps the dtype.

        Raises:
          ValueError: there is no activation of that name.
        """
        super().__init__(name)
        self._activation = find_activation(activation)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        return self._activation(inputs)


class Dropout(Layer):
    """Sets a random part of the activations to 0, and scales the others by 1/(1-rate).

    The mask depends on the session's seed, the execution, the micro-batch and the layer's scope, and not
    on how layers are split into stages.
    """

    kind = "dropout"

    def __init__(
        self,
        rate: float,
        noise_shape: Sequence[int | None] | None = None,
        seed: int | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """Describes the layer; it has no variables and keeps the dtype.

        Args:
          rate: the part that is set to 0, at least 0 and below 1.
          noise_shape: the mask's shape, which is broadcast; None for an axis's own size.
          seed: an integer, folded into the layer's random key.
          name: the layer's scope.

        Raises:
          TypeError: the seed is no integer.
          ValueError: the rate is out of range, or the seed has more than 32 bits.
        """
        super().__init__(name)
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout: rate must be at least 0 and below 1; got {rate!r}.")
        self.rate = float(rate)
        self._noise_shape = noise_shape
        self._seed = _check_seed(seed)

    def _apply(self, inputs: jax.Array, training: bool | None = None) -> jax.Array:
        """`training` None: True in a program that trains, False in others."""
        if not self._is_training(training) or self.rate == 0:
            return inputs
        shape = inputs.shape
        if self._noise_shape is not None:
            if len(self._noise_shape) != len(shape):
                raise ValueError(
                    f"Dropout: noise_shape {tuple(self._noise_shape)} must have one entry for each axis "
                    f"of the inputs, {shape}."
                )
            sizes = zip(self._noise_shape, shape, strict=True)
            shape = tuple(own if noise is None else noise for noise, own in sizes)
        key = draw_key("ipu.layers.Dropout", " With training=False it needs none.")
        if self._seed is not None:
            key = jax.random.fold_in(key, self._seed)
        is_kept = jax.random.bernoulli(key, 1 - self.rate, shape)
        return jnp.where(is_kept, inputs / (1 - self.rate), jnp.zeros((), inputs.dtype))


def _check_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if not is_integer(seed):
        raise TypeError(f"Dropout: seed must be an integer or None; got {seed!r}.")
    if not -(2**31) <= seed < 2**32:
        raise ValueError(f"Dropout: seed must have 32 bits; got {seed}.")
    return int(seed) % 2**32
