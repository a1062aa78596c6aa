"""Distances between rows."""

from __future__ import annotations

import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array
from ipu_pipeline.poptorch.lowering.reductions import vector_norm
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


@lowers("_cdist_forward")
def _cdist(a: Array, b: Array, p: float, compute_mode: int | None = None) -> Array:
    """Between all rows of a and all of b. torch multiplies matrices if there are many, and rounds more."""
    del compute_mode
    return vector_norm(a[..., :, None, :] - b[..., None, :, :], p, -1)


@lowers("_pdist_forward")
def _pdist(x: Array, p: float = 2) -> Array:
    """Between each row and those after it."""
    first, second = np.triu_indices(x.shape[0], 1)
    return vector_norm(x[first] - x[second], p, -1)
