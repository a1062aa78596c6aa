"""Exceptions that the engine and the front share."""

__all__ = ["OutOfRangeError", "ProcessError"]


class OutOfRangeError(Exception):
    """The data set ended before the run had all the micro-batches that it needs.

    Weight updates that were complete by then remain; the one that was being accumulated is dropped.
    """

    __module__ = "ipu_pipeline.errors"  # where users have it from, as tracebacks show it


class ProcessError(RuntimeError):
    """Another process of the run has ended, does not answer, or had an error; the message names it."""

    __module__ = "ipu_pipeline.errors"
