"""Checks whether files can be written somewhere, before doing the work whose result they are to hold."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

__all__ = ["check_writable"]


def check_writable(path: Path, what: str, may_be_full: bool = False) -> None:
    """Creates an unnamed file in a directory, or where that could be created, and drops it.

    Permissions alone do not tell: root has them all, and a disk may be read-only. Nothing is left behind,
    and no directory is created.
    """
    existing = next(folder for folder in (path, *path.parents) if folder.exists() or folder.is_symlink())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"?")
    except OSError as error:
        if may_be_full and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        reason = error.strerror or str(error)
        text = f"{what} cannot be written to {path}: {existing}: {reason}. Give another path."
        raise OSError(error.errno, text) from error
