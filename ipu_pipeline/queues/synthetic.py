"""Synthetic data: zeros that stay on the devices in place of an infeed's, and nothing that comes back.

On IPUs TF_POPLAR_FLAGS=--use_synthetic_data did this, to see what a program takes without its host.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ipu_pipeline.config_categories import warn_once
from ipu_pipeline.engine.devices.feeds import Take
from ipu_pipeline.engine.execution.contract import Runner

__all__ = ["make_synthetic", "uses_synthetic_data"]

VARIABLE = "TF_POPLAR_FLAGS"
_FLAG = "--use_synthetic_data"


def uses_synthetic_data() -> bool:
    """Whether TF_POPLAR_FLAGS asks for synthetic data. Warns, once, of other flags in it.

    Raises:
      ValueError: the flag has a value that is neither true nor false, or quotes do not match.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return False
    try:
        flags = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} must be flags such as {_FLAG}; got {text!r} ({error}).") from error
    is_used = False
    for flag in flags:
        name, _, value = flag.partition("=")
        if name.replace("-", "_").lstrip("_") != "use_synthetic_data":
            warn_once(flag, f"{VARIABLE}: {flag} has no effect here; only {_FLAG} has one.")
            continue
        values = {"": True, "true": True, "1": True, "false": False, "0": False}
        if value.lower() not in values:
            raise ValueError(f"{VARIABLE}: {_FLAG} must be true or false; got {value!r}.")
        is_used = values[value.lower()]
    return is_used


def make_synthetic(runner: Runner[Any], leaves: Sequence[jax.ShapeDtypeStruct], count: int) -> Take:
    """A take of micro-batches of zeros, which are on the devices from now on.

    Args:
      runner: what takes them.
      leaves: shapes and dtypes of what is fed.
      count: how many are taken at once at most; of a pipeline those of a weight update.
    """
    zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    elements = runner.place_ahead([runner.place_element(zeros) for _number in range(count)])

    def take(wanted: int) -> list[Any]:
        return elements[:wanted]

    return take
