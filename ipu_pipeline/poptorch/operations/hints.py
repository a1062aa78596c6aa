"""Hints to a compiler: some say what is kept or not merged, the others have no effect, and say so."""

from __future__ import annotations

from typing import Any

import torch

from ipu_pipeline.ground.enumerations import list_members
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.enums import OverlapMode
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.operations.checks import check_tensor, string

__all__ = [
    "Attribute",
    "NameScope",
    "nop",
    "recomputationCheckpoint",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]


class Attribute:
    """A context manager without effect, as a warning says once: its hints are PopTorch's compiler's."""

    def __init__(self, **attributes: Any) -> None:
        """Takes hints, as `__outline={"layer": "embedding"}`."""
        warn_once(f"poptorch.Attribute has no effect: XLA takes no hints ({', '.join(attributes)}).")

    def __enter__(self) -> Attribute:
        """Does nothing."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing."""


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor. When a model is compiled, XLA may not simplify across it.

    Args:
      tensor: of any shape and dtype.

    Raises:
      Error: it is no tensor.
    """
    check_tensor(tensor, "nop must take a torch.tensor argument.")
    return markers.copy_opaquely(tensor)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Says what the backward of a stage keeps of its forward. Everything else is then computed again.

    A model that calls it, and trains, holds of each micro-batch in flight what goes into its stages and
    these values; their backward computes the rest anew from them. A model that does not call it holds
    everything that its backward needs. Numbers are the same.

    Args:
      *tensors: of any shape and dtype, not within the body of a loop or a conditional. One list or tuple of
        them may stand for several.

    Returns:
      The tensor, or a tuple of several, or the like of the list. They are to be used from here on.

    Raises:
      ValueError: one is no tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        return type(tensors[0])([recomputationCheckpoint(tensor) for tensor in tensors[0]])
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"recomputationCheckpoint takes tensors; got {type(tensor).__name__}.")
    kept = tuple(map(markers.keep_for_backward, tensors)) if markers.is_traced() else tensors
    return kept[0] if len(kept) == 1 else kept


class NameScope:
    """A context manager: the values that are computed within have its name before theirs.

    `getTensorNames` has them as "name/layers.0/relu". Scopes within each other give "outer/inner/...".
    """

    def __init__(self, name: str) -> None:
        """Takes the name.

        Raises:
          AssertionError: it is no string.
          ValueError: it is empty.
        """
        string("NameScope: name", name)
        if not name:
            raise ValueError("NameScope: name must not be empty.")
        self.name = name

    def __enter__(self) -> NameScope:
        """Begins the scope."""
        markers.begin_scope(self.name)
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends it."""
        markers.end_scope()


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Returns the tensor as it is: JAX devices have no memory to be divided. Warns, once.

    Args:
      tensor: what a matrix product or convolution gave.
      available_memory_proportion: from 0 to 1.

    Raises:
      Error: it is no tensor.
      ValueError: the proportion is none.
    """
    check_tensor(tensor, "You may only set available memory for torch.tensor values.")
    if not 0 <= available_memory_proportion <= 1:
        raise ValueError(
            "set_available_memory: available_memory_proportion must be from 0 to 1; got "
            f"{available_memory_proportion!r}."
        )
    if not torch.compiler.is_dynamo_compiling():
        warn_once(
            "poptorch.set_available_memory has no effect: JAX devices have no tiles with memory of their "
            "own."
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
        raise ValueError(f"{name}: mode must be one of {list_members(OverlapMode)}; got {mode!r}.")
    if mode is not OverlapMode.NoOverlap:
        warn_once(f"poptorch.{name} has no effect: copies and computations always overlap.")
    return tensors
