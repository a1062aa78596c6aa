"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ipu_pipeline.poptorch.optim.base import AVERAGES_TYPES, AveragingOptimizer

__all__ = ["Adam", "AdamW"]


class Adam(AveragingOptimizer, torch.optim.Adam):
    """torch's Adam with what PopTorch adds."""

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        **AVERAGES_TYPES,
        "max_grad_norm": float("inf"),
    }

    max_grad_norm: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        *,
        decoupled_weight_decay: bool | None = None,
    ) -> None:
        """Takes torch's arguments and PopTorch's; None stands for the default.

        Args:
          params: parameters, or dicts with groups of them.
          lr: as in `torch.optim.Adam`.
          betas: as in torch.
          eps: as in torch.
          weight_decay: as in torch.
          amsgrad: as in torch. A model can only be trained without it.
          foreach: as in torch.
          maximize: as in torch.
          capturable: as in torch.
          differentiable: as in torch.
          fused: as in torch.
          loss_scaling: the loss is multiplied by it and the gradients are divided; by default 1.
          accum_type: the dtype that gradients accumulate in: torch.float32, the default, or torch.float16.
          first_order_momentum_accum_type: the same choice, for the averages of gradients.
          second_order_momentum_accum_type: the same choice, for the averages of squared gradients.
          max_grad_norm: gradients are scaled down to this norm over all of them; by default infinite.
          decoupled_weight_decay: as in torch.

        Raises:
          AssertionError: a type is neither torch.float32 nor torch.float16.
          ValueError: torch refuses a value.
        """
        of_torch, own = self.sort_given(locals())
        torch.optim.Adam.__init__(self, params, **of_torch)
        self.set_up(of_torch, own)


class AdamW(AveragingOptimizer, torch.optim.AdamW):
    """torch's AdamW with what PopTorch adds."""

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        "bias_correction": True,
        **AVERAGES_TYPES,
        "max_grad_norm": float("inf"),
    }

    bias_correction: bool
    max_grad_norm: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        """Takes torch's arguments and PopTorch's; None stands for the default.

        Args:
          params: parameters, or dicts with groups of them.
          lr: as in `torch.optim.AdamW`.
          betas: as in torch.
          eps: as in torch.
          weight_decay: as in torch.
          amsgrad: as in torch. A model can only be trained without it.
          maximize: as in torch.
          foreach: as in torch.
          capturable: as in torch.
          differentiable: as in torch.
          fused: as in torch.
          loss_scaling: the loss is multiplied by it and the gradients are divided; by default 1.
          bias_correction: whether averages are corrected for starting at 0; by default True.
          accum_type: the dtype that gradients accumulate in: torch.float32, the default, or torch.float16.
          first_order_momentum_accum_type: the same choice, for the averages of gradients.
          second_order_momentum_accum_type: the same choice, for the averages of squared gradients.
          max_grad_norm: gradients are scaled down to this norm over all of them; by default infinite.

        Raises:
          AssertionError: a type is neither torch.float32 nor torch.float16.
          ValueError: torch refuses a value.
        """
        of_torch, own = self.sort_given(locals())
        torch.optim.AdamW.__init__(self, params, **of_torch)
        self.set_up(of_torch, own)
