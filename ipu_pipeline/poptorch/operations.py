"""Functions for models: losses of their own, and where their forward runs."""

from __future__ import annotations

import torch

from ipu_pipeline.poptorch import markers

__all__ = ["identity_loss", "ipuHardwareIsAvailable", "ipuHardwareVersion", "isRunningOnIpu", "nop"]

_REDUCTIONS = ("sum", "mean", "none")


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Makes a value the loss of a model. Where models run without devices, it is only reduced.

    Args:
      x: of any shape.
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


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor. When a model is compiled, XLA may not simplify across it.

    Args:
      tensor: of any shape and dtype.

    Raises:
      ValueError: it is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"nop must take a torch.tensor argument. It got {type(tensor).__name__}.")
    return tensor.clone() if markers.current_capture() is None else markers.copy_opaquely(tensor)


def isRunningOnIpu() -> bool:
    """Whether a model's forward runs for its devices, and not on the CPU."""
    return markers.current_capture() is not None


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether there are so many IPUs of Graphcore's: never. Models run on JAX devices in their place."""
    if not isinstance(num_ipus, int) or num_ipus < 1:
        raise ValueError(f"ipuHardwareIsAvailable: num_ipus must be an integer from 1; got {num_ipus!r}.")
    return False


def ipuHardwareVersion() -> int:
    """The version of Graphcore's IPUs: 0, there are none."""
    return 0
