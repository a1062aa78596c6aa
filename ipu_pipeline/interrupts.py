"""Sections that Ctrl-C does not interrupt."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["deferred"]


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Lets SIGINT wait until the end of the `with` block.

    Signal handlers run in the main thread only, so elsewhere there is nothing to do; nor where Python
    does not handle the signal.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[-1])
