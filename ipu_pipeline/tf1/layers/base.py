"""What layers share: arguments, the dtypes in which they compute, and their scopes of variables."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, Field, InitVar, dataclass
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import get_variable, get_variable_scope
from ipu_pipeline.engine.fronts import (
    ProgramNames,
    absolute_scope,
    current_frame,
    find_frame,
    find_initializer,
)
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.checks import is_integer, join

# Arguments. An annotation of a class is an argument of its `__init__`:
#
#     @with_arguments
#     class Dense(VariableLayer):
#         units: int = argument("the size of the last axis of the outputs.", check_positive_integer)
#         activation: InitVar[ActivationFunction] = function(default=None)
#
# gives `Dense(units, activation=None, *, name=None, ...)`. Order, inheritance and `KW_ONLY` are those of
# `dataclasses`, as type checkers know them too. `InitVar` is for what is no attribute of that name and
# type.

ActivationFunction: TypeAlias = Callable[[jax.Array], jax.Array] | str | None
# Takes the layer's class and the argument's name, for errors, and the value; returns what is kept.
Check: TypeAlias = Callable[[str, str, Any], Any]
ClassT = TypeVar("ClassT")

_arguments: dict[type, Any] = {}  # by class, a dataclass of its arguments

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
    "softsign": jax.nn.soft_sign,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def argument(
    meaning: str,
    check: Check | None = None,
    *,
    default: Any = dataclasses.MISSING,
    attribute: str = "{}",
) -> Any:
    """Declares an argument of a layer."""
    metadata = {"meaning": meaning, "check": check, "attribute": attribute}
    return dataclasses.field(default=default, metadata=metadata)


def initializer(variable: str, shape: str, *, default: Any) -> Any:
    """Declares the argument that says how a variable of that name and shape starts."""
    return argument(
        f"of `{variable}`, {shape}: a name in Keras, or as for `get_variable`.",
        lambda _layer, _argument, value: find_initializer(value),
        default=default,
        attribute=f"_{variable}_initializer",
    )


def function(of: str = "", *, default: Any = dataclasses.MISSING) -> Any:
    """Declares the argument that gives an activation function, of what `of` says."""
    return argument(
        f"{of}a function, or its name in Keras.",
        lambda _layer, _argument, value: find_activation(value),
        default=default,
        attribute="_{}",
    )


def flag(meaning: str, *, default: bool = False, attribute: str = "{}") -> Any:
    """Declares an argument that is True or False; False if it is not passed and there is no default."""
    return argument(meaning, check_flag, default=default, attribute=attribute)


@dataclass_transform(field_specifiers=(argument, initializer, function))
def with_arguments(cls: type[ClassT]) -> type[ClassT]:
    """Gives a class of layers its `__init__`, which takes the inherited arguments and the class's own.

    The class's module imports `annotations` from `__future__`.
    """
    new_arguments = [
        (name, re.sub(r"^InitVar\[(.*)\]$", r"\1", annotation), vars(cls).get(name, dataclasses.field()))
        for name, annotation in inspect.get_annotations(cls).items()
    ]
    # From Python 3.12 on it would be of this module, in which the annotations have no meaning.
    module: dict[str, Any] = {"module": cls.__module__} if sys.version_info >= (3, 12) else {}
    # A class of the arguments alone has the __init__ that takes them, with Python's own errors.
    inherited = [_arguments[base] for base in cls.__mro__ if base in _arguments][:1]
    arguments = _arguments[cls] = dataclasses.make_dataclass(
        cls.__name__,
        new_arguments,
        bases=(*inherited,),
        namespace={"__module__": cls.__module__},
        eq=False,
        repr=False,
        **module,
    )
    fields = dataclasses.fields(arguments)

    @functools.wraps(vars(arguments)["__init__"])
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        self._set_arguments(fields, vars(arguments(*args, **options)))

    __init__.__doc__ = _describe(arguments)
    for name in vars(cls).keys() & inspect.get_annotations(cls).keys():
        delattr(cls, name)
    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def _describe(arguments: Any) -> str:
    """Returns the docstring of an `__init__`."""
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    lines = ["Describes the layer.", "", "Args:"]
    for name in inspect.signature(arguments).parameters:
        text = f"{name}: {fields[name].metadata['meaning']}"
        lines += textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")
    return "\n".join([*lines, "", "Raises:", "  TypeError, ValueError: an argument is not usable."])


def check_positive_integer(layer: str, argument: str, value: Any) -> int:
    """Returns an argument that must be a positive integer."""
    if not is_integer(value, 1):
        raise ValueError(f"{layer}: {argument} must be a positive integer; got {value!r}.")
    return int(value)


def check_number(rule: str, holds: Callable[[Any], bool]) -> Check:
    """Makes a check for numbers; the error calls what must hold `rule`."""

    def check(layer: str, argument: str, value: Any) -> float:
        if not holds(value):
            raise ValueError(f"{layer}: {argument} must be {rule}; got {value!r}.")
        return float(value)

    return check


def optional(check: Check) -> Check:
    """Makes a check that lets None pass."""
    return lambda layer, argument, value: None if value is None else check(layer, argument, value)


def check_flag(layer: str, argument: str, value: Any) -> bool:
    """Returns an argument that must be True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{layer}: {argument} must be True or False; got {value!r}.")
    return bool(value)


def find_activation(activation: ActivationFunction) -> Callable[[Any], Any]:
    """The function of that name, or the function itself; None is the identity."""
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


# Mixed precision. Sources of the method and of the policies' names: P. Micikevicius et al., Mixed Precision
# Training, arXiv:1710.03740, and Keras's `mixed_precision`. Weights are kept in 32 bits, so that small
# updates are not rounded away, and are cast to 16 bits where they are used.

_Dtype = np.dtype[Any]


@dataclass(frozen=True)
class Policy:
    """Two dtypes; None: not set here.

    Attributes:
      dtype: of the computation.
      param_dtype: of variables.
    """

    dtype: _Dtype | None = None
    param_dtype: _Dtype | None = None

    def within(self, around: Policy) -> Policy:
        """Returns this policy, with the dtypes that it does not set from the one around it."""
        # One by one: Dense(dtype=float32) in a block of mixed precision has the block's dtype of variables.
        return Policy(
            around.dtype if self.dtype is None else self.dtype,
            around.param_dtype if self.param_dtype is None else self.param_dtype,
        )


_policy: contextvars.ContextVar[Policy] = contextvars.ContextVar("policy", default=Policy())  # noqa: B039  # frozen


def current_policy() -> Policy:
    """The policy of the innermost `mixed_precision`, completed by the blocks around it."""
    return _policy.get()


@contextlib.contextmanager
def mixed_precision(
    policy: str | Policy | None = None, *, dtype: Any = None, param_dtype: Any = None
) -> Iterator[Policy]:
    """Sets the dtypes of layers that are made or applied in a `with` block and have no dtypes of their own.

    Layers cast inputs and variables to `dtype`, which their outputs have, too, and create variables in
    `param_dtype`. So do the functions of `normalization_ops`. Layers without variables (Dropout,
    Activation, pooling) keep the dtype of their inputs, and `get_variable` is not affected.

    Some operations use float32 or wider for any dtype: all of a normalization, with `gamma` and `beta` not
    cast; moving statistics; sums and gates of LSTM and GRU. Values that their backward needs are held in
    this dtype. Gradients of biases, embeddings and recurrent weights are added in at least `param_dtype`.

    Blocks nest: an inner block overrides the dtypes that it sets. For each dtype, a layer's argument has
    priority, then the block in which the layer is made, then the block in which it is applied. Without any,
    layers compute in float32, and a layer's variables have the dtype of its computation. (`layers.Flax`
    then leaves the dtypes to the module.)

    A block affects what is traced inside it: use it in a stage, or around `ipu_compiler.compile`, in the
    calling thread.

    Example:
      >>> def stage(x):
      ...     with ipu.mixed_precision(dtype=jnp.bfloat16, param_dtype=jnp.float32):
      ...         x = layers.Dense(64, activation="relu")(x)
      ...         print(x.dtype)
      ...         logits = layers.Dense(10, dtype=jnp.float32)(x)
      ...     print(logits.dtype)
      ...     return logits
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 16], np.float32))
      bfloat16
      float32

    Args:
      policy: "mixed_bfloat16" or "mixed_float16", as in Keras: computation in this dtype, variables in
        float32; or the name of a floating-point dtype for both; or the value that another block yielded.
      dtype: in place of `policy`, the floating-point dtype of the computation. It may be wider than
        `param_dtype`, which saves memory for weights that are not trained.
      param_dtype: in place of `policy`, the floating-point dtype of variables.

    Yields:
      The policy in the block: `dtype` and `param_dtype`, each None if not set.

    Raises:
      ValueError: there is no such policy, a dtype is not a floating-point dtype, or both a policy and a
        dtype are given.
    """
    new_policy = Policy(
        check_dtype("mixed_precision", "dtype", dtype),
        check_dtype("mixed_precision", "param_dtype", param_dtype),
    )
    if policy is not None and new_policy != Policy():
        raise ValueError(
            f"mixed_precision: a policy must stand alone, since it says both dtypes; got {policy!r} with "
            f"dtype={dtype!r} and param_dtype={param_dtype!r}. Leave out one or the other."
        )
    if policy is not None:
        new_policy = _find_policy(policy)
    # JAX keeps traces of inner functions (jax.jit) without the block that they were made in.
    token = _policy.set(new_policy.within(current_policy()))
    try:
        with jax_compat.fresh_trace() if find_frame() is not None else contextlib.nullcontext():
            yield current_policy()
    finally:
        _policy.reset(token)


def _find_policy(policy: Any) -> Policy:
    if isinstance(policy, Policy):
        return policy
    name = policy if isinstance(policy, str) else ""
    if name in ("mixed_bfloat16", "mixed_float16"):
        return Policy(np.dtype(name.removeprefix("mixed_")), np.dtype(np.float32))
    dtype = _as_dtype(name) if name else None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            "mixed_precision: policy must be 'mixed_bfloat16', 'mixed_float16', the name of a "
            f"floating-point dtype or what another block gave; got {policy!r}. Say others by dtype= and "
            "param_dtype=."
        )
    return Policy(dtype, dtype)


def check_dtype(owner: str, argument: str, value: Any) -> _Dtype | None:
    """Returns an argument as a dtype; None for None."""
    if value is None:
        return None
    dtype = _as_dtype(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        text = repr(value) if dtype is None else dtype.name
        raise ValueError(
            f"{owner}: {argument} must be a floating-point one; got {text}. Give a dtype like jnp.float32; "
            "for computation in 16 bits and weights in 32, dtype=jnp.bfloat16 and param_dtype=jnp.float32."
        )
    return dtype


def check_dtype_is_there(owner: str, dtype: _Dtype | None) -> None:
    """Raises if JAX, as it is configured, does not have a dtype."""
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{owner}: dtype {dtype.name} needs 64-bit mode; call "
            'jax.config.update("jax_enable_x64", True) first, or give another dtype.'
        )


def _as_dtype(value: Any) -> _Dtype | None:
    try:
        return np.dtype(value)
    except TypeError:
        return None


def cast_floating(tree: Any, dtype: _Dtype | None) -> Any:
    """Casts the floating-point arrays of a pytree; None: returns them as they are."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        is_array = isinstance(leaf, (jax.Array, np.ndarray))
        return jnp.asarray(leaf, dtype) if is_array and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


# The base of layers.

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
        policy = Policy(
            check_dtype(layer, "dtype", dtype),
            check_dtype(layer, "param_dtype", param_dtype),
        )
        self._policy_at_creation = policy.within(current_policy())
        self._scopes: weakref.WeakKeyDictionary[ProgramNames, str] = weakref.WeakKeyDictionary()

    def _set_arguments(self, fields: Sequence[Field[Any]], values: dict[str, Any]) -> None:
        """Checks and keeps the arguments of a class `with_arguments`."""
        Layer.__init__(self, **{name: values[name] for name in _COMMON if name in values})
        for field in fields:
            check, attribute = field.metadata["check"], field.metadata["attribute"]
            if check is not None:
                values[field.name] = check(type(self).__name__, field.name, values[field.name])
            if attribute:
                setattr(self, attribute.format(field.name), values[field.name])
        self._complete(values)

    def _complete(self, values: dict[str, Any]) -> None:
        """Sets attributes that depend on several arguments, which have been checked one by one."""
        del values

    @property
    def _policy(self) -> Policy:
        """The dtypes that were set, by the layer's arguments or by blocks of `mixed_precision`.

        A block counts where the layer is made, as in Keras, and where it is applied, as scopes do here. If
        only one counted, layers of the other habit would silently compute in float32.
        """
        return self._policy_at_creation.within(current_policy())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the computation, where the layer is applied."""
        dtype = self._policy.dtype
        return np.dtype(np.float32) if dtype is None else dtype

    @property
    def param_dtype(self) -> np.dtype[Any]:
        """The dtype of the layer's variables, where it is applied."""
        dtype = self._policy.param_dtype
        return self.dtype if dtype is None else dtype  # `dtype` alone sets both, as Keras's does

    def __call__(self, inputs: Any, **options: Any) -> jax.Array:
        """Applies the layer to a traced array, in a stage."""
        with self._own_scope():
            return self._apply(jnp.asarray(inputs), **options)

    @contextlib.contextmanager
    def _own_scope(self) -> Iterator[None]:
        """Enters the scope of the layer's variables; the second time in a program, they are used again."""
        names = current_frame(type(self).__name__).names
        around = get_variable_scope().name
        scope = self._scopes.get(names)
        is_again = scope is not None
        if scope is None:
            scope = join(around, self.name or names.layer_name(around, self.kind))
            self._scopes[names] = scope
        with absolute_scope(scope, reuse=is_again, trainable=self.trainable):
            check_dtype_is_there(self._full_name(), self._policy.dtype)
            yield

    @abc.abstractmethod
    def _apply(self, inputs: jax.Array) -> jax.Array:
        """The layer's outputs; subclasses may take options."""

    def _full_name(self) -> str:
        """The layer's name in errors while it is applied, for example "Dense encoder/dense"."""
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
        """Casts floating-point inputs to the dtype that the layer computes in."""
        self._check_floating(inputs)
        return self._cast(inputs)

    def _get_variable(
        self, name: str, shape: tuple[int, ...], dtype: Any = None, trainable: bool = True
    ) -> jax.Array:
        """Returns a variable that starts as the layer's argument `<name>_initializer` says."""
        dtype = self.param_dtype if dtype is None else dtype
        return get_variable(name, shape, dtype, getattr(self, f"_{name}_initializer"), trainable)

    def _own_variable(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """Returns such a variable in the dtype that the layer computes in."""
        return self._cast(self._get_variable(name, shape))

    def _add_bias(self, outputs: jax.Array) -> jax.Array:
        """Adds the variable `bias`, along the last axis."""
        bias = self._get_variable("bias", outputs.shape[-1:])
        if bias.dtype != self.dtype:
            # The cast comes behind the broadcast, so that the gradient is summed in the variable's dtype:
            # in bfloat16, a sum of ones ends at 256.
            bias = self._cast(jnp.broadcast_to(bias, outputs.shape))
        return outputs + bias

    def _cast(self, values: jax.Array) -> jax.Array:
        return values.astype(self.dtype)


def common(meaning: str, *, default: Any = None) -> Any:
    """Declares an argument that `Layer` checks and keeps."""
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
