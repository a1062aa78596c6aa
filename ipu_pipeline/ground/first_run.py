"""What is to happen before a program runs its first pipeline or loop, whichever way it runs them.

The engine tells when that is; what happens then may be in rooms above it.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["before_first_run", "begin_first_run"]

_waiting: list[Callable[[], None]] = []


def before_first_run(call: Callable[[], None]) -> None:
    """Has something called once, before the first pipeline or loop of the process is prepared."""
    _waiting.append(call)


def begin_first_run() -> None:
    """Calls what waits for the first run, each once."""
    while _waiting:
        _waiting.pop(0)()
