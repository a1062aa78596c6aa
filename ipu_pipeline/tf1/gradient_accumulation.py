"""Reduction of the gradients of a weight update's micro-batches to one gradient."""

from __future__ import annotations

import enum
from typing import Any

from ipu_pipeline.graphcore.sdk_names import explain_missing

__all__ = ["GradientAccumulationReductionMethod"]


class GradientAccumulationReductionMethod(enum.Enum):
    """SUM adds the gradients, MEAN divides the sum by their number, RUNNING_MEAN keeps their mean.

    Example:
      >>> mean = ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN
      >>> optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(
      ...     optax.sgd(0.1), num_mini_batches=16, reduction_method=mean
      ... )
    """

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, value: Any) -> GradientAccumulationReductionMethod:
        """Returns the member for a member, or for its name in upper or lower case.

        Raises:
          ValueError: there is no such member.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(
            f"Cannot parse {value!r} as one of GradientAccumulationReductionMethod: "
            f"{', '.join(cls.__members__)}."
        )


explain_missing(__name__)
