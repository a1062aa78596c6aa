"""Distances between rows."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, absolute
from ipu_pipeline.poptorch.lowering.reductions import vector_norm
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


def _length(difference: Array, p: float) -> Array:
    """Takes the norm over the last dimension. As in torch, a maximum's gradient is not divided here."""
    if not math.isinf(p):
        return vector_norm(difference, p, -1)
    sizes = absolute(difference)
    largest = jax.lax.stop_gradient(jnp.max(sizes, -1, keepdims=True))
    changes = jnp.where(sizes == largest, sizes - jax.lax.stop_gradient(sizes), 0)
    return largest[..., 0] + jnp.sum(changes, -1)


@lowers("_cdist_forward")
def _cdist(a: Array, b: Array, p: float, compute_mode: int | None = None) -> Array:
    """Takes distances between all rows of a and of b. torch multiplies large matrices, and rounds more."""
    del compute_mode
    return _length(a[..., :, None, :] - b[..., None, :, :], p)


@lowers("_pdist_forward")
def _pdist(x: Array, p: float = 2) -> Array:
    """Takes distances between each row and the later ones."""
    first, second = np.triu_indices(x.shape[0], 1)
    return _length(x[first] - x[second], p)


@lowers("dist", keep=True)
def _dist(a: Array, b: Array, p: float = 2) -> Array:
    """Takes the distance between two arrays as a whole."""
    return vector_norm(a - b, p)
