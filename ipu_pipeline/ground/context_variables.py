"""Context variables that have a value inside a `with` block."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

_Value = TypeVar("_Value")


@contextlib.contextmanager
def bound(variable: contextvars.ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Gives a context variable a value for a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
