"""Limits the work that devices have been given: a thread that would give them more waits first."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import jax

__all__ = ["Underway"]


class Underway:
    """Pieces of work that devices may not have done yet, each known by the arrays that it makes."""

    def __init__(self, limit: int | None) -> None:
        """Begins without any work."""
        self._limit = limit
        self._pieces: collections.deque[list[Any]] = collections.deque()

    def add(self, arrays: Iterable[Any]) -> None:
        """Adds a piece of work."""
        if self._limit is not None:
            self._pieces.append(list(arrays))

    def wait(self) -> None:
        """Waits until there are no more pieces than allowed."""
        while self._limit is not None and len(self._pieces) > self._limit:
            arrays = self._pieces.popleft()
            jax.block_until_ready([array for array in arrays if not array.is_deleted()])
