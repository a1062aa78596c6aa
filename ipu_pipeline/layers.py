"""Keras-like layers: objects that are called on activations within a stage.

Arguments, defaults and variable names are those of Keras, with channels last. The numerics are those of
`jax.nn` and `jax.lax`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import keys, names
from ipu_pipeline.engine.variables import get_variable

__all__ = ["Activation", "Dense", "Dropout", "Flatten", "Layer"]

ActivationFunction: TypeAlias = "Callable[[jax.Array], jax.Array] | str | None"

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "elu": jax.nn.elu,
    "exponential": jnp.exp,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "leaky_relu": lambda x: jax.nn.leaky_relu(x, 0.2),
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "softplus": jax.nn.softplus,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}
_INITIALIZERS: dict[str, Callable[[], Any]] = {
    "glorot_normal": jax.nn.initializers.glorot_normal,
    "glorot_uniform": jax.nn.initializers.glorot_uniform,
    "he_normal": jax.nn.initializers.he_normal,
    "he_uniform": jax.nn.initializers.he_uniform,
    "lecun_normal": jax.nn.initializers.lecun_normal,
    "lecun_uniform": jax.nn.initializers.lecun_uniform,
    "ones": lambda: jax.nn.initializers.ones,
    "orthogonal": jax.nn.initializers.orthogonal,
    "zeros": lambda: jax.nn.initializers.zeros,
}


class Layer:
    """What layers share: a name, and a scope for variables that a second call uses again.

    Within a program, a layer without a `name` is called after its kind, `dense`, and the next one in the
    same scope `dense_1`, counted over all stages.
    """

    kind = "layer"

    def __init__(self, name: str | None = None, dtype: Any = jnp.float32) -> None:
        """Names the layer.

        Args:
          name: the scope of its variables.
          dtype: of its variables and of the computation.
        """
        self.name = name
        self.dtype = np.dtype(dtype)
        self._scopes: weakref.WeakKeyDictionary[names.ProgramNames, str] = weakref.WeakKeyDictionary()

    def __call__(self, inputs: Any, **options: Any) -> jax.Array:
        """Applies the layer to a traced array, in a stage."""
        frame = names.current_frame(type(self).__name__)
        scope = self._scopes.get(frame.names)
        is_again = scope is not None
        if scope is None:
            own = self.name or frame.names.layer_name(names.current_scope(), self.kind)
            scope = names.join(names.current_scope(), own)
            self._scopes[frame.names] = scope
        with names.absolute_scope(scope, reuse=is_again):
            return self._apply(jnp.asarray(inputs), **options)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        raise NotImplementedError

    def _as_own_dtype(self, inputs: jax.Array) -> jax.Array:
        """Floating-point inputs in the layer's dtype."""
        if not jnp.issubdtype(inputs.dtype, jnp.floating):
            raise TypeError(
                f"{type(self).__name__} {names.current_scope()} needs floating-point inputs; got "
                f"{inputs.dtype.name}{list(inputs.shape)}."
            )
        return inputs.astype(self.dtype)


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
        dtype: Any = jnp.float32,
    ) -> None:
        """Describes the layer.

        Args:
          units: the size of the last axis of the outputs.
          activation: a function, or its name in Keras.
          use_bias: whether there is a `bias`.
          kernel_initializer: of `kernel`, [inputs, units]: a name in Keras, or as for `get_variable`.
          bias_initializer: of `bias`, [units].
          name: the scope of its variables.
          dtype: of its variables and of the computation.

        Raises:
          ValueError: `units` is not a positive integer; an activation or initializer is unknown.
        """
        super().__init__(name, dtype)
        if not isinstance(units, (int, np.integer)) or isinstance(units, bool) or units < 1:
            raise ValueError(f"Dense: units must be a positive integer; got {units!r}.")
        self.units = int(units)
        self.use_bias = use_bias
        self._activation = _find_activation(activation)
        self._kernel_initializer = _find_initializer(kernel_initializer)
        self._bias_initializer = _find_initializer(bias_initializer)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        if inputs.ndim < 2:
            raise ValueError(
                f"Dense {names.current_scope()} needs inputs of rank 2 or more, [batch, ..., features]; "
                f"got shape {inputs.shape}."
            )
        shape = (inputs.shape[-1], self.units)
        outputs = inputs @ get_variable("kernel", shape, self.dtype, self._kernel_initializer)
        if self.use_bias:
            outputs += get_variable("bias", (self.units,), self.dtype, self._bias_initializer)
        return self._activation(outputs)


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
        self._activation = _find_activation(activation)

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
          seed: folded into the layer's random key.
          name: the layer's scope.

        Raises:
          ValueError: the rate is out of range.
        """
        super().__init__(name)
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout: rate must be at least 0 and below 1; got {rate!r}.")
        self.rate = float(rate)
        self._noise_shape = noise_shape
        self._seed = seed

    def _apply(self, inputs: jax.Array, training: bool | None = None) -> jax.Array:
        """`training` None: True in a program that trains, False in others."""
        if training is None:
            training = names.current_frame("Dropout").is_training()
        if not training or self.rate == 0:
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
        key = keys.next_rng_key()
        if self._seed is not None:
            key = jax.random.fold_in(key, self._seed)
        is_kept = jax.random.bernoulli(key, 1 - self.rate, shape)
        return jnp.where(is_kept, inputs / (1 - self.rate), jnp.zeros((), inputs.dtype))


def _find_activation(activation: ActivationFunction) -> Callable[[Any], Any]:
    if activation is None:
        return _ACTIVATIONS["linear"]
    if callable(activation):
        return activation
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"There is no activation {activation!r}; there are {', '.join(_ACTIVATIONS)}, or give a "
            "function."
        )
    return _ACTIVATIONS[activation]


def _find_initializer(initializer: Any) -> Any:
    if not isinstance(initializer, str):
        return initializer
    if initializer not in _INITIALIZERS:
        raise ValueError(
            f"There is no initializer {initializer!r}; there are {', '.join(_INITIALIZERS)}, or give a "
            "function or an array."
        )
    return _INITIALIZERS[initializer]()
