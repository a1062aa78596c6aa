"""Queries of where a model's forward runs."""

from __future__ import annotations

import torch

from ipu_pipeline.poptorch import markers

__all__ = ["ipuHardwareIsAvailable", "ipuHardwareVersion", "isRunningOnIpu"]


def isRunningOnIpu() -> bool:
    """Whether a model's forward runs for its devices, and not on the CPU."""
    if torch.compiler.is_dynamo_compiling():  # a branch, or the body of a loop
        return bool(torch.compiler.is_exporting())
    return markers.current_capture() is not None


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether there are `num_ipus` of Graphcore's IPUs: never. Models run on JAX devices instead."""
    if not isinstance(num_ipus, int) or num_ipus < 1:
        raise ValueError(f"ipuHardwareIsAvailable: num_ipus must be an integer from 1; got {num_ipus!r}.")
    return False


def ipuHardwareVersion() -> int:
    """Returns the version of Graphcore's IPUs: 0, because there are none."""
    return 0
