"""Finds an estimator's checkpoints, and takes weights for programs from them."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipu_pipeline.checkpointing import checkpoints
from ipu_pipeline.checkpointing.checkpoints import CheckpointSeries
from ipu_pipeline.checkpointing.in_memory import InMemorySeries
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.checkpointing.together import do_first
from ipu_pipeline.processes.joining import join_by_environment
from ipu_pipeline.tf1.program.program import Program
from ipu_pipeline.tf1.session.resuming import check_program
from ipu_pipeline.tf1.session.session import Session

__all__ = [
    "CHECKPOINTS",
    "GLOBAL_STEP",
    "agree_on_directory",
    "find_checkpoint",
    "find_newest",
    "find_warm_variables",
    "take_weights",
]

CHECKPOINTS = "checkpoints"  # the folder in `model_dir`
GLOBAL_STEP = "global_step"  # in a snapshot's extra
_logger = logging.getLogger("ipu_pipeline.estimator")


def agree_on_directory(own: str | None) -> str:
    """The model_dir, or a temporary one if there is none; the same in all processes: the first's."""
    join_by_environment()

    def choose() -> str:
        if own is not None:
            return own
        made = tempfile.mkdtemp(prefix="ipu_pipeline_estimator_")
        _logger.warning("Using temporary folder as model directory: %s", made)
        return made

    directory = do_first(choose)
    if own is not None and directory != own:
        _logger.warning("The model_dir of process 0 is used: %s, not %s.", directory, own)
    return directory


def find_checkpoint(
    series: CheckpointSeries, path: str | os.PathLike[str] | None
) -> tuple[Path, Snapshot] | None:
    """The checkpoint at a path, or the newest of a series, and its path; None if the series has none."""
    if path is not None:
        return Path(path), checkpoints.read_checkpoint(path)
    found = series.read_latest()
    return None if found is None else (series.path(found[0]), found[1])


@dataclass(frozen=True, eq=False)
class Newest:
    """The state that training goes on from.

    Attributes:
      global_step: its step.
      snapshot: what it is.
      source: where it is from.
      saved_step: the step of the newest checkpoint on disk, which may be older.
    """

    global_step: int
    snapshot: Snapshot
    source: Path
    saved_step: int


def find_newest(series: CheckpointSeries, in_memory: InMemorySeries | None) -> Newest | None:
    """The newest state of a training, in memory or on disk; None if there is none. All call it."""
    kept = None if in_memory is None else in_memory.find()
    if in_memory is not None and kept is not None:
        step_kept, saved = int(kept.extra[GLOBAL_STEP]), do_first(lambda: _latest_step(series))
        if step_kept > saved:
            in_memory.tell_resumed()
            return Newest(step_kept, kept, Path("memory"), saved)
    found = series.read_latest(set_aside=True)
    if found is None:
        return None
    step, snapshot = found
    global_step = int(snapshot.extra.get(GLOBAL_STEP, step))
    return Newest(global_step, snapshot, series.path(step), global_step)


def _latest_step(series: CheckpointSeries) -> int:
    latest = series.latest()
    return 0 if latest is None else int(latest.name)


def take_weights(session: Session, path: Path, snapshot: Snapshot, program: Program) -> int:
    """Loads the variables of a checkpoint into a session that infers.

    Returns:
      The global step of the variables.
    """
    _logger.info("The variables come from %s.", path)
    check_program(snapshot, path, program, allow_extra=True)
    session.take_over(snapshot, path, fits=False, feeds=False)
    return int(snapshot.extra.get(GLOBAL_STEP, 0))


def find_warm_variables(warm_start_from: str | os.PathLike[str], program: Program) -> dict[str, Any]:
    """A program's variables from a checkpoint, or from the newest one in a `model_dir`."""
    source = Path(os.fspath(warm_start_from))
    series = CheckpointSeries(source / CHECKPOINTS)
    if series.steps():
        found = series.read_latest()
        assert found is not None
        path, snapshot = series.path(found[0]), found[1]
    else:
        path, snapshot = source, checkpoints.read_checkpoint(source)
    check_program(snapshot, path, program, allow_extra=True)
    _logger.info("The variables begin as in %s.", path)
    return {name: snapshot.state.variables[name] for name in program.variables}
