"""An optimizer whose gradients are averaged over the replicas of a program."""

from __future__ import annotations

import dataclasses
from typing import Any

from ipu_pipeline.graphcore.importing import explain_missing
from ipu_pipeline.tf1.optimizers.base import Optimizer, Unwrapped

__all__ = ["CrossReplicaOptimizer"]


class CrossReplicaOptimizer(Optimizer):
    """An optimizer that averages gradients over replicas, and so makes a program run in replicas.

    A pipeline or loop of S IPUs with this optimizer has one replica per S IPUs that `IPUConfig` selects.
    The gradients of a weight update are accumulated in each replica and averaged over the replicas once.
    The wrapped optimizer gets the means, so variables stay equal in all replicas. Nested optimizers may
    have it at any level.

    Example:
      >>> def optimizer_function(loss):
      ...     optimizer = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(0.01))
      ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)
    """

    def __init__(self, opt: Any, name: str = "CrossReplicaOptimizer") -> None:
        """Wraps an optimizer.

        Args:
          opt: an Optax transformation, or another of these optimizers.
          name: the name of the optimizer's state.

        Raises:
          TypeError: `opt` is not an optimizer.
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
