"""Exceptions that the engine and the front share."""

__all__ = ["OutOfRangeError"]


class OutOfRangeError(Exception):
    """The data set ended before the run had all the micro-batches that it needs.

    Weight updates that were complete by then remain; the one that was being accumulated is dropped.
    """
