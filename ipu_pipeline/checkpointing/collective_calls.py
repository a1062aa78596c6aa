"""Collective calls of the processes that write a checkpoint together; all of them raise if one fails.

All processes call the functions of this module in the same order. In a process that runs alone, these only
call the function that they are given.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Callable
from typing import Any, TypeVar

from ipu_pipeline.engine import processes
from ipu_pipeline.ground.context_variables import bound

T = TypeVar("T")
_place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="checkpoint")


def process_index() -> int:
    """The number of this process."""
    peers = processes.current()
    return 0 if peers is None else peers.index


def is_first() -> bool:
    """Whether this is the process that acts for all of them."""
    return process_index() == 0


def do_first(function: Callable[[], T]) -> T:
    """Calls a function in process 0; the other processes wait for it."""
    values: list[T] = _do(function, takes_part=is_first())
    return values[0]


def do_each(function: Callable[[], T]) -> list[T]:
    """Calls a function in each process, and waits for all of them."""
    return _do(function, takes_part=True)


def beside(name: str) -> contextlib.AbstractContextManager[None]:
    """Gives this thread's exchanges with other processes a name of their own.

    The thread that writes a series may meet the others before or after what the program saves meanwhile.
    """
    return bound(_place, name)


def is_any(value: bool, subject: str) -> bool:
    """Whether `value` is True in any process; waits for all."""
    return largest(value, subject) > 0


def largest(value: int, subject: str) -> int:
    """The largest `value` of all processes; waits for all."""
    peers = processes.current()
    return value if peers is None else max(map(int, peers.exchange(subject, str(int(value)))))


def _do(function: Callable[[], T], takes_part: bool) -> list[T]:
    peers = processes.current()
    if peers is None:
        return [function()]
    value: Any = None
    error: Exception | None = None
    if takes_part:
        try:
            with processes.occupied("a checkpoint"):
                value = function()
        except Exception as raised:
            error = raised
    fault = None if error is None else f"{type(error).__name__}: {error}"
    answers = [json.loads(text) for text in peers.exchange(_place.get(), json.dumps([fault, value]))]
    if error is not None:
        raise error
    for process, (fault, _value) in enumerate(answers):
        if fault is not None:
            raise OSError(f"In process {process}: {fault}")
    return [value for _fault, value in answers]
