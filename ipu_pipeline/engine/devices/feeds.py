"""Micro-batches on their way to the devices: each an `Element`, stacked as the programs take them.

The thread that fetches micro-batches makes the elements. The elements of one program's call are placed
together. An element has memory of its own: a data set may give the same arrays again, with other values.

Micro-batches may have different shapes, for which there are different programs. An element says which of
the pipeline's shapes it has, by their number; a `Supply` tells where these change.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.pytrees import is_key

Take: TypeAlias = "Callable[[int], Sequence[Any]]"
Place: TypeAlias = "Callable[[Sequence[Any]], list[Any]]"

NEW_SHAPES = -1  # the number of shapes that the pipeline has no programs for yet
_ALIGNMENT = 64  # bytes; JAX shares the memory of such arrays on a CPU, and copies others


@dataclass(eq=False)
class Stack:
    """Micro-batches side by side."""

    # on the host, with a first axis of rows; the leaves of micro-batches
    arrays: list[np.ndarray[Any, Any]]
    placed: list[Any] | None  # the same on the devices; None if they are not there yet
    num_rows: int  # the number of micro-batches that there is room for


@dataclass(frozen=True, eq=False)
class Element:
    """A micro-batch: a row of a stack, or JAX arrays, which stay where they are until stacked.

    Attributes:
      stack: the stack; None for JAX arrays that are still to be stacked.
      row: the row in the stack.
      arrays: the leaves, if they are not in the stack's row.
      shapes: which of the pipeline's micro-batch shapes it has, a number from 0; or `NEW_SHAPES`.
    """

    stack: Stack | None
    row: int
    arrays: Sequence[Any] = ()
    shapes: int = 0

    @property
    def leaves(self) -> Sequence[Any]:
        """The micro-batch's leaves."""
        if self.arrays or self.stack is None:
            return self.arrays
        return [array[self.row] for array in self.stack.arrays]


class Feed:
    """Stacks micro-batches of the same shapes, and puts them on devices.

    Attributes:
      shapes: the number of these shapes; see `Element`.
    """

    def __init__(self, place: Place, size: int = 1, is_block: bool = False) -> None:
        """Makes an empty feed."""
        self.shapes = 0
        self._place = place
        self._size = size
        self._is_block = is_block
        self._stack: Stack | None = None  # the one that is being filled
        self._row = 0
        self._lock = threading.Lock()

    def set_size(self, size: int) -> None:
        """Sets the size of the stacks that are begun from now on."""
        with self._lock:
            if size != self._size:
                self._size, self._stack, self._row = size, None, 0

    def add(self, leaves: Sequence[Any]) -> Element:
        """Takes a micro-batch. Safe to call from several threads; shares no memory with NumPy arrays."""
        if not self._is_block and (self._size == 1 or any(isinstance(leaf, jax.Array) for leaf in leaves)):
            copies = copy_leaves(leaves)
            stack = Stack([], self._place(copies), 1) if self._size == 1 else None
            return Element(stack, 0, copies, self.shapes)
        if any(map(is_key, leaves)):  # NumPy has none
            return Element(None, 0, copy_leaves(leaves), self.shapes)
        arrays = [np.asarray(leaf) for leaf in leaves]
        with self._lock:
            if self._stack is None or self._row == self._stack.num_rows:
                self._stack, self._row = _make_stack(arrays, self._size), 0
            stack, row = self._stack, self._row
            self._row += 1
            if not self._is_block:  # a stack is placed when it is full, not while a thread still fills it
                _fill(stack, row, arrays)
                if row == stack.num_rows - 1 and arrays:
                    stack.placed = self._place(stack.arrays)
        if self._is_block:
            _fill(stack, row, arrays)
        return Element(stack, row, (), self.shapes)

    def place(self, elements: Sequence[Element], size: int | None = None) -> list[Any]:
        """Puts micro-batches from `add` on the devices, stacked in their order."""
        size = self._size if size is None else size
        stack = elements[0].stack
        is_whole = stack is not None and all(
            e.stack is stack and e.row == n for n, e in enumerate(elements)
        )
        if stack is not None and is_whole and stack.num_rows == size:
            if stack.placed is None:
                with self._lock:
                    if stack is self._stack:  # later micro-batches must not be written into it
                        self._stack = None
                return self._place(stack.arrays)
            return stack.placed
        if any(element.stack is None for element in elements):
            leaves = [element.leaves for element in elements]
            if self._is_block:
                leaves += leaves[-1:] * (size - len(leaves))  # rows that nothing reads
            return self._place([_stack_on_device(parts) for parts in zip(*leaves, strict=True)])
        gathered = _make_stack(elements[0].leaves, size)
        for row, element in enumerate(elements):
            _fill(gathered, row, element.leaves)
        return self._place(gathered.arrays)

    def place_ahead(self, elements: Sequence[Element], count: int, size: int) -> list[Element]:
        """Puts elements on their devices ahead of time. Returns elements for `place`."""
        ahead = []
        for first in range(0, len(elements), count):
            some = elements[first : first + count]
            stack = Stack([], self.place(some, size), size)
            ahead += [Element(stack, row, (), self.shapes) for row in range(len(some))]
        return ahead


def _make_stack(arrays: Sequence[Any], num_rows: int) -> Stack:
    return Stack([_empty((num_rows, *array.shape), array.dtype) for array in arrays], None, num_rows)


def _fill(stack: Stack, row: int, leaves: Sequence[Any]) -> None:
    for array, leaf in zip(stack.arrays, leaves, strict=True):
        array[row] = leaf


def copy_leaves(leaves: Sequence[Any]) -> list[Any]:
    """The leaves of a micro-batch, without memory that they share with NumPy arrays."""
    return [leaf if isinstance(leaf, jax.Array) else _copy(leaf) for leaf in leaves]


def _copy(leaf: Any) -> Any:
    leaf = np.asarray(leaf)
    copy = _empty(leaf.shape, leaf.dtype)
    copy[...] = leaf
    return copy


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def _stack_on_device(parts: Sequence[Any]) -> Any:
    """A leaf of each micro-batch as one array, where the first JAX array among them is."""
    first = next((part for part in parts if isinstance(part, jax.Array)), None)
    return _stack(*(parts if first is None else jax.device_put(list(parts), first.sharding)))


@jax.jit
def _stack(*parts: Any) -> Any:
    return jnp.stack(parts)


class PlacedMicroBatches:
    """The micro-batches of a step on the devices of a pipeline.

    Example:
      >>> pipeline = engine.Pipeline([lambda x: 2 * x], num_micro_batches=2)
      >>> batches = [np.float32(1), np.float32(2)]
      >>> state = pipeline.init(jax.random.key(0), batches[0])
      >>> placed = pipeline.place_micro_batches(batches)
      >>> for _ in range(3):
      ...     state, outputs = pipeline.step(state, placed)
    """

    def __init__(
        self,
        runner: Any,
        number: int,
        elements: Sequence[Any],
        leaves: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        """Made by `Pipeline.place_micro_batches`. `leaves` are kept where faults are looked for."""
        self.leaves = leaves
        self._runner = runner
        self._number = number
        self._elements = elements

    def taker(self, runner: Any, num_wanted: int) -> Take:
        """A function that takes them.

        Raises:
          ValueError: they are for another pipeline or other devices, or their number is wrong.
        """
        if runner is not self._runner:
            raise ValueError(
                "micro_batches: they were placed by another pipeline, or before this one got other devices "
                "or recomputation; call its place_micro_batches again."
            )
        if self._number != num_wanted:
            raise ValueError(
                f"micro_batches: {self._number} were placed, but a step has {num_wanted}. Place that many."
            )
        return take_from(self._elements)


class OtherShapes(Exception):  # noqa: N818  # no error: the runner goes on with other programs
    """The next micro-batches have other shapes. Only raised by `Supply.alike`, for the runner itself."""


class Supply:
    """A take of micro-batches that can be given back, and that says where their shapes change.

    Micro-batches whose shapes are new are placed when they are taken, by `resolve`. If that raises, those
    before have been taken, and the next take raises.

    Attributes:
      num_taken: the number of micro-batches that were taken from the take.
      is_taking: whether the take is being waited for.
      taken: all that were taken from the take; None: they are not kept.
    """

    def __init__(self, take: Take, resolve: Callable[[Any], Any] | None = None) -> None:
        """Begins with a take of elements, or of the values that stand for micro-batches without a feed."""
        self.num_taken, self.is_taking = 0, False
        self.taken: list[Any] | None = None
        self._take, self._resolve = take, resolve
        self._pending: collections.deque[Any] = collections.deque()

    @property
    def num_left(self) -> int:
        """The number of micro-batches that were taken from the take, and not from here."""
        return len(self._pending)

    @contextlib.contextmanager
    def through(self, wrap: Callable[[Take], Take]) -> Iterator[None]:
        """Wraps the take inside a `with` block."""
        inner = self._take
        self._take = wrap(inner)
        try:
            yield
        finally:
            self._take = inner

    def __call__(self, count: int) -> list[Any]:
        """Takes at least one micro-batch, and at most `count`."""
        pending = self._pending
        if not pending:
            self.is_taking = True
            fetched = list(self._take(count))
            self.is_taking = False
            self.num_taken += len(fetched)
            if self.taken is not None:
                self.taken += fetched
            if self._resolve is None or NEW_SHAPES not in map(shapes_of, fetched):
                return fetched
            pending.extend(fetched)
        elements: list[Any] = []
        while pending and len(elements) < count:
            element = pending[0]
            if shapes_of(element) == NEW_SHAPES and self._resolve is not None:
                try:
                    element = self._resolve(element)
                except Exception:
                    if not elements:
                        raise
                    break
            pending.popleft()
            elements.append(element)
        return elements

    def give_back(self, elements: Sequence[Any]) -> None:
        """Gives back the last micro-batches that were taken."""
        self._pending.extendleft(reversed(elements))

    def next_shapes(self) -> int:
        """The number of the shapes of the next micro-batch."""
        self.give_back(self(1))
        return shapes_of(self._pending[0])

    def in_a_row(self, count: int) -> list[Any]:
        """Takes `count` micro-batches, or as many in a row as have the shapes of the first one."""
        elements = gather(self, count, count)
        shapes = shapes_of(elements[0])
        number = next((n for n, item in enumerate(elements) if shapes_of(item) != shapes), len(elements))
        self.give_back(elements[number:])
        return elements[:number]

    def alike(self, shapes: int) -> Take:
        """A take of micro-batches with these shapes: all that it is asked for, or none.

        It raises `OtherShapes` if there is another one among them, and then takes nothing.
        """

        def take(count: int) -> list[Any]:
            elements = self(count)
            if len(elements) < count:
                elements += gather(self, count - len(elements), count - len(elements))
            for element in elements:
                if shapes_of(element) != shapes:
                    self.give_back(elements)
                    raise OtherShapes
            return elements

        return take


def shapes_of(element: Any) -> int:
    """The number of an element's shapes; 0 for what stands for a micro-batch where there is no feed."""
    return element.shapes if isinstance(element, Element) else getattr(element, "shapes", 0)


def gather(take: Take, count: int, at_least: int) -> list[Any]:
    """Micro-batches from `take`, which may give fewer at once than it is asked for, but at least one."""
    elements: list[Any] = []
    while len(elements) < count:
        try:
            fetched = take(count - len(elements))
        except Exception:
            if len(elements) < at_least:
                raise
            break
        if not fetched:
            raise RuntimeError(
                f"take returned no micro-batch, of {count - len(elements)} that were asked for; it must "
                "return at least one, or raise an error."
            )
        elements += fetched
    return elements


def take_from(elements: Iterable[Any]) -> Take:
    """A take of the elements that are given, in their order."""
    remaining = iter(elements)
    return lambda count: list(itertools.islice(remaining, count))


def take_nothing(count: int) -> list[Any]:
    """A take where there is no feed: the micro-batches have no leaves."""
    return [()] * count
