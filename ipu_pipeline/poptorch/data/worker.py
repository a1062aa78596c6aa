"""The main function of the process that loads data. It needs torch and the data set, never JAX."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from types import FrameType
from typing import Any

import torch

from ipu_pipeline.poptorch.data.memory import allocate, map_bytes
from ipu_pipeline.poptorch.data.messages import (
    Ended,
    Failed,
    Free,
    Loaded,
    Loading,
    Ready,
    Renewed,
    Stop,
    Want,
)
from ipu_pipeline.poptorch.data.packing import Packed
from ipu_pipeline.poptorch.data.parcels import take_apart
from ipu_pipeline.poptorch.data.rebatching import rebatch

__all__ = ["serve"]


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
