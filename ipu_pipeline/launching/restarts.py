"""Whether a job is started again after one of its processes has failed."""

from __future__ import annotations

import collections

from ipu_pipeline.launching.causes import Cause

__all__ = ["Restarts"]

_HEALTHY_SECONDS = 600.0  # a run that lasted as long was no failure of the start
_MOST_DELAY = 60.0


class Restarts:
    """Counts the starts after failures of one cause, and gives up after so many.

    Attributes:
      most: after how many failures of one cause there is no other start.
      count: how often the job has been started again.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self.most = most
        self._of_kinds: collections.Counter[str] = collections.Counter()
        self._idle: collections.Counter[str] = collections.Counter()  # failures since the last progress

    def after(self, cause: Cause, seconds: float, has_progressed: bool = False) -> float | None:
        """Counts a failure.

        Args:
          cause: why the processes have ended.
          seconds: how long they ran. After ten minutes the counts begin anew.
          has_progressed: whether training had come further than before.

        Returns:
          How many seconds to wait before the next start: 0 after progress, else 1, 2, 4 and so on up to 60.
          None: there is no other start.
        """
        if seconds >= _HEALTHY_SECONDS:
            self._of_kinds.clear()
            self._idle.clear()
        if self._of_kinds[cause.kind] >= self.most:
            return None
        self._of_kinds[cause.kind] += 1
        self.count += 1
        if has_progressed:
            self._idle.clear()
            return 0.0
        self._idle[cause.kind] += 1
        return min(_MOST_DELAY, 2.0 ** (self._idle[cause.kind] - 1))

    def describe(self, cause: Cause) -> str:
        """Which start the next one is, in words."""
        return f"restart {self._of_kinds[cause.kind]} of at most {self.most} for this cause"
