"""Arguments of layers, each said once: an annotation of a class is an argument of its `__init__`.

    @with_arguments
    class Dense(VariableLayer):
        units: int = argument("the size of the last axis of the outputs.", check_positive_integer)
        activation: InitVar[ActivationFunction] = function(default=None)

gives `Dense(units, activation=None, *, name=None, ...)`. Order, inheritance and `KW_ONLY` are those of
`dataclasses`, as type checkers know them too. `InitVar` is for what is no attribute of that name and type.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.fronts import find_initializer
from ipu_pipeline.ground.checks import is_integer

__all__ = [
    "ActivationFunction",
    "argument",
    "check_flag",
    "check_number",
    "check_positive_integer",
    "find_activation",
    "function",
    "initializer",
    "optional",
    "with_arguments",
]

ActivationFunction: TypeAlias = Callable[[jax.Array], jax.Array] | str | None
# What is kept, of the layer's class and the argument's name, which are for errors, and the value.
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
    """An argument of a layer."""
    kept = {"meaning": meaning, "check": check, "attribute": attribute}
    return dataclasses.field(default=default, metadata=kept)


def initializer(variable: str, shape: str, *, default: Any) -> Any:
    """The argument that says how a variable of that name and shape starts."""
    return argument(
        f"of `{variable}`, {shape}: a name in Keras, or as for `get_variable`.",
        lambda _layer, _argument, value: find_initializer(value),
        default=default,
        attribute=f"_{variable}_initializer",
    )


def function(of: str = "", *, default: Any = dataclasses.MISSING) -> Any:
    """The argument that gives an activation function, of what `of` says."""
    return argument(
        f"{of}a function, or its name in Keras.",
        lambda _layer, _argument, value: find_activation(value),
        default=default,
        attribute="_{}",
    )


@dataclass_transform(field_specifiers=(argument, initializer, function))
def with_arguments(cls: type[ClassT]) -> type[ClassT]:
    """Gives a class of layers its `__init__`, which takes the inherited arguments and the class's own.

    The class's module imports `annotations` from `__future__`.
    """
    own = [
        (name, re.sub(r"^InitVar\[(.*)\]$", r"\1", annotation), vars(cls).get(name, dataclasses.field()))
        for name, annotation in inspect.get_annotations(cls).items()
    ]
    # From Python 3.12 on it would be of this module, in which the annotations have no meaning.
    module: dict[str, Any] = {"module": cls.__module__} if sys.version_info >= (3, 12) else {}
    # A class of the arguments alone has the __init__ that takes them, with Python's own errors.
    inherited = [_arguments[base] for base in cls.__mro__ if base in _arguments][:1]
    arguments = _arguments[cls] = dataclasses.make_dataclass(
        cls.__name__,
        own,
        bases=(*inherited,),
        namespace={"__module__": cls.__module__},
        eq=False,
        repr=False,
        **module,
    )
    fields = dataclasses.fields(arguments)

    @functools.wraps(vars(arguments)["__init__"])
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        self._take(fields, vars(arguments(*args, **options)))

    __init__.__doc__ = _describe(arguments)
    for name in vars(cls).keys() & inspect.get_annotations(cls).keys():
        delattr(cls, name)
    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def _describe(arguments: Any) -> str:
    """What `help` says of an `__init__`."""
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    lines = ["Describes the layer.", "", "Args:"]
    for name in inspect.signature(arguments).parameters:
        text = f"{name}: {fields[name].metadata['meaning']}"
        lines += textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")
    return "\n".join([*lines, "", "Raises:", "  TypeError, ValueError: an argument is not usable."])


def check_positive_integer(layer: str, argument: str, value: Any) -> int:
    """The value of an argument that must be a positive integer."""
    if not is_integer(value, 1):
        raise ValueError(f"{layer}: {argument} must be a positive integer; got {value!r}.")
    return int(value)


def check_number(rule: str, holds: Callable[[Any], bool]) -> Check:
    """A check for numbers of which something holds, which the error calls `rule`."""

    def check(layer: str, argument: str, value: Any) -> float:
        if not holds(value):
            raise ValueError(f"{layer}: {argument} must be {rule}; got {value!r}.")
        return float(value)

    return check


def optional(check: Check) -> Check:
    """A check that lets None pass."""
    return lambda layer, argument, value: None if value is None else check(layer, argument, value)


def check_flag(layer: str, argument: str, value: Any) -> bool:
    """The value of an argument that must be True or False."""
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
