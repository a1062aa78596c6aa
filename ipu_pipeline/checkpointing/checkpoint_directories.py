"""Checkpoints on disk: directories that Orbax writes, and a document that makes them complete.

The document `checkpoint.json` has everything but the arrays, and the SHA-256 of each file. It is written
last, under another name, and then renamed. So a checkpoint that has it is complete; one without it was
being written when the process ended.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ipu_pipeline.checkpointing.collective_calls import beside, do_each, do_first, is_first, process_index
from ipu_pipeline.checkpointing.states import State, from_numpy, furthest, is_own, to_numpy
from ipu_pipeline.engine import processes
from ipu_pipeline.ground.errors import CheckpointError, NoCheckpointError
from ipu_pipeline.ground.tables import between_bars
from ipu_pipeline.ground.user_warnings import warn_of_untested
from ipu_pipeline.processes.interrupts import written_whole

# Written by us, not as JSON of Orbax: when another item fails, that one's thread waits on for minutes.
DOCUMENT = "checkpoint.json"
ARRAYS = "default"  # as Orbax's CheckpointManager names its only item
# The possible contents of a checkpoint without its document.
_PARTS = re.compile(
    rf"{ARRAYS}|process\d+\.npz|_CHECKPOINT_METADATA|commit_success\.txt|{re.escape(DOCUMENT)}\.being-written"
)
_numbers = itertools.count()  # of directories beside checkpoints
_MAX_REPLACEMENTS = 10  # before a save gives up because other processes put the old checkpoint back
_WRITTEN, _REPLACED = "being-written", "being-replaced"  # in the names of directories beside a checkpoint
# Left in a series by processes that ended; the last one is from CheckpointManager, of earlier versions.
_LEFT_OVER = (f".*.{_WRITTEN}-*", "*.orbax-checkpoint-tmp*")
_MOST_READS = 10  # attempts to read a series that other processes are writing
_NONE_READS = (
    "None of the checkpoints in {directory} can be read: {reasons} Training does not begin anew over "
    "them: give another directory, or remove these."
)
# In a path, Orbax takes some of these for a pattern, and TensorStore a backslash for a slash; it takes no
# bytes that are not UTF-8, for which Python has surrogates.
_MISREAD = re.compile(r"[*?\[\]\\\ud800-\udfff]")
_ORBAX = os.path.join("", "orbax", "checkpoint", "")  # in the paths of its modules
_OF_PROCESS = "process"  # then its number: the file of the arrays of a process other than 0
_logger = logging.getLogger("ipu_pipeline")


class IncompleteCheckpointError(CheckpointError):
    """The checkpoint was still being written when the process ended."""


def write_checkpoint(
    path: str | os.PathLike[str], snapshot: State, files: Mapping[str, bytes] | None = None
) -> None:
    """Writes a checkpoint. An existing one is replaced when the new one is complete."""
    target = _find_directory(path)
    check_same_path(target)
    with written_whole(f"the checkpoint {target}"):
        started = Path(do_first(lambda: str(_begin(target))))
        old = _beside(target, _REPLACED)
        try:
            feeds = do_each(lambda: write_arrays(started, snapshot))

            def end() -> None:
                for name, content in (files or {}).items():
                    (started / name).write_bytes(content)
                _complete(started, {**snapshot.document(), "feeds": furthest(feeds)})
                _replace(target, started, old)

            do_first(end)
        finally:
            if is_first():
                shutil.rmtree(started, ignore_errors=True)
                if not target.exists() and old.exists():
                    old.rename(target)
                shutil.rmtree(old, ignore_errors=True)


def _begin(target: Path) -> Path:
    """Makes the directory in which a checkpoint is written."""
    check_writable(target.parent, "save: a checkpoint")
    target.parent.mkdir(parents=True, exist_ok=True)
    _recover(target)
    if target.exists() and not (target / DOCUMENT).exists():
        raise ValueError(f"save: {target} exists and is no checkpoint; it is not replaced.")
    for leftover in _left_beside(target, _WRITTEN):
        shutil.rmtree(leftover, ignore_errors=True)
    started = _beside(target, _WRITTEN)
    started.mkdir()
    return started


def _replace(target: Path, started: Path, old: Path) -> None:
    """Moves a checkpoint into its place, and the one that was there to `old`."""
    for is_last in [*[False] * _MAX_REPLACEMENTS, True]:
        if target.exists():
            # An interrupted save may have left one.
            for leftover in _left_beside(target, _REPLACED):
                shutil.rmtree(leftover, ignore_errors=True)
            target.rename(old)
        try:
            started.rename(target)
            return
        except OSError:  # another process looked just then, and put the old one back
            if is_last or not target.exists():
                raise


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint's document, see `State.document`. The files are not verified."""
    directory = _find_directory(path)
    _recover(directory)
    if not directory.is_dir():
        raise NoCheckpointError(f"There is no checkpoint at {directory}.")
    try:
        text = (directory / DOCUMENT).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise IncompleteCheckpointError(
            f"The checkpoint {directory} is not complete: it has no {DOCUMENT}, which is written last."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"The file {directory / DOCUMENT} cannot be read: {error}.") from error
    try:
        document: dict[str, Any] = json.loads(text)
        digest = document.pop("sha256")
        if digest == _digest_of(document):
            return document
    except (ValueError, KeyError, AttributeError):  # damaged, in whatever way
        pass
    raise CheckpointError(f"The file {directory / DOCUMENT} is damaged.")


def read_checkpoint(path: str | os.PathLike[str]) -> State:
    """Reads a checkpoint, after comparing all its files with their digests."""
    directory = _find_directory(path)
    document = read_document(directory)
    for name, digest in document["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"The file {file} of the checkpoint is missing.")
        try:
            actual_digest = _digest_of_file(file)
        except OSError as error:
            raise CheckpointError(f"The file {file} cannot be read: {error}.") from error
        if actual_digest != digest:
            raise CheckpointError(
                f"The file {file} is damaged: its {file.stat().st_size} bytes are not what was written."
            )
    try:
        return State.of(document, with_empty_arrays(document["arrays"], read_arrays(directory)))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The checkpoint {directory} cannot be read: {error}") from error


def check_same_path(path: Path) -> None:
    """Raises a ValueError if the processes of the run are to write to different places; all call it."""
    paths = do_each(lambda: str(path))
    if len(set(paths)) > 1:
        raise ValueError(
            "save: all processes of a run write one checkpoint, and must name the same path; "
            f"{_list(paths)}."
        )


def read_same_checkpoint(path: str | os.PathLike[str], snapshot: State | None = None) -> State:
    """Reads a checkpoint in all processes of the run, each by its own path; all of them call it."""
    snapshots: list[State] = []

    def read() -> tuple[str, str, dict[str, int]]:
        snapshots.append(read_checkpoint(path) if snapshot is None else snapshot)
        counts = {name: counts.update_count for name, counts in snapshots[0].counts.items()}
        return _digest_of(read_document(path)), str(_find_directory(path)), counts

    descriptions = do_each(read)
    if len({digest for digest, _path, _counts in descriptions}) > 1:
        described = [
            f"{where} (weight updates: {counts or 'none'})" for _digest, where, counts in descriptions
        ]
        raise CheckpointError(
            "The processes of the run restore different checkpoints, and would train apart: "
            f"{_list(described)}. Let one process choose, for example the first, and give all the same."
        )
    return snapshots[0]


def _list(texts: Sequence[str]) -> str:
    return "; ".join(f"process {number}: {text}" for number, text in enumerate(texts))


class CheckpointSeries:
    """The checkpoints of a training run in a directory, numbered by step.

    Example:
      series = CheckpointSeries(directory, max_to_keep=5)
      series.start_saving(step, snapshot)  # returns at once
      series.wait()
    """

    def __init__(self, directory: str | os.PathLike[str], max_to_keep: int | None = None) -> None:
        """Does not create the directory yet."""
        self.directory = Path(directory).absolute()
        self._max_to_keep = max_to_keep
        self._thread: threading.Thread | None = None

    def steps(self) -> list[int]:
        """The steps that have a directory, from the oldest to the newest."""
        if not self.directory.is_dir():
            return []
        names = [entry.name for entry in self.directory.iterdir() if entry.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)

    def path(self, step: int) -> Path:
        """The path of a step's checkpoint."""
        return self.directory / str(step)

    def is_complete(self, step: int) -> bool:
        """Whether a step has a complete checkpoint; its files are not verified."""
        return (self.path(step) / DOCUMENT).exists()

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = list(filter(self.is_complete, self.steps()))
        return self.path(complete[-1]) if complete else None

    def read_latest(self, set_aside: bool = False) -> tuple[int, State] | None:
        """The step and contents of the newest checkpoint that can be read; None if none was complete."""
        newest: tuple[int, State] | None = None

        def read() -> int | None:
            nonlocal newest
            newest = self._read_latest(set_aside)
            return None if newest is None else newest[0]

        step = do_first(read)  # other processes get its error, instead of waiting
        if step is None:
            return newest
        return step, read_same_checkpoint(self.path(step), None if newest is None else newest[1])

    def _read_latest(self, set_aside: bool) -> tuple[int, State] | None:
        for _attempt in range(_MOST_READS):
            listed = self.steps()
            skipped: dict[int, CheckpointError] = {}
            newest = None
            for step in reversed(listed):
                try:
                    newest = step, read_checkpoint(self.path(step))
                    break
                except CheckpointError as error:
                    skipped[step] = error
            if newest is not None or listed == self.steps():
                break  # else another process has written a new one meanwhile, and deleted these
        reasons = " ".join(map(str, skipped.values()))
        if newest is None and not all(isinstance(e, IncompleteCheckpointError) for e in skipped.values()):
            raise CheckpointError(_NONE_READS.format(directory=self.directory, reasons=reasons))
        if skipped:
            restored = "there is no other one" if newest is None else f"step {newest[0]} restored"
            warnings.warn(f"Checkpoints were skipped, and {restored}: {reasons}", stacklevel=2)
        for unreadable in skipped if set_aside else ():
            self._set_aside(unreadable)
        return newest

    def start_saving(self, step: int, snapshot: State) -> None:
        """Writes a checkpoint in a thread. Waits first for the one before, if that is still being written.

        An error is logged; training goes on, and what was there stays.
        """
        self.wait()
        # Threads of Orbax's asynchronous saving keep the process from ending for minutes after an error.
        self._thread = threading.Thread(
            target=self._save_or_report,
            args=(step, snapshot),
            name="ipu-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def save(self, step: int, snapshot: State) -> None:
        """Writes a checkpoint, and deletes the oldest ones. A complete checkpoint of this step is kept."""
        path = self.path(step)

        def prepare() -> bool:
            if self.is_complete(step):
                return False
            if os.path.lexists(path):
                self._set_aside(step)
            for pattern in _LEFT_OVER:
                for leftover in self.directory.glob(pattern):
                    shutil.rmtree(leftover, ignore_errors=True)
            return True

        if do_first(prepare):
            # Orbax's CheckpointManager would also delete users' folders that have numbers for names.
            write_checkpoint(path, snapshot)
            with between_bars():
                _logger.info("The checkpoint of step %d is saved in %s.", step, path)
            do_first(lambda: self.delete_old(step))

    def delete_old(self, newest: int) -> None:
        """Deletes the oldest checkpoints beyond the number that is kept, but never step `newest`'s."""
        if self._max_to_keep is None:
            return
        steps = self.steps()
        complete = list(filter(self.is_complete, steps))
        oldest_kept = min(complete[-self._max_to_keep :], default=0)
        for old in [step for step in steps if step < oldest_kept and step != newest]:
            try:
                if self.is_complete(old) or _has_only_parts(self.path(old)):  # else it is a user's folder
                    _delete(self.path(old))
            except OSError as error:
                _logger.error("The checkpoint %s could not be deleted: %s.", self.path(old), error)

    def amend(self, step: int, extra: dict[str, Any]) -> None:
        """Replaces a checkpoint's `State.extra`. The checkpoint stays complete meanwhile."""
        document = read_document(self.path(step))
        _write_document(self.path(step), {**document, "extra": extra})

    def _save_or_report(self, step: int, snapshot: State) -> None:
        try:
            with beside("checkpoint of a series"):
                self.save(step, snapshot)
        except Exception as error:
            latest = self.latest()
            _logger.error(
                "The checkpoint of step %d could not be saved in %s: %s. Training goes on; %s.",
                step,
                self.directory,
                str(error) or type(error).__name__,
                "there is none yet" if latest is None else f"the last good one is {latest}",
            )

    def _set_aside(self, step: int) -> None:
        """Renames an unreadable checkpoint; deletes one that was being written when a process ended."""
        path = self.path(step)
        if not path.is_symlink() and path.is_dir() and _has_only_parts(path):
            shutil.rmtree(path)
            return
        number = 0
        while os.path.lexists(free_path := path.with_name(f"unreadable-{step}-{number}")):
            number += 1
        path.rename(free_path)


def _find_directory(path: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint; if the path is a symbolic link, its target."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path).absolute()


def _has_only_parts(path: Path) -> bool:
    """Whether a directory without a document can only be what a checkpoint's writing or deletion left."""
    return all(_PARTS.fullmatch(entry.name) for entry in path.iterdir())


def _delete(path: Path) -> None:
    """Deletes a checkpoint. If the path is a symbolic link, only the link is removed."""
    if path.is_symlink():
        path.unlink()
        return
    (path / DOCUMENT).unlink(missing_ok=True)  # without it, what is left if this fails is incomplete
    shutil.rmtree(path)


def _beside(target: Path, purpose: str) -> Path:
    """A path that no other save uses: after Ctrl-C, Orbax's threads go on writing for a while."""
    return target.with_name(f".{target.name}.{purpose}-{os.getpid()}-{next(_numbers)}")


def _left_beside(target: Path, purpose: str) -> list[Path]:
    """The paths beside a checkpoint that were made by `_beside`."""
    begin = f".{target.name}.{purpose}-"
    return [path for path in target.parent.iterdir() if path.name.startswith(begin)]


def _recover(target: Path) -> None:
    """Puts back a checkpoint that was being replaced when a process ended."""
    if target.exists() or not target.parent.is_dir():
        return
    for old in _left_beside(target, _REPLACED):
        if not target.exists() and (old / DOCUMENT).exists():
            old.rename(target)


def _complete(directory: Path, document: dict[str, Any]) -> None:
    """Writes the document, with the digests of all files."""
    files = {
        str(file.relative_to(directory)): _digest_of_file(file)
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
    _write_document(directory, {**document, "files": files})


def _write_document(directory: Path, document: dict[str, Any]) -> None:
    started = directory / f"{DOCUMENT}.being-written"
    with open(started, "w", encoding="utf-8") as stream:
        json.dump({**document, "sha256": _digest_of(document)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    started.rename(directory / DOCUMENT)


def _digest_of(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _digest_of_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Arrays on disk. Orbax is imported when it is first needed.


def write_arrays(directory: Path, snapshot: State) -> list[dict[str, Any]]:
    """Writes the arrays of this process. Returns the positions of its data sets."""
    arrays, process = _storable(snapshot.arrays()), process_index()
    if arrays and process == 0:
        import orbax.checkpoint as ocp

        with _quiet_orbax(), _open_orbax() as checkpointer, _taken_literally(directory) as path:
            checkpointer.save(path / ARRAYS, args=ocp.args.PyTreeSave(arrays))
            metadata = checkpointer.metadata(path / ARRAYS).item_metadata
            if metadata is None or _names(metadata.tree) != _names(arrays):
                raise OSError(
                    f"save: the arrays that were just written to {directory} are not found there."
                )
    elif arrays:  # Orbax writes NumPy arrays in process 0 only
        leaves = list(flatten(arrays))
        names = np.frombuffer(json.dumps([path for path, _leaf in leaves]).encode(), np.uint8)
        numbered = {str(number): leaf for number, (_path, leaf) in enumerate(leaves)}
        np.savez(directory / f"{_OF_PROCESS}{process}.npz", names=names, **numbered)
    return snapshot.describe_feeds()


def _open_orbax() -> Any:
    """Returns a checkpointer that writes and reads arrays for this process alone."""
    import orbax.checkpoint as ocp

    warn_of_untested("orbax-checkpoint", ocp.__version__)
    process = process_index()
    options = ocp.options.MultiprocessingOptions()
    if processes.current() is not None:
        options = ocp.options.MultiprocessingOptions(
            primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
        )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


@contextlib.contextmanager
def _taken_literally(directory: Path) -> Iterator[Path]:
    """A path to a directory; a link to it where Orbax or TensorStore would misread its own path."""
    if not _MISREAD.search(str(directory)):
        yield directory
        return
    if _MISREAD.search(tempfile.gettempdir()):
        raise ValueError(
            f"The path of the checkpoint {str(directory)!r} has one of [ ] * ? \\, or a byte that is not "
            "UTF-8. It is written and read through a link in the directory for temporary files, whose path "
            f"has one, too: {tempfile.gettempdir()!r}. Set TMPDIR to another directory."
        )
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, "checkpoint")
        link.symlink_to(directory, target_is_directory=True)
        yield link


def read_arrays(directory: Path) -> dict[str, Any]:
    """The arrays of all processes, in nested dicts."""
    import orbax.checkpoint as ocp

    stored: dict[str, Any] = {}
    # Without a target, Orbax returns what was saved as NumPy arrays, unchanged. It starts JAX's backend, so
    # devices are selected before.
    if (directory / ARRAYS).exists():
        with _quiet_orbax(), _open_orbax() as checkpointer, _taken_literally(directory) as path:
            stored = checkpointer.restore(path / ARRAYS, args=ocp.args.PyTreeRestore())
    for part in sorted(directory.glob(f"{_OF_PROCESS}*.npz")):
        with np.load(part, allow_pickle=False) as loaded:
            for number, path in enumerate(json.loads(loaded["names"].tobytes())):
                inner = stored
                for key in path[:-1]:
                    inner = inner.setdefault(key, {})
                inner[path[-1]] = loaded[str(number)]
    return stored


def flatten(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of nested dicts, with their paths."""
    for key, part in tree.items():
        if isinstance(part, dict):
            yield from flatten(part, (*path, key))
        else:
            yield (*path, key), part


def _names(tree: Mapping[str, Any]) -> set[tuple[str, ...]]:
    return {path for path, _leaf in flatten(tree)}


def _storable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of this process as Orbax takes them: NumPy's, none of size 0, and no empty dict."""
    stored: dict[str, Any] = {}
    for key, part in arrays.items():
        if isinstance(part, dict):
            if inner := _storable(part):
                stored[key] = inner
        elif is_own(part) and part.size > 0:
            stored[key] = to_numpy(part)
    return stored


def with_empty_arrays(described: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Adds the arrays of size 0 by their descriptions; the inverse of `_storable`."""
    arrays: dict[str, Any] = {}
    for key, part in described.items():
        if isinstance(part, dict):
            arrays[key] = with_empty_arrays(part, stored.get(key, {}))
        else:
            arrays[key] = from_numpy(stored.get(key), part)
    return arrays


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Drops what Orbax logs below warnings during a call, about thirty lines for a checkpoint.

    Orbax logs with absl, whose logger other code uses too, for example users who call Orbax themselves. So
    no level is changed; only messages of Orbax's own modules are dropped.
    """
    _drop_repeated_errors()
    absl = logging.getLogger("absl")

    def is_kept(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or _ORBAX not in record.pathname

    absl.addFilter(is_kept)
    try:
        yield
    finally:
        absl.removeFilter(is_kept)


@functools.cache
def _drop_repeated_errors() -> None:
    """Keeps Orbax's threads and coroutines from logging errors that it also raises.

    They may do so after the call, so the filter stays.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_thread = "_SignalingThread" in text
        is_coroutine = "was never retrieved" in text and ("OCDBT" in text or "orbax" in text)
        return not is_thread and not is_coroutine

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_kept)


def check_writable(path: Path, content: str, may_be_full: bool = False) -> None:
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
        text = f"{content} cannot be written to {path}: {existing}: {reason}. Give another path."
        raise OSError(error.errno, text) from error
