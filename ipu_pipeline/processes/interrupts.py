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
# Those that people handle in Python: to save, to stop, to give up waiting. Some systems lack some of them.
_DEFERRED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
    if hasattr(signal, name)
)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Lets signals wait until the end of the `with` block, where their handlers find everything whole.

    Signal handlers run in the main thread only, so elsewhere there is nothing to do; nor where Python
    does not handle the signal. Of signals that came several times the last one is handled.
    """
    handlers = {number: signal.getsignal(number) for number in _DEFERRED}
    handled = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not handled:
        yield
        return
    received: dict[int, FrameType | None] = {}

    def note(received_number: int, frame: FrameType | None) -> None:
        received[received_number] = frame

    for number in handled:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        with contextlib.ExitStack() as handling:  # all of them, also if one raises
            for number, handler in reversed(handled.items()):
                if number in received:
                    handling.callback(handler, number, received[number])


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
