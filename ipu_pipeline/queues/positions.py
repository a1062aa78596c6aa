"""Passes over a data set that know where they are, and can begin there again.

A position is a number of elements. An iterator with `get_state` and `set_state`, as grain's have, goes to
one by its own state; in a data set that can only be indexed, the elements before it are not read; anything
else is iterated over from its beginning. The data set must give the same elements again.
"""

from __future__ import annotations

import collections
import copy
import json
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ipu_pipeline.data import json_trees

__all__ = ["DataPass", "Position", "is_factory", "is_sequence"]

_STATES_EVERY = 16  # elements; asking an iterator for its state takes time


@dataclass(frozen=True)
class Position:
    """The position of a pass over a data set."""

    count: int  # how many elements were taken
    state: str | None = None  # the iterator's own state, as JSON; None if it has none
    state_count: int = 0  # the number of elements it belongs to, at most `count`
    has_ended: bool = False  # whether more was asked for and there was none


class _State(NamedTuple):
    """An iterator's state after a number of elements."""

    num_read: int
    state: Any


def is_factory(dataset: Any) -> bool:
    """Whether a data set is to be called: a function, or a class, whose instances may be iterators."""
    return callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__iter__"))


def _iterate(dataset: Any) -> Iterator[Any]:
    try:
        return iter(dataset)
    except RuntimeError as error:
        if "eager" not in str(error):  # TensorFlow's
            raise
        raise RuntimeError(
            f"IPUInfeedQueue: the data set, a {type(dataset).__name__}, can be iterated over only while "
            "TensorFlow executes eagerly, which tf.disable_v2_behavior() and tf.disable_eager_execution() "
            "turn off. Leave them out, since nothing here needs them; or give a function that yields what "
            "a tf.Session returns for make_one_shot_iterator(dataset).get_next()."
        ) from error


class DataPass:
    """An iterator over a data set, from its beginning or from a position.

    One thread at a time reads it; `position` and `forget_before` may be called by another one meanwhile.
    """

    def __init__(self, dataset: Any, start: Position | None = None) -> None:
        """Reads nothing yet, except what the data set's own iterator reads."""
        made = dataset() if is_factory(dataset) else dataset
        self.count = 0  # elements read
        self._skip_to = 0 if start is None else start.count
        if not hasattr(made, "__iter__") and is_sequence(made):
            self.count = min(self._skip_to, len(made))
            # `iter` would look for an IndexError.
            self._iterator: Iterator[Any] = (made[index] for index in range(self.count, len(made)))
        else:
            self._iterator = _iterate(made)
        self._peeked: list[Any] = []
        self._states: collections.deque[_State] = collections.deque()
        self._has_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
        if self._has_state and start is not None and start.state is not None:
            self._iterator.set_state(json_trees.decode(json.loads(start.state)))  # type: ignore[attr-defined]
            self.count = start.state_count

    def __iter__(self) -> DataPass:
        return self

    def peek(self) -> Any:
        """Returns the next element, which comes again."""
        if not self._peeked:
            self._peeked.append(next(self))
        return self._peeked[0]

    def __next__(self) -> Any:
        """Returns the next element."""
        if self._peeked:
            return self._peeked.pop()
        while self.is_skipping:
            self._read()
        return self._read()

    @property
    def reference(self) -> Callable[[], Any] | None:
        """Returns a reference to the iterator; None if it may begin again, as a class's own can.

        It keeps the iterator alive only where Python has no weak references to it.
        """
        iterator = self._iterator
        if type(iterator).__module__ not in ("builtins", "itertools"):
            return None
        try:
            return weakref.ref(iterator)
        except TypeError:
            return lambda: iterator

    @property
    def is_skipping(self) -> bool:
        """Whether elements before the start are still to be passed over."""
        return self.count < self._skip_to

    @property
    def start(self) -> int:
        """The number of elements before the beginning of the pass."""
        return self._skip_to

    def position(self, count: int) -> Position:
        """The position after `count` elements, which must not be before one that was asked for earlier."""
        self.forget_before(count)
        if not self._states or self._states[0].num_read > count:
            return Position(count)
        try:
            state = json.dumps(json_trees.encode(self._states[0].state))
            return Position(count, state, self._states[0].num_read)
        except TypeError as error:
            warnings.warn(
                f"The state of the data set's iterator has a {error}, which a checkpoint cannot hold: "
                "get_state should return numbers, strings, bytes and NumPy arrays, in lists, tuples and "
                "dicts. Going on will read the elements before it again.",
                stacklevel=2,
            )
            self._has_state = False
            self._states.clear()
            return Position(count)

    def forget_before(self, count: int) -> None:
        """Notes that no position before `count` will be asked for."""
        while len(self._states) > 1 and self._states[1].num_read <= count:
            self._states.popleft()

    def _read(self) -> Any:
        if self._has_state and self.count % _STATES_EVERY == 0:
            self._states.append(_State(self.count, copy.deepcopy(self._iterator.get_state())))  # type: ignore[attr-defined]
        element = next(self._iterator)
        self.count += 1
        return element


def is_sequence(dataset: Any) -> bool:
    """Whether a data set can be indexed from 0 to its length."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
