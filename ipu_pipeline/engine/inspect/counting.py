"""Counts the operations of a function, from its jaxpr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.jaxprs.costs import count_operations, count_primitives
from ipu_pipeline.engine.tracing import frames

__all__ = ["Work", "count_work"]


class Work(NamedTuple):
    """The operations of a function.

    Attributes:
      num_primitives: the number of JAX primitives, before XLA fuses any.
      num_flop: estimated floating-point operations, see `jaxprs.costs.count_operations`.
    """

    num_primitives: int
    num_flop: float


def count_work(function: Callable[..., Any], *arguments: Any) -> Work:
    """Traces a function as part of a stage, and counts its operations. Runs nothing.

    Example:
      >>> engine.inspect.count_work(lambda x: x @ x, np.ones([64, 64], np.float32))
      Work(num_primitives=1, num_flop=524288.0)

    Args:
      function: the function; it may use `get_variable` and `next_rng_key`.
      *arguments: its arguments, or their shapes and dtypes.
    """
    stage = frames.Frame(frames.ProgramNames(), training=False, place="an operation", is_stage=True)
    with frames.frame(stage):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return Work(count_primitives(jaxpr), count_operations(jaxpr))
