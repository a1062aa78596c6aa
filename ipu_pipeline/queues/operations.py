"""Operations: what recorded actions return, and what a session runs."""

from __future__ import annotations

__all__ = ["Operation"]


class Operation:
    """What `pipeline`, `minimize` and `enqueue` return: something that runs, without a value."""

    def __init__(self, name: str) -> None:
        """Names the operation."""
        self.name = name
