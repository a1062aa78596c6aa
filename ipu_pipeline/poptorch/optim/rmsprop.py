"""RMSprop, as torch has it or as TensorFlow has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ipu_pipeline.poptorch.optim.base import AVERAGES_TYPES, AveragingOptimizer

__all__ = ["RMSprop"]


class RMSprop(AveragingOptimizer, torch.optim.RMSprop):
    """torch's RMSprop with what PopTorch adds."""

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        **AVERAGES_TYPES,
        "use_tf_variant": False,
    }

    use_tf_variant: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
        *,
        capturable: bool | None = None,
    ) -> None:
        """Takes torch's arguments and PopTorch's; None stands for the default.

        Args:
          params: parameters, or dicts with groups of them.
          lr: as in `torch.optim.RMSprop`.
          alpha: as in torch.
          eps: as in torch.
          weight_decay: as in torch.
          momentum: as in torch.
          centered: as in torch.
          foreach: as in torch.
          maximize: as in torch.
          differentiable: as in torch.
          loss_scaling: the loss is multiplied by it and the gradients are divided; by default 1.
          accum_type: the dtype that gradients accumulate in: torch.float32, the default, or torch.float16.
          first_order_momentum_accum_type: the same choice, for momentum buffers and averages of gradients.
          second_order_momentum_accum_type: the same choice, for averages of squared gradients.
          use_tf_variant: if True, TensorFlow's formula. The average of squares starts at 1, `eps` is inside
            the root, and the momentum buffer takes in the learning rate. By default False.
          capturable: as in torch.

        Raises:
          AssertionError: a type is neither torch.float32 nor torch.float16.
          ValueError: torch refuses a value.
        """
        of_torch, own = self.sort_given(locals())
        torch.optim.RMSprop.__init__(self, params, **of_torch)
        self.set_up(of_torch, own)
