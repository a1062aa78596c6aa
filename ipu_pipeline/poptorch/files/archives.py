"""Files of named parts: written whole or not at all, and read without trusting what is in them.

A file is a ZIP archive without compression. Its parts are read into memory, never unpacked to disk, and
each is compared with the check sum that ZIP keeps of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO, TypeAlias

from ipu_pipeline.poptorch.errors import Error

__all__ = ["MANIFEST", "PROGRAM", "ArchiveReader", "PathLike", "find_target", "read_parts", "write_parts"]

PathLike: TypeAlias = "str | os.PathLike[str]"

MANIFEST = "manifest.json"
PROGRAM = "program.pt2"
_PART = re.compile(r"manifest\.json|program\.pt2|tensors/\d{1,9}", re.ASCII)
_ENCRYPTED = 0x1  # a flag of ZIP's


def find_target(filename: PathLike) -> str:
    """The path that a file is to be written to, in a directory that is made if there is none.

    A link stands for what it leads to.

    Raises:
      Error: the path is empty, or that of something that is no file; or the directory cannot be made.
      TypeError: it is no path.
    """
    if not isinstance(filename, (str, os.PathLike)) or not isinstance(os.fspath(filename), str):
        raise TypeError(f"filename must be a path; got {filename!r}.")
    if not os.fspath(filename):
        raise Error("filename must be the path of a file; it is empty.")
    target = os.path.realpath(filename)
    if os.path.lexists(target) and not stat.S_ISREG(os.lstat(target).st_mode):
        kind = "a directory" if os.path.isdir(target) else "no regular file"
        raise Error(f"filename must be the path of a file; {os.fspath(filename)} is {kind}.")
    directory = os.path.dirname(target)
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise Error(
            f"{os.fspath(filename)} cannot be written: the directory {directory} cannot be made ({error}). "
            "Give another path."
        ) from error
    return target


def write_parts(filename: PathLike, parts: Iterable[tuple[str, bytes]]) -> None:
    """Writes a file.

    It gets its name when it is whole: whatever happens before leaves what was there. Who may read it is as
    for the file that it replaces, or as for any new file.

    Args:
      filename: where to.
      parts: names and contents; each is made when it is written.

    Raises:
      Error: see `find_target`; or the system cannot write it.
    """
    target = find_target(filename)
    beside = f"{target}.{secrets.token_hex(6)}.part"
    try:
        try:
            with open(beside, "xb") as file:
                with contextlib.suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
                _write(file, parts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Error(f"{os.fspath(filename)} cannot be written: {reason}. Give another path.") from error


def _write(file: BinaryIO, parts: Iterable[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts:
            archive.writestr(zipfile.ZipInfo(name), content)


class ArchiveReader:
    """The parts of a file that is open."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        """Looks over the parts.

        Args:
          archive: is looked at, and nothing of it read.
          size: of the file, in bytes.

        Raises:
          ValueError: a part has a name or a kind that no part has.
        """
        self._archive = archive
        names = archive.namelist()
        if MANIFEST not in names:
            raise ValueError(f"it has no {MANIFEST}, but {', '.join(map(repr, names[:3])) or 'nothing'}")
        left = size
        for info in archive.infolist():
            if not _PART.fullmatch(info.filename) or names.count(info.filename) != 1:
                raise ValueError(f"it has a part {info.filename!r}, which is none of such a file")
            left -= info.file_size
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED or left < 0:
                raise ValueError(f"its part {info.filename} is packed, or longer than the file")

    def read(self, name: str) -> bytes:
        """The content of a part.

        Raises:
          KeyError: there is no such part.
          zipfile.BadZipFile: it is not what was written.
        """
        return self._archive.read(name)


@contextlib.contextmanager
def read_parts(filename: PathLike) -> Iterator[ArchiveReader]:
    """Opens a file. Whatever its parts turn out not to be in the `with` block is an error of the file.

    Raises:
      Error: there is no such file; or it is damaged, or something else.
      TypeError: `filename` is no path.
    """
    if not isinstance(filename, (str, os.PathLike)) or not isinstance(path := os.fspath(filename), str):
        raise TypeError(f"filename must be a path; got {filename!r}.")
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(4)
        if not begin:
            raise Error(f"{path} is empty. compileAndExport writes it anew.")
        if begin not in (b"PK\x03\x04", b"PK\x05\x06"):
            raise Error(f"{path} is no file of compileAndExport or save: it is no archive.")
        try:
            with zipfile.ZipFile(file) as archive:
                yield ArchiveReader(archive, size)
        except (Error, MemoryError):
            raise
        except Exception as error:  # bytes that were damaged can be anything
            raise Error(
                f"{path} cannot be read as a file of compileAndExport or save: it was damaged or cut off, "
                f"or something else wrote it ({type(error).__name__}: {error}). Export the model again."
            ) from error


def _open(path: str) -> BinaryIO:
    try:
        # Opening a pipe would wait for who writes to it.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise Error(f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}.")
        return open(path, "rb")
    except FileNotFoundError:
        raise Error(f"There is no file {path}. compileAndExport and save write such files.") from None
    except (OSError, ValueError) as error:  # a path may have a character that none can have
        raise Error(f"{path!r} cannot be read: {error}.") from error
