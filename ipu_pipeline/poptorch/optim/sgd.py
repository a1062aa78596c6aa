"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.optim.base import Optimizer

__all__ = ["SGD"]


class SGD(Optimizer, torch.optim.SGD):
    """torch's SGD with what PopTorch adds.

    Example:
      optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, loss_scaling=1024.0)
    """

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": float("inf"),
    }

    use_combined_accum: bool
    accum_type: torch.dtype
    velocity_accum_type: torch.dtype
    max_grad_norm: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | torch.Tensor | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        *,
        fused: bool | None = None,
    ) -> None:
        """Takes torch's arguments and PopTorch's; None stands for the default.

        Args:
          params: parameters, or dicts with groups of them.
          lr: as in `torch.optim.SGD`.
          momentum: as in torch.
          dampening: as in torch.
          weight_decay: as in torch.
          nesterov: as in torch.
          maximize: as in torch.
          foreach: as in torch.
          differentiable: as in torch.
          loss_scaling: the loss is multiplied by it and the gradients are divided, so that small gradients
            survive float16; by default 1.
          velocity_scaling: in the combined variant, the momentum buffers are kept multiplied by it; by
            default 1. It may differ per group.
          use_combined_accum: if True, gradients are accumulated and momentum buffers kept in the dtype of
            the parameter, and the next two types are ignored. By default False.
          accum_type: the dtype that gradients accumulate in: torch.float32, the default, or torch.float16.
          velocity_accum_type: the same choice, for the momentum buffers.
          max_grad_norm: gradients are scaled down to this norm over all of them; by default infinite.
          fused: as in torch.

        Raises:
          AssertionError: a type is neither torch.float32 nor torch.float16.
          ValueError: torch refuses a value.
        """
        of_groups, own = self.sort_given(locals())
        of_torch = {name: value for name, value in of_groups.items() if name != "velocity_scaling"}
        torch.optim.SGD.__init__(self, params, **of_torch)
        if use_combined_accum:
            scaling = 1.0 if velocity_scaling is None else velocity_scaling
            self.defaults["velocity_scaling"] = scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", scaling)
        elif velocity_scaling is not None:
            logs.warn_once(
                "velocity_scaling value ignored when using the separate variant "
                "(use_combined_accum=False): its momentum buffers are float32, or what velocity_accum_type "
                "says, and not scaled."
            )
        if use_combined_accum and not (accum_type is None and velocity_accum_type is None):
            logs.warn_once(
                "accum_type and velocity_accum_type are ignored when using the combined variant "
                "(use_combined_accum=True): it has one tensor, in the dtype of the parameter."
            )
        self.set_up(of_groups, own)
