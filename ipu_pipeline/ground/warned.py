"""Warnings that are given only once."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_once"]

_warned: set[str] = set()


def warn_once(name: str, message: str, category: type[Warning] = UserWarning) -> None:
    """Warns the first time that it is called for a name."""
    if name not in _warned:
        _warned.add(name)
        frame, level = sys._getframe(), 1  # noqa: SLF001  # the program's line, however deep this is
        while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
            level += not _is_skipped(frame.f_code.co_filename)
            frame = frame.f_back
        warnings.warn(message, category, stacklevel=level)


def _is_between(module: str) -> bool:
    """Whether a module is the package, or what imports it."""
    return module.split(".")[0] in ("ipu_pipeline", "importlib")


def _is_skipped(file: str) -> bool:
    """Whether `warnings.warn` does not count a frame of a file."""
    return "importlib" in file and "_bootstrap" in file
