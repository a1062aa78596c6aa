"""Why a process has ended, and whether the job is started again then."""

from __future__ import annotations

import collections
import re
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cause", "Restarts", "count_memory_kills"]

_VMSTAT = Path("/proc/vmstat")
_HEALTHY_SECONDS = 600.0  # a run that lasted as long was no failure of the start
_MOST_DELAY = 60.0


@dataclass(frozen=True)
class Cause:
    """How a process ended that was the first to fail.

    Attributes:
      process: its number.
      code: its exit code, or the negative number of the signal that ended it.
      last_error: the last line that it wrote on the standard error, or the beginning of a long one; empty
        if it wrote nothing.
      was_memory: whether the kernel has ended processes meanwhile for lack of memory.
    """

    process: int
    code: int
    last_error: str = ""
    was_memory: bool = False

    @property
    def status(self) -> int:
        """The exit status that tells of it: 128 more than the number of a signal."""
        return self.code if self.code > 0 else 128 - self.code

    @property
    def kind(self) -> str:
        """What it has in common with other ends of the same cause: not the process, and no numbers."""
        return f"{self._how()} {re.sub(r'[0-9]+', '#', self._why())}"

    @property
    def what(self) -> str:
        """What happened to the process, without its number."""
        return f"{self._how()}{self._why()}"

    def __str__(self) -> str:
        return f"process {self.process} {self.what}"

    def _how(self) -> str:
        if self.code >= 0:
            return f"ended with status {self.code}"
        try:
            return f"was ended by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was ended by signal {-self.code}"

    def _why(self) -> str:
        if self.code == -signal.SIGKILL:
            return (
                ", probably for lack of memory: the kernel has ended processes for that" * self.was_memory
            )
        # A process that a signal ends seldom has written why.
        return f": {self.last_error.rstrip('.')}" if self.code > 0 and self.last_error else ""


def count_memory_kills() -> int:
    """How many processes the kernel has ended for lack of memory since it started; 0 if it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


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
