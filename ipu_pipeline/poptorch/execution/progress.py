"""The progress bar of compiling, and how long that took."""

from __future__ import annotations

import time
from datetime import timedelta

import tqdm

__all__ = ["CompileProgress"]

_SHARES = {"capture": 30, "trace": 30, "compile": 40}  # of 100, roughly as their times


class CompileProgress:
    """Counts the parts of compiling.

    Attributes:
      time: how long all of it took; None before its end.
    """

    def __init__(self, shows_bar: bool) -> None:
        """Begins.

        Args:
          shows_bar: whether a bar is shown on the standard error.
        """
        self.time: timedelta | None = None
        self._start = time.perf_counter()
        self._bar = tqdm.tqdm(total=sum(_SHARES.values()), desc="Graph compilation", disable=not shows_bar)

    def done(self, part: str) -> None:
        """Notes that "capture", "trace" or "compile" is done."""
        self._bar.update(_SHARES[part])

    def end(self) -> None:
        """Notes the time."""
        self.time = timedelta(seconds=time.perf_counter() - self._start)
        self._bar.close()

    def close(self) -> None:
        """Ends the bar, also after an error."""
        self._bar.close()
