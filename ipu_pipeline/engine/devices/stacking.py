"""Micro-batches stacked on the host, as they come, for a program that takes a block of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["StackedElement", "Stacker"]

_ALIGNMENT = 64  # bytes; JAX shares the memory of such arrays on a CPU, and copies others


class StackedElement(NamedTuple):
    """A micro-batch in a stack: the stack's leaves, and its row."""

    stack: list[np.ndarray[Any, Any]]
    row: int

    @property
    def leaves(self) -> list[np.ndarray[Any, Any]]:
        """The micro-batch's own leaves."""
        return [leaf[self.row] for leaf in self.stack]


class Stacker:
    """Copies micro-batches into stacks. A stack is never written again once it is full or was taken."""

    def __init__(self) -> None:
        """Makes a stacker whose stacks have room for one."""
        self._capacity = 1
        self._stack: list[np.ndarray[Any, Any]] = []
        self._row = 0
        self._lock = threading.Lock()

    def set_capacity(self, capacity: int) -> None:
        """Gives stacks that are begun from now on room for so many."""
        with self._lock:
            if capacity != self._capacity:
                self._capacity, self._stack, self._row = capacity, [], 0

    def add(self, leaves: Sequence[Any]) -> StackedElement:
        """Copies a micro-batch into the current stack. Safe to call from several threads."""
        arrays = [np.asarray(leaf) for leaf in leaves]
        with self._lock:
            if not self._stack or self._row == self._capacity:
                self._stack = [_empty((self._capacity, *array.shape), array.dtype) for array in arrays]
                self._row = 0
            stack, row = self._stack, self._row
            self._row += 1
        for leaf, array in zip(stack, arrays, strict=True):
            leaf[row] = array
        return StackedElement(stack, row)

    def stack(self, elements: Sequence[StackedElement], capacity: int) -> list[np.ndarray[Any, Any]]:
        """The leaves of micro-batches stacked in their order.

        Args:
          elements: from `add`.
          capacity: the size of the first axis; what is beyond the micro-batches means nothing.
        """
        if not elements or not elements[0].stack:
            return []
        stack = elements[0].stack
        is_whole = all(
            element.stack is stack and element.row == row for row, element in enumerate(elements)
        )
        with self._lock:
            if is_whole and len(stack[0]) == capacity:
                if stack is self._stack:  # what follows must not be written into it
                    self._stack = []
                return stack
        gathered = [_empty((capacity, *leaf.shape[1:]), leaf.dtype) for leaf in stack]
        for row, element in enumerate(elements):
            for target, leaf in zip(gathered, element.leaves, strict=True):
                target[row] = leaf
        return gathered


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).reshape(shape)
