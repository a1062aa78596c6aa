"""The outfeed: what programs enqueue, copied to the host until it is dequeued."""

from __future__ import annotations

import collections
import enum
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

__all__ = ["IPUOutfeedMode", "IPUOutfeedQueue", "OutfeedOperation"]


class IPUOutfeedMode(enum.Enum):
    """ALL keeps every element until it is dequeued, LAST the last one only."""

    ALL = "all"
    LAST = "get_last"


class OutfeedOperation:
    """What `Session.run` runs to dequeue."""

    def __init__(self, queue: IPUOutfeedQueue) -> None:
        """Made by `IPUOutfeedQueue.dequeue`."""
        self.queue = queue


class IPUOutfeedQueue:
    """Takes what a pipeline's last stage returns, or its loss, once per micro-batch.

    Example:
      losses = session.run(outfeed_queue.dequeue())  # one per micro-batch since the last dequeue
    """

    def __init__(self, outfeed_mode: IPUOutfeedMode = IPUOutfeedMode.ALL, buffer_depth: int = 3) -> None:
        """Makes an empty queue.

        Args:
          outfeed_mode: see `IPUOutfeedMode`.
          buffer_depth: how many enqueued elements stay on the device before they are copied to the host.

        Raises:
          TypeError: the mode is none.
          ValueError: `buffer_depth` is below 1.
        """
        if not isinstance(outfeed_mode, IPUOutfeedMode):
            raise TypeError(f"outfeed_mode must be an IPUOutfeedMode; got {outfeed_mode!r}.")
        is_integer = isinstance(buffer_depth, int) and not isinstance(buffer_depth, bool)
        if not is_integer or buffer_depth < 1:
            raise ValueError(f"buffer_depth must be an integer of at least 1; got {buffer_depth!r}.")
        self._mode = outfeed_mode
        self._buffer_depth = buffer_depth
        self._structure: tuple[Any, tuple[jax.ShapeDtypeStruct, ...]] | None = None
        self._on_device: collections.deque[list[Any]] = collections.deque()
        self._on_host: list[list[Any]] = []

    @property
    def outfeed_mode(self) -> IPUOutfeedMode:
        """The mode."""
        return self._mode

    def bind(self, tree: Any, avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Called when a program that enqueues is compiled.

        Args:
          tree: the structure of an element.
          avals: shapes and dtypes of its leaves.

        Raises:
          ValueError: another program enqueues elements of another structure.
        """
        structure = (tree, tuple(avals))
        if self._structure is not None and self._structure != structure:
            raise ValueError(
                "An IPUOutfeedQueue holds elements of one structure, but two programs enqueue "
                f"{self._structure} and {structure}. Give each its own queue."
            )
        self._structure = structure

    def extend(self, elements: Sequence[list[Any]]) -> None:
        """Enqueues the leaves of elements, which may still be computed; does not wait for them."""
        if self._mode is IPUOutfeedMode.LAST:
            elements = elements[-1:]
            self._on_device.clear()
            self._on_host.clear()
        for leaves in elements:
            self._on_device.append(leaves)
        for leaves in list(self._on_device)[: max(0, len(self._on_device) - self._buffer_depth)]:
            for leaf in leaves:
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()
        while len(self._on_device) > self._buffer_depth and all(map(_is_ready, self._on_device[0])):
            self._on_host.append([np.asarray(leaf) for leaf in self._on_device.popleft()])

    def enqueue(self, value: Any) -> NoReturn:
        """Not built yet: pipelines enqueue by themselves; it comes with loops."""
        raise NotImplementedError("IPUOutfeedQueue.enqueue: loops that enqueue are not built yet.")

    def dequeue(self, wait_for_completion: bool = False) -> OutfeedOperation:
        """The operation that empties the queue; may be asked for before the program is compiled.

        Args:
          wait_for_completion: True has no effect and warns: `run` has completed when it returns.

        Returns:
          The operation. Run, it returns the element's structure, with lists for tuples: in mode ALL
          each leaf has a new first axis, over the elements since the last dequeue, which has size 0 if
          there were none; in mode LAST it is the last element.
        """
        if wait_for_completion:
            warnings.warn(
                "dequeue(wait_for_completion=True) has no effect: Session.run returns when the program "
                "has completed.",
                stacklevel=2,
            )
        return OutfeedOperation(self)

    def take(self) -> Any:
        """What the operation returns; waits for what is still being computed.

        Raises:
          ValueError: no program enqueues to the queue; or, in mode LAST, nothing was enqueued yet.
        """
        if self._structure is None:
            raise ValueError(
                "The outfeed was dequeued before any program that enqueues to it was compiled."
            )
        tree, avals = self._structure
        elements = [*self._on_host, *self._on_device]
        if self._mode is IPUOutfeedMode.LAST:
            if not elements:
                raise ValueError("The outfeed is in mode LAST and nothing has been enqueued yet.")
            arrays = [np.asarray(leaf) for leaf in elements[-1]]
        else:
            self._on_host, self._on_device = [], collections.deque()
            arrays = [
                np.stack([np.asarray(leaves[place]) for leaves in elements])
                if elements
                else np.empty((0, *aval.shape), aval.dtype)
                for place, aval in enumerate(avals)
            ]
        value = tree.unflatten(arrays)
        return list(value) if isinstance(value, tuple) else value


def _is_ready(leaf: Any) -> bool:
    """Whether an array has been computed."""
    return not isinstance(leaf, jax.Array) or bool(leaf.is_ready())  # type: ignore[attr-defined]  # JAX's stub lacks it
