"""Operations: what recorded actions return, and what a session runs."""

from __future__ import annotations

__all__ = ["Operation"]


class Operation:
    """The result of `pipeline`, `minimize` and `enqueue`: it can be run, and has no value."""

    def __init__(self, name: str) -> None:
        """Names the operation."""
        self.name = name
