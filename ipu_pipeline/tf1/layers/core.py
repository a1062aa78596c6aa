"""Layers without a window: Dense, Embedding, and those that have no variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.fronts import draw_key
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.tf1.layers.arguments import (
    ActivationFunction,
    argument,
    check_flag,
    check_number,
    check_positive_integer,
    function,
    initializer,
    with_arguments,
)
from ipu_pipeline.tf1.layers.base import PlainLayer, VariableLayer, common

__all__ = ["Activation", "Dense", "Dropout", "Embedding", "Flatten"]


@with_arguments
class Dense(VariableLayer):
    """`activation(inputs @ kernel + bias)`, over the last axis.

    Example:
      >>> def stage(images, labels):
      ...     hidden = layers.Dense(64, activation="relu")(images)
      ...     return layers.Dense(10, name="head")(hidden), labels
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace((np.ones([8, 784], np.float32), np.ones(8, np.int32)))
      >>> list(pipeline.variables.values())
      [dense/kernel: float32[784, 64], dense/bias: float32[64],
       head/kernel: float32[64, 10], head/bias: float32[10]]
    """

    kind = "dense"

    units: int = argument("the size of the last axis of the outputs.", check_positive_integer)
    activation: InitVar[ActivationFunction] = function(default=None)
    use_bias: bool = argument("whether there is a `bias`.", check_flag, default=True)
    kernel_initializer: InitVar[Any] = initializer("kernel", "[inputs, units]", default="glorot_uniform")
    bias_initializer: InitVar[Any] = initializer("bias", "[units]", default="zeros")

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        if inputs.ndim < 2:
            raise ValueError(
                f"{self._full_name()} needs inputs of rank 2 or more, [batch, ..., features]; "
                f"got shape {inputs.shape}."
            )
        shape = (inputs.shape[-1], self.units)
        outputs = inputs @ self._own_variable("kernel", shape)
        if self.use_bias:
            outputs = self._add_bias(outputs)
        return self._activation(outputs)


@with_arguments
class Embedding(VariableLayer):
    """Looks up a row of `embeddings` for each integer.

    For integers below 0 or of at least `input_dim`, the row is NaN, so that the loss shows the fault, and
    `embeddings` gets no gradient from it. TensorFlow raises an error on a CPU; a compiled program cannot,
    as values are not known when it is compiled.

    Example:
      >>> def stage(tokens):
      ...     vectors = layers.Embedding(input_dim=1000, output_dim=64)(tokens)
      ...     print(vectors.shape)
      ...     return vectors
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.zeros([8, 128], np.int32))
      (8, 128, 64)
      >>> list(pipeline.variables.values())
      [embedding/embeddings: float32[1000, 64]]
    """

    kind = "embedding"

    input_dim: int = argument("how many rows there are; inputs are below it.", check_positive_integer)
    output_dim: int = argument(
        "the size of a row, and of the last axis of the outputs.", check_positive_integer
    )
    embeddings_initializer: InitVar[Any] = initializer(
        "embeddings", '[input_dim, output_dim] ("uniform" is from -0.05 to 0.05)', default="uniform"
    )
    _: KW_ONLY
    dtype: InitVar[Any] = common(
        "of the outputs; None: see `mixed_precision`, by default float32. Rows are looked up, then cast."
    )

    def _apply(self, inputs: jax.Array) -> jax.Array:
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise TypeError(
                f"{self._full_name()} needs integer inputs; got {inputs.dtype.name}{list(inputs.shape)}."
            )
        if inputs.dtype.itemsize < 4:  # input_dim need not fit into a narrow dtype
            inputs = inputs.astype(jnp.int32)
        embeddings = self._get_variable("embeddings", (self.input_dim, self.output_dim))
        rows = jnp.where(inputs < 0, self.input_dim, inputs)  # a negative one would count from the end
        return self._cast(jnp.take(embeddings, rows, axis=0))


@with_arguments
class Flatten(PlainLayer):
    """Reshapes [batch, ...] to [batch, features]. It keeps the dtype.

    Example:
      >>> def stage(images):
      ...     flat = layers.Flatten()(images)
      ...     print(flat.shape)
      ...     return flat
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 28, 28, 1], np.float32))
      (8, 784)
    """

    kind = "flatten"

    def _apply(self, inputs: jax.Array) -> jax.Array:
        if inputs.ndim == 0:
            raise ValueError("Flatten needs inputs with a batch axis; got a scalar.")
        return inputs.reshape((inputs.shape[0], math.prod(inputs.shape[1:])))


@with_arguments
class Activation(PlainLayer):
    """Applies a function, given itself or by its name in Keras. It has no variables.

    Example:
      >>> def stage(x):
      ...     return layers.Activation("relu")(x)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> x = np.array([-1, 2], np.float32)
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x])
      >>> outputs.outputs[0]
      Array([0., 2.], dtype=float32)
    """

    kind = "activation"

    activation: InitVar[ActivationFunction] = function()

    def _apply(self, inputs: jax.Array) -> jax.Array:
        return self._activation(inputs)


def _check_seed(layer: str, argument: str, value: Any) -> int | None:
    if value is None:
        return None
    if not is_integer(value):
        raise TypeError(f"{layer}: {argument} must be an integer or None; got {value!r}.")
    if not -(2**31) <= value < 2**32:
        raise ValueError(f"{layer}: {argument} must have 32 bits; got {value}.")
    return int(value) % 2**32


@with_arguments
class Dropout(PlainLayer):
    """Sets a random part of the activations to 0, and scales the others by 1/(1-rate).

    The mask depends on the session's seed, the execution, the micro-batch and the layer's scope, and not on
    the split into stages. It keeps the dtype.

    Example:
      >>> def stage(x):
      ...     return layers.Dropout(0.5)(x)
      >>> x = np.ones(1000, np.float32)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x])
      >>> bool((outputs.outputs[0] == x).all())  # without an optimizer nothing is dropped
      True
    """

    kind = "dropout"

    rate: float = argument(
        "the part that is set to 0, at least 0 and below 1.",
        check_number("at least 0 and below 1", lambda value: 0 <= value < 1),
    )
    noise_shape: InitVar[Sequence[int | None] | None] = argument(
        "the mask's shape, which is broadcast; None for an axis's own size.", default=None, attribute=""
    )
    seed: InitVar[int | None] = argument(
        "an integer, folded into the layer's random key.", _check_seed, default=None, attribute=""
    )

    def _complete(self, given: dict[str, Any]) -> None:
        self._noise_shape, self._seed = given["noise_shape"], given["seed"]

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
