"""The infeed: a data set, fetched ahead and placed on the devices by a thread."""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.feeds import Take
from ipu_pipeline.engine.shapes import as_shape, check_like, trees_equal
from ipu_pipeline.errors import CheckpointError, OutOfRangeError
from ipu_pipeline.placeholders import cast_exactly
from ipu_pipeline.positions import DataPass, Position, is_sequence

__all__ = ["IPUInfeedQueue", "InfeedOperation"]

_JOIN_SECONDS = 0.5

Place = Callable[[Sequence[Any]], Any]


class InfeedOperation:
    """What `Session.run` runs to start an infeed over, or to end it."""

    def __init__(self, queue: IPUInfeedQueue, starts: bool) -> None:
        """Made by `IPUInfeedQueue`."""
        self.queue = queue
        self.starts = starts


class IPUInfeedQueue:
    """Feeds a data set to pipelines, micro-batch by micro-batch.

    Example:
      infeed_queue = IPUInfeedQueue(dataset)
      ...
      session.run(infeed_queue.initializer)
    """

    def __init__(self, dataset: Any, prefetch_depth: int = 3) -> None:
        """Takes the data set; nothing is read from it yet.

        Args:
          dataset: whatever can be iterated over again and again, or indexed from 0 to its length, and
            yields pytrees of arrays that all have the same shapes; or a callable that returns an
            iterator. A data source of tensorflow-datasets, a grain data set or loader, a
            tf.data.Dataset and a torch DataLoader are such; an array is what NumPy can make one of.
            A tuple or list becomes positional arguments of the first stage, a dict keyword arguments.
          prefetch_depth: how many elements are fetched ahead, 1..255. A program on one device takes blocks
            of elements, and of these one is fetched ahead where it is larger; programs that handle chunks
            of several elements have four chunks fetched ahead.

        Raises:
          TypeError: the data set cannot be iterated over, or only once.
          ValueError: `prefetch_depth` is out of range.
        """
        is_integer = isinstance(prefetch_depth, int) and not isinstance(prefetch_depth, bool)
        if not is_integer or not 1 <= prefetch_depth <= 255:
            raise ValueError(f"prefetch_depth must be an integer from 1 to 255; got {prefetch_depth!r}.")
        if hasattr(dataset, "__next__"):
            raise TypeError(
                "IPUInfeedQueue: dataset must be something that can be iterated over again, but it is an "
                f"iterator ({type(dataset).__name__}). Pass what it was made from, or a callable that "
                "returns a new iterator."
            )
        if not callable(dataset) and not hasattr(dataset, "__iter__") and not is_sequence(dataset):
            raise TypeError(
                "IPUInfeedQueue: dataset must be iterable, or a callable that returns an iterator; got "
                f"{type(dataset).__name__}."
            )
        self._dataset = dataset
        self._prefetch_depth = prefetch_depth
        self._peeked: DataPass | None = None
        self._element: Any = None
        self._feeder: _Feeder | None = None
        self._started: object = None
        self._finalizer: weakref.finalize[..., IPUInfeedQueue] | None = None
        self._is_initializer_taken = False
        self._deleted = False

    @property
    def prefetch_depth(self) -> int:
        """How many elements are fetched ahead."""
        return self._prefetch_depth

    @property
    def initializer(self) -> InfeedOperation:
        """The operation that starts the infeed, at the beginning of the data set; to be read once.

        Raises:
          ValueError: it was read before.
        """
        if self._is_initializer_taken:
            raise ValueError(
                "The IPUInfeedQueue `initializer` function can only be accessed once. Keep what it "
                "returned: it can be run again to start over."
            )
        self._is_initializer_taken = True
        return InfeedOperation(self, starts=True)

    @property
    def deleter(self) -> InfeedOperation:
        """The operation that ends the infeed and lets go of what it holds."""
        return InfeedOperation(self, starts=False)

    @property
    def element(self) -> Any:
        """Shapes and dtypes of an element. The first access reads the first one, which is not lost.

        Raises:
          ValueError: the data set is empty, or an element's leaf is no array.
        """
        if self._element is None:
            # A program may be traced meanwhile; what the data set does with JAX is no part of it.
            with jax.ensure_compile_time_eval():
                data = DataPass(self._dataset)
                try:
                    first = data.peek()
                except StopIteration:
                    raise ValueError("IPUInfeedQueue: the dataset is empty.") from None
            what = "IPUInfeedQueue: element 0 of the dataset"
            self._element = jax.tree.map(lambda leaf: as_shape(_as_array(leaf, what)), first)
            self._peeked = data
        return self._element

    @property
    def number_of_tuple_elements(self) -> int:
        """How many arrays an element has."""
        return len(jax.tree.leaves(self.element))

    def initialize(self) -> object:
        """Starts over at the beginning of the data set. Returns what `delete` knows this pass by."""
        element = self.element
        data, self._peeked = self._peeked or DataPass(self._dataset), None
        self._start(_Feeder(data, element))
        self._started = object()
        return self._started

    def seek(self, position: Position) -> None:
        """Goes to a position of the data set; the infeed must be initialized."""
        self._start(_Feeder(DataPass(self._dataset, position), self.element))

    def _start(self, feeder: _Feeder) -> None:
        if self._feeder is not None:
            self._feeder.discard()
        self._feeder = feeder
        self._deleted = False
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._feeder.stop)  # also when Python ends

    def delete(self, only: object = None) -> None:
        """Ends the infeed; it can be initialized again.

        Args:
          only: from `initialize`: nothing happens if it was initialized again since.
        """
        if only is not None and only is not self._started:
            return
        if self._feeder is not None:
            self._feeder.discard()
        self._feeder = None
        self._deleted = True

    def stop(self) -> None:
        """Ends the thread. What was fetched is kept, and the next `connect` goes on from there."""
        if self._feeder is not None:
            self._feeder.stop()

    def check_initialized(self) -> None:
        """Raises if the infeed cannot be connected.

        Raises:
          RuntimeError: it was not initialized, or was ended by its deleter.
        """
        if self._feeder is None:
            state = (
                "was ended, by its `deleter` or with its session"
                if self._deleted
                else "has not been initialized"
            )
            raise RuntimeError(
                f"The infeed {state}. Run its initializer first: session.run(infeed_queue.initializer)."
            )

    def connect(self, place: Place, num_taken: int = 1, is_tentative: bool = False) -> Take:
        """Starts the thread.

        Args:
          place: puts the leaves of an element on devices. Called in the thread.
          num_taken: how many elements will be taken at once; so many at least are fetched ahead.
          is_tentative: whether not all that is taken may be needed: then what has been fetched is taken
            without waiting for more, and kept for `give_back`.

        Returns:
          A function that takes up to so many elements, and one at least: it returns what `place` made of
          them. It waits for as many as were asked for, unless the data end. It raises OutOfRangeError at
          the end of the data, and what the data set raised.

        Raises:
          RuntimeError: the infeed was not initialized.
        """
        self.check_initialized()
        assert self._feeder is not None
        self._feeder.start(place, max(self._prefetch_depth, num_taken), is_tentative)
        return self._feeder.take

    def give_back(self, count: int) -> None:
        """Puts the last elements that were taken at once back; they come again."""
        if self._feeder is not None:
            self._feeder.give_back(count)

    def mark(self, num_unneeded: int = 0) -> None:
        """Notes that what was taken so far has been used, except the last ones; see `position`."""
        if self._feeder is not None:
            self._feeder.mark(num_unneeded)

    @property
    def position(self) -> Position | None:
        """Where the data set stood at the last `mark`; None if the infeed is not initialized."""
        return None if self._feeder is None else self._feeder.position


class _Entry(NamedTuple):
    """An element that was fetched: as it came, and placed by `place`. Or an error, after the last one."""

    leaves: Sequence[Any]
    placed: Any
    place: Place
    error: BaseException | None
    traceback: TracebackType | None = None


class _Feeder:
    """The thread and its buffer, for one pass over the data.

    Whether a thread runs is known from `_is_running`, which the thread itself clears, under the lock that
    everyone takes to read it. It is never joined for long: a data set that hangs holds up nobody else, and
    the thread, a daemon, ends when it wakes up or goes on if it is wanted again.
    """

    def __init__(self, data: DataPass, element: Any) -> None:
        self._data = data
        self._element = element
        self._expected, self._expected_tree = jax.tree.flatten(element)
        self._number = self._num_taken = self._num_used = data.start
        self._has_raised_end = False
        self._condition = threading.Condition()
        # What follows is read and written with the condition held.
        self._buffer: collections.deque[_Entry] = collections.deque()
        self._depth = 1
        self._is_tentative = False
        self._taken: list[_Entry] = []  # at the last call of `take`, if it may be given back
        self._has_wide_dtypes = False
        self._place: Place | None = None
        self._thread: threading.Thread | None = None
        self._is_running = False
        self._is_stopping = False
        self._is_given_up = False

    def start(self, place: Place, depth: int, is_tentative: bool) -> None:
        with self._condition:
            self._place = place
            self._depth = depth
            self._is_tentative = is_tentative
            self._taken = []
            self._has_wide_dtypes = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # set dynamically
            self._condition.notify_all()
            self._is_stopping = self._is_given_up = False
            if not self._is_running and not self._has_ended():
                self._is_running = True
                self._thread = threading.Thread(target=self._run, name="ipu-infeed", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()
            is_worth_waiting = self._is_running and not self._is_given_up
            self._is_given_up = True  # waited for once, until it is wanted again
            thread = self._thread
        if is_worth_waiting and thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_JOIN_SECONDS)

    def discard(self) -> None:
        self.stop()
        with self._condition:
            self._buffer.clear()
            self._taken = []
            self._data = DataPass(())

    def take(self, wanted: int) -> list[Any]:
        with self._condition:
            at_least = 1 if self._is_tentative else wanted
            while len(self._buffer) < at_least and not self._has_ended():
                if not self._is_running and not self._buffer:
                    raise RuntimeError("The infeed was stopped, by its deleter or its session's end.")
                if not self._is_running:
                    break
                self._condition.wait()
            error = self._buffer[0].error
            if error is not None:  # it stays: whoever asks again gets the same answer
                self._has_raised_end = isinstance(error, OutOfRangeError)
                raise error.with_traceback(self._buffer[0].traceback)  # raising it again would add to it
            num_taken = min(wanted, len(self._buffer) - self._has_ended())
            taken = [self._buffer.popleft() for _element in range(num_taken)]
            self._num_taken += num_taken
            if self._is_tentative:
                self._taken = taken
            place = self._place
            self._condition.notify_all()
        assert place is not None
        # Fetched ahead for another program, an element goes to this one's devices now.
        return [entry.placed if entry.place == place else place(entry.leaves) for entry in taken]

    def give_back(self, count: int) -> None:
        with self._condition:
            first = len(self._taken) - count
            self._buffer.extendleft(reversed(self._taken[first:]))
            self._taken = []
            self._num_taken -= count

    def mark(self, num_unneeded: int) -> None:
        with self._condition:
            self._num_used = self._num_taken - num_unneeded
        self._data.forget_before(self._num_used)

    @property
    def position(self) -> Position:
        position = self._data.position(self._num_used)
        return dataclasses.replace(position, has_ended=self._has_raised_end)

    def _has_ended(self) -> bool:
        return bool(self._buffer) and self._buffer[-1].error is not None

    def _run(self) -> None:
        while True:
            with self._condition:
                while len(self._buffer) >= self._depth and not self._is_stopping:
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
                with jax.enable_x64(has_wide_dtypes):  # of the thread that wants the elements
                    entry = self._fetch(place)
            with self._condition:
                self._buffer.append(entry)
                self._condition.notify_all()

    def _fetch(self, place: Place) -> _Entry:
        try:
            leaves = self._check(next(self._data))
            self._number += 1
            return _Entry(leaves, place(leaves), place, None)
        except StopIteration:
            error: BaseException = OutOfRangeError(
                f"The infeed's data ended after {self._number} elements, before the run had all the "
                "micro-batches that it needs. Completed weight updates stand. Repeat the dataset, or run "
                "the initializer to start over."
            )
            if self._data.is_skipping:
                error = CheckpointError(
                    f"The infeed's data ended after {self._data.count} elements. They were to go on after "
                    f"{self._data.start}, where the checkpoint was saved: this is another dataset. Session."
                    "restore(path, infeeds=False) begins with its first element; an estimator does "
                    "so for an "
                    "input_fn of another name."
                )
        except BaseException as raised:  # whatever the data set raises belongs to the caller of `run`
            error = raised
        return _Entry((), (), place, error, error.__traceback__)

    def _check(self, element: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(element)
        if trees_equal(tree, self._expected_tree) and all(map(_is_expected, leaves, self._expected)):
            return leaves  # what follows takes longer than copying a small element
        what = f"IPUInfeedQueue: element {self._number} of the dataset"

        def as_array(leaf: Any) -> Any:
            array = _as_array(leaf, what)
            dtype = as_shape(array).dtype
            if array.dtype.kind in "iu" and dtype != array.dtype:
                array = cast_exactly(array, dtype, what)  # int64, without JAX's 64-bit mode
            return array

        return check_like(jax.tree.map(as_array, element), self._element, what)


def _is_expected(leaf: Any, known: jax.ShapeDtypeStruct) -> bool:
    return type(leaf) is np.ndarray and leaf.dtype == known.dtype and leaf.shape == known.shape


def _as_array(leaf: Any, what: str) -> Any:
    """A leaf of an element as a NumPy array, or the JAX array that it is.

    Raises:
      ValueError: it is no array of numbers.
    """
    problem = f"{what} has a leaf of type {type(leaf).__name__}; elements must be pytrees of numeric arrays"
    try:
        array: Any = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:  # all of which torch raises
        raise ValueError(f"{problem}. {error}") from error
    if not jnp.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        raise ValueError(f"{problem}, and its dtype is {array.dtype}.")
    return array
