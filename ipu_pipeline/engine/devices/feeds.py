"""Micro-batches on their way to the devices: taken one by one, or stacked in chunks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.stacking import StackedElement, Stacker

__all__ = ["ChunkFeed", "FedElement", "Take", "gather", "take_nothing"]

Take: TypeAlias = "Callable[[int], Sequence[Any]]"
Place: TypeAlias = "Callable[[Sequence[Any]], list[Any]]"


@dataclass(frozen=True, eq=False)
class FedElement:
    """A micro-batch for a chunk.

    Attributes:
      leaves: JAX arrays, which stay where they are until the chunk is made; or None.
      stacked: else, where it lies in a stack on the host.
      placed: of the last one of a stack: the stack on the devices.
    """

    leaves: Sequence[Any] | None
    stacked: StackedElement | None = None
    placed: list[Any] | None = None


class ChunkFeed:
    """Puts chunks of micro-batches on devices."""

    def __init__(self, size: int, place: Place) -> None:
        """Makes an empty one.

        Args:
          size: how many micro-batches a chunk has.
          place: puts the stacked leaves of a chunk on the devices that read them.
        """
        self._size = size
        self._place = place
        self._stacker = Stacker()
        self._stacker.set_capacity(size)
        self._lock = threading.Lock()

    def add(self, leaves: Sequence[Any]) -> FedElement:
        """Takes a micro-batch. Safe to call from several threads; shares no memory with NumPy arrays."""
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            return FedElement(leaves)
        with self._lock:  # a stack is placed when it is full, and not while another thread fills it
            stacked = self._stacker.add(leaves)
            is_full = bool(leaves) and stacked.row == self._size - 1
            return FedElement(None, stacked, self._place(stacked.stack) if is_full else None)

    def place_ahead(self, elements: Sequence[FedElement]) -> list[FedElement]:
        """A chunk of micro-batches for `stack`, on their devices already."""
        placed = self.stack(elements)
        no_memory: list[Any] = []
        return [FedElement(None, StackedElement(no_memory, row), placed) for row in range(len(elements))]

    def stack(self, elements: Sequence[FedElement]) -> list[Any]:
        """A chunk of micro-batches from `add`, on its devices."""
        stacked = [element.stacked for element in elements if element.stacked is not None]
        if len(stacked) == len(elements):
            last = elements[-1]
            is_whole = all(e.stack is stacked[0].stack and e.row == row for row, e in enumerate(stacked))
            if last.placed is not None and is_whole:
                return last.placed
            return self._place(self._stacker.stack(stacked, self._size))
        leaves = [e.stacked.leaves if e.stacked is not None else e.leaves or () for e in elements]
        return self._place([_stack_on_device(parts) for parts in zip(*leaves, strict=True)])


def _stack_on_device(parts: Sequence[Any]) -> Any:
    """A leaf of each micro-batch as one array, where the first JAX array among them is."""
    first = next((part for part in parts if isinstance(part, jax.Array)), None)
    return _stack(*(parts if first is None else jax.device_put(list(parts), first.sharding)))


@jax.jit
def _stack(*parts: Any) -> Any:
    return jnp.stack(parts)


class PlacedMicroBatches:
    """The micro-batches of a step on the devices of a pipeline."""

    def __init__(self, executor: Any, number: int, elements: Sequence[Any]) -> None:
        """Made by `Pipeline.place_micro_batches`.

        Args:
          executor: what placed them.
          number: how many micro-batches there are.
          elements: what it takes.
        """
        self._executor = executor
        self._number = number
        self._elements = elements

    def taker(self, executor: Any, every: int) -> Take:
        """A function that takes them.

        Args:
          executor: what they are for.
          every: how many a step has.

        Raises:
          ValueError: they are for another pipeline, or other devices; or too few or too many.
        """
        if executor is not self._executor:
            raise ValueError(
                "micro_batches: they were placed by another pipeline, or before this one got other devices "
                "or recomputation; call its place_micro_batches again."
            )
        if self._number != every:
            raise ValueError(
                f"micro_batches: {self._number} were placed, but a step has {every}. Place as many."
            )
        left = iter(self._elements)

        def take(wanted: int) -> list[Any]:
            return list(itertools.islice(left, wanted))

        return take


def gather(take: Take, wanted: int, at_least: int) -> list[Any]:
    """Micro-batches from `take`, which may give fewer at once than it is asked for.

    Args:
      take: returns up to so many micro-batches, and one at least.
      wanted: how many to get.
      at_least: with so many, an error of `take` only ends the gathering: who asks again gets it again.
    """
    elements: list[Any] = []
    while len(elements) < wanted:
        try:
            elements += take(wanted - len(elements))
        except Exception:
            if len(elements) < at_least:
                raise
            break
    return elements


def take_nothing(wanted: int) -> list[Any]:
    """Micro-batches where there is no feed."""
    return [()] * wanted
