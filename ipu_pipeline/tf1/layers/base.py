"""What layers share: their scopes, and what they make of common arguments."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import get_variable
from ipu_pipeline.engine.fronts import (
    ProgramNames,
    absolute_scope,
    current_scope,
    find_initializer,
    is_training,
    program_names,
)
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.ground.names import join
from ipu_pipeline.tf1.layers import policies

__all__ = [
    "ActivationFunction",
    "Layer",
    "at_least_float32",
    "check_flag",
    "check_positive_integer",
    "find_activation",
    "find_initializer",
]

ActivationFunction: TypeAlias = "Callable[[jax.Array], jax.Array] | str | None"

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "elu": jax.nn.elu,
    "exponential": jnp.exp,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "hard_sigmoid": lambda x: jnp.clip(0.2 * x + 0.5, 0, 1),  # TensorFlow 1's and IPUs'; Keras 3 has x / 6
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


class Layer(abc.ABC):
    """What layers share: a name, and a scope for variables that a second call uses again.

    Within a program, a layer without a `name` is called after its kind, `dense`, and the next one in the
    same scope `dense_1`, counted over all stages.
    """

    kind = "layer"

    def __init__(
        self,
        name: str | None = None,
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        """Names the layer.

        Args:
          name: the scope of its variables.
          dtype: of the computation, a floating-point one; None: that of `mixed_precision`, by default
            float32.
          param_dtype: of its variables, a floating-point one; None: that of `mixed_precision`, by default
            the one that it computes in.
          trainable: whether an optimizer trains its variables.

        Raises:
          TypeError: `trainable` is no boolean.
          ValueError: a dtype is not a floating-point one.
        """
        self.name = name
        layer = type(self).__name__
        self.trainable = check_flag(layer, "trainable", trainable)
        given = policies.Policy(
            policies.check_dtype(layer, "dtype", dtype),
            policies.check_dtype(layer, "param_dtype", param_dtype),
        )
        self._made_with = given.within(policies.current())
        self._scopes: weakref.WeakKeyDictionary[ProgramNames, str] = weakref.WeakKeyDictionary()

    @property
    def _policy(self) -> policies.Policy:
        """The dtypes that somebody has said: the layer's arguments, or a block of `mixed_precision`."""
        return self._made_with.within(policies.current())

    @property
    def dtype(self) -> np.dtype[Any]:
        """What the layer computes in, where it is applied."""
        dtype = self._policy.dtype
        return np.dtype(np.float32) if dtype is None else dtype

    @property
    def param_dtype(self) -> np.dtype[Any]:
        """What its variables have, where it is applied."""
        dtype = self._policy.param_dtype
        return self.dtype if dtype is None else dtype

    def __call__(self, inputs: Any, **options: Any) -> jax.Array:
        """Applies the layer to a traced array, in a stage."""
        with self._own_scope():
            return self._apply(jnp.asarray(inputs), **options)

    @contextlib.contextmanager
    def _own_scope(self) -> Iterator[None]:
        """The scope of the layer's variables; the second time in a program, they are used again."""
        names, around = program_names(type(self).__name__), current_scope()
        scope = self._scopes.get(names)
        is_again = scope is not None
        if scope is None:
            scope = join(around, self.name or names.layer_name(around, self.kind))
            self._scopes[names] = scope
        with absolute_scope(scope, reuse=is_again, trainable=self.trainable):
            policies.check_is_there(self._full_name(), self._policy.dtype)
            yield

    @abc.abstractmethod
    def _apply(self, inputs: jax.Array) -> jax.Array:
        """The layer's outputs; subclasses may take options."""

    def _full_name(self) -> str:
        """What errors call the layer while it is applied, for example "Dense encoder/dense"."""
        return f"{type(self).__name__} {current_scope()}"

    def _is_training(self, training: bool | None) -> bool:
        """Whether the layer is applied as in training.

        Args:
          training: what the caller asked for; None: True in a program that trains, False in others.
        """
        if training is None:
            return is_training(type(self).__name__)
        return check_flag(type(self).__name__, "training", training)

    def _check_floating(self, inputs: jax.Array) -> None:
        if not jnp.issubdtype(inputs.dtype, jnp.floating):
            raise TypeError(
                f"{self._full_name()} needs floating-point inputs; got "
                f"{inputs.dtype.name}{list(inputs.shape)}."
            )

    def _as_own_dtype(self, inputs: jax.Array) -> jax.Array:
        """Floating-point inputs in the dtype that the layer computes in."""
        self._check_floating(inputs)
        return self._cast(inputs)

    def _own_variable(self, name: str, shape: tuple[int, ...], initializer: Any) -> jax.Array:
        """A variable of the layer, in the dtype that the layer computes in."""
        return self._cast(get_variable(name, shape, self.param_dtype, initializer))

    def _add_bias(self, outputs: jax.Array, initializer: Any) -> jax.Array:
        """Adds the variable `bias`, along the last axis."""
        bias = get_variable("bias", outputs.shape[-1:], self.param_dtype, initializer)
        if bias.dtype != self.dtype:
            # The cast comes behind the broadcast, so that the gradient is summed in the variable's dtype.
            bias = self._cast(jnp.broadcast_to(bias, outputs.shape))
        return outputs + bias

    def _cast(self, values: jax.Array) -> jax.Array:
        return values.astype(self.dtype)


def at_least_float32(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype for means over many values: a wider one than 32 bits stays, others become float32."""
    return dtype if dtype.itemsize > 4 else np.dtype(np.float32)


def check_positive_integer(layer: str, argument: str, value: Any) -> int:
    """The value of an argument that must be a positive integer.

    Args:
      layer: the class of the layer, for the error.
      argument: what the argument is called.
      value: what was given for it.

    Raises:
      ValueError: it is not a positive integer.
    """
    if not is_integer(value, 1):
        raise ValueError(f"{layer}: {argument} must be a positive integer; got {value!r}.")
    return int(value)


def check_flag(layer: str, argument: str, value: Any) -> bool:
    """The value of an argument that must be True or False.

    Args:
      layer: the class of the layer, for the error.
      argument: what the argument is called.
      value: what was given for it.

    Raises:
      TypeError: it is neither.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{layer}: {argument} must be True or False; got {value!r}.")
    return bool(value)


def find_activation(activation: ActivationFunction) -> Callable[[Any], Any]:
    """The function of that name, or the function itself; None is the identity.

    Raises:
      ValueError: there is no activation of that name.
    """
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
