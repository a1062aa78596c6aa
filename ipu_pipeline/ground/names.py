"""Joins and hashes names, and finds near ones."""

from __future__ import annotations

import difflib
import functools
import hashlib
from collections.abc import Callable
from typing import Any

__all__ = ["find_near", "hash_name", "join", "name_of"]


def find_near(name: str, known: list[str], prefix: str = "") -> str:
    """A hint at a name that may have been meant; an empty text if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {prefix + near[0]!r}?" if near else ""


def hash_name(name: str) -> int:
    """The first 32 bits of the SHA-256 of a name, as an unsigned integer."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def join(scope: str, name: str) -> str:
    """The full name of `name` within `scope`."""
    return f"{scope}/{name}" if scope else name


def name_of(function: Callable[..., Any]) -> str:
    """What errors call a function; a `functools.partial` has the name of the function that it wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
