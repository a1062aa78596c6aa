"""The host of this process: cores that it may use, and directories that only its user can change."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Directories that only their owner can change, for files that a process trusts.
#
# A directory is the user's own if it belongs to the user, and no other user can write to it. It stays so if
# the directories above it belong to the user or to root, and others cannot write to those either, or only
# with the sticky bit, as in /tmp. Then no other user can put another directory in its place.

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def others_can_write(status: os.stat_result, path: Path | None = None) -> bool:
    """Whether a user other than its owner can write to a file or directory."""
    if not status.st_mode & _OTHERS_WRITE:
        return False
    return path is None or bool(status.st_mode & stat.S_IWOTH) or not _is_private_group(status, path)


def _is_private_group(status: os.stat_result, path: Path) -> bool:
    with contextlib.suppress(OSError, AttributeError):
        os.getxattr(path, "system.posix_acl_access")
        return False  # the mode's bits of the group are then those of an access list, which may name others
    try:
        user, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def make_own(path: Path) -> Path:
    """Makes a directory of the user's own, if it does not exist."""
    path = path.resolve()
    for folder in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir(0o700)
        status = folder.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"Not a directory: {folder}")
        is_above = folder != path
        if status.st_uid != os.geteuid() and not (is_above and status.st_uid == 0):
            raise PermissionError(f"{folder} belongs to another user")
        if others_can_write(status, folder) and not (is_above and status.st_mode & stat.S_ISVTX):
            raise PermissionError(f"others can write to {folder} (chmod go-w {folder})")
    return path


def check_files(path: Path) -> None:
    """Raises a PermissionError if a file in a directory is another user's, or others can write to it."""
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has just renamed or removed it
                status = entry.stat(follow_symlinks=False)
                if status.st_uid != os.geteuid() or others_can_write(status, Path(entry.path)):
                    raise PermissionError(
                        f"{entry.path} belongs to another user, or others can write to it (delete it)"
                    )
