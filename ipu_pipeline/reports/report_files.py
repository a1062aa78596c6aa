"""The files of a report: written whole, listed in a manifest, and removed only if listed there."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
PAGE = "report.html"
REPORTS = ("profile.json", "trace.json", PAGE)  # the files of a trace
_FORMAT = "ipu_pipeline reports"


def check_directory(directory: Path, names: Iterable[str]) -> None:
    """Creates a directory for reports, if there is none."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass
    reports = read_manifest(directory)
    for name in names:
        if name not in reports and os.path.lexists(directory / name):
            raise ValueError(
                f"The directory {str(directory)!r} has a file {name!r} that its {MANIFEST} does not list "
                "as a report. Give a directory of its own, or move the file."
            )


def read_manifest(directory: Path) -> tuple[str, ...]:
    """The names of the reports in a directory; empty if there is no manifest, or it is not ours."""
    path = directory / MANIFEST
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            document = json.load(file)
        if document["format"] != _FORMAT:
            return ()
        names = [str(name) for name in document["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(name for name in names if name == os.path.basename(name) and name not in ("", ".", ".."))


def write_reports(directory: Path, texts: dict[str, str]) -> None:
    """Writes files, each whole or not at all, and adds them to the manifest."""
    files = dict.fromkeys([MANIFEST, *read_manifest(directory)])
    for name, text in texts.items():
        write_file(directory / name, text)
        files[name] = None
        write_file(
            directory / MANIFEST, json.dumps({"format": _FORMAT, "version": 1, "files": list(files)})
        )


def write_file(path: Path, text: str) -> None:
    """Puts a file in its place in one step. A link in its place is replaced, not followed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def remove_report(directory: Path, name: str) -> None:
    """Removes a report that a directory's manifest lists, if it exists and is not a link."""
    path = directory / name
    with contextlib.suppress(FileNotFoundError):
        if name in read_manifest(directory) and stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)


def remove_reports(directory: Path) -> tuple[str, ...]:
    """Removes the reports that a directory's manifest lists, and the directory if nothing is left.

    Only plain files in the directory itself are removed: nothing is removed through a link, and a directory
    that is a link is left alone.

    Returns:
      The names of the files that were removed.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return ()
    removed = []
    try:
        names = read_manifest(directory)
        for name in sorted(names, key=lambda name: name == MANIFEST):  # last, so that it can be done again
            try:
                if stat.S_ISREG(os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=handle)
                    removed.append(name)
            except FileNotFoundError:
                continue
    finally:
        os.close(handle)
    with contextlib.suppress(OSError):
        directory.rmdir()
    return tuple(removed)
