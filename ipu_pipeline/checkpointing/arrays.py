"""The arrays of a checkpoint on disk, as each process writes its own.

Process 0 writes its arrays with Orbax. The other processes of a run write theirs as NumPy files, because
Orbax writes NumPy arrays in process 0 only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ipu_pipeline.checkpointing.snapshots import Snapshot, from_numpy, is_own, to_numpy
from ipu_pipeline.checkpointing.together import process_index
from ipu_pipeline.engine import processes
from ipu_pipeline.ground.tested import warn_of_untested

__all__ = ["ARRAYS", "flatten", "read_arrays", "with_empty_ones", "write_arrays"]

# In a path, Orbax takes some of these for a pattern, and TensorStore a backslash for a slash; it takes no
# bytes that are not UTF-8, for which Python has surrogates.
_MISREAD = re.compile(r"[*?\[\]\\\ud800-\udfff]")
ARRAYS = "default"  # the name of the only item of Orbax's CheckpointManager
_ORBAX = os.path.join("", "orbax", "checkpoint", "")  # in the paths of its modules
_OF_PROCESS = "process"  # then its number: the file of the arrays of a process other than 0


def write_arrays(directory: Path, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Writes the arrays that this process writes; returns where its data sets stand."""
    arrays, own = _storable(snapshot), process_index()
    if arrays and own == 0:
        with _quiet_orbax(), _open_orbax() as checkpointer, _taken_literally(directory) as path:
            _save(checkpointer, path / ARRAYS, arrays)
            found = checkpointer.metadata(path / ARRAYS).item_metadata
            if found is None or _names(found.tree) != _names(arrays):
                raise OSError(
                    f"save: the arrays that were just written to {directory} are not found there."
                )
    elif arrays:  # Orbax writes NumPy arrays in process 0 only
        leaves = list(flatten(arrays))
        names = np.frombuffer(json.dumps([path for path, _leaf in leaves]).encode(), np.uint8)
        numbered = {str(number): leaf for number, (_path, leaf) in enumerate(leaves)}
        np.savez(directory / f"{_OF_PROCESS}{own}.npz", names=names, **numbered)
    return snapshot.describe_feeds()


def _open_orbax() -> Any:
    """Returns a checkpointer that writes and reads arrays for this process alone."""
    import orbax.checkpoint as ocp

    warn_of_untested("orbax-checkpoint", ocp.__version__)
    own = process_index()
    options = ocp.options.MultiprocessingOptions()
    if processes.current() is not None:
        options = ocp.options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
        )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


@contextlib.contextmanager
def _taken_literally(directory: Path) -> Iterator[Path]:
    """A path to a directory; a link if Orbax took its own for a pattern or TensorStore for another."""
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


def _save(checkpointer: Any, path: Path, arrays: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    checkpointer.save(path, args=ocp.args.PyTreeSave(arrays))


def read_arrays(directory: Path) -> dict[str, Any]:
    """The arrays of all processes, in nested dicts."""
    import orbax.checkpoint as ocp

    stored: dict[str, Any] = {}
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


def _storable(snapshot: Snapshot) -> dict[str, Any]:
    """The arrays of this process as Orbax takes them: NumPy's, none of size 0, and no empty dict."""

    def prune(tree: dict[str, Any]) -> dict[str, Any]:
        pruned = {}
        for key, part in tree.items():
            if isinstance(part, dict):
                stored: Any = prune(part)
                is_stored = bool(stored)
            elif is_stored := is_own(part) and part.size > 0:
                stored = to_numpy(part)
            if is_stored:
                pruned[key] = stored
        return pruned

    arrays: dict[str, Any] = prune(snapshot.arrays())
    return arrays


def with_empty_ones(described: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_storable`: arrays that are described as having size 0 are created again."""
    found: dict[str, Any] = {}
    for key, part in described.items():
        if isinstance(part, dict):
            found[key] = with_empty_ones(part, stored.get(key, {}))
        else:
            found[key] = from_numpy(stored.get(key), part)
    return found


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
