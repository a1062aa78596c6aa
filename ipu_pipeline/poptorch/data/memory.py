"""Memory that processes share. It has no name in any file system, so nothing can be left behind."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

__all__ = ["allocate", "map_bytes"]


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
