"""The directory in memory in which the processes of a job keep their state."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["DEFAULT_DIRECTORY", "Memory", "remove_left"]

DEFAULT_DIRECTORY = Path("/dev/shm")  # noqa: S108  # a file system in memory, on every Linux
_PREFIX, _LOCK = "ipu_pipeline-launch-", "lock"


class Memory:
    """A directory that only this user can open, and that a lock shows to be in use.

    Attributes:
      path: its path.
    """

    def __init__(self, parent: Path, label: str = "") -> None:
        """Makes it."""
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{label}", dir=parent)).absolute()
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under this name others would remove it if it were not locked.
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left(parent: Path, label: str = "") -> bool:
    """Removes the directories that killed launchers of this user have left behind.

    A launcher that is still running holds the lock of its directory.

    Returns:
      Whether none is left.
    """
    for path in parent.glob(f"{_PREFIX}{label}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or being removed by somebody else
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
    return not any(parent.glob(f"{_PREFIX}{label}*"))
