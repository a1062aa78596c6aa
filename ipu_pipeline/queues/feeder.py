"""The feeder of an infeed: passes over a data set from any position, and a thread that reads ahead."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground import pytrees
from ipu_pipeline.ground.errors import CheckpointError, OutOfRangeError
from ipu_pipeline.ground.pytrees import as_plain, check_like, leaves_if_like

# Passes over a data set.
#
# A position is a number of elements. An iterator with `get_state` and `set_state`, as grain's have, goes to
# one by its own state; in a data set that can only be indexed, the elements before it are not read;
# anything else is iterated over from its beginning. The data set must give the same elements again.

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


def is_sequence(dataset: Any) -> bool:
    """Whether a data set can be indexed from 0 to its length."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


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
        source = dataset() if is_factory(dataset) else dataset
        self.count = 0  # elements read
        self._skip_to = 0 if start is None else start.count
        if not hasattr(source, "__iter__") and is_sequence(source):
            self.count = min(self._skip_to, len(source))
            # `iter` would look for an IndexError.
            self._iterator: Iterator[Any] = (source[index] for index in range(self.count, len(source)))
        else:
            self._iterator = _iterate(source)
        self._peeked: list[Any] = []
        self._states: collections.deque[_State] = collections.deque()
        self._has_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
        if self._has_state and start is not None and start.state is not None:
            self._iterator.set_state(pytrees.decode_tree(json.loads(start.state)))  # type: ignore[attr-defined]
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
            state = json.dumps(pytrees.encode_tree(self._states[0].state))
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


# The thread that reads ahead.

_JOIN_SECONDS = 0.5
_MAX_KEPT_BYTES = 2**30  # the most that is kept of elements until their weight update is done
_THREAD_NAME = "ipu-infeed"
Place = Callable[[Sequence[Any]], Any]


class _Entry(NamedTuple):
    """A fetched element: its leaves and what `place` made of them. After the last element, an error."""

    leaves: Sequence[Any]
    placed: Any
    place: Place | None
    error: BaseException | None
    traceback: TracebackType | None = None


_LOST = _Entry((), None, None, None)


class Feeder:
    """The thread and its buffer, for one pass over the data.

    `_is_running` says whether a thread runs. The thread itself clears it, under the lock that is also taken
    to read it. The thread is never joined for long, so a data set that hangs holds up nothing else. It is a
    daemon: when it wakes up, it ends, or goes on if it is wanted again.

    What is taken stays among the entries until `mark` says that it was used. A run that ends before that,
    by Ctrl-C or an error, loses nothing: the next one gets the same elements.
    """

    def __init__(self, data: DataPass, element: Any) -> None:
        self._data = data
        self._element = element
        expected_leaves, self._expected_tree = jax.tree.flatten(element)
        self._shapes = [leaf.shape for leaf in expected_leaves]
        self._number = self._num_used = data.start
        num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in expected_leaves)
        self._max_kept = _MAX_KEPT_BYTES // max(num_bytes, 1)
        self._has_raised_end = False
        self._condition = threading.Condition()
        # What follows is read and written with the condition held.
        self._entries: list[_Entry] = []  # first those taken since the last `mark`
        self._num_taken = 0
        self._depth = 1
        self._is_tentative = False
        self._may_vary = False
        self._has_wide_dtypes = False
        self._place: Place | None = None
        self._thread: threading.Thread | None = None  # the last one that was started
        self._turn: object = None  # identifies the thread that is to run; any other one ends
        self._is_running = False
        self._is_stopping = False
        self._is_given_up = False

    def start(self, place: Place, depth: int, is_tentative: bool, shapes_may_vary: bool = False) -> None:
        """Starts the thread; see `IPUInfeedQueue.connect`."""
        with self._condition:
            self._place = place
            self._depth = depth
            self._is_tentative, self._may_vary = is_tentative, shapes_may_vary
            self._give_back()
            self._has_wide_dtypes = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # set dynamically
            self._condition.notify_all()
            self._is_stopping = self._is_given_up = False
            if not self._is_running and not self._has_ended():
                turn = object()
                try:
                    self._turn, self._is_running = turn, True
                    thread = threading.Thread(
                        target=self._run, args=(turn,), name=_THREAD_NAME, daemon=True
                    )
                    thread.start()
                    self._thread = thread
                except BaseException:  # Ctrl-C: the thread may have been started or not; if it was, it ends
                    self._turn, self._is_running = None, False
                    raise

    def stop(self) -> None:
        """Ends the thread, and waits for it at most half a second."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()
            is_worth_waiting = self._is_running and not self._is_given_up
            self._is_given_up = True  # waited for once, until it is wanted again
            thread = self._thread
        if is_worth_waiting and thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_JOIN_SECONDS)

    def discard(self) -> None:
        """Ends the thread and lets go of what was fetched, and of the data set."""
        self.stop()
        with self._condition:
            self._entries, self._num_taken = [], 0
            self._data = DataPass(())

    def take(self, num_elements: int) -> list[Any]:
        """Takes up to `wanted` elements; see `IPUInfeedQueue.connect`."""
        with self._condition:
            at_least = 1 if self._is_tentative else num_elements
            while self._num_ahead < at_least and not self._has_ended():
                if not self._is_running and not self._num_ahead:
                    raise RuntimeError("The infeed was stopped, by its deleter or its session's end.")
                if not self._is_running:
                    break
                self._condition.wait()
            first = self._num_taken
            error = self._entries[first].error
            if error is not None:  # it stays: the next call gets the same answer
                self._has_raised_end = isinstance(error, OutOfRangeError)
                raise error.with_traceback(
                    self._entries[first].traceback
                )  # raising it again would add to it
            end = first + min(num_elements, self._num_ahead - self._has_ended())
            entries = self._entries[first:end]
            self._num_taken = end  # in one step: Ctrl-C comes before or after it
            if not self._is_tentative:
                self._let_go(first, end)
            place, may_vary, number = self._place, self._may_vary, self._num_used + first
            self._condition.notify_all()
        assert place is not None
        placed: list[Any] = []
        for entry in entries:
            if entry.place == place:
                placed.append(entry.placed)
            else:  # fetched ahead for another program, it goes to this one's devices now
                if not may_vary:
                    self._check_shapes(entry, number + len(placed))
                placed.append(place(entry.leaves))
        return placed

    def _let_go(self, first: int, end: int) -> None:
        """Keeps only the taken elements' arrays on the host, or nothing if they are very large."""
        if end <= self._max_kept:
            for number in range(first, end):
                self._entries[number] = self._entries[number]._replace(placed=None, place=None)
        elif end > first:
            first = 0 if self._entries[0] is not _LOST else first
            self._entries[first:end] = [_LOST] * (end - first)

    def give_back(self) -> None:
        """Gives back the elements taken since the last `mark`, and those that it left as not needed."""
        with self._condition:
            self._give_back()

    def _give_back(self) -> None:
        num_lost = sum(entry is _LOST for entry in self._entries[: self._num_taken])
        if num_lost:
            warnings.warn(
                f"A run was interrupted, or failed, within a weight update. The {self._num_taken} elements "
                "of the data set that it had taken for this update were too many to be kept, and are lost: "
                "the next run goes on after them.",
                stacklevel=2,
            )
            del self._entries[: self._num_taken]
            self._num_used += self._num_taken
        self._num_taken = 0

    def mark(self, num_unneeded: int) -> None:
        """Notes that the taken elements have been used, except the last ones. Must not be interrupted."""
        with self._condition:
            num_used = self._num_taken - num_unneeded
            del self._entries[:num_used]
            self._num_taken = num_unneeded
            self._num_used += num_used
        self._data.forget_before(self._num_used)

    @property
    def position(self) -> Position:
        """The position of the data set at the last `mark`."""
        position = self._data.position(self._num_used)
        return dataclasses.replace(position, has_ended=self._has_raised_end)

    @property
    def _num_ahead(self) -> int:
        """The number of entries that are not taken; the error at the end counts as one."""
        return len(self._entries) - self._num_taken

    def _has_ended(self) -> bool:
        return bool(self._entries) and self._entries[-1].error is not None

    def _run(self, turn: object) -> None:
        while True:
            with self._condition:
                if turn is not self._turn:
                    return
                while self._num_ahead >= self._depth and not self._is_stopping:
                    self._condition.wait()
                if self._is_stopping or self._has_ended():
                    self._is_running = False
                    self._condition.notify_all()
                    return
                place = self._place
                has_wide_dtypes = self._has_wide_dtypes
            assert place is not None
            if has_wide_dtypes == jax.config.jax_enable_x64:  # type: ignore[attr-defined]
                entry = self._fetch(place)
            else:
                with jax.enable_x64(has_wide_dtypes):  # as in the thread that wants the elements
                    entry = self._fetch(place)
            with self._condition:
                self._entries.append(entry)
                self._condition.notify_all()

    def _fetch(self, place: Place) -> _Entry:
        try:
            leaves = self._check(next(self._data))
            self._number += 1
            placed = place(leaves)
            # The data set may overwrite its arrays from here on.
            host_leaves = getattr(placed, "leaves", leaves)
            return _Entry(host_leaves, placed, place, None)
        except StopIteration:
            error: BaseException = OutOfRangeError(
                f"The infeed's data ended after {self._number} elements, before the run had all the "
                "micro-batches that it needs. Completed weight updates stand. Repeat the dataset, or run "
                "the initializer to start over."
            )
            if self._data.is_skipping:
                error = CheckpointError(
                    f"The infeed's data ended after {self._data.count} elements. They were to go on after "
                    f"{self._data.start}, where the checkpoint was saved: this is another dataset. "
                    "Session.restore(path, infeeds=False) begins with its first element; an estimator does "
                    "so for an input_fn of another name."
                )
        except BaseException as raised:  # whatever the data set raises belongs to the caller of `run`
            error = raised
        return _Entry((), (), place, error, error.__traceback__)

    def _check_shapes(self, entry: _Entry, number: int) -> None:
        """Raises if a fetched element has other shapes, with which it may be there for another program."""
        if [np.shape(leaf) for leaf in entry.leaves] != self._shapes:
            element = jax.tree.unflatten(self._expected_tree, entry.leaves)
            check_like(element, self._element, _name(number))

    def _check(self, element: Any) -> list[Any]:
        leaves = leaves_if_like(element, self._element, may_vary=self._may_vary)
        if leaves is not None:
            return leaves  # the check below takes longer than copying a small element
        name = _name(self._number)
        element = jax.tree.map(lambda leaf: as_array(leaf, name), element)
        return check_like(element, self._element, name, may_vary=self._may_vary)


def _name(number: int) -> str:
    return f"IPUInfeedQueue: element {number} of the dataset"


def is_feeding() -> bool:
    """Whether the caller runs in the thread of an infeed, as data sets do."""
    return threading.current_thread().name == _THREAD_NAME


def as_array(leaf: Any, name: str) -> Any:
    """A leaf of an element as a NumPy array in this machine's byte order, or the JAX array that it is."""
    problem = f"{name} has a leaf of type {type(leaf).__name__}; elements must be pytrees of numeric arrays"
    try:
        array: Any = leaf if isinstance(leaf, (jax.Array, np.ma.MaskedArray)) else np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:  # all of which torch raises
        raise ValueError(f"{problem}. {error}") from error
    if not jnp.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        raise ValueError(f"{problem}, and its dtype is {array.dtype}.")
    return array if isinstance(array, jax.Array) else as_plain(array, f"{name}: a leaf")
