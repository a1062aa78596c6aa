"""Checks of an option's value: each takes the option's name and a value, and returns what is kept.

A wrong type is an AssertionError, as in PopTorch; a number out of range is a ValueError.
"""

from __future__ import annotations

import enum
import numbers
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from ipu_pipeline.ground.enumerations import list_members

__all__ = [
    "Check",
    "boolean",
    "directory",
    "fail",
    "instance",
    "integer",
    "list_of_strings",
    "member",
    "optional",
    "string",
]

Check: TypeAlias = "Callable[[str, Any], Any]"


def fail(name: str, rule: str, value: Any) -> AssertionError:
    """The error for a value of a wrong type."""
    return AssertionError(f"{name} must be {rule}; got {value!r}.")


def boolean(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise fail(name, "True or False", value)
    return value


def string(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise fail(name, "a string", value)
    return value


def directory(name: str, value: Any) -> str:
    """A directory, as a string."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(path := os.fspath(value), str):
        raise fail(name, "a path", value)
    if not path:
        raise ValueError(f"{name} must be a path; got an empty string.")
    return path


def integer(minimum: int | None = None) -> Check:
    """An integer that is not below a minimum, if there is one."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise fail(name, "an integer", value)
        if minimum is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}; got {value}.")
        return int(value)

    return check


def member(kind: type[enum.Enum]) -> Check:
    """A member of an enumeration."""
    return instance(kind, f"one of {list_members(kind)}")


def instance(kind: type, rule: str) -> Check:
    """An instance of a class; the rule says which in words."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise fail(name, rule, value)
        return value

    return check


def optional(check: Check) -> Check:
    """None, or what another check lets through."""

    def check_unless_none(name: str, value: Any) -> Any:
        return None if value is None else check(name, value)

    return check_unless_none


def list_of_strings(name: str, value: Any) -> list[str]:
    """A list or tuple of strings, as a list."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise fail(name, "a list of strings", value)
    return list(value)
