"""Convolutions side by side."""

from __future__ import annotations

from typing import Any, Self

import torch

from ipu_pipeline.ground.checks import is_int, is_real
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.enums import MultiConvPlanType
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.operations.checks import fail, member

__all__ = ["MultiConv"]


class MultiConv:
    """A context manager whose convolutions are one operation in PopTorch.

    On JAX devices XLA plans the convolutions, and they are computed as without it. The methods' arguments
    are checked, also against the number of convolutions, and warn that they have no effect. On the CPU it
    does nothing.

    Example:
      with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Parallel):
          y, z = self.first(x), self.second(x)
    """

    def __init__(self) -> None:
        """Starts without settings."""
        self._counts: dict[str, int] = {}

    def availableMemoryProportions(self, value: float | list[float]) -> Self:
        """Has no effect.

        Args:
          value: one number for all convolutions, or one for each, from 0 to 1.

        Raises:
          AssertionError: it is not such a number.
        """
        for one in self._note("availableMemoryProportions", value):
            if not is_real(one) or not 0 <= one <= 1:
                raise fail("MultiConv.availableMemoryProportions:", "floats from 0 to 1", one)
        return self

    def partialsTypes(self, value: torch.dtype | list[torch.dtype]) -> Self:
        """Has no effect.

        Args:
          value: `torch.float32` or `torch.float16`, for all convolutions, or one for each.

        Raises:
          ValueError: it is neither.
        """
        for one in self._note("partialsTypes", value):
            if one not in (torch.float32, torch.float16):
                raise ValueError(
                    f"MultiConv.partialsTypes: must be torch.float32 or torch.float16; got {one!r}."
                )
        return self

    def planType(self, value: MultiConvPlanType) -> Self:
        """Has no effect.

        Args:
          value: whether they run at the same time.

        Raises:
          AssertionError: it is not a plan.
        """
        member(MultiConvPlanType)("MultiConv.planType:", value)
        return self._tell("planType")

    def perConvReservedTiles(self, value: int) -> Self:
        """Has no effect.

        Args:
          value: a number of tiles.

        Raises:
          AssertionError: it is not such a number.
        """
        if not is_int(value) or value < 0:
            raise fail("MultiConv.perConvReservedTiles:", "an integer from 0", value)
        return self._tell("perConvReservedTiles")

    def cycleBackOff(self, value: float) -> Self:
        """Has no effect.

        Args:
          value: a proportion, from 0 to 1.

        Raises:
          AssertionError: it is not such a number.
        """
        if not is_real(value) or not 0 <= value <= 1:
            raise fail("MultiConv.cycleBackOff:", "from 0 to 1", value)
        return self._tell("cycleBackOff")

    def enableConvDithering(self, value: bool | list[bool]) -> Self:
        """Has no effect.

        Args:
          value: one boolean for all convolutions, or one for each.

        Raises:
          ValueError: it is not a boolean.
        """
        for one in self._note("enableConvDithering", value):
            if not isinstance(one, bool):
                raise ValueError(f"MultiConv.enableConvDithering: must be booleans; got {one!r}.")
        return self

    def __enter__(self) -> Self:
        """Begins the `MultiConv`."""
        if markers.is_traced():
            markers.begin_multi_conv()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends the `MultiConv`."""
        if markers.is_traced() and kind is None:
            markers.end_multi_conv(self._counts)

    def _note(self, name: str, value: Any) -> list[Any]:
        self._tell(name)
        if isinstance(value, (list, tuple)):
            self._counts[name] = len(value)
            return list(value)
        self._counts.pop(name, None)
        return [value]

    def _tell(self, name: str) -> Self:
        warn_once(f"poptorch.MultiConv.{name} has no effect: XLA plans convolutions by itself.")
        return self
