"""The directory in memory in which processes keep their state while others are started again."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from ipu_pipeline.processes import board

__all__ = ["DEFAULT_DIRECTORY", "make_memory", "remove_left"]

DEFAULT_DIRECTORY = Path("/dev/shm")  # noqa: S108  # a file system in memory, on every Linux
_NAME = re.compile(r"ipu_pipeline-launch-(\d+)-(\d+)-.*")


def make_memory(parent: Path) -> Path:
    """Makes a directory that only this user can open.

    Raises:
      OSError: it cannot be made there.
    """
    own = board.this_process()
    prefix = f"ipu_pipeline-launch-{os.getpid()}-{0 if own is None else own.start}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def remove_left(parent: Path) -> None:
    """Removes the directories of launchers of this user that were killed."""
    for path in parent.glob("ipu_pipeline-launch-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or path.stat().st_uid != os.getuid():
            continue
        pid, start = map(int, match.groups())
        found = board.find_process(pid)
        if found is None or found.start != start:
            shutil.rmtree(path, ignore_errors=True)
