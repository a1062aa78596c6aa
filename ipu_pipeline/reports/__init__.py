"""What a person wants to know of a program: placements, and traces of runs."""

from ipu_pipeline.reports.capturing import Capture, capture

__all__ = ["Capture", "capture"]
