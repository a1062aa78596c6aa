"""Small values that programs ask for again and again, placed once for each device."""

from __future__ import annotations

from typing import Any

import numpy as np

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.placing import put

__all__ = ["Constants"]

_MAX_SCALARS = 4096  # per group; loops count their iterations without end


class Constants:
    """Integers, and random keys and their numbers, on groups."""

    def __init__(self) -> None:
        self._scalars: dict[tuple[int, int], Any] = {}  # (device, integer) -> int32 scalar there
        self._key_numbers: dict[tuple[int, int], Any] = {}  # (device, number) -> uint32 scalar there
        self._keys: dict[int, tuple[Any, Any]] = {}  # device -> the last random key, and its copy there

    def key(self, key: Any, group: DeviceGroup) -> Any:
        """A random key on a group. The last one is kept: steps use the same key, and placing is slow."""
        known = self._keys.get(group.ipu)
        if known is None or known[0] is not key:
            (placed,) = put([key], group)
            known = self._keys[group.ipu] = (key, placed)
        return known[1]

    def key_number(self, number: int, group: DeviceGroup) -> Any:
        """A uint32 scalar on a group, with which random keys are folded; made once."""
        if (group.ipu, number) not in self._key_numbers:
            (self._key_numbers[group.ipu, number],) = put([np.uint32(number)], group)
        return self._key_numbers[group.ipu, number]

    def scalar(self, number: int, group: DeviceGroup) -> Any:
        """An int32 scalar on a group; small ones are made once."""
        known = self._scalars.get((group.ipu, number))
        if known is None:
            (known,) = put([np.int32(number)], group)
            if number < _MAX_SCALARS:
                self._scalars[group.ipu, number] = known
        return known
