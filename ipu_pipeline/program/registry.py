"""The compiled programs that are still in use."""

from __future__ import annotations

import itertools
import weakref

from ipu_pipeline.program.program import Program

__all__ = ["compiled_programs", "register"]

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(program: Program) -> None:
    """Enters a program, for as long as somebody else refers to it."""
    _programs[next(_numbers)] = program


def compiled_programs() -> list[Program]:
    """The programs that are still in use, in the order in which they were compiled."""
    return [program for _number, program in sorted(_programs.items())]
