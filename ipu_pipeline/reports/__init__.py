"""Reports about programs for people: placements, and traces of runs.

The code that records a trace is imported when it is first used: reading one takes no JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipu_pipeline.reports.capturing import Capture, capture

__all__ = ["Capture", "capture"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ipu_pipeline.reports import capturing

    globals()[name] = value = getattr(capturing, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
