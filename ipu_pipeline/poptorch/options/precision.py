"""Options of arithmetic: exceptions, rounding, and the type of partial results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from ipu_pipeline.ground.enumerations import list_members
from ipu_pipeline.poptorch.enums import HalfFloatCastingBehavior
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.options import checks
from ipu_pipeline.poptorch.options.base import OptionGroup, Setting, configurable

__all__ = ["PrecisionOptions"]


def _check_partials(name: str, value: Any) -> torch.dtype:
    if value not in (torch.float16, torch.float32):
        raise ValueError(f"{name} must be torch.float16 or torch.float32; got {value!r}.")
    dtype: torch.dtype = value
    return dtype


class PrecisionOptions(OptionGroup):
    """`Options.Precision`.

    Attributes:
      floating_point_exceptions: whether a result that is not finite is an error.
      stochastic_rounding: without effect.
      partials_type: without effect; it has no value until it is set.
    """

    floating_point_exceptions: bool
    stochastic_rounding: bool
    partials_type: torch.dtype

    path = "poptorch.Options().Precision"
    settings: ClassVar[Mapping[str, Setting]] = {
        "floating_point_exceptions": Setting(checks.boolean, False),
        "stochastic_rounding": Setting(
            checks.boolean, False, no_effect="XLA rounds float16 to the nearest number."
        ),
        "partials_type": Setting(
            _check_partials,
            no_effect="XLA decides in which type a matrix product or convolution is summed up.",
        ),
    }

    @configurable
    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Whether a NaN or an infinity among a call's results is an error.

        Raises:
          AssertionError: it is no boolean.
        """
        return self.set(floating_point_exceptions=enabled)

    @configurable
    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Has no effect: float16 results are rounded to the nearest number. True warns.

        Raises:
          AssertionError: it is no boolean.
        """
        return self.set(stochastic_rounding=enabled)

    def autocastEnabled(self, enabled: bool) -> Self:
        """Has no effect: `torch.autocast` in forward casts, nothing else. Warns, unless it is True.

        Raises:
          AssertionError: it is no boolean.
        """
        if not checks.boolean("autocastEnabled", enabled):
            _warn(
                "autocastEnabled",
                "torch.autocast(enabled=False) in forward switches casts off.",
            )
        return self

    def autocastPolicy(self, policy: Any) -> Self:
        """Has no effect: `torch.autocast` goes by torch's own lists of operations. Warns."""
        del policy
        _warn("autocastPolicy", "torch.autocast goes by torch's own lists of operations.")
        return self

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """Has no effect: float16 and float32 together are float32, as torch has it. Others warn.

        Raises:
          AssertionError: it is no `HalfFloatCastingBehavior`.
        """
        assert isinstance(half_float_casting, HalfFloatCastingBehavior), (
            f"halfFloatCasting must be given one of {list_members(HalfFloatCastingBehavior)}; got "
            f"{half_float_casting!r}."
        )
        if half_float_casting is HalfFloatCastingBehavior.FloatDowncastToHalf:
            _warn("halfFloatCasting", "float16 and float32 together are float32, as in torch.")
        return self

    @configurable
    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Has no effect: XLA decides in which type matrix products and convolutions are summed up. Warns.

        Args:
          dtype: torch.float16 or torch.float32.

        Raises:
          ValueError: it is neither.
        """
        return self.set(partials_type=dtype)


def _warn(name: str, reason: str) -> None:
    warn_once(f"poptorch.Options().Precision.{name} has no effect: {reason}")
