"""Members of enumerations that users name, and errors that list the members."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

__all__ = ["list_members", "parse_member"]

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
        known = ", ".join(repr(member.value) for member in kind) if are_texts else list_members(kind)
        raise ValueError(f"{argument} must be one of {known}; got {value!r}.") from None
