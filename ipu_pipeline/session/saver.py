"""`Saver`: checkpoints of a session in a directory, of which the newest are kept."""

from __future__ import annotations

import operator
import os
from pathlib import Path

from ipu_pipeline.checkpointing.checkpoints import CheckpointSeries
from ipu_pipeline.session.session import Session

__all__ = ["Saver", "latest_checkpoint"]


class Saver:
    """Writes checkpoints one after another, named by the count of weight updates.

    A directory is for one run at a time: the newest checkpoint is that with the greatest number.

    Example:
      saver = ipu.Saver(max_to_keep=3)
      path = saver.save(session, "checkpoints")  # checkpoints/1200
      saver.restore(session, ipu.latest_checkpoint("checkpoints"))
    """

    def __init__(self, max_to_keep: int | None = 5) -> None:
        """Writes nothing yet.

        Args:
          max_to_keep: the oldest checkpoints beyond this number are deleted; None or 0 keeps all.

        Raises:
          ValueError: it is no such number.
        """
        is_number = isinstance(max_to_keep, int) and not isinstance(max_to_keep, bool) and max_to_keep >= 0
        if max_to_keep is not None and not is_number:
            raise ValueError(f"Saver: max_to_keep must be an integer from 0, or None; got {max_to_keep!r}.")
        self.max_to_keep = max_to_keep or None

    def save(
        self, session: Session, directory: str | os.PathLike[str], global_step: int | None = None
    ) -> str:
        """Writes a checkpoint, and deletes the oldest ones. One of the same step is replaced.

        Args:
          session: whose variables and optimizer states, counts and positions in data sets it has.
          directory: where the checkpoints are; it is made.
          global_step: the number that is its name; None: the count of weight updates, that of the pipeline
            with the most.

        Returns:
          The checkpoint's path.

        Raises:
          OSError: it cannot be written.
          ValueError: there are no variables yet, or the step is no number from 0.
        """
        step = session.most_updates() if global_step is None else global_step
        if isinstance(step, bool) or not hasattr(type(step), "__index__") or step < 0:
            raise ValueError(f"Saver.save: global_step must be an integer from 0; got {global_step!r}.")
        step = operator.index(step)
        series = CheckpointSeries(directory, self.max_to_keep)
        path = series.path(step)
        session.save(path)
        series.delete_old(step)
        return str(path)

    def restore(self, session: Session, save_path: str | os.PathLike[str]) -> None:
        """Has a session go on from a checkpoint; see `Session.restore`."""
        session.restore(save_path)


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The path of the newest checkpoint in a directory that is complete; None if there is none.

    Args:
      directory: where `Saver.save` or an estimator wrote them.
    """
    found: Path | None = CheckpointSeries(directory).latest()
    return None if found is None else str(found)
