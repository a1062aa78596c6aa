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
    """A context manager: the convolutions within are one operation of PopTorch's.

    On JAX devices XLA plans them, and they are computed as without it. What is said by the methods is
    checked, against the number of convolutions too, and a warning says that it has no effect. On the CPU
    nothing happens.

    Example:
      with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Parallel):
          y, z = self.first(x), self.second(x)
    """

    def __init__(self) -> None:
        """Says nothing."""
        self._counts: dict[str, int] = {}

    def availableMemoryProportions(self, value: float | list[float]) -> Self:
        """Has no effect.

        Args:
          value: of all convolutions, or one for each, from 0 to 1.

        Raises:
          AssertionError: it is none.
        """
        for one in self._note("availableMemoryProportions", value):
            if not is_real(one) or not 0 <= one <= 1:
                raise fail("MultiConv.availableMemoryProportions:", "floats from 0 to 1", one)
        return self

    def partialsTypes(self, value: torch.dtype | list[torch.dtype]) -> Self:
        """Has no effect.

        Args:
          value: `torch.float32` or `torch.float16`, of all convolutions, or one for each.

        Raises:
          ValueError: it is none of these.
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
          value: whether they run at a time.

        Raises:
          AssertionError: it is no plan.
        """
        member(MultiConvPlanType)("MultiConv.planType:", value)
        return self._tell("planType")

    def perConvReservedTiles(self, value: int) -> Self:
        """Has no effect.

        Args:
          value: a number of tiles.

        Raises:
          AssertionError: it is none.
        """
        if not is_int(value) or value < 0:
            raise fail("MultiConv.perConvReservedTiles:", "an integer from 0", value)
        return self._tell("perConvReservedTiles")

    def cycleBackOff(self, value: float) -> Self:
        """Has no effect.

        Args:
          value: a proportion, from 0 to 1.

        Raises:
          AssertionError: it is none.
        """
        if not is_real(value) or not 0 <= value <= 1:
            raise fail("MultiConv.cycleBackOff:", "from 0 to 1", value)
        return self._tell("cycleBackOff")

    def enableConvDithering(self, value: bool | list[bool]) -> Self:
        """Has no effect.

        Args:
          value: of all convolutions, or one for each.

        Raises:
          ValueError: it is no boolean.
        """
        for one in self._note("enableConvDithering", value):
            if not isinstance(one, bool):
                raise ValueError(f"MultiConv.enableConvDithering: must be booleans; got {one!r}.")
        return self

    def __enter__(self) -> Self:
        """Begins it."""
        if markers.is_traced():
            markers.begin_multi_conv()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends it."""
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
