"""The number of weight updates so far, with which stages and optimizers can compute."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["count_aval", "update_count", "update_count_p"]

update_count_p = jax_core.Primitive("update_count")


@update_count_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _update_count_abstract() -> Any:
    return count_aval()


@update_count_p.def_impl  # type: ignore[untyped-decorator]
def _update_count_value() -> Any:
    return frames.current_values("update_count").update_count


def count_aval() -> Any:
    """Shape and dtype of a count."""
    return jax_compat.shaped_array((), np.dtype(np.int32))


def update_count() -> jax.Array:
    """Returns the number of weight updates before the current one, in a stage or an optimizer.

    Each pipeline name has its own count. It continues when a checkpoint is restored.

    Example:
      >>> def optimizer_of(loss):
      ...     return optax.sgd(0.1 / (1 + engine.update_count()))
      >>> def stage(x):
      ...     return x * (engine.update_count() < 100)
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones(4, np.float32))

    Returns:
      An int32 scalar, modulo 2**32.

    Raises:
      RuntimeError: not called in a stage of a pipeline, in its optimizer_function, or in the update of its
        optimizer.
    """
    frame = frames.current_frame("update_count")
    if not (frame.has_metrics or frame.is_traced_again):
        raise RuntimeError(
            f"update_count (get_global_step) is used in {frame.place}, which has no such number. Compute "
            "with it in a stage of a pipeline, in its optimizer_function, or in the update of its "
            "optimizer. Optax's schedules count by themselves."
        )
    value: jax.Array = update_count_p.bind()
    return value
