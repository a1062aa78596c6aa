"""Small values that programs ask for again and again, placed once for each IPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.devices.rows import Row

__all__ = ["Constants"]

_MAX_SCALARS = 4096  # per row; loops count their iterations without end


class Constants:
    """Integers and random keys on rows."""

    def __init__(self) -> None:
        self._scalars: dict[tuple[int, int], Any] = {}  # (IPU, integer) -> int32 scalar there
        self._keys: dict[int, tuple[Any, Any]] = {}  # IPU -> the last random key, and its copy there

    def key(self, key: Any, row: Row) -> Any:
        """A random key on a row. The last one is kept: steps use the same key, and placing is slow."""
        known = self._keys.get(row.ipu)
        if known is None or known[0] is not key:
            (placed,) = put([key], row)
            known = self._keys[row.ipu] = (key, placed)
        return known[1]

    def scalar(self, number: int, row: Row) -> Any:
        """An int32 scalar on a row; small ones are made once."""
        known = self._scalars.get((row.ipu, number))
        if known is None:
            (known,) = put([np.int32(number)], row)
            if number < _MAX_SCALARS:
                self._scalars[row.ipu, number] = known
        return known
