"""Operations as others of torch's: torch's decompositions, and a few of our own.

torch.export decomposes into what it calls the core operations. Here also those are decomposed that have no
lowering, where torch has a decomposition at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.lowering.registry import find_lowering, kept_operations

__all__ = ["decompositions"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What the operations of a captured model are made of, by the operations."""
    from torch._decomp import decomposition_table  # takes seconds to load; export needs it too

    table: Any = torch.export.default_decompositions()
    more = {
        operation: function
        for operation, function in decomposition_table.items()
        if isinstance(operation, OpOverload) and find_lowering(operation) is None and operation not in table
    }
    table.update(more | _OURS)
    for operation in kept_operations():
        table.pop(operation, None)
    found: dict[Any, Callable[..., Any]] = table
    return found


def _storage(x: torch.Tensor, name: str) -> torch.Tensor:
    """The elements of a tensor in the order in which they lie in memory.

    Raises:
      Error: they are a part of the memory only, or some of them the same.
    """
    order = sorted(range(x.dim()), key=lambda dim: (x.stride(dim), x.shape[dim]), reverse=True)
    dense = x.permute(order)
    if not dense.is_contiguous():
        raise Error(
            f"{name} of a tensor of shape {tuple(x.shape)} and strides {x.stride()}, which is a part of "
            "another one: the rest of its memory is not known. Call contiguous() on it before."
        )
    return dense.reshape(-1)


def _places(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> torch.Tensor:
    """Where the elements of a strided view are in the memory of its base."""
    start = int((0 if offset is None else offset) - x.storage_offset())
    places = torch.full(tuple(size), start, dtype=torch.int64)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[dim] = length
        places = places + (torch.arange(length) * step).reshape(shape)
    return places


def _as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    places = _places(x, size, stride, storage_offset)
    return _storage(x, "as_strided").index_select(0, places.reshape(-1)).reshape(tuple(size))


def _as_strided_scatter(
    x: torch.Tensor,
    source: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    places = _places(x, size, stride, storage_offset)
    flat = _storage(x, "as_strided_scatter")
    order = sorted(range(x.dim()), key=lambda dim: (x.stride(dim), x.shape[dim]), reverse=True)
    made = flat.index_put((places.reshape(-1),), source.reshape(-1)).reshape(
        [x.shape[dim] for dim in order]
    )
    return made.permute([order.index(dim) for dim in range(x.dim())])


_aten = torch.ops.aten
_OURS: dict[Any, Callable[..., Any]] = {
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_copy.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
}
