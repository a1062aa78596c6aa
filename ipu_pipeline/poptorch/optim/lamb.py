"""LAMB: Adam whose step per parameter is as large as the parameter.

Source: You et al., Large Batch Optimization for Deep Learning (arXiv:1904.00962), algorithm 2, with the
function phi(z) = min(z, max_weight_norm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ipu_pipeline.poptorch.optim.base import AVERAGES_TYPES, AveragingOptimizer

__all__ = ["LAMB"]


class LAMB(AveragingOptimizer):
    """LAMB. `step` computes an update on the CPU, for comparisons."""

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        "bias_correction": True,
        **AVERAGES_TYPES,
    }

    bias_correction: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        """Takes its arguments; None stands for the default.

        Args:
          params: parameters, or dicts with groups of them.
          lr: the learning rate; by default 0.001.
          betas: how much is kept of the averages of gradients and of their squares; (0.9, 0.999) by
            default.
          eps: added to the denominator; by default 1e-8.
          weight_decay: the share of the weights that is added to the update; by default 0.01.
          bias_correction: whether averages are corrected for starting at 0; by default True.
          loss_scaling: the loss is multiplied by it and the gradients are divided; by default 1.
          max_weight_norm: a parameter counts as no larger than this; by default 65500.
          accum_type: the dtype that gradients accumulate in: torch.float32, the default, or torch.float16.
          first_order_momentum_accum_type: the same choice, for the averages of gradients.
          second_order_momentum_accum_type: the same choice, for the averages of squared gradients.

        Raises:
          AssertionError: a type is neither torch.float32 nor torch.float16.
          ValueError: a value is out of its range.
        """
        of_groups, own = self.sort_given(locals())
        defaults: dict[str, Any] = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "max_weight_norm": 65500.0,  # about the largest float16
        }
        defaults |= of_groups
        for name in ("lr", "eps", "weight_decay", "max_weight_norm"):
            if not defaults[name] >= 0:
                raise ValueError(f"LAMB: {name} must be at least 0; got {defaults[name]}.")
        if len(defaults["betas"]) != 2 or not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ValueError(f"LAMB: betas must be two numbers from 0 to below 1; got {defaults['betas']}.")
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.set_up(of_groups, own)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes an update on the CPU.

        Args:
          closure: computes the loss and the gradients again.

        Returns:
          What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(
                step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
            )
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrections = (1.0, 1.0)
        if self.bias_correction:
            corrections = (1 - beta1 ** state["step"], 1 - beta2 ** state["step"])
        update = (mean / corrections[0]) / (square.sqrt() / math.sqrt(corrections[1]) + group["eps"])
        update += group["weight_decay"] * parameter
        weight_norm = min(float(parameter.norm()), group["max_weight_norm"])
        update_norm = float(update.norm())
        ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
        parameter.sub_(update, alpha=group["lr"] * ratio)
