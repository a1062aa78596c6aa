"""The values that a program returns, one by one, and what is computed from them on the host."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Computed", "Fetched", "Output"]


class Fetched:
    """Something for `Session.run`. Operators of Python give another such thing, computed on the host."""

    __array_ufunc__ = None  # NumPy's arrays and scalars leave operators to it
    __iter__ = None  # it has no length before it is run


@dataclass(frozen=True, eq=False)
class Output(Fetched):
    """A value that a compiled function returns; `Session.run` runs the program once for all of them.

    Attributes:
      program: the program.
      number: the position of the value among the leaves of what the function returns.
    """

    program: Any
    number: int


@dataclass(frozen=True, eq=False)
class Computed(Fetched):
    """What is computed of values when they have been fetched.

    Attributes:
      function: computes it.
      parts: its arguments: what is fetched, or what it takes as it is.
    """

    function: Callable[..., Any]
    parts: tuple[Any, ...]


def _forward(function: Callable[..., Any], is_reflected: bool = False) -> Callable[..., Computed]:
    def method(self: Fetched, *others: Any) -> Computed:
        parts = (*others, self) if is_reflected else (self, *others)
        return Computed(function, parts)

    return method


for _name in ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"]:
    _function = getattr(operator, _name)
    setattr(Fetched, f"__{_name}__", _forward(_function))
    setattr(Fetched, f"__r{_name}__", _forward(_function, is_reflected=True))
for _name in ["neg", "pos", "abs", "getitem"]:
    setattr(Fetched, f"__{_name}__", _forward(getattr(operator, _name)))
