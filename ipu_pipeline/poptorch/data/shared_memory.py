"""Values in memory that processes share: made, taken apart into it, and put together from it.

The memory has no name in any file system, so nothing can be left behind.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

import torch


def allocate(num_bytes: int, on_disk: bool = False) -> int:
    """Makes memory. Returns its file descriptor, which the caller must close."""
    if on_disk:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    else:
        descriptor = os.memfd_create("poptorch-data", os.MFD_CLOEXEC)
    try:
        # Allocated now, because a write to mapped memory that cannot be had later kills the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_bytes(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Maps a file descriptor's memory to a 1-D tensor of bytes. The descriptor may then be closed."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


_ALIGNMENT = 64
_PROTOCOL = 5  # the first with buffers beside the pickle


class _Placed(NamedTuple):
    """A tensor's contents: the offset in bytes, and how to read them; None if they are contiguous."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...] | None


@dataclass
class Parcel:
    """A value that was taken apart."""

    pickled: bytes = b""  # everything but the contents
    # offset and number of bytes of each buffer that NumPy's arrays and the like gave
    buffers: list[tuple[int, int]] = field(default_factory=list)
    # what is to be copied to each offset
    contents: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    num_bytes: int = 0  # the memory that the contents need

    def add(self, content: torch.Tensor) -> int:
        """Finds a place for a content. Returns its offset."""
        offset = self.num_bytes
        self.contents.append((offset, content))
        self.num_bytes = offset + -(-content.nbytes // _ALIGNMENT) * _ALIGNMENT
        return offset

    def write(self, memory: torch.Tensor) -> None:
        """Copies the contents into memory, one-dimensional and of bytes."""
        for offset, content in self.contents:
            place = memory[offset : offset + content.nbytes].view(content.dtype)
            place.view(content.size()).copy_(content)


class _Pickler(ForkingPickler):
    """The pickler of `take_apart`."""

    def __init__(self, stream: io.BytesIO, parcel: Parcel, whole_storages: bool) -> None:
        super().__init__(stream, _PROTOCOL, True, self._keep_buffer)
        self._parcel = parcel
        self._whole_storages = whole_storages
        self._offsets: dict[tuple[int, int], int] = {}  # address and size of a storage -> its offset

    def _keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.readonly:
            return True  # into the pickle
        content = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0).byte()
        self._parcel.buffers.append((self._parcel.add(content), view.nbytes))
        return False

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Generator and obj.device.type == "cpu":
            # torch reads a state from the beginning of a storage, whatever the tensor's offset is.
            return _make_generator, (bytes(obj.get_state().numpy()),)
        return NotImplemented

    def persistent_id(self, obj: Any) -> _Placed | None:
        # Other kinds of tensors are left to torch's own ways of sending them.
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return None
        if obj.is_quantized or obj.is_conj() or obj.is_neg():
            return None
        return self._place_storage(obj) if self._whole_storages else self._place_content(obj.detach())

    def _place_content(self, tensor: torch.Tensor) -> _Placed:
        return _Placed(self._parcel.add(tensor), tensor.nbytes, tensor.dtype, tensor.size(), None)

    def _place_storage(self, tensor: torch.Tensor) -> _Placed | None:
        if tensor.requires_grad or tensor.is_shared():
            return None
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._offsets:
            content = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._offsets[key] = self._parcel.add(content)
        offset = self._offsets[key] + int(tensor.storage_offset()) * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        num_bytes = (last + 1) * tensor.itemsize if tensor.numel() else 0
        return _Placed(offset, num_bytes, tensor.dtype, tensor.size(), tensor.stride())


class _Unpickler(pickle.Unpickler):
    """The unpickler of `put_together`."""

    def __init__(self, pickled: bytes, buffers: list[Any], memory: torch.Tensor, copied: bool) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._memory = memory
        self._copied = copied

    def persistent_load(self, pid: _Placed) -> torch.Tensor:
        content = self._memory[pid.offset : pid.offset + pid.num_bytes].view(pid.dtype)
        content = content.clone() if self._copied else content
        return content.view(pid.size) if pid.stride is None else content.as_strided(pid.size, pid.stride)


def _make_generator(state: bytes) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def take_apart(value: Any, whole_storages: bool = False) -> Parcel:
    """Pickles a value, except for the contents of its tensors and arrays."""
    parcel = Parcel()
    stream = io.BytesIO()
    _Pickler(stream, parcel, whole_storages).dump(value)
    parcel.pickled = stream.getvalue()
    return parcel


def put_together(
    pickled: bytes, buffers: list[tuple[int, int]], memory: torch.Tensor, copied: bool = False
) -> Any:
    """Inverts `take_apart`. Tensors and arrays are in the memory, which they keep alive, or copies."""
    views = [memory[offset : offset + num_bytes].numpy() for offset, num_bytes in buffers]
    views = [view.copy() for view in views] if copied else views
    return _Unpickler(pickled, views, memory, copied).load()


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
