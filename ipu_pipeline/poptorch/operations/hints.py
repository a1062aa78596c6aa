"""What a model says of itself: its loss, its names, hints to a compiler, and whether it runs on devices."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from ipu_pipeline.ground.checks import list_members
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.enums import OverlapMode
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.operations.checks import check_tensor, string

# Losses.

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


# Hints to a compiler. Some choose what is kept or not merged; the others warn that they have no effect.


class Attribute:
    """A context manager without effect, which warns once. Its hints are for PopTorch's compiler."""

    def __init__(self, **attributes: Any) -> None:
        """Takes hints, such as `__outline={"layer": "embedding"}`."""
        warn_once(f"poptorch.Attribute has no effect: XLA takes no hints ({', '.join(attributes)}).")

    def __enter__(self) -> Attribute:
        """Does nothing."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing."""


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor. When a model is compiled, XLA may not simplify across the copy.

    Args:
      tensor: the tensor, of any shape and dtype.

    Raises:
      Error: it is not a tensor.
    """
    check_tensor(tensor, "nop must take a torch.tensor argument.")
    return markers.copy_opaquely(tensor)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Chooses what a stage's backward keeps of its forward. Everything else is then recomputed.

    A training model that calls it holds, for each micro-batch in flight, the inputs of its stages and these
    values, from which the backward recomputes the rest. A model that does not call it holds everything that
    its backward needs. The numbers are the same.

    Args:
      *tensors: tensors of any shape and dtype, not within the body of a loop or a conditional. One list or
        tuple of them may stand for several.

    Returns:
      The tensor, a tuple of several, or a list or tuple like the given one. Use these from here on.

    Raises:
      ValueError: one is not a tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        return type(tensors[0])([recomputationCheckpoint(tensor) for tensor in tensors[0]])
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"recomputationCheckpoint takes tensors; got {type(tensor).__name__}.")
    checkpoints = tuple(map(markers.keep_for_backward, tensors)) if markers.is_traced() else tensors
    return checkpoints[0] if len(checkpoints) == 1 else checkpoints


class NameScope:
    """A context manager that puts its name before the names of values computed within.

    `getTensorNames` has them as "name/layers.0/relu". Nested scopes give "outer/inner/...".
    """

    def __init__(self, name: str) -> None:
        """Takes the name.

        Raises:
          AssertionError: it is not a string.
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
        """Ends the scope."""
        markers.end_scope()


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Returns the tensor unchanged, because JAX devices have no memory to divide. Warns once.

    Args:
      tensor: the result of a matrix product or convolution.
      available_memory_proportion: a number from 0 to 1.

    Raises:
      Error: it is not a tensor.
      ValueError: the proportion is not such a number.
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
    """Returns the tensors unchanged, because inputs are always put on the devices ahead. Warns once."""
    return _overlap("set_overlap_for_input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Returns the tensors unchanged, because no device waits for its outputs to be read. Warns once."""
    return _overlap("set_overlap_for_output", output_tensors, mode)


def _overlap(name: str, tensors: Any, mode: OverlapMode) -> Any:
    if not isinstance(mode, OverlapMode):
        raise ValueError(f"{name}: mode must be one of {list_members(OverlapMode)}; got {mode!r}.")
    if mode is not OverlapMode.NoOverlap:
        warn_once(f"poptorch.{name} has no effect: copies and computations always overlap.")
    return tensors


# Where a model's forward runs.

_VERSION_VARIABLE = "IPU_PIPELINE_HARDWARE_VERSION"


def isRunningOnIpu() -> bool:
    """Whether a model's forward runs for its devices, and not on the CPU."""
    if torch.compiler.is_dynamo_compiling():  # a branch, or the body of a loop
        return bool(torch.compiler.is_exporting())
    return markers.current_capture() is not None


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether there are `num_ipus` of Graphcore's IPUs: never. Models run on JAX devices instead."""
    if not isinstance(num_ipus, int) or num_ipus < 1:
        raise ValueError(f"ipuHardwareIsAvailable: num_ipus must be an integer from 1; got {num_ipus!r}.")
    return False


def ipuHardwareVersion() -> int:
    """Returns the version of Graphcore's IPUs that programs are to suppose: 0, as there are none.

    The environment variable IPU_PIPELINE_HARDWARE_VERSION sets another one, for programs that insist on it:
    2 or 21 for an Mk2.

    Raises:
      ValueError: the variable is not a whole number.
    """
    text = os.environ.get(_VERSION_VARIABLE, "0")
    if not text.isdecimal():
        raise ValueError(
            f"The environment variable {_VERSION_VARIABLE} must be a whole number; it is {text!r}."
        )
    return int(text)
