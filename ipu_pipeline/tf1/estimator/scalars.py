"""Scalars of training and evaluation, as JSON lines and as TensorBoard event files."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["FILE", "ScalarWriter"]

FILE = "metrics.jsonl"
_SECONDS_BETWEEN_FLUSHES = 5
_logger = logging.getLogger("ipu_pipeline.estimator")


class ScalarWriter:
    """Appends to `metrics.jsonl`, a line per scalar, and to an event file, if tensorboardX is installed.

    A line is an object with `step`, `time` (seconds since 1970), `name` and `value` (null where it is not
    finite). If a scalar cannot be written, an error is logged and work goes on.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        """Opens the files."""
        self._directory = Path(directory)
        self._path = self._directory / FILE
        self._stream: Any = None
        self._events: Any = None
        self._flushed_at = time.monotonic()
        with self._reporting("opened"):
            self._directory.mkdir(parents=True, exist_ok=True)
            if step is not None:
                _drop_later(self._path, step)
            self._stream = open(self._path, "a", encoding="utf-8")  # noqa: SIM115  # closed by `close`
            self._events = _open_events(self._directory, step)

    @property
    def is_open(self) -> bool:
        """Whether the file of lines could be opened, and lines of later steps could be dropped from it."""
        return self._stream is not None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes scalars. The event file has them a few seconds later."""
        now = time.time()
        with self._reporting("written"):
            for name, value in scalars.items():
                known = float(value) if math.isfinite(value) else None
                line = json.dumps({"step": step, "time": now, "name": name, "value": known})
                if self._stream is not None:
                    self._stream.write(line + "\n")
            if self._stream is not None:
                self._stream.flush()
            if self._events is not None:
                self._write_events(step, now, scalars)

    def _write_events(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._events.write_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
        if time.monotonic() - self._flushed_at > _SECONDS_BETWEEN_FLUSHES:
            self._events.flush()  # to the disk itself
            self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Closes the files."""
        for opened in (self._stream, self._events):
            if opened is not None:
                with self._reporting("written"):
                    opened.close()
        self._stream = self._events = None

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _logger.error("Scalars in %s could not be %s: %s.", self._directory, what, error)


def _open_events(directory: Path, step: int | None) -> Any:
    """An event file, or None. Its class writes in the calling thread; `SummaryWriter` uses its own thread.

    If a full disk ended that thread, `SummaryWriter.flush` would wait forever.
    """
    try:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
    except ImportError:
        _logger.info(
            "tensorboardX is not installed, so there are no event files; %s has the scalars.",
            directory / FILE,
        )
        return None
    events = EventsWriter(str(directory / "events"))
    if step is not None:  # TensorBoard hides what it has of this step and later ones
        events.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))
    return events


def _drop_later(path: Path, step: int) -> None:
    """Removes lines of steps after this one, and an incomplete last line."""
    if not path.exists():
        return
    kept, num_lines = [], 0
    with open(path, encoding="utf-8", errors="replace") as stream:
        for num_lines, line in enumerate(stream, 1):  # noqa: B007
            try:
                is_kept = line.endswith("\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                is_kept = False
            if is_kept:
                kept.append(line)
    if len(kept) == num_lines:
        return
    started = path.with_name(f"{path.name}.being-written")
    started.write_text("".join(kept), encoding="utf-8")
    started.replace(path)
