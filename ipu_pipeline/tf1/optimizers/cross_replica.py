"""Optimizers whose gradients are averaged over the replicas of a program."""

from __future__ import annotations

import dataclasses
from typing import Any

from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.optimizers.accumulating import GradientAccumulationOptimizerV2
from ipu_pipeline.tf1.optimizers.base import Optimizer, Unwrapped

__all__ = ["CrossReplicaGradientAccumulationOptimizerV2", "CrossReplicaOptimizer"]


class CrossReplicaOptimizer(Optimizer):
    """Says that gradients are averaged over replicas, and so how many replicas there are.

    A pipeline or loop of S IPUs with such an optimizer has as many replicas as there are times S IPUs in
    what `IPUConfig` selects. The gradients of a weight update, accumulated in each replica, are averaged
    over the replicas once, and the wrapped optimizer gets the means: the variables stay the same in all of
    them. It may stand anywhere in a nest of optimizers.

    Example:
      CrossReplicaOptimizer(optax.sgd(0.01))
    """

    def __init__(self, opt: Any, name: str = "CrossReplicaOptimizer") -> None:
        """Wraps an optimizer.

        Args:
          opt: an Optax transformation, or another of these optimizers.
          name: the optimizer's state is kept under it.

        Raises:
          TypeError: `opt` is no optimizer.
        """
        super().__init__(opt, name)

    def wrap(self, inner: Unwrapped) -> Unwrapped:
        """Adds the mean over replicas."""
        return _averaged(inner)


class CrossReplicaGradientAccumulationOptimizerV2(GradientAccumulationOptimizerV2):
    """A `GradientAccumulationOptimizerV2` that is a `CrossReplicaOptimizer` as well.

    It is for the bodies of loops; a pipeline accumulates by itself, and takes a `CrossReplicaOptimizer`.

    Example:
      optimizer = CrossReplicaGradientAccumulationOptimizerV2(optax.sgd(0.01), num_mini_batches=16)
      train_op = optimizer.minimize(loss)
    """

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str = "CrossReplicaGradientAccumulationOptimizerV2",
    ) -> None:
        """Wraps an optimizer; see `GradientAccumulationOptimizerV2`, whose arguments these are."""
        super().__init__(
            opt,
            num_mini_batches,
            offload_weight_update_variables,
            replicated_optimizer_state_sharding,
            dtype,
            reduction_method,
            name,
        )

    def wrap(self, inner: Unwrapped) -> Unwrapped:
        """Adds the accumulation, and the mean over replicas."""
        return _averaged(super().wrap(inner))


def _averaged(inner: Unwrapped) -> Unwrapped:
    if inner.averages_replicas:
        raise ValueError("An optimizer can average gradients over replicas only once; two are nested.")
    return dataclasses.replace(inner, averages_replicas=True)
