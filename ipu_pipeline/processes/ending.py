"""Ends a process whose main thread may be stuck, but leaves nothing half written."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["STATUS", "end_process", "written_whole"]

STATUS = 1  # the same as after an exception
_FLUSHING_SECONDS = 1.0
_MOST_SECONDS = 600.0  # that something may take to be written
_writing: dict[int, str] = {}


@contextlib.contextmanager
def written_whole(what: str) -> Iterator[None]:
    """Wraps writing something that `end_process` must not break off."""
    key = threading.get_ident()
    before = _writing.get(key)
    _writing[key] = what
    try:
        yield
    finally:
        if before is None:
            del _writing[key]
        else:
            _writing[key] = before


def end_process(message: str) -> None:
    """Ends this process, from any thread: no Python code runs any more."""
    waited_for = sorted(set(_writing.values()))
    _write(message + (f"First {', '.join(waited_for)} is written.\n" if waited_for else ""))
    deadline = time.monotonic() + _MOST_SECONDS
    while _writing and time.monotonic() < deadline:
        time.sleep(0.05)
    for stream in (sys.stdout, sys.stderr):
        # A stuck thread may hold the lock of the stream.
        flushing = threading.Thread(target=_flush, args=(stream,), daemon=True)
        flushing.start()
        flushing.join(_FLUSHING_SECONDS)
    os._exit(STATUS)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _flush(stream: Any) -> None:
    with contextlib.suppress(Exception):  # it is closed, or a pipe without a reader
        stream.flush()
