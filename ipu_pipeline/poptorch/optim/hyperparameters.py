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

from ipu_pipeline.poptorch.optim.specs import Kind, LossScaling, OptimizerSpec, Structure

__all__ = ["STEP", "STORED_SCALING", "Hyperparameters"]

# Columns that updates write: the number of updates (for SGD: of those with momentum), and the factor that
# momentum buffers are multiplied by.
STEP = "step"
STORED_SCALING = "stored_scaling"


class Hyperparameters:
    """Packs the numbers of specs of one structure.

    Attributes:
      columns: the names of the array's columns.
      kept: the columns that updates write.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        """Takes one of the specs."""
        self.kept = _find_kept(spec.structure)
        self.columns = (*self.kept, *_derive_all(spec)[0])

    def pack(self, spec: OptimizerSpec, before: Any = None) -> np.ndarray[Any, Any]:
        """Makes the array.

        Args:
          spec: the spec with the values.
          before: the array before, from which the columns that updates write are kept; None at the start.
        """
        rows = _derive_all(spec)
        packed = np.zeros((len(rows), len(self.columns)), jax.dtypes.canonicalize_dtype(np.float64))
        for number, row in enumerate(rows):
            packed[number] = [row.get(column, 0) for column in self.columns]
        if before is not None and self.kept:
            packed[:, : len(self.kept)] = np.asarray(before)[:, : len(self.kept)]
        elif STORED_SCALING in self.kept:
            packed[:, self.index(STORED_SCALING)] = packed[:, self.index("velocity_scaling")]
        return packed

    def index(self, column: str) -> int:
        """Returns the position of a column."""
        return self.columns.index(column)


def _find_kept(structure: Structure) -> tuple[str, ...]:
    if structure.kind is Kind.SGD:
        counts = any(group.has_momentum for group in structure.groups)
    else:
        counts = structure.kind not in (Kind.RMSPROP, Kind.ADADELTA, Kind.RPROP, Kind.MUON)
    return (*((STEP,) if counts else ()), *((STORED_SCALING,) if structure.scales_velocity else ()))


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
