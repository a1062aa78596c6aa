"""Options of training: accumulation of gradients, and how they become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ipu_pipeline.poptorch.enums import MeanReductionStrategy, ReductionType
from ipu_pipeline.poptorch.options import checks
from ipu_pipeline.poptorch.options.base import OptionGroup, Setting, configurable

__all__ = ["TrainingOptions"]


def _check_reduction(name: str, value: Any) -> ReductionType:
    if not isinstance(value, ReductionType) or value is ReductionType.NoReduction:
        raise ValueError(
            f"{name} must be poptorch.ReductionType.Sum or poptorch.ReductionType.Mean; got {value!r}."
        )
    return value


class TrainingOptions(OptionGroup):
    """`Options.Training`.

    Attributes:
      gradient_accumulation: micro-batches per weight update.
      accumulation_and_replication_reduction_type: how their gradients, and those of replicas, become one.
      meanAccumulationAndReplicationReductionStrategy: when a mean is divided.
      automatic_loss_scaling: whether the loss is scaled by a factor that follows the gradients.
      convolution_dithering: without effect.
    """

    gradient_accumulation: int
    accumulation_and_replication_reduction_type: ReductionType
    meanAccumulationAndReplicationReductionStrategy: MeanReductionStrategy
    automatic_loss_scaling: bool
    convolution_dithering: bool

    path = "poptorch.Options().Training"
    settings: ClassVar[Mapping[str, Setting]] = {
        "gradient_accumulation": Setting(checks.integer(1), 1),
        "accumulation_and_replication_reduction_type": Setting(_check_reduction, ReductionType.Mean),
        "meanAccumulationAndReplicationReductionStrategy": Setting(
            checks.member(MeanReductionStrategy), MeanReductionStrategy.Post
        ),
        "automatic_loss_scaling": Setting(checks.boolean, False),
        "convolution_dithering": Setting(
            checks.boolean,
            False,
            no_effect="it spreads convolutions over the tiles of an IPU, and other devices have none.",
        ),
    }

    @configurable
    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """How many micro-batches go into a weight update.

        Raises:
          AssertionError: it is no integer.
          ValueError: it is below 1.
        """
        return self.set(gradient_accumulation=gradient_accumulation)

    @configurable
    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """How the gradients of micro-batches, and of replicas, become one.

        Args:
          reduction_type: `ReductionType.Sum` or `Mean`.

        Raises:
          ValueError: it is neither.
        """
        return self.set(accumulation_and_replication_reduction_type=reduction_type)

    @configurable
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> Self:
        """When a mean of gradients is divided.

        If this is not called, it is `Post`; or `Running` if the optimizer accumulates in float16 (its
        `accum_type`) without combined accumulation.

        Args:
          mean_reduction_strategy: `Running`: as each micro-batch is added, so that sums stay small. `Post`
            and `PostAndLoss`: at the end. Replicas' means are taken at the end in any case.

        Raises:
          AssertionError: it is no `MeanReductionStrategy`.
        """
        return self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)

    @configurable
    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Whether the loss is scaled, so that float16 gradients neither vanish nor overflow.

        Raises:
          AssertionError: it is no boolean.
        """
        return self.set(automatic_loss_scaling=enabled)

    @configurable
    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Has no effect: it is about the tiles of an IPU. True warns.

        Raises:
          AssertionError: it is no boolean.
        """
        return self.set(convolution_dithering=enabled)
