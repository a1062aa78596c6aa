"""Files of tensors and JSON in safetensors' format, written whole or not at all, and read without trust.

The JSON is in the metadata, and the tensors are named by their numbers. A checksum finds damage. It does
not protect against files that are forged.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ipu_pipeline.poptorch.errors import Error

__all__ = ["PathLike", "TensorList", "find_target", "read_file", "write_file"]

PathLike: TypeAlias = "str | os.PathLike[str]"

_MANIFEST = "ipu_pipeline.poptorch"
_CHECK_SUM = "crc32"
_HEADER_BEGIN = 8  # behind the header's length


class TensorList:
    """The tensors of a file, each of them once."""

    def __init__(self) -> None:
        """Starts empty."""
        self._numbers: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Adds a tensor to the list if it is not there yet. Returns its number."""
        if tensor.dtype is torch.complex128:
            raise Error("A file of a model cannot hold tensors of complex128. Make them complex64.")
        number = self._numbers.setdefault(id(tensor), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(tensor)
        return number

    def by_name(self) -> dict[str, torch.Tensor]:
        """Returns the tensors as a file has them: contiguous, and without shared memory."""
        found, storages = {}, set()
        for number, tensor in enumerate(self._tensors):
            tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            found[str(number)] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        return found


def find_target(filename: PathLike) -> str:
    """Finds the path to write a file to. Makes its directory if there is none.

    A link is followed.
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


def write_file(filename: PathLike, manifest: Any, tensors: TensorList) -> None:
    """Writes a file.

    It gets its name when it is complete, so an earlier failure leaves the old file. It has the permissions
    of the file that it replaces, or of any new file.
    """
    target = find_target(filename)
    directory, name = os.path.split(target)
    text, named = json.dumps(manifest), tensors.by_name()
    try:
        with tempfile.TemporaryDirectory(".part", f"{name}.", directory) as beside:
            whole = os.path.join(beside, name)
            with open(whole, "xb"):  # with the permissions of any new file
                mode = os.stat(target if os.path.exists(target) else whole).st_mode
            save_file(named, whole, {_MANIFEST: text, _CHECK_SUM: _check_sum(text, named)})
            with open(whole, "rb") as file:
                os.fsync(file.fileno())
            os.chmod(whole, stat.S_IMODE(mode))
            os.replace(whole, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Error(f"{os.fspath(filename)} cannot be written: {reason}. Give another path.") from error


def _check_sum(manifest: str, tensors: Mapping[str, torch.Tensor]) -> str:
    found = zlib.crc32(manifest.encode())
    for name, tensor in tensors.items():
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        found = zlib.crc32(content, found)
    return f"{found:08x}"


@contextlib.contextmanager
def read_file(filename: PathLike) -> Iterator[tuple[Any, Mapping[int, torch.Tensor]]]:
    """Reads a file: the manifest, and the tensors by number.

    Any error in the `with` block counts as an error of the file.
    """
    if not isinstance(filename, (str, os.PathLike)) or not isinstance(path := os.fspath(filename), str):
        raise TypeError(f"filename must be a path; got {filename!r}.")
    _check_begin(path)
    try:
        # The tensors get memory of their own, so that later changes to the file cannot reach them.
        with safe_open(path, "pt", backend="pread") as file:
            metadata = file.metadata() or {}
            if _MANIFEST not in metadata:
                raise ValueError(f"its metadata has no {_MANIFEST}, but {sorted(metadata)[:3]}")
            named = {name: file.get_tensor(name) for name in map(str, range(len(file.keys())))}
        text = metadata[_MANIFEST]
        if metadata.get(_CHECK_SUM) != _check_sum(text, named):
            raise ValueError("its check sum does not match its contents")
        yield json.loads(text), {int(name): tensor for name, tensor in named.items()}
    except (Error, MemoryError):
        raise
    except Exception as error:  # bytes that were damaged can be anything
        raise Error(
            f"{path} cannot be read as a file of compileAndExport or save: it was damaged or cut off, "
            f"or something else wrote it ({type(error).__name__}: {error}). Export the model again."
        ) from error


def _check_begin(path: str) -> None:
    try:
        # Opening a pipe would wait for its writer.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise Error(f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}.")
        with open(path, "rb") as file:
            begin = file.read(_HEADER_BEGIN + 1)
    except FileNotFoundError:
        raise Error(f"There is no file {path}. compileAndExport and save write such files.") from None
    except (OSError, ValueError) as error:  # a path may have an invalid character
        raise Error(f"{path!r} cannot be read: {error}.") from error
    if not begin:
        raise Error(f"{path} is empty. compileAndExport writes it anew.")
    if begin.startswith(b"PK"):
        raise Error(
            f"{path} is a ZIP archive. If compileAndExport or save wrote it, that was ipu_pipeline 0.1.0 "
            "before its release, in version 1 of the format, which is not read any more: export the model "
            "again."
        )
    if begin[_HEADER_BEGIN:] != b"{":
        raise Error(
            f"{path} is no file of compileAndExport or save: it is not in the format of safetensors."
        )
