"""Checks of a user's values. Booleans, which Python counts as integers, are not integers here."""

from __future__ import annotations

import numbers
from typing import Any, TypeGuard

__all__ = ["is_int", "is_integer", "is_number", "is_real"]


def is_int(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is a Python integer, and not less than `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_integer(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy, and not less than `least`."""
    is_one = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_one and (least is None or bool(value >= least))


def is_real(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a Python number, and not complex."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number of Python or NumPy, and not complex."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
