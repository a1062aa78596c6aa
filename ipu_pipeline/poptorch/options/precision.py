"""Options of arithmetic: exceptions, rounding, and the dtype of partial results."""

from __future__ import annotations

from typing import Any, Self

import torch

from ipu_pipeline.ground.enumerations import list_members
from ipu_pipeline.poptorch.enums import HalfFloatCastingBehavior
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import Option, OptionGroup

__all__ = ["PrecisionOptions"]


def _check_partials(name: str, value: Any) -> torch.dtype:
    if value not in (torch.float16, torch.float32):
        raise ValueError(f"{name} must be torch.float16 or torch.float32; got {value!r}.")
    dtype: torch.dtype = value
    return dtype


class PrecisionOptions(OptionGroup):
    """`Options.Precision`."""

    path = "poptorch.Options().Precision"

    floating_point_exceptions = Option(checks.boolean, False)

    @floating_point_exceptions.setter
    def enableFloatingPointExceptions(self, enabled: bool) -> None:
        """Whether a NaN or an infinity among a call's results is an error."""

    stochastic_rounding = Option(
        checks.boolean, False, no_effect="XLA rounds float16 to the nearest number."
    )

    @stochastic_rounding.setter
    def enableStochasticRounding(self, enabled: bool) -> None:
        """Has no effect: float16 results are rounded to the nearest number. True warns."""

    partials_type = Option(
        _check_partials,
        no_effect="XLA decides in which type a matrix product or convolution is summed up.",
    )

    @partials_type.setter
    def setPartialsType(self, dtype: torch.dtype) -> None:
        """Has no effect, and warns: XLA decides the dtype that matrix products and convolutions sum up in.

        Args:
          dtype: torch.float16 or torch.float32.

        Raises:
          ValueError: it is neither.
        """

    def autocastEnabled(self, enabled: bool) -> Self:
        """Has no effect: only `torch.autocast` in forward casts. False warns.

        Raises:
          AssertionError: it is not a boolean.
        """
        if not checks.boolean("autocastEnabled", enabled):
            _warn(
                "autocastEnabled",
                "torch.autocast(enabled=False) in forward switches casts off.",
            )
        return self

    def autocastPolicy(self, policy: Any) -> Self:
        """Has no effect, and warns: `torch.autocast` uses torch's own lists of operations."""
        del policy
        _warn("autocastPolicy", "torch.autocast goes by torch's own lists of operations.")
        return self

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """Has no effect: float16 with float32 gives float32, as in torch. `FloatDowncastToHalf` warns.

        Raises:
          AssertionError: it is not a `HalfFloatCastingBehavior`.
        """
        rule = f"given one of {list_members(HalfFloatCastingBehavior)}"
        checks.instance(HalfFloatCastingBehavior, rule)("halfFloatCasting", half_float_casting)
        if half_float_casting is HalfFloatCastingBehavior.FloatDowncastToHalf:
            _warn("halfFloatCasting", "float16 and float32 together are float32, as in torch.")
        return self


def _warn(name: str, reason: str) -> None:
    warn_once(f"poptorch.Options().Precision.{name} has no effect: {reason}")
