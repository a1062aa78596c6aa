"""Options of training: the accumulation and reduction of gradients."""

from __future__ import annotations

from typing import Any

from ipu_pipeline.poptorch.enums import MeanReductionStrategy, ReductionType
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import Option, OptionGroup

__all__ = ["TrainingOptions"]


def _check_reduction(name: str, value: Any) -> ReductionType:
    if not isinstance(value, ReductionType) or value is ReductionType.NoReduction:
        raise ValueError(
            f"{name} must be poptorch.ReductionType.Sum or poptorch.ReductionType.Mean; got {value!r}."
        )
    return value


class TrainingOptions(OptionGroup):
    """`Options.Training`."""

    path = "poptorch.Options().Training"

    gradient_accumulation = Option(checks.integer(1), 1)

    @gradient_accumulation.setter
    def gradientAccumulation(self, gradient_accumulation: int) -> None:
        """Sets the number of micro-batches per weight update."""

    accumulation_and_replication_reduction_type = Option(_check_reduction, ReductionType.Mean)

    @accumulation_and_replication_reduction_type.setter
    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> None:
        """Sets the reduction of the gradients over micro-batches and replicas.

        Args:
          reduction_type: `ReductionType.Sum` or `Mean`.

        Raises:
          ValueError: it is another value.
        """

    meanAccumulationAndReplicationReductionStrategy = Option(
        checks.member(MeanReductionStrategy), MeanReductionStrategy.Post
    )

    @meanAccumulationAndReplicationReductionStrategy.setter
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> None:
        """Sets the time of division in a mean of gradients.

        The default is `Post`, or `Running` if the optimizer accumulates in float16 (its `accum_type`)
        without combined accumulation.

        Args:
          mean_reduction_strategy: `Running`: when each micro-batch is added, so that sums stay small.
            `Post` and `PostAndLoss`: at the end. Means over replicas are always taken at the end.
        """

    automatic_loss_scaling = Option(checks.boolean, False)

    @automatic_loss_scaling.setter
    def setAutomaticLossScaling(self, enabled: bool) -> None:
        """Sets whether the loss is scaled, so that float16 gradients neither vanish nor overflow.

        The scale starts at the optimizer's `loss_scaling`. An update with gradients that are not finite is
        skipped, and halves the scale, down to 1. After 100 updates without a skip the scale doubles. All
        replicas have the same scale.
        """

    convolution_dithering = Option(
        checks.boolean,
        False,
        no_effect="it spreads convolutions over the tiles of an IPU, and other devices have none.",
    )

    @convolution_dithering.setter
    def setConvolutionDithering(self, enabled: bool) -> None:
        """Has no effect: it concerns the tiles of an IPU. True warns."""
