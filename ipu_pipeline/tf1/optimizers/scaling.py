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
    """Starts the backward from a scale in place of 1, so that small float16 gradients do not become zero.

    An update divides the gradients by the scale again, in 32 bits at least, and the wrapped optimizer runs
    in these. If a gradient of any stage is not finite, the update is skipped in all stages: variables and
    the wrapped optimizer's state stay. The scale is in the optimizer's state. Losses that are reported, and
    gradients that a `MapGradientOptimizer` gets, are without it; a map that gets an infinite or NaN
    gradient cannot hide it. The backward starts in the loss's dtype, which in float16 holds scales up to
    65504.

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
          initial_scale: the first scale, a finite number above 0. Powers of two round no gradient.
          dynamic: whether the scale changes; False keeps it, and skips updates too.
          growth_interval: after so many updates with finite gradients, from 1, the scale is multiplied by
            `factor`.
          factor: above 1. Gradients that are not finite divide the scale by it, down to 1 at least.
          name: the optimizer's state is kept under it.

        Raises:
          TypeError, ValueError: an argument is not usable.
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
