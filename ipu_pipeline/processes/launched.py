"""What passes between this process and the launcher that started it, with others."""

from __future__ import annotations

import contextlib
import functools
import os
import time

__all__ = [
    "CACHE_DIR_VARIABLE",
    "LAUNCHER_VARIABLE",
    "MEMORY_EVERY_VARIABLE",
    "MEMORY_VARIABLE",
    "RESTART_VARIABLE",
    "restart_number",
    "runs_between_checkpoints",
    "tell_progress",
    "tell_results",
]

CACHE_DIR_VARIABLE = "IPU_PIPELINE_CACHE_DIR"  # where compiled programs are
LAUNCHER_VARIABLE = "IPU_PIPELINE_LAUNCHER_FD"  # the number of a file that is open for writing
MEMORY_VARIABLE = "IPU_PIPELINE_MEMORY_DIR"  # where in-memory checkpoints are
MEMORY_EVERY_VARIABLE = "IPU_PIPELINE_MEMORY_EVERY"  # how many runs there are from one to the next
RESTART_VARIABLE = "IPU_PIPELINE_RESTART"  # how often the job has been started again

_TELL_EVERY = 0.2  # seconds


def restart_number() -> int:
    """How often the job has been started again; 0 without a launcher.

    Raises:
      ValueError: the variable has no such number.
    """
    return _read_number(RESTART_VARIABLE, 0, 0)


def runs_between_checkpoints() -> int:
    """How many runs there are from one in-memory checkpoint to the next; 1 without a launcher.

    Raises:
      ValueError: the variable has no such number.
    """
    return _read_number(MEMORY_EVERY_VARIABLE, 1, 1)


def _read_number(variable: str, default: int, least: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not (text.isdecimal() and int(text) >= least):
        raise ValueError(
            f"The environment variable {variable} must be a whole number from {least}; it is {text!r}."
        )
    return int(text)


@functools.cache  # once
def tell_results(process: int) -> None:
    """Says that a process has the results of a pipeline's last stage, if a launcher asks for that."""
    _tell(f"results {process}")


_told_at = -1.0


def tell_progress(training: str, run: int, step: int) -> None:
    """Says how far a training has come, if a launcher asks for that; five times a second at most.

    Args:
      training: a name for it, without spaces.
      run: the number of the run that was done.
      step: the global step after it.
    """
    global _told_at
    now = time.monotonic()
    if now > _told_at + _TELL_EVERY:
        _told_at = now
        _tell(f"progress {training} {run} {step}")


def _tell(text: str) -> None:
    number = os.environ.get(LAUNCHER_VARIABLE, "")
    if number.isdecimal():
        with contextlib.suppress(OSError):  # the launcher is gone
            os.write(int(number), f"{text}\n".encode())
