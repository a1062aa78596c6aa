"""Tensors as bytes, as they lie in memory, and what says how to read them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["BYTE_ORDER", "TensorList", "read_tensors"]

BYTE_ORDER = sys.byteorder

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class TensorList:
    """The tensors of a file, each once."""

    def __init__(self) -> None:
        """Starts empty."""
        self._numbers: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor in the list, where it is put if it is not there yet."""
        number = self._numbers.setdefault(id(tensor), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(tensor)
        return number

    def describe(self) -> list[dict[str, Any]]:
        """Dtype and shape of each, for JSON."""
        return [
            {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for tensor in self._tensors
        ]

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """The parts of the file: the names, and the elements one after another."""
        for number, tensor in enumerate(self._tensors):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            yield _part(number), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def read_tensors(described: Sequence[Any], read: Callable[[str], bytes]) -> list[torch.Tensor]:
    """The tensors of a file.

    Args:
      described: by `TensorList.describe`.
      read: gives a part of the file.

    Raises:
      ValueError: a part has not the bytes that its tensor has; or others, for what describes none.
    """
    tensors = []
    for number, one in enumerate(described):
        dtype, shape = _DTYPES[one["dtype"]], torch.Size(one["shape"])
        content = read(_part(number))
        if len(content) != shape.numel() * dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{_part(number)} has {len(content)} bytes, and not {dtype} of {list(shape)}")
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        tensors.append(flat.reshape(shape))
    return tensors


def _part(number: int) -> str:
    return f"tensors/{number}"
