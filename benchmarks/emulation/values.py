"""What emulated stages compute with: NumPy arrays, for a pipeline and for torch alike."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["RATE", "WIDTH", "make_micro_batches", "make_parameters"]

WIDTH = 8  # of a stage's only variable
RATE = 1e-3  # of plain SGD


def make_parameters(num_stages: int, width: int = WIDTH) -> list[np.ndarray[Any, Any]]:
    """The variable of each stage, float32[width]."""
    return [
        np.linspace(0.9, 1.1, width, dtype=np.float32) + np.float32(0.01 * n) for n in range(num_stages)
    ]


def make_micro_batches(number: int, num_bytes: int, width: int = WIDTH) -> list[np.ndarray[Any, Any]]:
    """Different micro-batches, float32[n, width], of so many bytes each."""
    rng = np.random.default_rng(0)
    shape = (num_bytes // (4 * width), width)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(number)]
