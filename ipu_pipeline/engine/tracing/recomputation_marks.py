"""Checkpoints: marks in a stage on the values that recomputation keeps."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.specs import serial_numbers
from ipu_pipeline.ground import jax_core

__all__ = ["check_marks", "has_marks", "mark_of", "recomputation_checkpoint"]

_MARK = "ipu_pipeline.recomputation_checkpoint."


def recomputation_checkpoint(tree: Any, name: str | None = None) -> Any:
    """Marks values that a stage keeps for its backward instead of computing them again.

    It does nothing without recomputation, and in the mode RecomputeThenBackpropagate. An unmarked value
    that is used before and after a checkpoint is computed again on both sides.

    Example:
      >>> def stage(x):
      ...     x = layers.Dense(64, activation="relu")(x)
      ...     x = ipu.pipelining_ops.recomputation_checkpoint(x)  # the backward begins here
      ...     return jnp.mean(layers.Dense(10)(x))
      >>> pipeline = engine.Pipeline(
      ...     [stage],
      ...     num_micro_batches=2,
      ...     optimizer=optax.sgd(0.1),
      ...     recompute="recompute_and_backpropagate_interleaved",
      ... )
      >>> pipeline.trace(np.ones([8, 16], np.float32))

    Args:
      tree: a pytree of arrays in the stage being traced.
      name: an operation's name in TensorFlow; not used here.

    Returns:
      The same values. Use these from here on.

    Raises:
      RuntimeError: not called within a computational stage.
    """
    del name
    current = frames.current_frame("recomputation_checkpoint")
    if not current.may_recompute:
        raise RuntimeError(
            "recomputation_checkpoint was called outside of a computational stage; only pipelines "
            "recompute. jax.checkpoint works everywhere."
        )
    mark = f"{_MARK}{next(serial_numbers)}"
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, mark), tree)


def mark_of(equation: Any) -> str | None:
    """The mark that an equation leaves; None if it leaves none."""
    name = equation.params.get("name")
    return name if isinstance(name, str) and name.startswith(_MARK) else None


def has_marks(flat: jaxprs.FlatJaxpr) -> bool:
    """Whether a stage has checkpoints."""
    return any(mark_of(equation) is not None for equation in flat.equations)


def check_marks(flat: jaxprs.FlatJaxpr, place: str) -> None:
    """Raises if a checkpoint stands where it cannot be reached."""
    for equation in flat.equations:
        if _has_inner_mark(equation):
            raise ValueError(
                f"{place}: recomputation_checkpoint is called inside the body of "
                f"{equation.primitive.name}, where the stage cannot be cut. Call it on what the body takes "
                "or returns; within the body jax.checkpoint says what is kept."
            )


def _has_inner_mark(equation: Any) -> bool:
    return any(
        mark_of(inner) is not None or _has_inner_mark(inner)
        for jaxpr in jax_core.jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )
