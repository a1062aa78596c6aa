"""Warnings that are given only once."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_once"]

_warned: set[str] = set()


def warn_once(name: str, message: str) -> None:
    """Warns the first time that it is called for a name."""
    if name not in _warned:
        _warned.add(name)
        frame, level = sys._getframe(), 1  # noqa: SLF001  # the program's line, however deep this is
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("ipu_pipeline"):
            frame, level = frame.f_back, level + 1
        warnings.warn(message, stacklevel=level)
