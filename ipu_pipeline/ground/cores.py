"""The processor's cores."""

from __future__ import annotations

import os

__all__ = ["count_cores"]


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
