"""A data set on its way to the process that loads it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from multiprocessing.reduction import DupFd
from typing import Any

from ipu_pipeline.poptorch.data.memory import allocate, map_bytes
from ipu_pipeline.poptorch.data.parcels import put_together, take_apart

__all__ = ["Packed"]


class Packed:
    """A data set that is pickled when a process is started with it, with its tensors in shared memory.

    torch's way of sending tensors needs an open file for each: a fork server accepts 254, a process 1,024.
    """

    def __init__(self, dataset: Iterable[Any], on_disk: bool) -> None:
        """Pickles nothing yet, and nothing at all if the process is forked."""
        self._dataset = dataset
        self._on_disk = on_disk
        self._descriptor: int | None = None

    def __getstate__(self) -> tuple[Any, ...]:
        try:
            parcel = take_apart(self._dataset, whole_storages=True)
        except Exception as error:
            raise TypeError(
                f"The data set cannot be sent to the process that loads it. {type(error).__name__}: "
                f"{error}. Define its classes and functions at the top of a module, neither inside of "
                "another function nor as a lambda. Or use SharingStrategy.Fork, which sends nothing: "
                "AsynchronousDataAccessor(..., sharing_strategy=poptorch.SharingStrategy.Fork) or "
                'DataLoader(..., async_options={"sharing_strategy": poptorch.SharingStrategy.Fork}).'
            ) from error
        num_bytes = max(parcel.num_bytes, 1)
        self._descriptor = allocate(num_bytes, self._on_disk)
        parcel.write(map_bytes(self._descriptor, num_bytes))
        return parcel.pickled, parcel.buffers, num_bytes, DupFd(self._descriptor)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def unpack(self) -> Iterable[Any]:
        """Unpacks the data set in the process that it was sent to; only once."""
        if not hasattr(self, "_state"):
            return self._dataset
        pickled, buffers, num_bytes, duplicate = self._state
        descriptor = duplicate.detach()
        try:
            memory = map_bytes(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        del self._state
        dataset: Iterable[Any] = put_together(pickled, buffers, memory)
        return dataset

    def close(self) -> None:
        """Releases what was made for sending, once the process is started."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
