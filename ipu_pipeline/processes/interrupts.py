"""Signals and the end of the process: sections that neither breaks off, stops after an update."""

from __future__ import annotations

import _thread
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Signals.

_STOPPING = (signal.SIGINT, signal.SIGTERM)
# Signals that people handle in Python: to save, to stop, to give up waiting. Some systems lack some.
_DEFERRED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
    if hasattr(signal, name)
)
_UNTIL_SENT_AGAIN = 0.01  # seconds in which the callback that ignored an exception ends


class StoppedAtOnce(BaseException):
    """A second signal came before the work of the first was done."""


class StopRequest:
    """Notes whether a signal came.

    Attributes:
      number: the number of the signal that came to this process; None if none did.
      elsewhere: the number of one that came to another process, as the caller has found; None if none did.
      is_final: whether what runs now is the last thing to do, so that further signals are ignored.
    """

    number: int | None = None
    elsewhere: int | None = None
    is_final: bool = False

    def is_made(self) -> bool:
        """Whether a signal came, to any process."""
        return self.number is not None or self.elsewhere is not None


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers signals to the end of the `with` block, where their handlers find everything consistent.

    Signal handlers run only in the main thread, so there is nothing to do elsewhere, nor where Python does
    not handle the signal. If a signal came several times, the last one is handled.
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
        with contextlib.ExitStack() as handling:  # all are handled, even if one raises
            for number, handler in reversed(handled.items()):
                if number in received:
                    handling.callback(handler, number, received[number])


@contextlib.contextmanager
def sent_again_if_ignored() -> Iterator[None]:
    """Sends a signal again, during the `with` block, where Python ignored what its handler raised.

    A handler is called wherever the main thread is just then. In a callback of the garbage collector (JAX
    has one), of a weak reference, or in `__del__`, an exception has no caller that could get it: Python
    prints "Exception ignored in", and Ctrl-C would have no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_hook = sys.unraisablehook

    def look(ignored: sys.UnraisableHookArgs) -> None:
        number = _find_signal(ignored)
        if number is None:
            former_hook(ignored)
            return
        # Not threading.Thread: the main thread may hold locks of that module just now.
        _thread.start_new_thread(_send_again, (number,))

    sys.unraisablehook = look
    try:
        yield
    finally:
        if sys.unraisablehook is look:
            sys.unraisablehook = former_hook


@contextlib.contextmanager
def raised_if_wrapped() -> Iterator[None]:
    """Raises what the handlers of signals raise, where JAX turned that into an error of its own.

    JAX does so if a signal comes while a program calls back into Python, which on a CPU may happen in the
    thread that started the program.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        pattern = r"callback.*^(?:\S*\.)?(KeyboardInterrupt|StoppedAtOnce)\b"
        match = re.search(pattern, str(error), re.MULTILINE | re.DOTALL)
        if match is None:
            raise
        raise (KeyboardInterrupt if match[1] == "KeyboardInterrupt" else StoppedAtOnce) from error


def _find_signal(ignored: sys.UnraisableHookArgs) -> int | None:
    """The signal whose handler raised an exception, in this thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    codes, traceback = set(), ignored.exc_traceback
    while traceback is not None:
        codes.add(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    for number in _DEFERRED:
        handler = signal.getsignal(number)
        if handler is signal.default_int_handler and ignored.exc_type is KeyboardInterrupt:
            return number
        if getattr(handler, "__code__", None) in codes:
            return number
    return None


def _send_again(number: int) -> None:
    time.sleep(_UNTIL_SENT_AGAIN)
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)  # this also ends what the thread waits for


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """Notes SIGINT and SIGTERM instead of handling them as usual; a second one raises.

    Outside of the main thread, where Python handles no signals, it does nothing.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if request.number is not None and not request.is_final:
            raise StoppedAtOnce
        request.number = request.number or number

    former_handlers: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    try:
        for number in _STOPPING:
            former_handlers[number] = signal.signal(number, note)
        yield request
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# The end of a process whose main thread may be stuck.

EXIT_STATUS = 1  # the same as after an exception
_FLUSHING_SECONDS = 1.0
_MOST_WRITING_SECONDS = 600.0  # that something may take to be written
_writing: dict[int, str] = {}


@contextlib.contextmanager
def written_whole(name: str) -> Iterator[None]:
    """Wraps the writing of something that `end_process` must not break off."""
    key = threading.get_ident()
    outer_name = _writing.get(key)
    _writing[key] = name
    try:
        yield
    finally:
        if outer_name is None:
            del _writing[key]
        else:
            _writing[key] = outer_name


def end_process(message: str) -> None:
    """Ends this process, from any thread: no Python code runs any more."""
    names = sorted(set(_writing.values()))
    _write_message(message + (f"First {', '.join(names)} is written.\n" if names else ""))
    deadline = time.monotonic() + _MOST_WRITING_SECONDS
    while _writing and time.monotonic() < deadline:
        time.sleep(0.05)
    for stream in (sys.stdout, sys.stderr):
        # A stuck thread may hold the lock of the stream.
        thread = threading.Thread(target=_flush, args=(stream,), daemon=True)
        thread.start()
        thread.join(_FLUSHING_SECONDS)
    os._exit(EXIT_STATUS)


def _write_message(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _flush(stream: Any) -> None:
    with contextlib.suppress(Exception):  # it is closed, or a pipe without a reader
        stream.flush()
