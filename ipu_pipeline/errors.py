"""Exceptions of the library."""

from ipu_pipeline.engine.errors import OutOfRangeError

__all__ = ["OutOfRangeError"]
