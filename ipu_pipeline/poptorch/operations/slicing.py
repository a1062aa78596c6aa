"""Slices that begin at a place given by a tensor.

In plain torch they are selections by indices, on the devices XLA's slices. A slice beyond the end of the
tensor is an IndexError in plain torch. On the devices, which cannot raise, the slice begins earlier, so
that it fits.
"""

from __future__ import annotations

from typing import Any

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.checks import check_dim, check_int, check_tensor

__all__ = ["SLICE", "UPDATE", "dynamic_slice", "dynamic_update"]

SLICE, UPDATE = f"{markers.NAMESPACE}::dynamic_slice", f"{markers.NAMESPACE}::dynamic_update"


def dynamic_slice(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> torch.Tensor:
    """Returns every `step`-th element of a part of a tensor, along one dimension.

    Args:
      tensor: the tensor, which is not a scalar.
      dim: the dimension.
      start: where the part begins, from 0: one integer. On the devices, a part that extends past the end
        begins earlier, so that it fits.
      size: the size of the part.
      step: the step from one element to the next.

    Returns:
      A tensor of `tensor`'s shape, with ceil(size / step) along `dim`.

    Raises:
      Error: `start` is not a tensor of one integer, the part is larger than the tensor, or a number is
        not an integer.
      IndexError: in plain torch, where the part is not within the tensor.
    """
    check_tensor(tensor, "dynamic_slice must take a torch.tensor argument.")
    dim = check_dim(dim, tensor.dim(), "dynamic_slice")
    _check_start(start, "dynamic_slice")
    check_int(size, "Size must be an integer.")
    check_int(step, "Step must be an integer.")
    if size > tensor.shape[dim]:
        raise Error(
            f"dynamic_slice: size {size} is larger than dimension {dim} of the tensor, {tensor.shape[dim]}."
        )
    sliced: torch.Tensor = _OPERATIONS.dynamic_slice(tensor, dim, start, size, step)
    return sliced


def dynamic_update(
    input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    """Returns a copy of a tensor with a part of it replaced.

    Args:
      input: the tensor, which is not a scalar.
      src: the new part, of the shape of `input`, with `size` along `dim`.
      dim: the dimension.
      start: where the part begins, from 0: one integer. On the devices, a part that extends past the end
        begins earlier, so that it fits.
      size: the size of the part.

    Raises:
      Error: `start` is not a tensor of one integer, or the tensors do not fit each other.
      IndexError: in plain torch, where the part is not within the tensor.
    """
    check_tensor(input, "dynamic_update must take a torch.tensor argument.")
    check_tensor(src, "dynamic_update must take a torch.tensor argument.")
    if input.dim() != src.dim():
        raise Error(
            "input and src tensors must have same dimensionality. They have "
            f"{input.dim()} and {src.dim()} dimensions."
        )
    if input.dtype != src.dtype:
        raise Error(f"input and src tensor must have same dtype. They have {input.dtype} and {src.dtype}.")
    dim = check_dim(dim, input.dim(), "dynamic_update")
    _check_start(start, "dynamic_update")
    check_int(size, "Size must be an integer.")
    wanted = [size if number == dim else length for number, length in enumerate(input.shape)]
    if list(src.shape) != wanted or size > input.shape[dim]:
        raise Error(
            f"dynamic_update: src must have the shape of input, {tuple(input.shape)}, with size {size} "
            f"along dimension {dim}, at most {input.shape[dim]}; it has {tuple(src.shape)}."
        )
    updated: torch.Tensor = _OPERATIONS.dynamic_update(input, src, dim, start)
    return updated


def _check_start(start: Any, name: str) -> None:
    check_tensor(start, f"Slice start argument to {name} must be a torch.tensor.")
    if start.numel() != 1 or start.is_floating_point() or start.dtype is torch.bool:
        raise Error(
            f"{name}: start must have one integer; got a tensor of {start.dtype} with {start.numel()} "
            "elements."
        )


def _slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    return tensor.index_select(dim, start.reshape(()) + torch.arange(0, size, step, device=start.device))


def _update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor) -> torch.Tensor:
    places = start.reshape(()) + torch.arange(src.shape[dim], device=start.device)
    return input.index_copy(dim, places, src)


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define("dynamic_slice(Tensor tensor, int dim, Tensor start, int size, int step) -> Tensor")
_library.impl("dynamic_slice", _slice, "CompositeImplicitAutograd")
_library.define("dynamic_update(Tensor input, Tensor src, int dim, Tensor start) -> Tensor")
_library.impl("dynamic_update", _update, "CompositeImplicitAutograd")
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)
