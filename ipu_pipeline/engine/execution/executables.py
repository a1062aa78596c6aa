"""Compiled programs, loaded for other devices than they were compiled for.

XLA compiles a program anew for each device, even where stages compute the same, as the blocks of a
transformer do. This module writes out what XLA made for one device and reads it in for another, in about a
tenth of the time or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ipu_pipeline.ground import jax_compat

__all__ = ["Executable", "is_portable"]

_LEAST_OPERATIONS = 1000  # XLA's own bound: `cheap_computation` of its CPU client


def is_portable(devices: Sequence[Any]) -> bool:
    """Whether what is compiled for such devices can be loaded for others.

    It cannot with JAX's persistent compilation cache, which saves as much. Only CPUs have been tried.
    """
    if len(devices) > 1:
        return False
    (device,) = devices
    return device.platform == "cpu" and jax_compat.can_move_executables(device.client)


class Executable:
    """A compiled program, written out."""

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        """Writes a compiled program out."""
        costs = compiled.cost_analysis() or {}
        if costs.get("flops", 0) < _LEAST_OPERATIONS:
            raise ValueError("The program is run where it is started, and must be compiled for that.")
        self._written = jax_compat.write_executable(compiled)

    def load(self, device: Any) -> jax.stages.Compiled:
        """The program for a device of the same kind, where its arguments must lie."""
        return jax_compat.read_executable(self._written, device)
