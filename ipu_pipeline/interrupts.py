"""Signals: sections that they do not interrupt, and training that ends after an update."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["StopRequest", "StoppedAtOnce", "deferred", "stopping_on_signals"]

_STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Lets SIGINT and SIGTERM wait until the end of the `with` block.

    Signal handlers run in the main thread only, so elsewhere there is nothing to do; nor where Python
    does not handle the signal.
    """
    handlers = {number: signal.getsignal(number) for number in _STOPPING}
    handled = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not handled:
        yield
        return
    received: dict[int, FrameType | None] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received[number] = frame

    for stopping in handled:
        signal.signal(stopping, note)
    try:
        yield
    finally:
        for stopping, handler in handled.items():
            signal.signal(stopping, handler)
        for stopping, handler in handled.items():
            if stopping in received:
                handler(stopping, received[stopping])


class StoppedAtOnce(BaseException):
    """A second signal came before the work of the first was done."""


class StopRequest:
    """Whether a signal came.

    Attributes:
      number: of the signal; None if none came.
      is_final: whether what runs now is the last thing to do, so that further signals are ignored.
    """

    number: int | None = None
    is_final: bool = False

    def is_made(self) -> bool:
        """Whether one came."""
        return self.number is not None


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """Notes SIGINT and SIGTERM, instead of what they do otherwise; a second one raises.

    In another thread than the main one, where Python handles no signals, it does nothing.

    Raises:
      StoppedAtOnce: in the block, at the second signal.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if request.is_made() and not request.is_final:
            raise StoppedAtOnce
        request.number = request.number or number

    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    try:
        for stopping in _STOPPING:
            before[stopping] = signal.signal(stopping, note)
        yield request
    finally:
        for stopping, handler in before.items():
            signal.signal(stopping, signal.SIG_DFL if handler is None else handler)
