"""The progress bar of compiling, and its duration."""

from __future__ import annotations

import os
import time
from datetime import timedelta

from tqdm.auto import tqdm

from ipu_pipeline.engine.fronts import watched_by

__all__ = ["CompileProgress"]

_ENDS = {"capture": 30, "trace": 60, "compile": 100}  # of 100, roughly in proportion to their times
_NEXT = {"capture": "tracing", "trace": "compiling"}


class CompileProgress:
    """Counts the parts of compiling.

    Attributes:
      time: how long compiling took; None before its end.
    """

    def __init__(self, shows_bar: bool, told: str = "") -> None:
        """Begins."""
        self.time: timedelta | None = None
        self._start = time.perf_counter()
        is_disabled = not shows_bar or bool(os.environ.get("TQDM_DISABLE"))
        self._bar = tqdm(
            total=_ENDS["compile"],
            desc=f"Graph compilation{told}",
            disable=is_disabled,
            postfix="capturing the model",
        )
        self._watched = watched_by(self._show)

    def done(self, part: str) -> None:
        """Notes that "capture" or "trace" is done."""
        self._bar.set_postfix_str(_NEXT[part], refresh=False)
        self._move_to(_ENDS[part])

    def _show(self, num_done: int, total: int) -> None:
        """Counts the programs that the engine compiles, instead of the engine's own line."""
        begin, end = _ENDS["trace"], _ENDS["compile"]
        self._bar.set_postfix_str(f"{num_done} of {total} programs", refresh=False)
        self._move_to(begin + (end - begin) * num_done // total)

    def _move_to(self, place: int) -> None:
        self._bar.update(max(0, place - self._bar.n))

    def end(self) -> None:
        """Notes that all is done, and the time."""
        self._move_to(_ENDS["compile"])
        self.time = timedelta(seconds=time.perf_counter() - self._start)

    def __enter__(self) -> CompileProgress:
        """Shows the bar for a block."""
        self._watched.__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends the bar, even after an error."""
        self._watched.__exit__(None, None, None)
        self._bar.close()
