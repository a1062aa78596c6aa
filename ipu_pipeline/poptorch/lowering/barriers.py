"""What XLA may not see through."""

from __future__ import annotations

import jax

from ipu_pipeline.poptorch.lowering.arrays import Array
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


@lowers("ipu_poptorch::nop")
def _nop(x: Array) -> Array:
    return jax.lax.optimization_barrier(x)
