"""Scalars of training and evaluation, as JSON lines and as TensorBoard event files."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["ScalarWriter"]

FILE = "metrics.jsonl"
_logger = logging.getLogger("ipu_pipeline")


class ScalarWriter:
    """Appends to `metrics.jsonl`, a line per scalar, and to an event file, if tensorboardX is installed.

    A line is an object with `step`, `time` (seconds since 1970), `name` and `value` (null where it is not
    finite).
    """

    def __init__(self, directory: str | os.PathLike[str], step: int = 0) -> None:
        """Opens the files.

        Args:
          directory: where they are; it is made.
          step: where training goes on. What was written for later steps is dropped.
        """
        self._path = Path(directory) / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_later(self._path, step)
        self._stream = open(self._path, "a", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        self._events: Any = None
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            _logger.info(
                "tensorboardX is not installed, so there are no event files; %s has the scalars.",
                self._path,
            )
        else:
            self._events = SummaryWriter(str(directory), purge_step=step)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes scalars; they are in the files when it returns.

        Args:
          step: of all of them.
          scalars: by name.
        """
        now = time.time()
        for name, value in scalars.items():
            known = float(value) if math.isfinite(value) else None
            line = json.dumps({"step": step, "time": now, "name": name, "value": known})
            self._stream.write(line + "\n")
            if self._events is not None:
                self._events.add_scalar(name, value, step)
        self._stream.flush()
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Closes the files."""
        self._stream.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> ScalarWriter:
        """The writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the files."""
        self.close()


def _drop_later(path: Path, step: int) -> None:
    """Takes out lines of steps after this one, and one that was not written to its end."""
    if not path.exists():
        return
    kept = []
    with open(path, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                is_kept = line.endswith("\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                is_kept = False
            if is_kept:
                kept.append(line)
    started = path.with_name(f"{path.name}.being-written")
    started.write_text("".join(kept), encoding="utf-8")
    started.replace(path)
