"""Memory that processes share. It has no name in any file system: nothing of it can be left behind."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

__all__ = ["allocate", "map_bytes"]


def allocate(num_bytes: int, on_disk: bool = False) -> int:
    """Makes memory. Returns its file descriptor, to be closed by the caller.

    Raises:
      OSError: there is not enough.
    """
    if on_disk:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    else:
        descriptor = os.memfd_create("poptorch-data", os.MFD_CLOEXEC)
    try:
        # Now, since where it is missing later a write to the mapped memory kills the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_bytes(descriptor: int, num_bytes: int) -> torch.Tensor:
    """The memory of a file descriptor, which may then be closed, as a one-dimensional tensor of bytes."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
