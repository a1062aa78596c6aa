"""torch's DataLoader, with batches that hold all micro-batches of a call."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.utils.data

from ipu_pipeline.ground.checks import parse_member
from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.data.loading_process import AsynchronousDataAccessor
from ipu_pipeline.poptorch.enums import DataLoaderMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.structures import join

if TYPE_CHECKING:
    from ipu_pipeline.poptorch.options import Options

_ASYNC_OPTIONS = (
    "buffer_size",
    "early_preload",
    "load_indefinitely",
    "miss_sleep_time_in_ms",
    "sharing_strategy",
)


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A torch DataLoader whose batches are the inputs of one call of a wrapped model.

    The rows of a batch are in the order of the data set: device iteration outermost, then accumulation
    step, then replica, then the row in its micro-batch.

    Workers (`num_workers`) are forked, as in torch. In modes other than Sync they are forked from the
    process that loads the data, which has no JAX in it.

    Attributes:
      mode: the process in which batches are made.
    """

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: Mapping[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Freezes the options. In modes other than Sync, starts the process that loads the data.

        Args:
          options: the model's options, which set the number of micro-batches in a call.
          dataset: a data set of torch, with an index or iterable.
          batch_size: rows of a micro-batch. None: the data set's elements are used as they are.
          shuffle: whether rows come in a new order in each iteration; None: False.
          num_workers: the number of processes that load rows. With 0, the process that makes batches loads
            them.
          drop_last: whether the last rows are dropped if they are too few for a call.
          persistent_workers: whether workers stay from one iteration to the next; None: True.
          auto_distributed_partitioning: whether each of several processes (`options.Distributed`) gets its
              part of the data: contiguous and equal parts, of a permutation that all have in common if rows
              are shuffled. Otherwise the data set or the sampler must do this.
          mode: the process in which batches are made. Sync: this process; Async: another process, see
            `AsynchronousDataAccessor`; AsyncRebatched: another process, from smaller batches of the
            workers.
          async_options: arguments of `AsynchronousDataAccessor`, by name.
          rebatched_worker_size: rows of the workers' batches in mode AsyncRebatched; None: as many as in
            the yielded batches.
          batch_sampler: a torch batch sampler, in place of `batch_size`. It yields the indices of each
            micro-batch's rows. `collate_fn` makes each micro-batch by itself.
          **kwargs: torch's other arguments.

        Raises:
          AssertionError: an argument does not fit mode, data set or number of processes.
          Error: `options` are not options, or `batch_sampler` comes with arguments that it replaces; see
            also `AsynchronousDataAccessor`.
          TypeError: there is no such argument; see also `AsynchronousDataAccessor`.
          ValueError: torch, or the partition, does not take these arguments together.
        """
        # Options import JAX, which the process that loads data does not need.
        from ipu_pipeline.poptorch.options import Options

        if not isinstance(options, Options):
            raise Error(f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)")
        mode = parse_member(DataLoaderMode, mode, "DataLoader: mode")
        if batch_sampler is not None and (batch_size != 1 or shuffle):
            raise Error("`batch_sampler` option is mutually exclusive with batch_size, shuffle.")
        options.freeze()
        number = _count_micro_batches(options)
        combined = None if batch_size is None else batch_size * number
        if batch_size is None:
            drop_last = False  # there is nothing left over
        arguments: dict[str, Any] = {
            "batch_size": combined,
            "shuffle": shuffle,
            "num_workers": num_workers,
            "drop_last": drop_last,
            "persistent_workers": num_workers > 0 if persistent_workers is None else persistent_workers,
            **kwargs,
        }
        if batch_sampler is not None:
            size = getattr(batch_sampler, "batch_size", None)
            combined = None if size is None else size * number
            arguments.update(batch_size=1, drop_last=False, batch_sampler=batch_sampler)
        if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
            arguments.update(_partition(options, dataset, arguments))
        _warn(dataset, num_workers, kwargs, mode, async_options, rebatched_worker_size)
        self._options: Options | None = options
        self._combined_batch_size = combined
        self._accessor: AsynchronousDataAccessor | None = None
        self._joining = _Joining(1 if batch_sampler is None else number, drop_last)
        self.mode = mode
        super().__init__(dataset, **arguments)
        _warn_if_empty(dataset, combined, arguments)
        if mode != DataLoaderMode.Sync:
            rebatched_size = None
            source_arguments = arguments
            if mode == DataLoaderMode.AsyncRebatched:
                size = None if batch_sampler is not None else combined
                worker_size = _check_worker_size(rebatched_worker_size, size)
                source_arguments = {**arguments, "batch_size": worker_size, "drop_last": False}
                rebatched_size = combined if combined != 1 else None
            source: Any = torch.utils.data.DataLoader(dataset, **source_arguments)
            if batch_sampler is not None:
                source = _Joined(source, self._joining)
            source.rebatched_drop_last = drop_last  # the accessor reads it
            self._accessor = AsynchronousDataAccessor(
                source, rebatched_size=rebatched_size, **_check_async_options(async_options)
            )

    def __iter__(self) -> Any:
        """Iterates over the data once. In modes other than Sync, this ends an unfinished iteration."""
        if self._accessor is not None:
            return iter(self._accessor)
        with warnings.catch_warnings():
            # Workers are forked by torch, and do not use JAX, which warns of every fork.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            return self._joining.join(super().__iter__())

    def __len__(self) -> int:
        return self._joining.count(super().__len__())

    def __getstate__(self) -> dict[str, Any]:
        if self._accessor is not None:
            raise TypeError(f"A DataLoader in mode {self.mode.name} has a process, and cannot be pickled.")
        # The process that loads data does not need the options, nor what they import.
        return {**vars(self), "_options": None, "_iterator": None}

    @property
    def combinedBatchSize(self) -> int | None:
        """The number of rows that a call takes; None if the data set's elements are taken as they are."""
        return self._combined_batch_size

    @property
    def options(self) -> Options | None:
        """The model's options; None in a copy or an unpickled one."""
        return self._options

    def terminate(self) -> None:
        """Ends the process that loads data, and the workers. Iterating again starts new ones."""
        self._iterator = None
        if self._accessor is not None:
            self._accessor.terminate()


def _count_micro_batches(options: Options) -> int:
    replicas: int = options.replication_factor // options.input_group_size
    return options.device_iterations * replicas * options.Training.gradient_accumulation


def _partition(options: Options, dataset: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments to give to torch instead, for the part of this process."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise AssertionError(
            "IterableDatasets not supported for distributed execution, unless the data set itself yields "
            "the part of this process: with auto_distributed_partitioning=False."
        )
    for name in ("sampler", "batch_sampler"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"DataLoader: {name} and the automatic partition for several processes exclude each other. "
                "Use auto_distributed_partitioning=False, with a sampler of this process's part."
            )
    if arguments["shuffle"] and not hasattr(options, "random_seed"):
        raise AssertionError(
            "When using distributed execution you must set poptorch.Options().randomSeed(), to the same in "
            "all processes, for shuffle=True."
        )
    distributed = options.Distributed
    part = _find_part(
        len(dataset),
        arguments["batch_size"] or 1,
        arguments["drop_last"],
        distributed.processId,
        distributed.numProcesses,
    )
    seed = options.random_seed if arguments["shuffle"] else None
    return {"sampler": _PartSampler(len(dataset), part, seed), "shuffle": None}


def _check_worker_size(worker_size: int | None, combined: int | None) -> int:
    if combined is None:
        raise AssertionError(
            "poptorch.DataLoaderMode.AsyncRebatched needs batch_size; for batch_size=None and for a "
            "batch_sampler use poptorch.DataLoaderMode.Async."
        )
    if worker_size is None:
        return combined
    if worker_size < 1:
        raise AssertionError(f"The rebatched_worker_size ({worker_size}) must be at least 1")
    if worker_size > combined:
        raise AssertionError(
            f"The rebatched_worker_size ({worker_size}) must be <= to the combined batch size ({combined})"
        )
    return worker_size


def _check_async_options(async_options: Mapping[str, Any] | None) -> dict[str, Any]:
    options = dict(async_options or {})
    unknown = sorted(set(options) - set(_ASYNC_OPTIONS))
    if unknown:
        raise TypeError(
            f"DataLoader: async_options are {', '.join(_ASYNC_OPTIONS)}; got {', '.join(unknown)}."
        )
    return options


def _warn_if_empty(dataset: Any, combined: int | None, arguments: Mapping[str, Any]) -> None:
    if combined is None or not arguments["drop_last"] or not hasattr(dataset, "__len__"):
        return
    if 0 < len(dataset) < combined:
        logs.warn_once(
            f"DataLoader: the data set has {len(dataset)} rows, fewer than the {combined} of one call, so "
            "nothing is loaded: lower batch_size, or deviceIterations or gradientAccumulation of the "
            "options."
        )


def _warn(
    dataset: Any,
    num_workers: int,
    torch_arguments: Mapping[str, Any],
    mode: DataLoaderMode,
    async_options: Mapping[str, Any] | None,
    rebatched_worker_size: int | None,
) -> None:
    """Warns of arguments without effect, or with an unexpected one."""
    if async_options and mode == DataLoaderMode.Sync:
        logs.warn_once("DataLoader: async_options has no effect in mode Sync.")
    if rebatched_worker_size is not None and mode != DataLoaderMode.AsyncRebatched:
        logs.warn_once(f"DataLoader: rebatched_worker_size has no effect in mode {mode.name}.")
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if is_iterable and num_workers > 1 and torch_arguments.get("worker_init_fn") is None:
        logs.warn_once(
            f"DataLoader: each of the {num_workers} workers iterates over the whole IterableDataset, whose "
            "elements come as often, unless it looks at torch.utils.data.get_worker_info()."
        )


@dataclass(frozen=True)
class _Joining:
    """Joins the micro-batches that a batch sampler chose to the batches of calls."""

    number: int  # of micro-batches in a call
    drop_last: bool

    def join(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches of calls."""
        return batches if self.number == 1 else self._join(batches)

    def _join(self, batches: Iterator[Any]) -> Iterator[Any]:
        while micro_batches := list(itertools.islice(batches, self.number)):
            if len(micro_batches) == self.number or not self.drop_last:
                yield join(micro_batches, "a batch of DataLoader")

    def count(self, num_micro_batches: int) -> int:
        """Returns the number of batches."""
        num_full, num_left_over = divmod(num_micro_batches, self.number)
        return num_full + (num_left_over > 0 and not self.drop_last)


class _Joined:
    """A loader of micro-batches, as one of the batches of calls."""

    def __init__(self, loader: torch.utils.data.DataLoader[Any], joining: _Joining) -> None:
        """Takes the loader."""
        self._loader, self._joining = loader, joining

    def __len__(self) -> int:
        return self._joining.count(len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        return self._joining.join(iter(self._loader))


class _PartSampler(torch.utils.data.Sampler[int]):
    """Samples one of several equal parts, each contiguous: of the data set, or of a permutation of it."""

    def __init__(self, num_rows: int, part: range, seed: int | None) -> None:
        """Takes arguments that are the same in all processes, and this process's part."""
        self._num_rows = num_rows
        self._part = part
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self) -> Iterator[int]:
        if self._generator is None:
            return iter(self._part)
        permutation = torch.randperm(self._num_rows, generator=self._generator)
        return iter(permutation[self._part.start : self._part.stop].tolist())


def _find_part(num_rows: int, combined_batch_size: int, drop_last: bool, index: int, count: int) -> range:
    """Returns the positions of one part."""
    if drop_last:
        size = num_rows // (combined_batch_size * count) * combined_batch_size
    elif num_rows % count:
        raise AssertionError(
            f"The number of elements in the dataset ({num_rows}) is not divisible by the number of "
            f"processes ({count}) and drop_last=False. Switch to drop_last=True."
        )
    else:
        size = num_rows // count
    return range(index * size, (index + 1) * size)
