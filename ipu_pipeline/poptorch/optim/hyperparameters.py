"""The numbers of an optimizer as one array, a row per group.

There is one array, and not one per number, because each array that another device reads is sent there at
every update. What a formula derives from a number (1 - beta, the logarithm of beta) is computed here in 64
bits: in float32, 1 - 0.999 has lost five digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ipu_pipeline.poptorch.optim.specs import Kind, LossScaling, OptimizerSpec

__all__ = ["STORED_SCALING", "Hyperparameters"]

STORED_SCALING = "stored_scaling"  # the column that updates write: the factor of momentum buffers


class Hyperparameters:
    """Packs the numbers of specs of one structure.

    Attributes:
      columns: the names of the array's columns.
      keeps_scaling: whether the first of them is `STORED_SCALING`.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        """Takes one of the specs."""
        self.keeps_scaling = spec.structure.scales_velocity
        kept = (STORED_SCALING,) if self.keeps_scaling else ()
        self.columns = (*kept, *_derive_all(spec)[0])

    def pack(self, spec: OptimizerSpec, before: Any = None) -> np.ndarray[Any, Any]:
        """Makes the array."""
        rows = _derive_all(spec)
        packed = np.zeros((len(rows), len(self.columns)), jax.dtypes.canonicalize_dtype(np.float64))
        for number, row in enumerate(rows):
            packed[number] = [row.get(column, 0) for column in self.columns]
        if self.keeps_scaling:
            column = self.index("velocity_scaling")
            packed[:, 0] = packed[:, column] if before is None else np.asarray(before)[:, 0]
        return packed

    def index(self, column: str) -> int:
        """Returns the position of a column."""
        return self.columns.index(column)


def _derive_all(spec: OptimizerSpec) -> list[dict[str, float]]:
    common: dict[str, float] = {}
    if spec.structure.loss_scaling is LossScaling.MANUAL:
        common["loss_scaling"] = float(np.float32(spec.loss_scaling))  # as the backward has it
    if spec.structure.clips:
        common["max_grad_norm"] = spec.max_grad_norm
    if spec.structure.kind is Kind.RADAM:
        return [_derive(values) | _derive_rectified(values) | common for values in spec.values]
    return [_derive(values) | common for values in spec.values]


def _derive_rectified(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns RAdam's rho for infinitely many updates, and how far it is above -2 / log(beta2)."""
    beta = values["betas"][1]
    limit = 2 / (1 - beta) - 1
    return {"rho_limit": limit, "rho_difference": limit + 2 / math.log(beta) if beta > 0 else limit}


def _derive(values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if name == "betas":
            for number, beta in enumerate(value, 1):
                found[f"beta{number}"] = beta
                found[f"one_minus_beta{number}"] = 1 - beta
                found[f"log_beta{number}"] = math.log(beta) if beta > 0 else -math.inf
        elif isinstance(value, tuple):
            found |= {f"{name}{number}": part for number, part in enumerate(value, 1)}
        else:
            found[name] = value
            if name in ("alpha", "dampening", "momentum", "rho"):
                found[f"one_minus_{name}"] = 1 - value
    return found
