"""Checks of what users give: of values, such as those of options, and of the arguments of operations.

A `Check` takes a value's name, for errors, and the value, and returns what is kept. As in PopTorch, a wrong
type is an AssertionError for it, and a number out of range is a ValueError.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.ground.enumerations import list_members
from ipu_pipeline.poptorch.errors import Error

__all__ = [
    "Check",
    "boolean",
    "check_dim",
    "check_int",
    "check_outside",
    "check_tensor",
    "directory",
    "fail",
    "instance",
    "integer",
    "list_of_strings",
    "member",
    "optional",
    "string",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
MemberT = TypeVar("MemberT", bound=enum.Enum)


def fail(name: str, rule: str, value: Any) -> AssertionError:
    """The error for a value of a wrong type."""
    return AssertionError(f"{name} must be {rule}; got {value!r}.")


def _keep(_name: str, value: Any) -> Any:
    """What a check keeps that changes nothing."""
    return value


@dataclass(frozen=True)
class Check(Generic[T_co]):
    """A check of a value's type, and then of the value.

    Attributes:
      rule: what a value must be, in words.
      accepts: whether a value is of the right type.
      keep: takes the name and a value of the right type, and returns what is kept.
      refuses: which values `keep` raises a ValueError for, in words.
      is_optional: whether None is let through.
    """

    rule: str
    accepts: Callable[[Any], bool]
    keep: Callable[[str, Any], T_co] = _keep
    refuses: str = ""
    is_optional: bool = False

    def __call__(self, name: str, value: Any) -> T_co:
        """Checks a value.

        Raises:
          AssertionError: the value is of a wrong type.
          ValueError: the value is out of range.
        """
        if value is None and self.is_optional:
            return _keep(name, None)
        if not self.accepts(value):
            raise fail(name, self.rule, value)
        return self.keep(name, value)

    @property
    def raises(self) -> str:
        """The errors, for the documentation of what is checked."""
        wrong = "neither None nor" if self.is_optional else "not"
        text = f"AssertionError: the value is {wrong} {self.rule}."
        return f"{text}\n  ValueError: the value is {self.refuses}." if self.refuses else text


def instance(kind: type[T], rule: str) -> Check[T]:
    """An instance of a class; the rule says which in words."""
    return Check(rule, lambda value: isinstance(value, kind))


def member(kind: type[MemberT]) -> Check[MemberT]:
    """A member of an enumeration."""
    return instance(kind, f"one of {list_members(kind)}")


def integer(minimum: int | None = None) -> Check[int]:
    """An integer that is not below a minimum, if there is one."""

    def accepts(value: Any) -> bool:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)

    def keep(name: str, value: Any) -> int:
        if minimum is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}; got {value}.")
        return int(value)

    return Check("an integer", accepts, keep, "" if minimum is None else f"below {minimum}")


def optional(check: Check[T]) -> Check[T | None]:
    """None, or what another check lets through."""
    return dataclasses.replace(check, is_optional=True)


def _accepts_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str)


def _keep_path(name: str, value: Any) -> str:
    path: str = os.fspath(value)
    if not path:
        raise ValueError(f"{name} must be a path; got an empty string.")
    return path


def _accepts_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


boolean = instance(bool, "True or False")
string = instance(str, "a string")
directory = Check("a path", _accepts_path, _keep_path, "an empty string")  # kept as a string
list_of_strings: Check[list[str]] = Check(
    "a list of strings", _accepts_strings, lambda _name, value: list(value)
)


def check_tensor(value: Any, message: str) -> None:
    """Raises if a value is no tensor.

    Args:
      value: anything.
      message: begins the error's text.

    Raises:
      Error: it is none.
    """
    if not isinstance(value, torch.Tensor):
        raise Error(f"{message} It got {type(value).__name__}.")


def check_int(value: Any, message: str, minimum: int = 1) -> None:
    """Raises if a value is no integer, or too small.

    Raises:
      Error: so it is.
    """
    if not is_int(value) or value < minimum:
        raise Error(f"{message} It must be an integer from {minimum}; got {value!r}.")


def check_dim(dim: Any, ndim: int, name: str) -> int:
    """A dimension, counted from the front.

    Args:
      dim: counted from the front, or if it is negative from the end.
      ndim: of the tensor, which is no scalar.
      name: of the operation.

    Raises:
      Error: the tensor is a scalar, or it has no such dimension.
    """
    if not is_int(dim) or not -ndim <= dim < ndim:
        raise Error(
            f"{name}: dim must be an integer from {-ndim} to {ndim - 1} for a tensor of {ndim} dimensions; "
            f"got {dim!r}."
        )
    return dim % ndim


def check_outside(name: str) -> None:
    """Raises within a branch or the body of a loop, where torch cannot capture everything.

    Raises:
      RuntimeError: it is called there.
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(f"poptorch.{name} cannot be used in a branch, or in the body of a loop.")
