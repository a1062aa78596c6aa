"""Checks of users' values and names: numbers, functions, members of enumerations, mistyped names."""

from __future__ import annotations

import difflib
import enum
import functools
import hashlib
import numbers
from collections.abc import Callable, Collection
from typing import Any, TypeGuard, TypeVar

# Numbers. Booleans, which Python counts as integers, are not integers here.

MAX_INT32 = 2**31 - 1


def is_int(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is a Python integer, and not less than `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_integer(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy, and not less than `least`."""
    is_integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integral and (least is None or bool(value >= least))


def is_real(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a Python number, and not complex."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number of Python or NumPy, and not complex."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


# Members of enumerations.

Member = TypeVar("Member", bound=enum.Enum)


def list_members(kind: type[enum.Enum]) -> str:
    """The members of an enumeration for errors, for example "OverlapMode.NoOverlap, ..."."""
    return ", ".join(f"{kind.__name__}.{member.name}" for member in kind)


def parse_member(kind: type[Member], value: Any, argument: str) -> Member:
    """The member that a member or its value stands for."""
    try:
        return kind(value)
    except ValueError:
        are_texts = all(isinstance(member.value, str) for member in kind)
        members = ", ".join(repr(member.value) for member in kind) if are_texts else list_members(kind)
        raise ValueError(f"{argument} must be one of {members}; got {value!r}.") from None


def parse_members(kind: type[Member], values: Collection[Any], argument: str) -> frozenset[Member]:
    """The members that a collection of members or of their values stands for."""
    if isinstance(values, str):
        raise ValueError(f"{argument} must be a collection of names; got the string {values!r}.")
    return frozenset(parse_member(kind, value, f"{argument}: each entry") for value in values)


# Names.


def find_near(name: str, names: list[str], prefix: str = "") -> str:
    """A hint at a name that may have been meant; an empty text if none is near."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {prefix + matches[0]!r}?" if matches else ""


def hash_name(name: str) -> int:
    """The first 32 bits of the SHA-256 of a name, as an unsigned integer."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def join(scope: str, name: str) -> str:
    """The full name of `name` within `scope`."""
    return f"{scope}/{name}" if scope else name


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in errors; a `functools.partial` has that of the function that it wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


# Rules of arguments.


def require(holds: object, rule: str, value: Any, error: type[Exception] = ValueError) -> None:
    """Raises an error that says a rule and the value in its place, unless the rule holds."""
    if not holds:
        raise error(f"{rule}; got {value!r}.")


def check_positive(argument: str, value: Any) -> None:
    """Raises a ValueError if an argument is not an integer of at least 1, of Python or NumPy."""
    require(is_integer(value, 1), f"{argument} must be an integer of at least 1", value)


def check_name(argument: str, name: Any) -> None:
    """Raises a ValueError if an argument is not the name of a variable or a scope."""
    is_name = isinstance(name, str) and all(name.split("/"))
    require(is_name, f"{argument} must be a non-empty string without empty parts", name)


def check_int(argument: str, value: Any, least: int) -> None:
    """Raises a ValueError if an argument is not an integer of at least `least`, of Python."""
    require(is_int(value, least), f"{argument} must be an integer of at least {least}", value)


def check_integer(argument: str, value: Any, least: int = 1, most: int = MAX_INT32) -> int:
    """Returns an integer within limits as Python's; raises a TypeError or ValueError for another value."""
    require(is_integer(value), f"{argument} must be an integer", value, TypeError)
    if not least <= value <= most:
        raise ValueError(f"{argument} must be from {least} to {most}; got {value}.")
    return int(value)


def check_function(argument: str, value: Any) -> None:
    """Raises a TypeError if an argument cannot be called."""
    require(callable(value), f"{argument} must be a function", value, TypeError)


def check_member(argument: str, value: Any, kind: type[enum.Enum]) -> None:
    """Raises a TypeError if an argument is not a member of an enumeration."""
    require(isinstance(value, kind), f"{argument} must be one of {list_members(kind)}", value, TypeError)
