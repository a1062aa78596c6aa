"""Checkpoints in the machines' memory, which outlive the processes that made them.

`ipu-pipeline launch` gives its processes a directory in memory (a tmpfs). Before each run of a training,
every process writes what it has of the state there, while the run goes on. If there are several machines,
it also sends this to a process on another one. When a process has died and all have been started again,
they go on from the newest checkpoint of which all parts are there.

A checkpoint is one file for each process: a JSON header, then the arrays' bytes. Where several processes
have the same part of an array, the first one writes it. A file gets its last name when it is complete.

All processes begin each run together. Before that, each waits until the checkpoint before is written, and
with the beginning they tell each other so (`tell`, `hear`). Then each takes the next one. So the last one
that is complete in all processes is always known, and nothing else is needed. If one process cannot write
any more, all stop, and that one stays.

After a death all processes are started again. That the others stay was tried with jax 0.10.2: gloo keeps
connections by the devices' numbers as long as a process lives, so that collectives cannot take in a new
process, and a coordinator's death aborts all. It would save 0.3 s of the 5 s from a death to the next run.
"""

from __future__ import annotations

import atexit
import contextlib
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
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.checkpoint_directories import flatten
from ipu_pipeline.checkpointing.collective_calls import do_each, process_index
from ipu_pipeline.checkpointing.states import Parts, State, describe_array, from_numpy, furthest
from ipu_pipeline.engine import processes
from ipu_pipeline.engine.fronts import keep
from ipu_pipeline.ground.errors import ProcessError
from ipu_pipeline.ground.host import make_own
from ipu_pipeline.ground.tables import between_bars, describe_bytes
from ipu_pipeline.processes import interrupts, launcher
from ipu_pipeline.processes.launcher import (
    MEMORY_EVERY_VARIABLE,
    MEMORY_VARIABLE,
    RESTART_VARIABLE,
    count_useful,
    restart_number,
    restore_useful,
    runs_between_checkpoints,
    tell_progress,
    useful_seconds,
)

T = TypeVar("T")
_ALIGNMENT = 64  # bytes
_RUNS, _USEFUL = "runs before it", "seconds of these runs"  # in a snapshot's extra
_NOTHING = b"--"  # what a buddy gets in place of a file that could not be written
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
    """The parts of arrays that this process writes, kept before their memory is given away."""
    local_parts = [processes.parts_written_here(leaf) for leaf in leaves]
    kept_parts = iter(keep([_as_data(part) for parts in local_parts for _begin, part in parts]))
    return [
        Parts(
            tuple(leaf.shape),
            leaf.dtype,
            describe_array(leaf),
            tuple(begin for begin, _part in parts),
            tuple(next(kept_parts) for _part in parts),
        )
        for leaf, parts in zip(leaves, local_parts, strict=True)
    ]


def rows_of(leaves: Sequence[Any]) -> list[Parts]:
    """The same for variables of which each replica has its own values, with a row per replica."""
    local_rows = [processes.rows_written_here(leaf) for leaf in leaves]
    kept_rows = iter(keep([part for _count, parts in local_rows for _begin, part in parts]))
    rows = []
    for leaf, (count, parts) in zip(leaves, local_rows, strict=True):
        shape = (count, *leaf.shape)
        described = describe_array(jax.ShapeDtypeStruct(shape, leaf.dtype))
        begins = tuple(begin for begin, _part in parts)
        arrays = tuple(next(kept_rows) for _part in parts)
        rows.append(Parts(shape, leaf.dtype, described, begins, arrays, are_rows=True))
    return rows


def _as_data(array: Any) -> Any:
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


class _Key(NamedTuple):
    """The identity of a checkpoint in its series. Files of different starts are never put together."""

    number: int
    restart: int  # in which it was taken


@dataclass(frozen=True, order=True)
class _File:
    """A file: its checkpoint, and the process whose part it has."""

    number: int
    restart: int
    process: int
    count: int  # of processes

    @property
    def key(self) -> _Key:
        return _Key(self.number, self.restart)


_begun: dict[str, int] = {}  # series of this process -> the number of the next checkpoint
_named: Counter[str] = Counter()  # kind of training -> how many this process has named


def name_next(kind: str) -> str:
    """Names a training by its number among those of its kind in the program, the same in all processes."""
    number = _named[kind]
    _named[kind] += 1
    return f"{kind} {number}"


class InMemorySeries:
    """The in-memory checkpoints of one training.

    Attributes:
      runs: how many runs of the training are done.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Writes nothing yet. All processes call it."""
        self.runs = 0
        self._run_begun = 0.0  # by `time.monotonic`
        # What is run -> the seconds of its first run; None once it has been counted.
        self._first: dict[Hashable, float | None] = {}
        self._done_file: int | None = None
        self._directory = directory.resolve()
        self._name = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self._what = f"in-memory checkpoint {self._name}"
        self._index = process_index()
        self._next = _begun.get(self._name, 0)  # the number of the next checkpoint
        self._num_asked = 0
        self._num_written = 0
        self._written: _Key | None = None  # the last one that this process has written, or found
        self._complete: _Key | None = None  # the last one that all have
        self._is_working = True
        self._thread: threading.Thread | None = None
        # An error in one process is raised in all.
        machines, restarts, intervals = zip(*do_each(lambda: _describe_memory(directory)), strict=True)
        self._machines = list(machines)
        self._restart = _check_same(RESTART_VARIABLE, restarts)
        self._every = _check_same(MEMORY_EVERY_VARIABLE, intervals)
        self._count = len(self._machines)
        if len(set(self._machines)) > 1:
            processes.connect_all()
        buddies = _find_buddies(self._machines)
        self._buddy = buddies[self._index]
        self._of_buddies = [process for process, buddy in enumerate(buddies) if buddy == self._index]

    @classmethod
    def of_environment(cls, name: str) -> InMemorySeries | None:
        """The series in the directory that a launcher gave; None if it gave none. All processes call it."""
        directory = os.environ.get(MEMORY_VARIABLE)
        _check_same(MEMORY_VARIABLE, do_each(lambda: "set" if directory else "not set"))
        return cls(Path(directory), name) if directory else None

    # Before, at the beginning of, and after each run.

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            with processes.occupied("an in-memory checkpoint"):
                self._thread.join()
            self._thread = None

    def meet(self) -> None:
        """Waits, tells and hears before `take`, where no other exchange of the processes can carry it."""
        texts: Sequence[str] = ()
        if self.is_due:
            self.wait()
            peers = processes.current()
            texts = [self.tell()] if peers is None else peers.exchange(self._what, self.tell())
        self.hear(texts)

    def tell(self) -> str:
        """The text for the other processes before the next checkpoint is taken, after `wait`."""
        return str(self._written) if self._is_working else ""

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is taken before the next run; the same in all processes."""
        return self._num_asked % self._every == 0

    def hear(self, texts: Sequence[str]) -> None:
        """Takes what `tell` returned in all processes, when a run begins; nothing if none is due."""
        self._run_begun = time.monotonic()
        if "" in texts:
            self._is_working = False
        elif len(set(texts)) == 1:
            self._complete = self._written

    def take(self, snapshot: Callable[[], State]) -> None:
        """Writes the next checkpoint in a thread. All processes call it when a run has begun."""
        with interrupts.deferred():  # else the processes' numbers might differ
            is_due = self._is_working and self.is_due
            self._num_asked += 1
            if not is_due:
                return
            key = _Key(self._next, self._restart)
            self._next = _begun[self._name] = self._next + 1
            try:
                new_snapshot = snapshot()
                extra = {**new_snapshot.extra, _RUNS: self.runs, _USEFUL: useful_seconds()}
                arguments = (key, dataclasses.replace(new_snapshot, extra=extra))
                thread = threading.Thread(
                    target=self._write_or_report, args=arguments, name=_THREAD, daemon=True
                )
                thread.start()
                self._thread = thread
            except Exception as error:  # the run goes on
                self._answer(key, _NOTHING)
                self._report(error)

    def note_run(self, step: int, program: Hashable = None) -> None:
        """Counts a run that is done, with the global step after it.

        The first run of something also compiles it. It counts for as long as the second one takes.
        """
        seconds = time.monotonic() - self._run_begun
        if program not in self._first:
            self._first[program] = seconds
        else:
            first, self._first[program] = self._first[program], None
            count_useful(seconds + (0.0 if first is None else min(first, seconds)))
        tell_progress(self._name, self.runs, step)
        self.runs += 1
        self._write_done()

    def _write_done(self) -> None:
        """Writes how many runs are done, in a few microseconds."""
        with contextlib.suppress(OSError):  # where the memory is full, what is done again is not known
            if self._done_file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._done_file = os.open(self._done(self._index), flags, 0o600)
                weakref.finalize(self, os.close, self._done_file)
            os.pwrite(self._done_file, b"%20d" % self.runs, 0)

    # At the beginning and at the end of a training.

    def find(self) -> State | None:
        """Reads the newest checkpoint of which all parts are there; None if there is none. All call it.

        Nothing is found in a job's first start, and if this process has had such a series before: what is
        there is of another training then. Sets `runs` to the number of runs that were done before it.
        """
        is_first = self._name not in _begun
        _begun.setdefault(self._name, 0)
        if self._restart == 0 or not is_first:
            self.drop()
            return None
        listed = do_each(lambda: list(map(dataclasses.astuple, self._list())))
        holders: dict[_File, dict[str, int]] = {}  # file -> machine -> the first process there
        for process, files in enumerate(listed):
            for file in itertools.starmap(_File, files):
                holders.setdefault(file, {}).setdefault(self._machines[process], process)
        parts: dict[_Key, list[_File]] = {}
        for file in sorted(holders):
            parts.setdefault(file.key, []).append(file)
            self._next = _begun[self._name] = max(self._next, file.number + 1)
        complete = [key for key, files in parts.items() if len(files) == files[0].count]
        if not complete:
            return None
        newest = max(complete)
        with processes.occupied("an in-memory checkpoint"):
            snapshot = _join([_Content.read(self._open(file, holders[file])) for file in parts[newest]])
        self._written = self._complete = newest
        self.runs = snapshot.extra.pop(_RUNS)
        restore_useful(snapshot.extra.pop(_USEFUL))
        return snapshot

    def tell_resumed(self) -> None:
        """Reports how many runs are done again, after training has gone on with what was found."""
        with contextlib.suppress(OSError, ValueError):  # the node is new, or it was being written
            launcher.tell_resumed(max(0, int(self._done(self._index).read_text()) - self.runs))

    def say_resumed(self) -> None:
        """Does what `tell_resumed` does, and logs where training goes on."""
        self.tell_resumed()
        with between_bars():
            _logger.info("Training goes on with run %d, restored from memory.", self.runs)

    def _open(self, file: _File, holders: Mapping[str, int]) -> BinaryIO:
        """Opens a file, which may be on another machine. All processes call it, in the same order."""
        subject, number, teller = "a file in memory", next(_numbers), min(holders.values())
        lacking = [process for process, machine in enumerate(self._machines) if machine not in holders]
        if self._index == teller and lacking:
            processes.offer_bytes(subject, number, lacking, self._path(file).read_bytes())
        if self._index in lacking:
            return io.BytesIO(processes.fetch_bytes(subject, number, teller))
        return open(self._path(file), "rb")

    def leave(self) -> None:
        """Leaves what was found to a later series of this name."""
        _begun.pop(self._name, None)

    def drop(self) -> None:
        """Removes what this process has written."""
        self.wait()
        for file in self._list():
            if file.process in (self._index, *self._of_buddies) or file.process >= self._count:
                self._path(file).unlink(missing_ok=True)
        for process in (self._index, *self._of_buddies):
            self._started(process).unlink(missing_ok=True)
        for path in self._directory.glob(f"{self._name}-*.done"):
            process = int(path.stem.rpartition("-")[2])
            if process == self._index or process >= self._count:
                path.unlink(missing_ok=True)

    # Files.

    def _path(self, file: _File) -> Path:
        values = f"{file.number}-{file.restart}-{file.process}of{file.count}"
        return self._directory / f"{self._name}-{values}"

    def _done(self, process: int) -> Path:
        """The number of runs that a process has done."""
        return self._directory / f"{self._name}-{process}.done"

    def _started(self, process: int) -> Path:
        return self._directory / f"{self._name}-{process}.being-written-by-{self._index}"

    def _list(self) -> list[_File]:
        """The files that are complete."""
        pattern = re.compile(rf"{self._name}-(\d+)-(\d+)-(\d+)of(\d+)")
        matches = map(pattern.fullmatch, os.listdir(self._directory))
        return sorted(_File(*map(int, match.groups())) for match in matches if match is not None)

    def _write_or_report(self, key: _Key, snapshot: State) -> None:
        try:
            self._write(key, snapshot)
        except Exception as error:
            peers = processes.current()
            if isinstance(error, ProcessError) or (peers is not None and peers.failure is not None):
                _logger.debug("In-memory checkpoint %d was not written: %s", key.number, error)
            else:
                self._report(error)

    def _report(self, error: Exception) -> None:
        self._is_working = False
        for process in (self._index, *self._of_buddies):
            with contextlib.suppress(OSError):
                self._started(process).unlink()  # others may need the memory
        _logger.warning(
            "No more checkpoints are kept in memory: %s. After a restart, training goes on from the last "
            "one that was complete, or from a newer one on disk. The directory is %s; ipu-pipeline launch "
            "takes another one as --memory-dir.",
            str(error) or type(error).__name__,
            self._directory,
        )

    def _write(self, key: _Key, snapshot: State) -> None:
        """Writes this process's part, and its buddies'. Whatever fails here, those get an answer."""
        fault, sent = None, memoryview(_NOTHING)
        try:
            content = _Content.of(snapshot)
            file = _File(*key, self._index, self._count)
            self._store(file, content.write)
            if self._buddy is not None:
                copy = io.BytesIO()
                content.write(copy)
                sent = copy.getbuffer()
        except Exception as error:
            fault = error
        self._answer(key, sent)
        for process in self._of_buddies:
            received = processes.fetch_bytes(self._what, key.number, process)
            if bytes(received[:2]) == _NOTHING:
                fault = fault or OSError(f"process {process} cannot write its own")
            elif fault is None:
                self._store(_File(*key, process, self._count), functools.partial(_write_bytes, received))
        if fault is not None:
            raise fault
        self._written = key
        self._num_written += 1
        if self._num_written == 2:  # of a state that a run has made
            self._say_size(file)

    def _answer(self, key: _Key, content: bytes | memoryview) -> None:
        """Lets the buddy fetch this process's part, which it waits for."""
        if self._buddy is not None:
            processes.offer_bytes(self._what, key.number, [self._buddy], content)

    def _say_size(self, file: _File) -> None:
        num_bytes = self._path(file).stat().st_size
        copies = ", ".join(map(str, self._of_buddies))
        with between_bars():
            _logger.info(
                "In-memory checkpoints take %s in %s%s.",
                describe_bytes(2 * num_bytes),
                self._directory,
                f", and as much as those of process {copies} take there" if copies else "",
            )

    def _store(self, file: _File, write: Callable[[BinaryIO], None]) -> None:
        """Writes a file, over one that is no longer needed if there is one: new memory would be slower."""
        started = self._started(file.process)
        for old in self._list():
            if old.key == self._complete:
                continue
            if old.process == file.process and not started.exists():
                self._path(old).rename(started)
            elif old.process == file.process or old.process >= self._count:
                self._path(old).unlink(missing_ok=True)
        opened = os.open(started, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(opened, "r+b") as stream:
            write(stream)
            stream.truncate()
        started.rename(self._path(file))


def _write_bytes(content: memoryview, stream: BinaryIO) -> None:
    stream.write(content)


def _describe_memory(directory: Path) -> tuple[str, int, int]:
    """Makes the directory if it is gone, and describes it and this process's settings.

    Returns:
      A text that is the same in processes that share the directory, and only there; the number of restarts,
      and that of runs between checkpoints.
    """
    status = os.stat(make_own(directory))
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {status.st_dev} {status.st_ino}", restart_number(), runs_between_checkpoints()


def _check_same(variable: str, values: Sequence[T]) -> T:
    """The value of an environment variable, which must be the same in all processes."""
    if len(set(values)) > 1:
        texts = ", ".join(f"{value} in process {process}" for process, value in enumerate(values))
        raise ValueError(
            f"The environment variable {variable} must be the same in all processes of a run: {texts}."
        )
    return values[0]


def _find_buddies(machines: Sequence[str]) -> list[int | None]:
    """Finds for each process the one that also keeps what it writes: on the next machine, if any.

    The buddies of a machine's processes are spread evenly over the processes of the next machine.
    """
    of_machines: dict[str, list[int]] = {}
    for process, machine in enumerate(machines):
        of_machines.setdefault(machine, []).append(process)
    order = list(of_machines)
    if len(order) == 1:
        return [None] * len(machines)
    buddies: list[int | None] = []
    for process, machine in enumerate(machines):
        beside = of_machines[order[(order.index(machine) + 1) % len(order)]]
        buddies.append(beside[of_machines[machine].index(process) % len(beside)])
    return buddies


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of an array's data: where it begins, and the data."""

    begin: tuple[int, ...]
    data: np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class _Content:
    """The contents of a file.

    Attributes:
      document: `State.document`.
      parts: the path of each array -> the shape of its data, and the parts that are in the file.
    """

    document: dict[str, Any]
    parts: Mapping[tuple[str, ...], tuple[tuple[int, ...], Sequence[_Part]]]

    @classmethod
    def of(cls, snapshot: State) -> _Content:
        """The contents of the file for a snapshot."""
        parts = {}
        for path, array in flatten(snapshot.arrays()):
            data = [np.asarray(part, order="C") for part in array.parts]
            if array.are_rows:
                data = [row[None] for row in data]
            if data:
                inner = data[0].shape[len(array.shape) :]  # of the data of a random key
                begins = [(*begin, *[0] * len(inner)) for begin in array.begins]
                parts[path] = ((*array.shape, *inner), list(map(_Part, begins, data)))
        return cls(snapshot.document(), parts)

    def write(self, stream: BinaryIO) -> None:
        """Writes the file, where the stream stands, at its beginning."""
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
        offsets = (offset for *_entry, described in entries for _begin, _shape, offset in described)
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
            arrays = {}
            for path, shape, dtype, described in entries:
                parts = []
                for begin, part_shape, offset in described:
                    data = np.empty(part_shape, dtype)
                    stream.seek(base + offset)
                    num_read = stream.readinto(data.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
                    if num_read != data.nbytes:
                        raise ValueError("An in-memory checkpoint is shorter than it was.")
                    parts.append(_Part(tuple(begin), data))
                arrays[tuple(path)] = (tuple(shape), parts)
        return cls(document, arrays)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _join(contents: Sequence[_Content]) -> State:
    """Joins the files of all processes to the snapshot."""
    feeds = furthest([content.document["feeds"] for content in contents])
    document = {**contents[0].document, "feeds": feeds}

    def assemble(described: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
        return {
            key: assemble(part, (*path, key)) if isinstance(part, dict) else join((*path, key), part)
            for key, part in described.items()
        }

    def join(path: tuple[str, ...], described: str) -> Any:
        entries = [content.parts[path] for content in contents if path in content.parts]
        if not entries:
            empty = from_numpy(None, described)
            if empty.size:
                raise ValueError(f"An in-memory checkpoint lacks {'/'.join(path)}.")
            return empty
        shape, parts = entries[0]
        array = np.empty(shape, parts[0].data.dtype)
        if sum(part.data.size for _shape, some in entries for part in some) != array.size:
            raise ValueError(f"An in-memory checkpoint lacks a part of {'/'.join(path)}.")
        for _shape, some in entries:
            for part in some:
                ends = (begin + size for begin, size in zip(part.begin, part.data.shape, strict=True))
                array[tuple(map(slice, part.begin, ends))] = part.data
        return from_numpy(array, described)

    return State.of(document, assemble(document["arrays"]))
