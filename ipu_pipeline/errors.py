"""Exceptions of the library."""

from ipu_pipeline.engine.errors import OutOfRangeError, ProcessError

__all__ = ["CheckpointError", "OutOfRangeError", "ProcessError"]


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not fit the programs that are to use it."""
