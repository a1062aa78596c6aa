"""Scalars of training and evaluation as JSON lines and TensorBoard event files."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ipu_pipeline.ground.checks import is_integer

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
                number = float(value) if math.isfinite(value) else None
                line = json.dumps({"step": step, "time": now, "name": name, "value": number})
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
    def _reporting(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _logger.error("Scalars in %s could not be %s: %s.", self._directory, action, error)


def _open_events(directory: Path, step: int | None) -> Any:
    """Opens an event file; returns None without tensorboardX.

    `EventsWriter` writes in the calling thread. If a full disk ended the thread of tensorboardX's
    `SummaryWriter`, its `flush` would wait forever.
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
    lines, num_lines = [], 0
    with open(path, encoding="utf-8", errors="replace") as stream:
        for num_lines, line in enumerate(stream, 1):  # noqa: B007
            try:
                is_kept = line.endswith("\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                is_kept = False
            if is_kept:
                lines.append(line)
    if len(lines) == num_lines:
        return
    started = path.with_name(f"{path.name}.being-written")
    started.write_text("".join(lines), encoding="utf-8")
    started.replace(path)


class SummaryWriter:
    """Writes scalars as JSON lines, and as a TensorBoard event file if tensorboardX is installed.

    The lines are appended to `metrics.jsonl`: each is an object with `step`, `time` (seconds since 1970),
    `name` and `value`, which is null where it is not finite. They are there as soon as they have been
    written; the event file has them a few seconds later, and when the writer is closed.

    Example:
      >>> with ipu.SummaryWriter("runs/first") as writer:
      ...     for step in range(100):
      ...         writer.write(step, {"loss": 1 / (1 + step)})
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        """Opens the files.

        Args:
          directory: the directory of the files; it is created. One writer at a time uses it.
          step: the step from which training goes on, for example `session.update_count()` after a restore:
            scalars that an earlier run wrote for later steps are dropped. None keeps everything.

        Raises:
          OSError: they cannot be opened.
          ValueError: the step is not an integer from 0.
        """
        if step is not None:
            _check_step(step)
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, FILE), "a", encoding="utf-8"):
            pass  # errors in opening are raised here; later errors are logged, and training goes on
        self._writer: ScalarWriter | None = ScalarWriter(directory, step)
        if not self._writer.is_open:
            raise OSError(
                f"SummaryWriter: the scalars in {directory} could not be opened, or those after step "
                f"{step} not be dropped; the log says why."
            )

    def __enter__(self) -> SummaryWriter:
        """Returns the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the writer."""
        self.close()

    def close(self) -> None:
        """Closes the files. It may be called again."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes scalars of one step. If they cannot be written, an error is logged.

        Args:
          step: an integer from 0, such as `session.update_count()`.
          scalars: real numbers, or arrays of one element, by name.

        Raises:
          TypeError: `scalars` is not a dict, a name is not a string, or a value is not such a number.
          ValueError: the step is not an integer from 0, or the writer was closed.
        """
        if self._writer is None:
            raise ValueError("SummaryWriter: write was called after close.")
        _check_step(step)
        if not isinstance(scalars, Mapping):
            raise TypeError(f"SummaryWriter.write: scalars must be a dict; got {scalars!r}.")
        self._writer.write(
            int(step), {_check_name(name): _number(name, value) for name, value in scalars.items()}
        )

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Writes what `Session.metrics` returned; the step of each value is the number of its update.

        Args:
          metrics: arrays by name, with the numbers of the updates as "update". NaN, where a program did not
            report a metric, is written as null.

        Raises:
          ValueError: "update" is missing, or the arrays are not of one length; or the writer was closed.
        """
        if self._writer is None:
            raise ValueError("SummaryWriter: write_metrics was called after close.")
        if not isinstance(metrics, Mapping):
            raise TypeError(f"SummaryWriter.write_metrics: metrics must be a dict; got {metrics!r}.")
        if "update" not in metrics:
            raise ValueError(
                'SummaryWriter.write_metrics: metrics must have "update", as from Session.metrics; got '
                f"{', '.join(metrics) or 'none'}."
            )
        values = {name: np.atleast_1d(np.asarray(value)) for name, value in metrics.items()}
        steps = values.pop("update")
        different = [name for name, value in values.items() if value.shape != steps.shape]
        if different:
            raise ValueError(
                "SummaryWriter.write_metrics: each metric must have one value per update; there are "
                f"{len(steps)} updates, and {different[0]!r} has the shape "
                f"{list(values[different[0]].shape)}."
            )
        for place, step in enumerate(steps):
            self.write(step, {name: value[place] for name, value in values.items()})


def _check_step(step: Any) -> None:
    if not is_integer(step, 0):
        raise ValueError(f"SummaryWriter: step must be an integer from 0; got {step!r}.")


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"SummaryWriter.write: names must be strings, not empty; got {name!r}.")
    return name


def _number(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real):
        return float(value)
    array = np.asarray(value)
    if array.size != 1 or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
        raise TypeError(
            f"SummaryWriter.write: the value of {name!r} must be a real number; it is "
            f"{array.dtype.name}{list(array.shape)}."
        )
    return float(array.reshape(()).astype(np.float64))
