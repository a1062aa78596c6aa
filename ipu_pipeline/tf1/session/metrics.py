"""The metrics of a session: it keeps what pipelines reported until it is read."""

from __future__ import annotations

import collections
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ipu_pipeline.engine.fronts import NUMBERS, Progress, Reported
from ipu_pipeline.tf1.program.calls import PipelineCall

__all__ = ["MetricLog"]

_MAX_UPDATES = 10_000  # the updates of one pipeline that are kept unread
_MAX_PENDING = 4  # entries that stay on the devices


class _Entry:
    """The metrics of some weight updates, on the devices or, once they have been read, on the host."""

    def __init__(self, numbers: range, reported: Reported) -> None:
        self.numbers = numbers
        self._reported: Reported | None = reported
        self._values: dict[str, np.ndarray[Any, Any]] = {}

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        reported = self._reported
        return reported is None or reported.is_ready()

    def read(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Returns the values by name; waits for the devices, which need not keep them any longer."""
        reported = self._reported
        if reported is not None:
            self._values = reported.read(len(self.numbers))
            self._reported = None
        return self._values


class _Log:
    """The unread reports of one pipeline, the oldest first.

    Attributes:
      entries: all entries.
      on_device: the entries that are still on the devices; after an interrupt, some may be missing.
      num_updates: the number of their weight updates.
    """

    def __init__(self, entries: Sequence[_Entry] = ()) -> None:
        self.entries = collections.deque(entries)
        self.on_device: collections.deque[_Entry] = collections.deque()
        self.num_updates = sum(len(entry.numbers) for entry in entries)

    def add(self, entry: _Entry) -> None:
        """Takes one more, moves computed entries to the host, and drops those that are too old."""
        self.entries.append(entry)
        self.on_device.append(entry)
        self.num_updates += len(entry.numbers)
        while len(self.on_device) > _MAX_PENDING and self.on_device[0].is_ready():
            self.on_device.popleft().read()
        while self.num_updates - len(self.entries[0].numbers) >= _MAX_UPDATES:
            self.num_updates -= len(self.entries.popleft().numbers)


class MetricLog:
    """The reports of a session's pipelines.

    It may be read while another thread runs them, and by a signal's handler: no thread waits for the
    devices while it holds the lock, and a handler that interrupts the thread that holds the lock has it,
    too.
    """

    def __init__(self) -> None:
        """Starts without reports."""
        self._lock = threading.RLock()
        self._logs: dict[tuple[str, bool], _Log] = {}

    def add(self, call: PipelineCall, num_updates: int, last: int, progress: Progress) -> None:
        """Takes a report of a pipeline; does not wait for its values."""
        reader = call.pipeline.built.metrics
        if not reader:
            return
        entry = _Entry(range(last - num_updates + 1, last + 1), reader.select(progress))
        with self._lock:
            self._logs.setdefault((call.name, call.trains), _Log()).add(entry)

    def read(self, name: str, training: bool) -> dict[str, np.ndarray[Any, Any]]:
        """Returns what a pipeline reported since the last call; see `Session.metrics`."""
        if not isinstance(name, str):
            raise TypeError(f"metrics: name must be the name of a pipeline; got {name!r}.")
        key = (name, training)
        with self._lock:
            if key not in self._logs:
                known = dict.fromkeys(other for other, _training in self._logs)
                if known and name not in known:
                    raise KeyError(
                        f"metrics: no pipeline named {name!r} has reported anything; these have: "
                        f"{', '.join(known)}."
                    )
                return {NUMBERS: np.zeros(0, np.int64)}
            log, self._logs[key] = self._logs[key], _Log()
        try:
            return _join(log.entries)
        except BaseException:  # it was not returned, so the next call returns it
            with self._lock:
                self._logs[key] = _Log([*log.entries, *self._logs[key].entries])
            raise


def _join(entries: Collection[_Entry]) -> dict[str, np.ndarray[Any, Any]]:
    """Joins the values of entries; NaN where a program of that name reports other metrics."""
    parts = [(len(entry.numbers), entry.read()) for entry in entries]
    numbers = [np.asarray(entry.numbers, np.int64) for entry in entries]
    found = {NUMBERS: np.concatenate([np.zeros(0, np.int64), *numbers])}
    for name in dict.fromkeys(name for _size, values in parts for name in values):
        own = [values.get(name, np.full(size, np.nan, np.float32)) for size, values in parts]
        found[name] = np.concatenate(own)
    return found
