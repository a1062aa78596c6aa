"""Checks of the arguments of operations."""

from __future__ import annotations

from typing import Any

import torch

from ipu_pipeline.poptorch.errors import Error

__all__ = ["check_dim", "check_int", "check_outside", "check_tensor"]


def check_tensor(value: Any, message: str) -> None:
    """Raises if a value is no tensor.

    Args:
      value: anything.
      message: begins the error's text.

    Raises:
      Error: it is none.
    """
    if not isinstance(value, torch.Tensor):
        raise Error(f"{message} It got {type(value).__name__}.")


def check_int(value: Any, message: str, minimum: int = 1) -> None:
    """Raises if a value is no integer, or too small.

    Raises:
      Error: so it is.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise Error(f"{message} It must be an integer from {minimum}; got {value!r}.")


def check_dim(dim: Any, ndim: int, name: str) -> int:
    """A dimension, counted from the front.

    Args:
      dim: counted from the front, or if it is negative from the end.
      ndim: of the tensor, which is no scalar.
      name: of the operation.

    Raises:
      Error: the tensor is a scalar, or it has no such dimension.
    """
    if not isinstance(dim, int) or isinstance(dim, bool) or not -ndim <= dim < ndim:
        raise Error(
            f"{name}: dim must be an integer from {-ndim} to {ndim - 1} for a tensor of {ndim} dimensions; "
            f"got {dim!r}."
        )
    return dim % ndim


def check_outside(name: str) -> None:
    """Raises within a branch or the body of a loop, where torch cannot capture everything.

    Raises:
      RuntimeError: it is called there.
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(f"poptorch.{name} cannot be used in a branch, or in the body of a loop.")
