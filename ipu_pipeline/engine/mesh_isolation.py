"""Keeps what a pipeline traces and runs apart from the mesh that its caller has set for JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import numpy as np

from ipu_pipeline.ground import jax_compat

P = ParamSpec("P")
R = TypeVar("R")
_NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())


def apart(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a function without the mesh of a `jax.set_mesh` around the call: a pipeline has its own."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if jax.sharding.get_abstract_mesh().empty or not jax_compat.is_outside_of_traces():
            return function(*args, **kwargs)
        with jax.set_mesh(_NO_MESH):
            return function(*args, **kwargs)

    return wrapped
