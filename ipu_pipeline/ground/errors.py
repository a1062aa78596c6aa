"""Exceptions of the library, and what they show of JAX's exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = [
    "CheckpointError",
    "NoCheckpointError",
    "OutOfRangeError",
    "ProcessError",
]

# The note with which JAX says that it has removed its frames from a traceback (JAX_TRACEBACK_FILTERING).
_TRACEBACK_NOTE = "JAX has removed its internal frames from the traceback"


class OutOfRangeError(Exception):
    """The data set ended before the run had all the micro-batches that it needs.

    Weight updates that were complete by then remain; the one that was being accumulated is dropped.

    Example:
      >>> infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(1)])
      >>> def model():
      ...     return ipu.loops.repeat(2, lambda total, x: total + x, [np.float32(0)], infeed_queue)
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model)
      >>> with ipu.Session() as session:
      ...     session.run(infeed_queue.initializer)
      ...     try:
      ...         session.run(program)
      ...     except ipu.errors.OutOfRangeError:
      ...         print("the data set has ended")
      the data set has ended
    """

    __module__ = "ipu_pipeline.errors"  # where users import it from, and what tracebacks show


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not fit the programs that are to use it.

    Example:
      >>> with ipu.Session() as session:
      ...     try:
      ...         ipu.Saver().restore(session, "no_such_folder")
      ...     except ipu.errors.CheckpointError as error:
      ...         print(type(error).__name__)
      NoCheckpointError
    """

    __module__ = "ipu_pipeline.errors"


class NoCheckpointError(CheckpointError):
    """There is no checkpoint at a path, nor one that an interrupted save was replacing there."""

    __module__ = "ipu_pipeline.errors"


class ProcessError(RuntimeError):
    """Another process of the run has ended, does not answer, or had an error; the message names it."""

    __module__ = "ipu_pipeline.errors"


@contextlib.contextmanager
def without_traceback_note() -> Iterator[None]:
    """Drops JAX's note about removed frames from an error that ends a `with` block or a function.

    The last lines of the traceback are then the error and our note about where it happened.
    """
    try:
        yield
    except Exception as error:
        drop_traceback_note(error)
        raise


def drop_traceback_note(error: BaseException) -> None:
    """Drops the note from an error that has been caught."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [note for note in notes if _TRACEBACK_NOTE not in str(note)]
