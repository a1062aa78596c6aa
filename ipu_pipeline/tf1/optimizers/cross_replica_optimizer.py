"""An optimizer whose gradients are averaged over the replicas of a program."""

from __future__ import annotations

import dataclasses
from typing import Any

from ipu_pipeline.graphcore.importing import explain_missing
from ipu_pipeline.tf1.optimizers.base import Optimizer, Unwrapped

__all__ = ["CrossReplicaOptimizer"]


class CrossReplicaOptimizer(Optimizer):
    """Says that gradients are averaged over replicas, and so how many replicas there are.

    A pipeline or loop of S IPUs with such an optimizer has as many replicas as there are times S IPUs in
    what `IPUConfig` selects. The gradients of a weight update, accumulated in each replica, are averaged
    over the replicas once, and the wrapped optimizer gets the means: the variables stay the same in all of
    them. It may stand anywhere in a nest of optimizers.

    Example:
      >>> def optimizer_function(loss):
      ...     optimizer = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(0.01))
      ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)
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
        return averaged(inner)


def averaged(inner: Unwrapped) -> Unwrapped:
    """Adds the mean over replicas to what a nest of optimizers amounts to."""
    if inner.averages_replicas:
        raise ValueError("An optimizer can average gradients over replicas only once; two are nested.")
    return dataclasses.replace(inner, averages_replicas=True)


explain_missing(__name__)
