"""What layers share: their scopes, and what they make of common arguments."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, Field, InitVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import get_variable, get_variable_scope
from ipu_pipeline.engine.fronts import ProgramNames, absolute_scope, current_frame
from ipu_pipeline.ground.names import join
from ipu_pipeline.tf1.layers import policies
from ipu_pipeline.tf1.layers.arguments import ActivationFunction, argument, check_flag, with_arguments

__all__ = [
    "ActivationFunction",
    "Layer",
    "PlainLayer",
    "VariableLayer",
    "at_least_float32",
    "check_flag",
    "common",
]

_COMMON = ("name", "dtype", "param_dtype", "trainable")


class Layer(abc.ABC):
    """The base of layers: a name, and a scope of variables that later calls use again.

    In a program, a layer without `name` is named after its kind, `dense`, and the next one in the same
    scope `dense_1`, counted over all stages.

    Example:
      >>> def stage(x):
      ...     shared = layers.Dense(16)  # one layer, applied twice: one kernel
      ...     return layers.Dense(10)(shared(shared(x)))
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 16], np.float32))
      >>> list(pipeline.variables)
      ['dense/kernel', 'dense/bias', 'dense_1/kernel', 'dense_1/bias']
    """

    kind = "layer"
    _activation: Callable[[Any], Any]

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
          dtype: the floating-point dtype of the computation; None: the dtype of `mixed_precision`, by
            default float32.
          param_dtype: the floating-point dtype of its variables; None: the `param_dtype` of
            `mixed_precision`, by default the dtype of the computation.
          trainable: whether an optimizer trains its variables.

        Raises:
          TypeError: `trainable` is not a boolean.
          ValueError: a dtype is not a floating-point dtype.
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

    def _take(self, fields: Sequence[Field[Any]], given: dict[str, Any]) -> None:
        """Checks and keeps the arguments of a class `with_arguments`."""
        Layer.__init__(self, **{name: given[name] for name in _COMMON if name in given})
        for field in fields:
            check, attribute = field.metadata["check"], field.metadata["attribute"]
            if check is not None:
                given[field.name] = check(type(self).__name__, field.name, given[field.name])
            if attribute:
                setattr(self, attribute.format(field.name), given[field.name])
        self._complete(given)

    def _complete(self, given: dict[str, Any]) -> None:
        """What a class makes of several of its arguments, which have been checked one by one."""
        del given

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
        names = current_frame(type(self).__name__).names
        around = get_variable_scope().name
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
        return f"{type(self).__name__} {get_variable_scope().name}"

    def _is_training(self, training: bool | None) -> bool:
        """Whether the layer is applied as in training."""
        if training is None:
            return current_frame(type(self).__name__).is_training()
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

    def _get_variable(
        self, name: str, shape: tuple[int, ...], dtype: Any = None, trainable: bool = True
    ) -> jax.Array:
        """A variable that starts as the layer's argument `initializer` of that name says."""
        dtype = self.param_dtype if dtype is None else dtype
        return get_variable(name, shape, dtype, getattr(self, f"_{name}_initializer"), trainable)

    def _own_variable(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """Such a variable in the dtype that the layer computes in."""
        return self._cast(self._get_variable(name, shape))

    def _add_bias(self, outputs: jax.Array) -> jax.Array:
        """Adds the variable `bias`, along the last axis."""
        bias = self._get_variable("bias", outputs.shape[-1:])
        if bias.dtype != self.dtype:
            # The cast comes behind the broadcast, so that the gradient is summed in the variable's dtype.
            bias = self._cast(jnp.broadcast_to(bias, outputs.shape))
        return outputs + bias

    def _cast(self, values: jax.Array) -> jax.Array:
        return values.astype(self.dtype)


def common(meaning: str, *, default: Any = None) -> Any:
    """An argument that `Layer` checks and keeps."""
    return argument(meaning, default=default, attribute="")


@with_arguments
class PlainLayer(Layer):
    """A layer without variables."""

    _: KW_ONLY
    name: str | None = common("the layer's scope.")


@with_arguments
class VariableLayer(PlainLayer):
    """A layer with variables."""

    _: KW_ONLY
    name: str | None = common("the scope of its variables.")
    dtype: InitVar[Any] = common(
        "of the computation and the outputs; None: see `mixed_precision`, by default float32."
    )
    param_dtype: InitVar[Any] = common("of its variables; None: likewise, by default `dtype`.")
    trainable: bool = common("whether an optimizer trains its variables.", default=True)


def at_least_float32(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype for means over many values: a wider one than 32 bits stays, others become float32."""
    return dtype if dtype.itemsize > 4 else np.dtype(np.float32)
