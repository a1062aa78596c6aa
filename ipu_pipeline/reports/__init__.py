"""What a person wants to know of a program: placements, and traces of runs.

What records a trace is imported when it is first used: to read one takes no JAX.
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
