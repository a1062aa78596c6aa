"""An optimizer that scales the loss, for gradients in float16."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import optax

from ipu_pipeline.engine.fronts import scale_loss
from ipu_pipeline.ground.checks import is_integer, is_number
from ipu_pipeline.tf1.optimizers.base import Optimizer, Unwrapped

__all__ = ["LossScalingOptimizer"]

_MAX_INT32 = 2**31 - 1


class LossScalingOptimizer(Optimizer):
    """Multiplies the loss by a scale, so that small float16 gradients do not become zero.

    The update divides gradients by the scale again, in at least 32 bits, in which the wrapped optimizer
    runs. If a gradient of any stage is not finite, the update is skipped in all stages: variables and the
    wrapped optimizer's state do not change. The scale is part of the optimizer's state. Reported losses,
    and gradients that a `MapGradientOptimizer` gets, are not scaled; the map cannot hide infinite or NaN
    gradients. The backward starts in the loss's dtype: in float16, scales are at most 65504.

    Example:
      >>> optimizer = ipu.optimizers.LossScalingOptimizer(optax.adam(1e-3), initial_scale=2.0**12)
    """

    def __init__(
        self,
        opt: Any,
        initial_scale: float = 2.0**15,
        dynamic: bool = True,
        growth_interval: int = 2000,
        factor: float = 2.0,
        name: str = "LossScalingOptimizer",
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: an Optax transformation, or another of these optimizers.
          initial_scale: the first scale, a finite number above 0. Powers of two cause no rounding.
          dynamic: whether the scale changes. False: it is constant, but updates are still skipped.
          growth_interval: the number of updates with finite gradients, at least 1, after which the scale is
            multiplied by `factor`.
          factor: a number above 1. Gradients that are not finite divide the scale by it, down to 1.
          name: the name of the optimizer's state.

        Raises:
          TypeError, ValueError: an argument has a wrong value.
        """
        super().__init__(opt, name)
        for argument, value, above in (("initial_scale", initial_scale, 0), ("factor", factor, 1)):
            if not is_number(value):
                raise TypeError(f"{argument} must be a number; got {value!r}.")
            if not above < value < np.finfo(np.float32).max:
                raise ValueError(f"{argument} must be finite in float32 and above {above}; got {value}.")
        if not isinstance(dynamic, bool):
            raise TypeError(f"dynamic must be True or False; got {dynamic!r}.")
        if not is_integer(growth_interval):
            raise TypeError(f"growth_interval must be an integer; got {growth_interval!r}.")
        if not 1 <= growth_interval <= _MAX_INT32:
            raise ValueError(f"growth_interval must be from 1 to {_MAX_INT32}; got {growth_interval}.")
        self._settings = (float(initial_scale), dynamic, int(growth_interval), float(factor))

    def wrap(self, inner: Unwrapped) -> Unwrapped:
        """Adds the scale, around the transformation."""
        if inner.scaled is not None:
            raise ValueError("An optimizer can scale the loss only once; two are nested.")

        def scaled(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
            return scale_loss(transformation, *self._settings)

        return dataclasses.replace(inner, scaled=scaled)
