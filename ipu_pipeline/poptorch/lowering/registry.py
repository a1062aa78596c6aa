"""The functions that compute operations of torch.

A lowering takes the operation's arguments: JAX arrays for tensors, NumPy dtypes for dtypes, everything else
as in torch. Arguments about a tensor's place or layout in memory are left out. A lowering returns an array,
or a tuple of arrays if the operation has several results. In our own tuples, a function without arguments
may stand for an array; it is called if that result is used. The operation decides the shapes and dtypes of
the results: `interpreter.run_node` casts, so a lowering may compute in whatever precision is right.

Lowerings are found by name, first "namespace::name.overload", then "namespace::name" for all overloads.
Lowerings that users register take precedence over ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import torch
from torch._ops import OpOverload, OpOverloadPacket

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Lowering:
    """The implementation of an operation.

    Attributes:
      function: computes it with JAX.
      is_registered: whether a user registered it.
    """

    function: Callable[..., Any]
    is_registered: bool


_lowerings: dict[str, Lowering] = {}
_registered: dict[str, Lowering] = {}
_undecomposed: list[str] = []


def lowers(*names: str, keep: bool = False) -> Callable[[_F], _F]:
    """Makes the decorated function the lowering of operations of ATen."""

    def decorate(function: _F) -> _F:
        for name in names:
            key = name if "::" in name else f"aten::{name}"
            assert key not in _lowerings, key
            _lowerings[key] = Lowering(function, is_registered=False)
            if keep:
                _undecomposed.append(key)
        return function

    return decorate


def lowers_without_gradient(name: str, function: Callable[..., Any]) -> None:
    """Makes a function of arrays and numbers the lowering of an operation without a derivative in torch.

    Differentiating it raises a NotImplementedError, as torch does, so its gradient is never silently 0.
    """
    compute = jax.custom_jvp(function)

    def refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise NotImplementedError(
            f"torch.{name.replace('special_', 'special.')} has no derivative in torch, nor here: nothing "
            "can be trained through it. Call detach() on its input."
        )

    compute.defjvp(refuse)

    @lowers(name)
    def call(*args: Any) -> Any:
        return compute(*(jnp.asarray(arg) for arg in args))


def register_lowering(operation: Any, function: Callable[..., Any] | None = None) -> Any:
    """Sets how JAX computes an operation of torch, in place of torch's decomposition or our lowering.

    It applies to models that are compiled afterwards. Gradients are the function's: `jax.custom_vjp` gives
    it others.

    Args:
      operation: `torch.ops.namespace.name.overload`, or "namespace::name.overload"; for all overloads
        `torch.ops.namespace.name`, or "namespace::name". It must exist: `torch.library` defines new ones.
      function: takes the operation's arguments: JAX arrays for tensors, NumPy dtypes for dtypes, everything
        else as in torch, but without layout, device, memory format and generator. Returns an array of the
        shape of the operation's result, or a tuple of arrays; they are cast to the result's dtype. If None,
        `register_lowering(operation)` is a decorator.

    Returns:
      The function, or the decorator.

    Raises:
      TypeError: an argument is of a wrong type.
      ValueError: there is no such operation, or it writes to its arguments.

    Example:
      @poptorch.register_lowering("my_library::scaled_tanh")
      def scaled_tanh(x, scale):
          return scale * jnp.tanh(x)
    """
    key = _key_of(operation)
    overloads = _overloads(key)
    if not overloads:
        raise ValueError(
            f"register_lowering: operation {key} writes to its arguments. Models are computed without such "
            "operations: register the lowering of the one that returns its result."
        )
    if function is None:
        return lambda decorated: register_lowering(operation, decorated)
    if not callable(function):
        raise TypeError(f"register_lowering: function must be callable; got {type(function).__name__}.")
    _registered[key] = Lowering(function, is_registered=True)
    return function


def find_lowering(target: Any) -> Lowering | None:
    """Finds the lowering of what a node of a graph calls, or None."""
    if not isinstance(target, OpOverload):
        return None
    full = full_name(target)
    for lowerings in (_registered, _lowerings):
        for key in (full, full.partition(".")[0]):
            if key in lowerings:
                return lowerings[key]
    return None


def kept_operations() -> list[OpOverload]:
    """Returns the operations that must not be decomposed, because they have a lowering as a whole."""
    overloads = {overload: None for key in [*_undecomposed, *_registered] for overload in _overloads(key)}
    return list(overloads)


def full_name(overload: OpOverload) -> str:
    """Returns "namespace::name.overload", where torch leaves an overload "default" out."""
    name = overload.name()
    return name if "." in name else f"{name}.default"


def _key_of(operation: Any) -> str:
    if isinstance(operation, OpOverload):
        return full_name(operation)
    if isinstance(operation, OpOverloadPacket):
        return full_name(getattr(operation, operation.overloads()[0])).partition(".")[0]
    if not isinstance(operation, str):
        raise TypeError(
            "register_lowering: operation must be one of torch.ops, or its name as a string; got "
            f"{type(operation).__name__}."
        )
    if operation.count("::") != 1:
        raise ValueError(
            "register_lowering: operation must be 'namespace::name' or 'namespace::name.overload'; got "
            f"{operation!r}."
        )
    return operation


def _overloads(key: str) -> list[OpOverload]:
    """Returns the overloads with that name that do not write to their arguments."""
    namespace, name = key.split("::")
    name, dot, overload = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        names = [overload] if dot else packet.overloads()
        overloads = [getattr(packet, overload_name) for overload_name in names]
    except AttributeError:
        raise ValueError(
            f"register_lowering: torch has no operation {key}. Define it with torch.library first."
        ) from None
    return [candidate for candidate in overloads if not vars(candidate)["_schema"].is_mutable]
