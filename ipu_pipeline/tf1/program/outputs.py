"""The values that a program returns, one by one, and values computed from them on the host."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

__all__ = ["Computed", "Fetched", "Output"]


class Fetched:
    """A value for `Session.run`. Python's operators on it give another such value, computed on the host."""

    __array_ufunc__ = None  # NumPy's arrays and scalars leave operators to it
    __iter__ = None  # it has no length before it is run


@dataclass(frozen=True, eq=False)
class Output(Fetched):
    """A value that a compiled function returns; `Session.run` runs the program once for all of them."""

    program: Any  # the program
    number: int  # the position of the value among the leaves of what the function returns


@dataclass(frozen=True, eq=False)
class Computed(Fetched):
    """A value that is computed from other values when these have been fetched."""

    function: Callable[..., Any]  # computes it
    parts: tuple[Any, ...]  # its arguments: values to fetch, or plain values


def _forward(name: str, is_reflected: bool = False) -> Callable[..., Computed]:
    function = getattr(operator, name)

    def method(self: Fetched, *others: Any) -> Computed:
        for other in others:
            _check_operand(other, name)
        parts = (*others, self) if is_reflected else (self, *others)
        return Computed(function, parts)

    return method


def _check_operand(value: Any, name: str) -> None:
    """Raises if an operand for the host is not a number, array or index."""
    if isinstance(value, Fetched):
        return
    is_usable = isinstance(value, (numbers.Number, np.generic, np.ndarray, jax.Array))
    if name == "getitem":
        parts = value if isinstance(value, tuple) else (value,)
        limits = [limit for part in parts if isinstance(part, slice) for limit in _limits(part)]
        is_usable = not any(isinstance(one, Fetched) for one in (*parts, *limits))
    elif isinstance(value, (list, tuple)):
        is_usable = np.asarray(value, dtype=object if _has_fetched(value) else None).dtype.kind in "biufc"
    if not is_usable:
        raise TypeError(
            f"What a program returns was an operand of {name}, with {type(value).__name__}. The host takes "
            "numbers, arrays and other values of programs with it. Compute the rest in the program, or "
            "from what Session.run returns."
        )


def _limits(part: slice) -> tuple[Any, Any, Any]:
    return part.start, part.stop, part.step


def _has_fetched(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_fetched, value))
    return isinstance(value, Fetched)


for _name in ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"]:
    setattr(Fetched, f"__{_name}__", _forward(_name))
    setattr(Fetched, f"__r{_name}__", _forward(_name, is_reflected=True))
for _name in ["neg", "pos", "abs", "getitem"]:
    setattr(Fetched, f"__{_name}__", _forward(_name))
