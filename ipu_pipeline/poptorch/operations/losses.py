"""The user's own losses."""

from __future__ import annotations

from typing import Literal

import torch

from ipu_pipeline.poptorch import markers

__all__ = ["identity_loss"]

_REDUCTIONS = ("sum", "mean", "none")


def identity_loss(x: torch.Tensor, reduction: Literal["sum", "mean", "none"]) -> torch.Tensor:
    """Makes a value the loss of a model. Without devices, it only reduces the value.

    Args:
      x: the value, of any shape.
      reduction: "sum" or "mean" over all elements; "none" only for a scalar, or within another loss.

    Returns:
      A scalar; with "none" a tensor of the shape of `x`.

    Raises:
      AssertionError: there is no such reduction.
    """
    assert reduction in _REDUCTIONS, (
        f"Unsupported reduction type! It must be one of {', '.join(_REDUCTIONS)}; got {reduction!r}."
    )
    return markers.reduce_loss(x, reduction)
