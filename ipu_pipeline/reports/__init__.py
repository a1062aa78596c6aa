"""Reports about programs for people: placements, and traces of runs.

The code that records a trace is imported when it is first used: reading one takes no JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipu_pipeline.ground.lazy_initialization import import_later

if TYPE_CHECKING:
    from ipu_pipeline.reports.trace_capture import Capture, capture

__all__ = ["Capture", "capture"]

__getattr__, __dir__ = import_later(__name__, {"reports.trace_capture": "Capture capture"})
