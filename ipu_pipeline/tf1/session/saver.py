"""Checkpoints in a directory: `Saver`, and the search for checkpoints and weights of estimators."""

from __future__ import annotations

import logging
import operator
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.checkpointing.checkpoint_directories import CheckpointSeries
from ipu_pipeline.checkpointing.collective_calls import do_first
from ipu_pipeline.checkpointing.in_memory import InMemorySeries
from ipu_pipeline.checkpointing.states import State
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.processes.rendezvous import join_by_environment
from ipu_pipeline.tf1.graph import GlobalStep
from ipu_pipeline.tf1.program.program import Program
from ipu_pipeline.tf1.session.resumption import check_program
from ipu_pipeline.tf1.session.session import Session

CHECKPOINTS = "checkpoints"  # the folder in `model_dir`
GLOBAL_STEP = "global_step"  # in a snapshot's extra
_logger = logging.getLogger("ipu_pipeline.estimator")


class Saver:
    """Writes checkpoints one after another, named by the count of weight updates.

    A directory is for one run at a time: the newest checkpoint is the one with the greatest number.

    Example:
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(layers.Dense(1), [np.ones([2, 8], np.float32)])
      >>> saver = ipu.Saver(max_to_keep=3)
      >>> with ipu.Session() as session:
      ...     session.run(ipu.global_variables_initializer())
      ...     path = saver.save(session, "checkpoints")
      ...     saver.restore(session, ipu.latest_checkpoint("checkpoints"))
    """

    def __init__(self, var_list: None = None, *, max_to_keep: int | None = 5) -> None:
        """Writes nothing yet.

        Args:
          var_list: only None; there for TensorFlow 1 code.
          max_to_keep: the oldest checkpoints beyond this number are deleted; None or 0 keeps all.

        Raises:
          ValueError: `max_to_keep` is not such a number, or there is a `var_list`.
        """
        if var_list is not None:
            raise ValueError(
                "Saver: var_list must be None, since a checkpoint has all that training goes on from. "
                "`session.restore(path, allow_partial=True)` takes what a model has of it, and "
                "`session.load` some variables."
            )
        if max_to_keep is not None and not is_int(max_to_keep, 0):
            raise ValueError(f"Saver: max_to_keep must be an integer from 0, or None; got {max_to_keep!r}.")
        self.max_to_keep = max_to_keep or None

    def save(
        self,
        session: Session,
        save_path: str | os.PathLike[str],
        global_step: int | GlobalStep | None = None,
    ) -> str:
        """Writes a checkpoint, and deletes the oldest ones. A checkpoint of the same step is replaced.

        It also has the initial values of variables that no run has made yet: after
        `global_variables_initializer()`, of all compiled programs that are still referred to; after
        `Session.load`, of programs that share a variable with the session.

        Args:
          session: the session whose variables, optimizer states, counts and positions in data sets are
            saved.
          save_path: the directory of the checkpoints; it is created. A path from TensorFlow 1 code, such as
            "logs/model.ckpt", is a directory here, too, and `latest_checkpoint("logs")` finds it.
          global_step: the number that is its name; None, or `get_global_step()`: the count of weight
            updates of the pipeline with the most.

        Returns:
          The checkpoint's path.

        Raises:
          OSError: it cannot be written.
          ValueError: there are no variables yet, or the step is not an integer from 0.
        """
        step: Any = session.most_updates() if global_step is None else global_step
        if isinstance(step, GlobalStep):
            step = session.run(step)
        if isinstance(step, bool) or not hasattr(type(step), "__index__") or step < 0:
            raise ValueError(f"Saver.save: global_step must be an integer from 0; got {global_step!r}.")
        step = operator.index(step)
        series = CheckpointSeries(save_path, self.max_to_keep)
        path = series.path(step)
        session.save(path)
        series.delete_old(step)
        return str(path)

    def restore(self, session: Session, save_path: str | os.PathLike[str]) -> None:
        """Makes a session go on from a checkpoint; see `Session.restore`.

        Raises:
          ValueError: the path is None, which `latest_checkpoint` returns if there is no checkpoint.
        """
        if save_path is None:
            raise ValueError(
                "Saver.restore: save_path must be the path of a checkpoint; it is None, as "
                "latest_checkpoint returns it where there is none."
            )
        session.restore(save_path)


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Returns the path of the newest complete checkpoint in a directory; None if there is none.

    Example:
      >>> ipu.latest_checkpoint("no_such_folder") is None
      True

    Args:
      directory: the directory that `Saver.save` or an estimator wrote them to. If it has none, the
        directories within it are searched, so "logs" finds what `saver.save(session, "logs/model.ckpt")`
        wrote; among several of these, the newest is the one written last.
    """
    path: Path | None = CheckpointSeries(directory).latest()
    if path is None and os.path.isdir(directory):
        inner = [CheckpointSeries(path).latest() for path in Path(directory).iterdir() if path.is_dir()]
        newest = [path for path in inner if path is not None]
        path = max(newest, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if path is None else str(path)


# Checkpoints of estimators.


def agree_on_directory(directory_here: str | None) -> str:
    """Returns the first process's model_dir to all of them; a temporary one if it has none."""
    join_by_environment()

    def choose() -> str:
        if directory_here is not None:
            return directory_here
        temporary = tempfile.mkdtemp(prefix="ipu_pipeline_estimator_")
        _logger.warning("Using temporary folder as model directory: %s", temporary)
        return temporary

    directory = do_first(choose)
    if directory_here is not None and directory != directory_here:
        _logger.warning("The model_dir of process 0 is used: %s, not %s.", directory, directory_here)
    return directory


def find_checkpoint(
    series: CheckpointSeries, path: str | os.PathLike[str] | None
) -> tuple[Path, State] | None:
    """Returns the checkpoint at a path, or a series's newest, after its path; None if there is none."""
    if path is not None:
        return Path(path), checkpoint_directories.read_checkpoint(path)
    latest = series.read_latest()
    return None if latest is None else (series.path(latest[0]), latest[1])


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """The state that training goes on from.

    Attributes:
      global_step: its step.
      snapshot: the state itself.
      source: the path it was read from, or "memory".
      saved_step: the step of the newest checkpoint on disk, which may be older.
    """

    global_step: int
    snapshot: State
    source: Path
    saved_step: int


def find_newest(series: CheckpointSeries, in_memory: InMemorySeries | None) -> ResumePoint | None:
    """The newest state of a training, in memory or on disk; None if there is none. All call it."""
    snapshot_in_memory = None if in_memory is None else in_memory.find()
    if in_memory is not None and snapshot_in_memory is not None:
        step = int(snapshot_in_memory.extra[GLOBAL_STEP])
        saved_step = do_first(lambda: _latest_step(series))
        if step > saved_step:
            in_memory.tell_resumed()
            return ResumePoint(step, snapshot_in_memory, Path("memory"), saved_step)
    latest = series.read_latest(set_aside=True)
    if latest is None:
        return None
    step, snapshot = latest
    global_step = int(snapshot.extra.get(GLOBAL_STEP, step))
    return ResumePoint(global_step, snapshot, series.path(step), global_step)


def _latest_step(series: CheckpointSeries) -> int:
    latest = series.latest()
    return 0 if latest is None else int(latest.name)


def take_weights(session: Session, path: Path, snapshot: State, program: Program) -> int:
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
    newest = find_checkpoint(CheckpointSeries(source / CHECKPOINTS), None)
    path, snapshot = newest or (source, checkpoint_directories.read_checkpoint(source))
    check_program(snapshot, path, program, allow_extra=True)
    _logger.info("The variables begin as in %s.", path)
    return {name: snapshot.variables[name] for name in program.variables}
