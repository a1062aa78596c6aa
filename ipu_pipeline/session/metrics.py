"""The metrics of a session: what its pipelines reported, until it is read."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipu_pipeline.engine.state import Progress
from ipu_pipeline.engine.tracing.metrics import MetricReader, Reported
from ipu_pipeline.program.calls import PipelineCall

__all__ = ["MetricLog"]

_MAX_UPDATES = 10_000  # of one pipeline that are kept for somebody who has not read any yet
_MAX_PENDING = 4  # entries that stay on the devices


@dataclass(frozen=True, eq=False)
class _Pending:
    """Weight updates whose metrics are still on the devices."""

    reader: MetricReader
    numbers: range
    reported: Reported

    def read(self) -> _Rows:
        return _Rows(self.numbers, self.reader.read(self.reported, len(self.numbers)))


@dataclass(frozen=True, eq=False)
class _Rows:
    """The metrics of some weight updates, on the host."""

    numbers: range
    values: Mapping[str, np.ndarray[Any, Any]]


class _Log:
    """What one pipeline reported."""

    def __init__(self) -> None:
        self.pending: collections.deque[_Pending] = collections.deque()
        self.rows: collections.deque[_Rows] = collections.deque()

    def settle(self, waits: bool) -> None:
        """Reads what the devices have computed; all that there is if this is to wait."""

        def is_due() -> bool:
            return len(self.pending) > _MAX_PENDING and self.pending[0].reported.is_ready()

        while self.pending and (waits or is_due()):
            self.rows.append(self.pending[0].read())
            self.pending.popleft()
        num_updates = sum(len(rows.numbers) for rows in self.rows)
        while self.rows and num_updates - len(self.rows[0].numbers) >= _MAX_UPDATES:
            num_updates -= len(self.rows.popleft().numbers)


class MetricLog:
    """What the pipelines of a session reported. It may be read while another thread runs them."""

    def __init__(self) -> None:
        """Nothing was reported yet."""
        self._lock = threading.Lock()
        self._logs: dict[tuple[str, bool], _Log] = {}

    def add(self, call: PipelineCall, num_updates: int, last: int, progress: Progress) -> None:
        """Takes what a pipeline reported; does not wait for it.

        Args:
          call: the pipeline.
          num_updates: how many weight updates these are; executions, in inference.
          last: the number of the last one.
          progress: what it gave.
        """
        reader = call.pipeline.metrics
        if not reader:
            return
        numbers = range(last - num_updates + 1, last + 1)
        pending = _Pending(reader, numbers, reader.select(progress))
        with self._lock:
            log = self._logs.setdefault((call.name, call.trains), _Log())
            log.pending.append(pending)
            log.settle(waits=False)

    def read(self, name: str, training: bool) -> dict[str, np.ndarray[Any, Any]]:
        """What a pipeline reported since the last time; see `Session.metrics`."""
        with self._lock:
            log = self._logs.get((name, training))
            if log is None:
                return {"update": np.zeros(0, np.int64)}
            log.settle(waits=True)
            rows = list(log.rows)
            log.rows.clear()
        numbers = np.concatenate([np.zeros(0, np.int64), *(np.asarray(part.numbers) for part in rows)])
        names = dict.fromkeys(one for part in rows for one in part.values)
        return {"update": numbers, **{one: _concatenate(rows, one) for one in names}}


def _concatenate(rows: Sequence[_Rows], name: str) -> np.ndarray[Any, Any]:
    """The values of one metric; NaN where another program of that name did not report it."""
    return np.concatenate(
        [part.values.get(name, np.full(len(part.numbers), np.nan, np.float32)) for part in rows]
    )
