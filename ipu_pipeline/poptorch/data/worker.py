"""Process that loads data: its messages, its random numbers, rebatching, and its main function.

It needs torch and the data set, never JAX. Slots are pieces of shared memory, numbered from 0. The
iterations over the data are counted from 1. The process continues the random numbers of the one that
starts it, so that seeds have an effect there.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import random
import select
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from ipu_pipeline.poptorch.data.shared_memory import Packed, allocate, map_bytes, take_apart


class Randomness(NamedTuple):
    """The states of the generators of Python, NumPy and torch.

    A data set's shuffling and transformations then draw the same numbers in the other process as here.
    """

    of_python: Any
    of_numpy: Any
    of_torch: bytes

    @classmethod
    def take(cls) -> Randomness:
        """Returns this process's states, and advances torch's generator, so that the next call differs."""
        of_torch = torch.get_rng_state().numpy().tobytes()
        states = cls(random.getstate(), np.random.get_state(), of_torch)  # noqa: NPY002
        torch.empty((), dtype=torch.int64).random_()
        return states

    def use(self) -> None:
        """Sets this process's generators to the states."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # noqa: NPY002  # the user's data sets may use this one
        torch.set_rng_state(torch.frombuffer(bytearray(self.of_torch), dtype=torch.uint8))


# Messages.


@dataclass(frozen=True)
class Loading:
    """The settings of loading."""

    num_slots: int  # the number of batches in shared memory
    load_indefinitely: bool  # whether the next iteration's batches are loaded before they are asked for
    rebatched_size: int | None  # the number of rows that batches are joined to; None to leave them
    drop_last: bool  # whether rows left over at the end are dropped


class Want(NamedTuple):
    """To the loader: an iteration is wanted, and earlier ones no longer."""

    iteration: int
    randomness: Randomness | None


class Free(NamedTuple):
    """To the loader: a slot may have another batch."""

    slot: int
    is_kept: bool  # whether somebody keeps the batch that is in it: then the next one needs other memory


class Stop(NamedTuple):
    """To the loader: end."""


class Ready(NamedTuple):
    """From the loader: it has the data set."""


class Renewed(NamedTuple):
    """From the loader: a slot has new memory. The file descriptor follows."""

    slot: int
    num_bytes: int


class Loaded(NamedTuple):
    """From the loader: a batch is in a slot; see `shared_memory` for the rest."""

    iteration: int
    slot: int
    pickled: bytes
    buffers: list[tuple[int, int]]


class Ended(NamedTuple):
    """From the loader: an iteration has no more batches."""

    iteration: int


class Failed(NamedTuple):
    """From the loader: an iteration ended with an error."""

    iteration: int  # its number
    error: bytes  # pickled; empty if it cannot be
    name: str  # the name of its class
    text: str  # its traceback


# Rebatching.


def rebatch(batches: Iterable[Any], num_rows: int, drop_last: bool) -> Iterator[Any]:
    """Yields the rows of some batches in their order, `num_rows` at a time."""
    parts: list[Any] = []
    missing = num_rows
    for batch in batches:
        end, start = _count_rows(batch), 0
        while end - start >= missing:
            yield _join([*parts, _cut(batch, start, start + missing, end)])
            start += missing
            parts, missing = [], num_rows
        if start < end:
            parts.append(_cut(batch, start, end, end))
            missing -= end - start
    if parts and not drop_last:
        yield _join(parts)


def _arrays_of(value: Any) -> Iterator[Any]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _arrays_of(part)


def _count_rows(batch: Any) -> int:
    counts = {len(array) if array.ndim else 0 for array in _arrays_of(batch)}
    if len(counts) != 1 or 0 in counts:
        shapes = [tuple(array.shape) for array in _arrays_of(batch)]
        raise TypeError(
            "Rebatching: all tensors of a batch must have the same number of rows, in their first "
            f"dimension; got a {type(batch).__name__} with tensors of the shapes {shapes}."
        )
    return counts.pop()


def _rebuild(like: Any, parts: Sequence[Any]) -> Any:
    """Makes a tuple or list of the same type."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def _is_by_row(value: Any, num_rows: int) -> bool:
    """Whether a tuple or list has one item per row that is not a tensor, such as strings."""
    return len(value) == num_rows and next(_arrays_of(value), None) is None


def _cut(value: Any, start: int, stop: int, num_rows: int) -> Any:
    if start == 0 and stop == num_rows:
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[start:stop]
    if isinstance(value, dict):
        return {key: _cut(part, start, stop, num_rows) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        if _is_by_row(value, num_rows):
            return value[start:stop]
        return _rebuild(value, [_cut(part, start, stop, num_rows) for part in value])
    return value


def _join(batches: Sequence[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    return _join_parts(batches, [_count_rows(batch) for batch in batches])


def _join_parts(values: Sequence[Any], num_rows: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, dict):
        return {key: _join_parts([value[key] for value in values], num_rows) for key in first}
    if isinstance(first, (tuple, list)):
        if all(_is_by_row(value, count) for value, count in zip(values, num_rows, strict=True)):
            return type(first)(itertools.chain(*values))
        return _rebuild(first, [_join_parts(parts, num_rows) for parts in zip(*values, strict=True)])
    if any(value != first for value in values):
        raise TypeError(
            "Rebatching: batches can be joined if what is not by row is the same in all of them; "
            f"got {' and '.join(map(repr, values))}."
        )
    return first


# The process.


def serve(connection: Connection, unneeded: Connection | None, packed: Packed, loading: Loading) -> None:
    """Loads data until told to stop, or until the other process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process, which ends this one
    signal.signal(signal.SIGTERM, _exit)
    torch.set_num_threads(1)  # more would compete with the model, and hang after a fork
    # For torch's workers, and other processes of the data set. This process has one thread, and would
    # otherwise start others in the way that it was started itself.
    multiprocessing.set_start_method("fork", force=True)
    if unneeded is not None:
        unneeded.close()
    with contextlib.suppress(_Stopped):  # here, not at the process's end, which kills torch's workers
        _Loader(connection, loading).run(packed)


def _exit(number: int, _frame: FrameType | None) -> None:
    """Ends at once. Python would only report an exception in some places, such as weak references."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


class _Stopped(SystemExit):
    """Nothing is wanted any longer."""


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Stops if the connection fails, because the other process is gone then."""
    try:
        yield
    except (EOFError, OSError):
        raise _Stopped from None


class _Outdated(Exception):  # noqa: N818  # no error
    """The iteration whose batches are being loaded is no longer wanted."""


class _Loader:
    """Iterates over the data, and puts batches into slots as they become free."""

    def __init__(self, connection: Connection, loading: Loading) -> None:
        self._connection = connection
        self._loading = loading
        self._events = select.poll()
        self._events.register(connection, select.POLLIN)
        self._free = list(range(loading.num_slots))
        self._memories = [torch.empty(0, dtype=torch.uint8)] * loading.num_slots
        self._wanted = 0

    def run(self, packed: Packed) -> None:
        """Loads iteration after iteration. Returns only if the data set cannot be unpacked."""
        try:
            dataset = packed.unpack()
        except Exception as error:
            self._report(0, error)
            return
        self._send(Ready())
        iteration, goes_on = 1, False
        while True:
            while self._wanted < iteration and not goes_on:
                self._receive()
            goes_on = self._load(dataset, iteration) and self._loading.load_indefinitely
            iteration = max(iteration + 1, self._wanted)

    def _load(self, dataset: Iterable[Any], iteration: int) -> bool:
        """Loads an iteration's batches. Returns whether the next one may follow before it is wanted."""
        num_loaded = 0
        try:
            for batch in self._iterate(dataset):
                self._hand_over(batch, iteration)
                num_loaded += 1
        except _Outdated:
            return True
        except Exception as error:
            self._report(iteration, error)
            return False
        self._send(Ended(iteration))
        return num_loaded > 0  # or empty iterations would follow each other without end

    def _iterate(self, dataset: Any) -> Iterator[Any]:
        if hasattr(dataset, "__iter__"):
            batches = iter(dataset)
        else:  # torch's indexed data sets need not raise at their end
            batches = (dataset[index] for index in range(len(dataset)))
        if self._loading.rebatched_size is None:
            return batches
        return rebatch(batches, self._loading.rebatched_size, self._loading.drop_last)

    def _hand_over(self, batch: Any, iteration: int) -> None:
        parcel = take_apart(batch)
        while not self._free or self._events.poll(0):
            self._receive()
            if self._wanted > iteration:
                raise _Outdated
        slot = self._free.pop()
        if self._memories[slot].numel() < parcel.num_bytes:
            self._renew(slot, parcel.num_bytes)
        parcel.write(self._memories[slot])
        self._send(Loaded(iteration, slot, parcel.pickled, parcel.buffers))

    def _renew(self, slot: int, num_bytes: int) -> None:
        old = self._memories[slot].numel()
        num_bytes = max(num_bytes, old + old // 2)  # batches may grow and grow
        descriptor = allocate(num_bytes)
        try:
            self._memories[slot] = map_bytes(descriptor, num_bytes)
            self._send(Renewed(slot, num_bytes))
            with _ending():
                send_handle(self._connection, descriptor, None)
        finally:
            os.close(descriptor)

    def _receive(self) -> None:
        with _ending():
            message = self._connection.recv()
        match message:
            case Want(iteration, randomness):
                self._wanted = iteration
                if randomness is not None:
                    randomness.use()
            case Free(slot, is_kept):
                self._free.append(slot)
                if is_kept:
                    self._memories[slot] = torch.empty(0, dtype=torch.uint8)
            case Stop():
                raise _Stopped

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message)
        with _ending():
            self._connection.send_bytes(data)

    def _report(self, iteration: int, error: Exception) -> None:
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # noqa: S301  # some errors can be pickled but not unpickled
        except Exception:
            pickled = b""
        self._send(Failed(iteration, pickled, f"{type(error).__name__}: {error}", traceback.format_exc()))
