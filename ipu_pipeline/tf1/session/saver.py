"""`Saver`: keeps the newest checkpoints of a session in a directory."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

from ipu_pipeline.checkpointing.checkpoints import CheckpointSeries
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.tf1.graph.symbols import GlobalStep
from ipu_pipeline.tf1.session.session import Session

__all__ = ["Saver", "latest_checkpoint"]


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
        is_number = is_int(max_to_keep, 0)
        if max_to_keep is not None and not is_number:
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
    found: Path | None = CheckpointSeries(directory).latest()
    if found is None and os.path.isdir(directory):
        inner = [CheckpointSeries(path).latest() for path in Path(directory).iterdir() if path.is_dir()]
        newest = [path for path in inner if path is not None]
        found = max(newest, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if found is None else str(found)
