"""Checkpoints in the memory of machines, which outlive the processes that made them.

`ipu-pipeline launch` gives its processes a directory in memory (a tmpfs). Before each run of a training,
every process writes what it has of the state there, while the run goes on. If there are several machines,
it also sends this to a process on another one. When a process has died and all have been started again,
they go on from the newest checkpoint of which all parts are there.

A checkpoint is one file for each process: a JSON header, then the arrays' bytes. Where several processes
have the same part of an array, the first one writes it. A file gets its last name when it is complete.

All processes begin each run together. Before that, each waits until the checkpoint before is written; then
it takes the next one. So whoever takes one knows that the one before is complete, and needs no older one.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.arrays import flatten
from ipu_pipeline.checkpointing.snapshots import Parts, Snapshot, describe_array, from_numpy, furthest
from ipu_pipeline.checkpointing.together import do_each, process_index
from ipu_pipeline.engine import processes
from ipu_pipeline.engine.fronts import between_bars, keep
from ipu_pipeline.ground.errors import ProcessError
from ipu_pipeline.ground.tables import describe_bytes
from ipu_pipeline.processes import interrupts
from ipu_pipeline.processes.launched import (
    MEMORY_VARIABLE,
    restart_number,
    runs_between_checkpoints,
    tell_progress,
)

__all__ = ["InMemorySeries", "parts_of"]

_ALIGNMENT = 64  # bytes
_BEGINNING = b"ipu_pipeline in-memory checkpoint 1\n"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_numbers = itertools.count()  # of files that go from machine to machine
_THREAD = "ipu-in-memory"
_MOST_SECONDS_AT_EXIT = 5.0  # for a process that may wait for one that is gone
_logger = logging.getLogger("ipu_pipeline")


@atexit.register
def _end_threads() -> None:
    """Waits for what is being written: a thread that is in JAX when Python ends aborts the process."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(_MOST_SECONDS_AT_EXIT)


def parts_of(leaves: Sequence[Any]) -> list[Parts]:
    """What this process writes of arrays, kept before their memory is given away."""
    found = [processes.parts_written_here(leaf) for leaf in leaves]
    kept = iter(keep([_as_data(part) for parts in found for _begin, part in parts]))
    return [
        Parts(
            tuple(leaf.shape),
            leaf.dtype,
            describe_array(leaf),
            tuple(begin for begin, _part in parts),
            tuple(next(kept) for _part in parts),
        )
        for leaf, parts in zip(leaves, found, strict=True)
    ]


def _as_data(array: Any) -> Any:
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


@dataclass(frozen=True, order=True)
class _File:
    """A file: its checkpoint's number, the restart in which that was taken, and whose part it has."""

    number: int
    restart: int
    process: int
    count: int  # of processes


class InMemorySeries:
    """The in-memory checkpoints of one training, numbered by the runs that came before them.

    Attributes:
      number: that of the next one.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Writes nothing yet. All processes call it.

        Args:
          directory: the launcher's.
          name: of the training, the same in all processes and after a restart.
        """
        self.number = 0
        self._directory = directory
        self._key = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self._index = process_index()
        self._restart = restart_number()
        self._every = runs_between_checkpoints()
        self._first: int | None = None
        self._thread: threading.Thread | None = None
        self._is_working = True
        self._machines: list[str] = do_each(lambda: _describe_memory(directory))
        self._count = len(self._machines)
        self._buddy = _find_buddy(self._machines, self._index)
        if len(set(self._machines)) > 1:
            processes.connect_all()
        self._of_buddies = [n for n in range(self._count) if _find_buddy(self._machines, n) == self._index]

    @classmethod
    def of_environment(cls, name: str) -> InMemorySeries | None:
        """The series in the directory that a launcher gave; None if it gave none."""
        directory = os.environ.get(MEMORY_VARIABLE)
        return cls(Path(directory), name) if directory else None

    def take(self, snapshot: Callable[[], Snapshot]) -> None:
        """Writes the next checkpoint in a thread. All processes call it when a run has begun, after `wait`.

        Args:
          snapshot: takes the snapshot, with `Parts` for arrays; it is called if a checkpoint is due.
        """
        with interrupts.deferred():  # else the processes' numbers might differ
            number, self.number = self.number, self.number + 1
            if self._first is None:
                self._first = number
            elif number == self._first + 1:
                tell_progress(self._first)
            if not self._is_working or number % self._every:
                return
            try:
                given = (number, snapshot())
                thread = threading.Thread(
                    target=self._write_or_report, args=given, name=_THREAD, daemon=True
                )
                thread.start()
                self._thread = thread
            except Exception as error:  # the run goes on
                self._report(error)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            with processes.waiting("an in-memory checkpoint"):
                self._thread.join()
            self._thread = None

    def find(self) -> Snapshot | None:
        """Reads the newest checkpoint of which all parts are there; None if there is none. All call it.

        Sets `number` to its number.
        """
        listed = do_each(lambda: list(map(dataclasses.astuple, self._list())))
        holders: dict[_File, dict[str, int]] = {}  # file -> machine -> the first process there
        for process, files in enumerate(listed):
            for file in itertools.starmap(_File, files):
                holders.setdefault(file, {}).setdefault(self._machines[process], process)
        complete: dict[tuple[int, int], list[_File]] = {}
        for file in sorted(holders):
            complete.setdefault((file.number, file.restart), []).append(file)
        complete = {key: files for key, files in complete.items() if len(files) == files[0].count}
        if not complete:
            return None
        newest = complete[max(complete)]
        self.number = newest[0].number
        return _join([_Content.read(self._open(file, holders[file])) for file in newest])

    def _open(self, file: _File, holders: Mapping[str, int]) -> BinaryIO:
        """Opens a file, which may be on another machine. All processes call it, in the same order."""
        what, lacking = (
            "a file in memory",
            [n for n, one in enumerate(self._machines) if one not in holders],
        )
        teller, number = min(holders.values()), next(_numbers)
        if self._index == teller and lacking:
            processes.offer_bytes(what, number, lacking, self._path(file).read_bytes())
        if self._index in lacking:
            return io.BytesIO(processes.fetch_bytes(what, number, teller))
        return open(self._path(file), "rb")

    def drop(self) -> None:
        """Removes what this process has written."""
        self.wait()
        for file in self._list():
            if file.process == self._index or file.process in self._of_buddies:
                self._path(file).unlink(missing_ok=True)

    def _path(self, file: _File) -> Path:
        values = f"{file.number}-{file.restart}-{file.process}of{file.count}"
        return self._directory / f"{self._key}-{values}"

    def _list(self) -> list[_File]:
        """The files that are complete."""
        pattern = re.compile(rf"{self._key}-(\d+)-(\d+)-(\d+)of(\d+)")
        matches = map(pattern.fullmatch, os.listdir(self._directory))
        return sorted(_File(*map(int, match.groups())) for match in matches if match is not None)

    def _write_or_report(self, number: int, snapshot: Snapshot) -> None:
        try:
            self._write(number, snapshot)
        except (ProcessError, jax.errors.JaxRuntimeError) as error:  # another one has died
            _logger.debug("In-memory checkpoint %d was not sent: %s", number, error)
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        self._is_working = False
        _logger.warning(
            "No more checkpoints are kept in memory: %s. After a restart, training goes on from its "
            "last checkpoint on disk. The directory is %s; ipu-pipeline launch takes another one as "
            "--memory-dir.",
            str(error) or type(error).__name__,
            self._directory,
        )

    def _write(self, number: int, snapshot: Snapshot) -> None:
        content = _Content.of(snapshot)
        own = _File(number, self._restart, self._index, self._count)
        self._store(own, content.write)
        if number == self._first:
            self._say_size(own)
        what = f"in-memory checkpoint {self._key}"
        if self._buddy is not None:
            written = io.BytesIO()
            content.write(written)
            processes.offer_bytes(what, number, [self._buddy], written.getbuffer())
        for process in self._of_buddies:
            received = processes.fetch_bytes(what, number, process)
            file = _File(number, self._restart, process, self._count)
            self._store(file, functools.partial(_write_bytes, received))

    def _say_size(self, file: _File) -> None:
        num_bytes = self._path(file).stat().st_size
        with between_bars():
            _logger.info(
                "In-memory checkpoints take %s in %s%s: %s for each of two.",
                describe_bytes(2 * num_bytes),
                self._directory,
                f", and about as much for process {self._of_buddies[0]}" if self._of_buddies else "",
                describe_bytes(num_bytes),
            )

    def _store(self, file: _File, write: Callable[[BinaryIO], None]) -> None:
        """Writes a file, over one that is no longer needed if there is one: new memory would be slower."""
        started = self._directory / f"{self._key}-{file.process}.being-written-by-{self._index}"
        for old in self._list():
            is_replaced = old.number < file.number - self._every or old.number == file.number
            if is_replaced and old.process == file.process and not started.exists():
                self._path(old).rename(started)
            elif is_replaced and (old.process == file.process or old.process >= self._count):
                self._path(old).unlink(missing_ok=True)
        with open(started, "r+b" if started.exists() else "wb") as stream:
            write(stream)
            stream.truncate()
        started.rename(self._path(file))


def _write_bytes(content: memoryview, stream: BinaryIO) -> None:
    stream.write(content)


def _describe_memory(directory: Path) -> str:
    """The same text in processes that share a directory in memory, and only there."""
    found = os.stat(directory)
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {found.st_dev} {found.st_ino}"


def _find_buddy(machines: Sequence[str], process: int) -> int | None:
    """The process that also keeps what a process writes: the next one on another machine, if any."""
    count = len(machines)
    for distance in range(1, count):
        other = (process + distance) % count
        if machines[other] != machines[process]:
            return other
    return None


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of an array's data: where it begins, and the data."""

    begin: tuple[int, ...]
    data: np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class _Content:
    """What a file holds.

    Attributes:
      document: `Snapshot.document`.
      parts: the path of each array -> the shape of its data, and the parts that are in the file.
    """

    document: dict[str, Any]
    parts: Mapping[tuple[str, ...], tuple[tuple[int, ...], Sequence[_Part]]]

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Content:
        """What is written of a snapshot."""
        found = {}
        for path, known in flatten(snapshot.arrays()):
            data = [np.asarray(part, order="C") for part in known.parts]
            if data:
                inner = data[0].shape[len(known.shape) :]  # of the data of a random key
                begins = [(*begin, *[0] * len(inner)) for begin in known.begins]
                found[path] = ((*known.shape, *inner), list(map(_Part, begins, data)))
        return cls(snapshot.document(), found)

    def write(self, stream: BinaryIO) -> None:
        """Writes it where the stream stands, at its beginning."""
        entries: list[Any] = []
        end = 0
        for path, (shape, parts) in self.parts.items():
            described = []
            for part in parts:
                end = _aligned(end)
                described.append([part.begin, part.data.shape, end])
                end += part.data.nbytes
            entries.append([path, shape, parts[0].data.dtype.name, described])
        header = json.dumps([self.document, entries]).encode()
        stream.write(_BEGINNING + f"{len(header)}\n".encode() + header)
        base = _aligned(stream.tell())
        offsets = (offset for *_known, described in entries for _begin, _shape, offset in described)
        for part, offset in zip(
            (p for _shape, some in self.parts.values() for p in some), offsets, strict=True
        ):
            stream.write(bytes(base + offset - stream.tell()))
            stream.write(part.data.reshape(-1).view(np.uint8).data)

    @classmethod
    def read(cls, stream: BinaryIO) -> _Content:
        """Reads what `write` wrote, and closes the stream."""
        with stream:
            if stream.readline() != _BEGINNING:
                raise ValueError("This is no in-memory checkpoint of this version of the library.")
            document, entries = json.loads(stream.read(int(stream.readline())))
            base = _aligned(stream.tell())
            found = {}
            for path, shape, dtype, described in entries:
                parts = []
                for begin, part_shape, offset in described:
                    data = np.empty(part_shape, dtype)
                    stream.seek(base + offset)
                    stream.readinto(data.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
                    parts.append(_Part(tuple(begin), data))
                found[tuple(path)] = (tuple(shape), parts)
        return cls(document, found)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _join(contents: Sequence[_Content]) -> Snapshot:
    """The snapshot of which each file has parts."""
    document = {**contents[0].document, "feeds": furthest([one.document["feeds"] for one in contents])}

    def assemble(described: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
        return {
            key: assemble(part, (*path, key)) if isinstance(part, dict) else join((*path, key), part)
            for key, part in described.items()
        }

    def join(path: tuple[str, ...], described: str) -> Any:
        found = [content.parts[path] for content in contents if path in content.parts]
        if not found:  # nothing is written of an array of size 0 that is divided
            return from_numpy(None, described)
        shape, parts = found[0]
        whole = np.empty(shape, parts[0].data.dtype)
        for _shape, some in found:
            for part in some:
                ends = (begin + size for begin, size in zip(part.begin, part.data.shape, strict=True))
                whole[tuple(map(slice, part.begin, ends))] = part.data
        return from_numpy(whole, described)

    return Snapshot.of(document, assemble(document["arrays"]))
