"""Decompositions into other operations of torch: torch's own, and a few of ours.

torch.export decomposes into what it calls the core operations. Here, operations without a lowering are also
decomposed if torch has a decomposition for them.
"""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.lowering.registry import find_lowering, kept_operations

# What divides operations into those that C++ decomposes and the others; torch does not document it.
_DIVIDE = "_split_decomp_table_to_cia_and_python_decomp"
_REMOVE = "_remove_unnecessary_copy_op_pass"  # nor this


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decomposes the operations of a captured model."""
    with _few_composites(), _copies_kept():
        return program.run_decompositions(_decompositions())


@contextlib.contextmanager
def _few_composites() -> Iterator[None]:
    """Registers kernels only for composite operations that torch is not to decompose as it always does.

    Decomposing would register 21 kernels for each of 500 operations, and list them twice in each of torch's
    26 namespaces, which takes more than half of the time for a small model.
    """
    from torch._export import utils
    from torch.export import exported_program

    find = getattr(utils, "_materialize_cpp_cia_ops", None)
    divide = getattr(exported_program, _DIVIDE, None)
    if find is None or divide is None:  # names that torch does not document
        yield
        return

    def divide_few(table: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        composites, python_table = divide(table)
        return {key: how for key, how in composites.items() if not _is_usual(key, how)}, python_table

    with (
        unittest.mock.patch.object(utils, "_materialize_cpp_cia_ops", functools.cache(find)),
        unittest.mock.patch.object(exported_program, _DIVIDE, divide_few),
    ):
        yield


@contextlib.contextmanager
def _copies_kept() -> Iterator[None]:
    """Keeps copies to buffers in the graph. A copy may convert the value to the buffer's dtype and shape.

    Export replaces each copy by its source, and then fails if two buffers have one source.
    """
    from torch.export import exported_program

    if not hasattr(exported_program, _REMOVE):
        yield
        return
    with unittest.mock.patch.object(exported_program, _REMOVE, lambda *program: program):
        yield


def _is_usual(operation: Any, how: Callable[..., Any]) -> bool:
    """Whether a decomposition is what torch makes of an operation's own."""
    return isinstance(how, functools.partial) and how.keywords.get("kernel") is operation


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns the decompositions of a captured model's operations, by operation."""
    from torch._decomp import decomposition_table  # takes seconds to load, but export needs it, too

    table: Any = torch.export.default_decompositions()
    more = {
        operation: function
        for operation, function in decomposition_table.items()
        if isinstance(operation, OpOverload) and find_lowering(operation) is None and operation not in table
    }
    table.update(more | _STRIDED_VIEWS)
    for operation in kept_operations():
        table.pop(operation, None)
    decompositions: dict[Any, Callable[..., Any]] = table
    return decompositions


def _storage(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the elements of a tensor in the order of its memory."""
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
    """Returns the places of a strided view's elements in the memory of its base."""
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
    memory = flat.index_put((places.reshape(-1),), source.reshape(-1)).reshape(
        [x.shape[dim] for dim in order]
    )
    return memory.permute([order.index(dim) for dim in range(x.dim())])


_aten = torch.ops.aten
_STRIDED_VIEWS: dict[Any, Callable[..., Any]] = {
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_copy.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
}
