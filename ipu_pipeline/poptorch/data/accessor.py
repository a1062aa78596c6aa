"""Loading of data in another process, while this one uses earlier data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils.data

from ipu_pipeline.ground.enumerations import parse_member
from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.data.messages import Loading
from ipu_pipeline.poptorch.data.process import LoadingProcess
from ipu_pipeline.poptorch.enums import DataLoaderMode, SharingStrategy
from ipu_pipeline.poptorch.errors import Error

__all__ = ["AsynchronousDataAccessor"]

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
        whole, rest = divmod(num_rows, self._loading.rebatched_size)
        return whole + (rest > 0 and not self._loading.drop_last)

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
