"""Loading of data in another process, while this one uses earlier data.

`LoadingProcess` is the user's side of that process: it starts it, asks for data, and always ends it.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing import connection, forkserver, util
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
import torch.utils.data

from ipu_pipeline.ground.checks import parse_member
from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.data import worker
from ipu_pipeline.poptorch.data.shared_memory import Packed, map_bytes, put_together
from ipu_pipeline.poptorch.data.worker import (
    Ended,
    Failed,
    Free,
    Loaded,
    Loading,
    Randomness,
    Ready,
    Renewed,
    Stop,
    Want,
)
from ipu_pipeline.poptorch.enums import DataLoaderMode, SharingStrategy
from ipu_pipeline.poptorch.errors import Error

_STOP_SECONDS = 2.0  # for what it is loading
_TERMINATE_SECONDS = 5.0  # for the processes that it has started itself
_GUARD = (
    'A program that loads data in another process must do so under `if __name__ == "__main__":`, since '
    "that process imports it; or use poptorch.SharingStrategy.Fork."
)
_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}


class LoadingProcess:
    """A process that loads data, the connection to it, and the memory shared with it."""

    def __init__(self, dataset: Iterable[Any], loading: Loading, strategy: SharingStrategy) -> None:
        """Starts the process. It loads nothing before `begin` or `preload`."""
        self._process: multiprocessing.process.BaseProcess | None = None
        self._memories = [torch.empty(0, dtype=torch.uint8)] * loading.num_slots
        self._owner = os.getpid()
        self._is_ready = False
        self._iteration = 0
        self._is_preloading = False
        self._copies = False  # batches from the shared memory, from when one is kept
        # the slots of the last batches, each with a weak reference to the view that all tensors of its
        # batch keep alive
        self._used: collections.deque[tuple[int, weakref.ref[Any]]] = collections.deque()
        self._connection, self._process = _start(dataset, loading, strategy)
        self._events = select.poll()  # each call of multiprocessing's `wait` would make another one
        self._events.register(self._connection, select.POLLIN)
        self._events.register(self._process.sentinel, select.POLLIN)
        # At its end, a process waits for its child processes, but calls this before. Python's own `atexit`
        # would come too late, or never in a process that was itself started by multiprocessing.
        reference = weakref.ref(self)
        self._at_exit = util.Finalize(None, _stop_if_there, (reference,), exitpriority=10)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process is None

    def preload(self) -> None:
        """Tells it to load the batches of the first iteration."""
        self._is_preloading = True
        with self._stopping_if_interrupted():
            self._send(Want(1, Randomness.take()))

    def begin(self) -> int:
        """Goes on to the next iteration over the data. Returns its number."""
        self._iteration += 1
        if self._iteration > 1 or not self._is_preloading:
            with self._stopping_if_interrupted():
                self._send(Want(self._iteration, Randomness.take() if self._iteration == 1 else None))
        return self._iteration

    def take(self, iteration: int) -> Any:
        """Returns the next batch.

        Frees the slot of the batch before the last one, because a loop variable may still hold the last. If
        something of that batch is kept, the program collects what it gets: each kept batch would cost a
        file descriptor, and each tensor hold its whole batch. So later batches are copied.
        """
        if self._process is None:
            raise Error("The process that loads the data was ended. Iterate again to start another one.")
        if iteration != self._iteration:
            raise Error(
                "Another iteration over the same data has begun, which ended this one: there is one "
                "process, and it loads for one at a time."
            )
        while True:
            with self._stopping_if_interrupted():
                while len(self._used) > 1:
                    slot, user = self._used.popleft()
                    is_kept = user() is not None
                    self._copies = self._copies or is_kept
                    self._send(Free(slot, is_kept))
                message = self._receive()
                if isinstance(message, Loaded):
                    memory: Any = self._memories[message.slot].numpy()
                    view = memoryview(memory)
                    self._used.append((message.slot, weakref.ref(view)))
            match message:
                case Loaded(number, _slot, pickled, buffers) if number == iteration:
                    return put_together(pickled, buffers, _as_tensor(view), self._copies)
                case Ended(number) if number == iteration:
                    raise StopIteration
                case Failed(number, _error, _name, _text) if number in (0, iteration):
                    if number == 0:
                        self.stop()
                    _raise(message)

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        process = self._process
        if process is None or self._owner != os.getpid():  # the latter is so in a forked process
            return
        try:
            self._send(Stop())
            self._connection.close()
            process.join(_STOP_SECONDS)
            if process.exitcode is None:
                process.terminate()
                process.join(_TERMINATE_SECONDS)
        finally:  # also after Ctrl-C
            self._process = None
            self._at_exit.cancel()
            process.kill()
            process.join()
            process.close()
            self._memories = []

    def __del__(self) -> None:
        self.stop()

    @contextlib.contextmanager
    def _stopping_if_interrupted(self) -> Iterator[None]:
        """Stops the process if an exchange of messages is interrupted: the sides would disagree."""
        try:
            yield
        except BaseException:  # Ctrl-C, or the process has ended
            self.stop()
            raise

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the process has ended; `take` will say so
            self._connection.send_bytes(pickle.dumps(message))

    def _receive(self) -> Any:
        assert self._process is not None
        while True:
            ready = [descriptor for descriptor, _event in self._events.poll()]
            if self._connection.fileno() not in ready:
                raise self._describe_end()
            try:
                message = pickle.loads(self._connection.recv_bytes())  # noqa: S301  # from our own process
                if isinstance(message, Renewed):
                    self._renew(message)
                elif isinstance(message, Ready):
                    self._is_ready = True
                else:
                    return message
            except (EOFError, ConnectionError):
                raise self._describe_end() from None

    def _renew(self, message: Renewed) -> None:
        descriptor = recv_handle(self._connection)
        try:
            self._memories[message.slot] = map_bytes(descriptor, message.num_bytes)
        finally:
            os.close(descriptor)

    def _describe_end(self) -> Error:
        assert self._process is not None
        self._process.join(_TERMINATE_SECONDS)
        code = self._process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        when = "" if self._is_ready else " before it had the data set"
        return Error(
            f"AsynchronousDataAccessor: the process that loads the data ended{when}, with exit code {code}"
            f"{name}. The error output may say why.{'' if self._is_ready else ' ' + _GUARD}"
        )


def _as_tensor(view: memoryview) -> torch.Tensor:
    """Returns a tensor of the bytes of a view, which lives as long as a tensor or array of these."""
    return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def _stop_if_there(reference: weakref.ref[LoadingProcess]) -> None:
    process = reference()
    if process is not None:
        process.stop()


def _start(
    dataset: Iterable[Any], loading: Loading, strategy: SharingStrategy
) -> tuple[connection.Connection, multiprocessing.process.BaseProcess]:
    method = _METHODS[strategy]
    is_importing_program = getattr(multiprocessing.current_process(), "_inheriting", False)
    if method != "fork" and is_importing_program:
        raise Error(f"This process was started to load data, and is importing the program. {_GUARD}")
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        _import_in_server(context)
    packed = Packed(dataset, on_disk=strategy == SharingStrategy.FileSystem)
    our_end, its_end = context.Pipe()
    try:
        arguments = (its_end, our_end if method == "fork" else None, packed, loading)
        # A daemon could not have workers of torch.
        process = context.Process(target=worker.serve, args=arguments, name="poptorch-data", daemon=False)
        process.start()
    except BaseException:
        our_end.close()
        raise
    finally:
        its_end.close()
        packed.close()
    return our_end, process


def _import_in_server(context: Any) -> None:
    """Makes the fork server import torch once, instead of in every process that it forks."""
    imported = getattr(getattr(forkserver, "_forkserver", None), "_preload_modules", None)
    if imported is not None and worker.__name__ not in imported:
        context.set_forkserver_preload([*imported, worker.__name__])


def _raise(failure: Failed) -> None:
    """Raises the data set's error, with its traceback as a note."""
    try:
        error = pickle.loads(failure.error)  # noqa: S301  # from our own process
    except Exception:
        error = None
    if not isinstance(error, Exception):  # it could not be pickled
        error = RuntimeError(failure.name)
    error.add_note(f"Raised in the process that loads the data:\n{failure.text}")
    raise error


_MISS_SLEEP_TIME = 0.1


class AsynchronousDataAccessor:
    """Iterates over a data set that another process loads ahead, into a ring of shared memory.

    A batch's tensors and arrays are in that memory, and stay as they are for as long as you keep one of
    them. Once you have kept one, all later tensors and arrays are copies with memory of their own.
    Iterating again before the end starts over and ends the previous iteration.

    The data set's random numbers, for example for shuffling, continue from this process's generators at the
    time when the first batch is asked for. So seeds give the same order as without another process.

    The data set is pickled and sent to the process, unless `SharingStrategy.Fork` is used. The process
    imports the program, so code that runs must stand under `if __name__ == "__main__":`.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = _MISS_SLEEP_TIME,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        """Starts the process.

        Args:
          dataset: an object that can be iterated over, such as a `DataLoader`, or indexed up to its length.
          buffer_size: the number of batches in the ring, including the one in use; 1 counts as 2. One slot
            is added for the previous batch.
          miss_sleep_time_in_ms: has no effect: the processes wake each other, and do not poll.
          load_indefinitely: whether the next iteration's batches are loaded as soon as one has ended; else
            when it begins.
          early_preload: whether the first iteration's batches are loaded at once; else when it begins.
          sharing_strategy: how the process is started. `ForkServer`: by another process, without threads,
            that has imported torch; the second and later ones start fast. `SharedMemory`: afresh. Both get
            the data set's tensors in shared memory. `FileSystem`: afresh, with the tensors in a temporary
            file. `Fork`: as a copy of this process, with the data set as it is. JAX warns of that, because
            a lock that one of its threads holds stays locked in the copy. Use it where the data set cannot
            be pickled, best before the first model runs, and do not use JAX in the data set.
          rebatched_size: the number of rows of the batches that the data set's batches are joined to. Rows
            left over at the end are dropped, unless the data set is a `DataLoader` with drop_last=False.

        Raises:
          AssertionError: incomplete batches are neither dropped nor rebatched, or `rebatched_size` is less
            than 2.
          Error: the data set is a DataLoader that loads in another process, or the program that starts the
            process has no `if __name__ == "__main__":`.
          TypeError: the data set cannot be iterated over, or cannot be pickled.
          ValueError: `buffer_size` is less than 1.
        """
        has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not has_index and not hasattr(dataset, "__iter__"):
            raise TypeError(
                "AsynchronousDataAccessor: dataset must be something that can be iterated over, or indexed "
                f"up to its length; got {type(dataset).__name__}."
            )
        mode = getattr(dataset, "mode", None)
        if isinstance(mode, DataLoaderMode) and mode != DataLoaderMode.Sync:
            raise Error(
                "The DataLoader already uses an AsynchronousDataAccessor internally. Iterate over it "
                "directly, or use poptorch.DataLoaderMode.Sync for it."
            )
        if not isinstance(buffer_size, int) or buffer_size < 1:
            raise ValueError(
                f"AsynchronousDataAccessor: buffer_size must be 1 or more; got {buffer_size!r}."
            )
        if rebatched_size is not None and rebatched_size < 2:
            raise AssertionError(f"rebatched_size must be None or greater than 1; got {rebatched_size}.")
        is_loaders = hasattr(dataset, "rebatched_drop_last")  # its last batch may be smaller
        if rebatched_size is None and not is_loaders and _may_leave_rows(dataset):
            raise AssertionError(
                "The 'drop_last=False' option from the DataLoader only works if 'rebatched_size' is "
                "specified too."
            )
        if miss_sleep_time_in_ms != _MISS_SLEEP_TIME:
            logs.warn_once(
                "AsynchronousDataAccessor: miss_sleep_time_in_ms has no effect: the processes wake each "
                "other instead of looking from time to time."
            )
        drop_last = getattr(dataset, "rebatched_drop_last", getattr(dataset, "drop_last", True))
        self._dataset = dataset
        self._loading = Loading(max(2, buffer_size) + 1, load_indefinitely, rebatched_size, drop_last)
        self._strategy = parse_member(
            SharingStrategy, sharing_strategy, "AsynchronousDataAccessor: sharing_strategy"
        )
        self._process = self._start()
        if early_preload:
            self._process.preload()

    def terminate(self) -> None:
        """Ends the process. Iterating again starts another one."""
        self._process.stop()

    def __len__(self) -> int:
        """Returns the number of batches in an iteration."""
        if self._loading.rebatched_size is None:
            return len(self._dataset)
        num_rows = _count_rows(self._dataset)
        if num_rows is None:
            raise TypeError(
                "AsynchronousDataAccessor: how many batches there are after rebatching is known only for a "
                "DataLoader of a known length and batch size; the data set is a "
                f"{type(self._dataset).__name__}."
            )
        num_full, num_left_over = divmod(num_rows, self._loading.rebatched_size)
        return num_full + (num_left_over > 0 and not self._loading.drop_last)

    def __iter__(self) -> Iterator[Any]:
        if self._process.has_ended:
            self._process = self._start()
        return _Iteration(self._process)

    def _start(self) -> LoadingProcess:
        return LoadingProcess(self._dataset, self._loading, self._strategy)


class _Iteration:
    """One iteration over the data."""

    def __init__(self, process: LoadingProcess) -> None:
        self._process = process
        self._number = process.begin()
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        try:
            return self._process.take(self._number)
        except BaseException:
            self._has_ended = True
            raise


def _count_rows(dataset: Any) -> int | None:
    """Returns the number of rows that a data set yields; None if it is not known."""
    if not isinstance(dataset, torch.utils.data.DataLoader) or dataset.batch_size is None:
        return None
    rows = (
        dataset.dataset
        if isinstance(dataset.dataset, torch.utils.data.IterableDataset)
        else dataset.sampler
    )
    try:
        num_rows = len(rows)  # type: ignore[arg-type]  # many have a length, not all
    except TypeError:
        return None
    return num_rows // dataset.batch_size * dataset.batch_size if dataset.drop_last else num_rows


def _may_leave_rows(dataset: Any) -> bool:
    """Whether the last batch may have fewer rows than the others."""
    if (
        not isinstance(dataset, torch.utils.data.DataLoader)
        or dataset.batch_size is None
        or dataset.drop_last
    ):
        return False
    num_rows = _count_rows(dataset)
    return num_rows is None or num_rows % dataset.batch_size != 0
