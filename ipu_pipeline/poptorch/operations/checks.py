"""Checks of users' input: of values, such as options, and of the arguments of operations.

A `Check` takes a value's name, for errors, and the value, and returns the value to keep. As in PopTorch, it
raises an AssertionError for a wrong type, and a ValueError for a number out of range.
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

from ipu_pipeline.ground.checks import is_int, list_members
from ipu_pipeline.poptorch.errors import Error

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
MemberT = TypeVar("MemberT", bound=enum.Enum)


def fail(name: str, rule: str, value: Any, error: type[Exception] = AssertionError) -> Exception:
    """Makes the error for a value of a wrong type."""
    return error(f"{name} must be {rule}; got {value!r}.")


def _keep(_name: str, value: Any) -> Any:
    """Returns the value unchanged, for checks that keep it so."""
    return value


@dataclass(frozen=True)
class Check(Generic[T_co]):
    """A check of a value's type, and then of the value.

    Attributes:
      rule: what a value must be, in words.
      accepts: whether a value is of the right type.
      keep: takes the name and a value of the right type, and returns the value to keep.
      refuses: the values that `keep` raises a ValueError for, in words.
      is_optional: whether None is let through.
      error: the class of the error for a value of a wrong type.
    """

    rule: str
    accepts: Callable[[Any], bool]
    keep: Callable[[str, Any], T_co] = _keep
    refuses: str = ""
    is_optional: bool = False
    error: type[Exception] = AssertionError

    def __call__(self, name: str, value: Any) -> T_co:
        """Checks a value."""
        if value is None and self.is_optional:
            return _keep(name, None)
        if not self.accepts(value):
            raise fail(name, self.rule, value, self.error)
        return self.keep(name, value)

    @property
    def raises(self) -> str:
        """The errors, for the documentation of the checked value."""
        wrong = "neither None nor" if self.is_optional else "not"
        text = f"{self.error.__name__}: the value is {wrong} {self.rule}."
        return f"{text}\n  ValueError: the value is {self.refuses}." if self.refuses else text


def instance(kind: type[T], rule: str, error: type[Exception] = AssertionError) -> Check[T]:
    """Checks for an instance of a class. The rule describes it in words."""
    return Check(rule, lambda value: isinstance(value, kind), error=error)


def member(kind: type[MemberT]) -> Check[MemberT]:
    """Checks for a member of an enumeration."""
    return instance(kind, f"one of {list_members(kind)}")


def integer(minimum: int | None = None) -> Check[int]:
    """Checks for an integer that is not below a minimum, if there is one."""

    def accepts(value: Any) -> bool:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)

    def keep(name: str, value: Any) -> int:
        if minimum is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}; got {value}.")
        return int(value)

    return Check("an integer", accepts, keep, "" if minimum is None else f"below {minimum}")


def optional(check: Check[T]) -> Check[T | None]:
    """Accepts None, and what another check accepts."""
    return dataclasses.replace(check, is_optional=True)


def _accepts_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str)


def _keep_path(name: str, value: Any) -> str:
    path: str = os.fspath(value)
    if not path:
        raise ValueError(f"{name} must be a path; got an empty string.")
    return path


def _accepts_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)


boolean = instance(bool, "True or False")
truth = Check(
    "True or False, or an integer", lambda value: isinstance(value, int), lambda _name, value: bool(value)
)
string = instance(str, "a string")
directory = Check("a path", _accepts_path, _keep_path, "an empty string")  # kept as a string
list_of_strings: Check[list[str]] = Check(
    "a list of strings", _accepts_strings, lambda _name, value: list(value)
)


def check_tensor(value: Any, message: str) -> None:
    """Raises if a value is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise Error(f"{message} It got {type(value).__name__}.")


def check_int(value: Any, message: str, minimum: int = 1) -> None:
    """Raises if a value is not an integer, or too small."""
    if not is_int(value) or value < minimum:
        raise Error(f"{message} It must be an integer from {minimum}; got {value!r}.")


def check_dim(dim: Any, ndim: int, name: str) -> int:
    """Returns a dimension counted from the front."""
    if not is_int(dim) or not -ndim <= dim < ndim:
        raise Error(
            f"{name}: dim must be an integer from {-ndim} to {ndim - 1} for a tensor of {ndim} dimensions; "
            f"got {dim!r}."
        )
    return dim % ndim


def check_outside(name: str) -> None:
    """Raises in a branch or the body of a loop, where torch cannot capture everything."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(f"poptorch.{name} cannot be used in a branch, or in the body of a loop.")
