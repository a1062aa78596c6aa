"""Bars of progress: where they are shown, and what is printed beside them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["between_bars", "is_shown_on"]


def is_shown_on(stream: Any) -> bool:
    """Whether bars are shown on a stream: on terminals and in Jupyter, unless TQDM_DISABLE is set."""
    if os.environ.get("TQDM_DISABLE"):
        return False
    try:
        return bool(stream.isatty() or type(stream).__module__ == "ipykernel.iostream")
    except (AttributeError, ValueError):  # there is no stream, or it is closed
        return False


@contextlib.contextmanager
def between_bars() -> Iterator[None]:
    """Wraps printing or logging while there may be bars of tqdm: these are drawn again below the text.

    Without bars tqdm is not asked, as its lock would fix the start method of the user's multiprocessing.
    """
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(bars, "_instances", None):
        yield
        return
    with bars.external_write_mode():  # type: ignore[union-attr]  # it has instances
        yield
