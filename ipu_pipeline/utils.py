"""Small things that scripts for IPUs expect under `ipu.utils`."""

from __future__ import annotations

import enum

__all__ = ["SelectionOrder"]


class SelectionOrder(enum.Enum):
    """The order in which stages take the devices, seen as a ladder whose rungs are 0-1, 2-3, 4-5, ...

    AUTO and ZIGZAG: 0, 1, 2, 3, ... SNAKE: 0, 1, 3, 2, 4, 5, 7, 6, ..., so that neighbours in a
    pipeline are neighbours on the ladder. HOOF: up one side, 0, 2, 4, ..., and down the other,
    ..., 5, 3, 1, so that the last is a neighbour of the first.
    """

    AUTO = enum.auto()
    ZIGZAG = enum.auto()
    SNAKE = enum.auto()
    HOOF = enum.auto()

    def permute(self, num_devices: int) -> tuple[int, ...]:
        """The devices' indices in this order."""
        indices = list(range(num_devices))
        if self is SelectionOrder.SNAKE:
            rungs = [indices[start : start + 2] for start in range(0, num_devices, 2)]
            return tuple(
                index
                for number, rung in enumerate(rungs)
                for index in (reversed(rung) if number % 2 else rung)
            )
        if self is SelectionOrder.HOOF:
            return (*indices[::2], *reversed(indices[1::2]))
        return tuple(indices)
