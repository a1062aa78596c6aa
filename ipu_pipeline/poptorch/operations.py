"""Functions for models: losses of their own, and where their forward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.enums import OverlapMode
from ipu_pipeline.poptorch.logs import warn_once

__all__ = [
    "NameScope",
    "identity_loss",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "nop",
    "recomputationCheckpoint",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]

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


# Hints to PopTorch's compiler. They change nothing here, and say so.


def recomputationCheckpoint(*tensors: torch.Tensor) -> Any:
    """Returns the tensors as they are: they are kept for the backward anyway. Warns, once.

    Args:
      *tensors: of any shape and dtype.

    Returns:
      The tensor, or a tuple of several.
    """
    warn_once(
        "poptorch.recomputationCheckpoint has no effect: what the backward needs is kept, and nothing is "
        "recomputed. torch.utils.checkpoint recomputes a part of a model."
    )
    return tensors[0] if len(tensors) == 1 else tensors


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Returns the tensor as it is: JAX devices have no memory to be divided. Warns, once.

    Args:
      tensor: what a matrix product or convolution gave.
      available_memory_proportion: from 0 to 1.

    Raises:
      ValueError: it is no tensor, or no proportion.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"You may only set available memory for torch.tensor values. It got {type(tensor).__name__}."
        )
    if not 0 <= available_memory_proportion <= 1:
        raise ValueError(
            "set_available_memory: available_memory_proportion must be from 0 to 1; got "
            f"{available_memory_proportion!r}."
        )
    warn_once(
        "poptorch.set_available_memory has no effect: JAX devices have no tiles with memory of their own."
    )
    return tensor


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Returns the tensors as they are: inputs are always put on the devices ahead. Warns, once."""
    return _overlap("set_overlap_for_input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Returns the tensors as they are: no device waits for its outputs to be read. Warns, once."""
    return _overlap("set_overlap_for_output", output_tensors, mode)


def _overlap(name: str, tensors: Any, mode: OverlapMode) -> Any:
    if not isinstance(mode, OverlapMode):
        raise ValueError(f"{name}: mode must be a poptorch.OverlapMode; got {mode!r}.")
    if mode is not OverlapMode.NoOverlap:
        warn_once(f"poptorch.{name} has no effect: copies and computations always overlap.")
    return tensors


@contextlib.contextmanager
def NameScope(name: str) -> Iterator[None]:
    """Names nothing: values are called after their modules (`getTensorNames`). Warns, once.

    Args:
      name: of the values that are computed within.
    """
    warn_once(f"poptorch.NameScope({name!r}) has no effect: values are called after their modules.")
    yield
