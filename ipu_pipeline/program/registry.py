"""The compiled programs that are still in use."""

from __future__ import annotations

import itertools
import weakref

from ipu_pipeline import config
from ipu_pipeline.program.program import Program

__all__ = ["compiled_programs", "register", "reserve_ipus"]

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(program: Program) -> None:
    """Enters a program, for as long as somebody else refers to it."""
    _programs[next(_numbers)] = program


def compiled_programs() -> list[Program]:
    """The programs that are still in use, in the order in which they were compiled."""
    return [program for _number, program in sorted(_programs.items())]


def reserve_ipus(ipu_device: int, number: int) -> None:
    """Sees to it that there will be IPUs for a program that is being compiled, beside those of the others.

    Args:
      ipu_device: the n of its `/device:IPU:<n>`.
      number: how many IPUs it needs.

    Raises:
      RuntimeError: JAX's CPU backend is running already, with fewer devices.
    """
    known = [(program.ipu_device, program.num_ipus) for program in compiled_programs()]
    config.reserve([*known, (ipu_device, number)])
