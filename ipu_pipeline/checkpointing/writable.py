"""Whether files can be written somewhere, found out before the work whose result they are to hold."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

__all__ = ["check_writable"]


def check_writable(path: Path, what: str) -> None:
    """Makes a file without a name where a directory is, or where it could be made, and drops it.

    Permissions alone do not tell: root has them all, and a disk may be read-only. Nothing is left behind,
    and no directory is made. A disk that is full is no reason to end: it may have room by the time that
    something is written, and what cannot be written then is reported then.

    Args:
      path: of a directory that may not exist yet.
      what: is to be written, for the message.

    Raises:
      OSError: nothing can be written there. It is of the class of the system's own error.
    """
    existing = next(folder for folder in (path, *path.parents) if folder.exists() or folder.is_symlink())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"?")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        reason = error.strerror or str(error)
        text = f"{what} cannot be written to {path}: {existing}: {reason}. Give another path."
        raise OSError(error.errno, text) from error
