"""Why a process has ended."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cause", "count_memory_kills"]

_VMSTAT = Path("/proc/vmstat")


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
        return f"process {self.process} {self.what}."

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
