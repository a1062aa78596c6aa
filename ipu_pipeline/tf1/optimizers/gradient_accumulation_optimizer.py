"""Optimizers for the bodies of loops that update the weights every few iterations."""

from __future__ import annotations

import dataclasses
from typing import Any

from ipu_pipeline.graphcore.importing import explain_missing
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.ground.shapes import check_float_dtype
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.optimizers.base import Accumulation, Optimizer, Unwrapped
from ipu_pipeline.tf1.optimizers.cross_replica_optimizer import averaged

__all__ = [
    "CrossReplicaGradientAccumulationOptimizerV2",
    "GradientAccumulationOptimizerV2",
    "GradientAccumulationReductionMethod",
]

_MAX_INT32 = 2**31 - 1


class GradientAccumulationOptimizerV2(Optimizer):
    """Accumulates gradients over several iterations, and then updates the weights.

    The session counts the iterations: a later run can complete an accumulation that a run has started.

    Example:
      >>> def body(x):
      ...     loss = jnp.mean(layers.Dense(1)(x) ** 2)
      ...     optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.01), 4)
      ...     return x, optimizer.minimize(loss)
      >>> def model(x):
      ...     return ipu.loops.repeat(8, body, [x])  # two weight updates
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.ones([4, 8], np.float32)])
    """

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str | None = None,
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: an Optax transformation, or another of these optimizers.
          num_mini_batches: iterations per weight update, at least 1.
          offload_weight_update_variables: whether the optimizer's state is in host memory between weight
            updates; None is False.
          replicated_optimizer_state_sharding: whether each replica keeps a part of the optimizer's state
            and updates its part of the weights. With one replica, the run warns that it has no effect.
          dtype: the dtype of the accumulators: None for the variable's dtype, a dtype, or a function from a
            variable (with `name`, `shape` and `dtype`) to a dtype. The optimizer, with its state, uses the
            wider of this dtype and the variable's: with float32, a float16 model has a float32 Adam.
          reduction_method: SUM, MEAN or RUNNING_MEAN of the gradients, or its name.
          name: the name of the optimizer's state; by default the name of the class.

        Raises:
          TypeError, ValueError: an argument has a wrong value.
        """
        super().__init__(opt, name or type(self).__name__)
        if not is_integer(num_mini_batches):
            raise TypeError(f"num_mini_batches must be an integer; got {num_mini_batches!r}.")
        if not 1 <= num_mini_batches < _MAX_INT32:
            raise ValueError(
                f"num_mini_batches must be from 1 to {_MAX_INT32 - 1}; got {num_mini_batches}."
            )
        if offload_weight_update_variables not in (None, False, True):
            raise TypeError(
                "offload_weight_update_variables must be True, False or None; got "
                f"{offload_weight_update_variables!r}."
            )
        if replicated_optimizer_state_sharding not in (False, True):
            raise TypeError(
                "replicated_optimizer_state_sharding must be True or False; got "
                f"{replicated_optimizer_state_sharding!r}."
            )
        if dtype is not None and not callable(dtype):
            check_float_dtype(dtype, "dtype")
        self._accumulation = Accumulation(
            num_mini_batches=int(num_mini_batches),
            dtype=dtype,
            reduction_method=GradientAccumulationReductionMethod.parse(reduction_method),
            offloads_state=bool(offload_weight_update_variables),
            shards_state=bool(replicated_optimizer_state_sharding),
        )

    def wrap(self, inner: Unwrapped) -> Unwrapped:
        """Adds the accumulation."""
        if inner.accumulation is not None:
            raise ValueError("An optimizer can accumulate gradients only once; two are nested.")
        return dataclasses.replace(inner, accumulation=self._accumulation)


class CrossReplicaGradientAccumulationOptimizerV2(GradientAccumulationOptimizerV2):
    """A `GradientAccumulationOptimizerV2` that is also a `CrossReplicaOptimizer`.

    Use it in the bodies of loops. Pipelines accumulate gradients anyway, and take a
    `CrossReplicaOptimizer`.

    Example:
      >>> optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2(
      ...     optax.sgd(0.01), num_mini_batches=16
      ... )
    """

    def wrap(self, inner: Unwrapped) -> Unwrapped:
        """Adds the accumulation, and the mean over replicas."""
        return averaged(super().wrap(inner))


explain_missing(__name__)
