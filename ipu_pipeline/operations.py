"""What a recorded action returns, to be returned from the compiled function or a loop's body."""

from __future__ import annotations

__all__ = ["Operation"]


class Operation:
    """What `pipeline`, `minimize` and `enqueue` return: something that runs, without a value."""

    def __init__(self, name: str) -> None:
        """Names the operation."""
        self.name = name
