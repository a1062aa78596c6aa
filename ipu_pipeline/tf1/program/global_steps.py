"""The global step among the `inputs` of a pipeline: not a constant, so the first stage computes it.

Inputs stay the same during a run. So the stage is given the number of weight updates before the run, which
the session fills in, in place of the first of these inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipu_pipeline.engine import update_count
from ipu_pipeline.tf1.graph.symbols import at_run_begin, split_steps

__all__ = ["give_steps", "keep_steps"]

_HAS_STEPS = "_computes_global_steps"  # an attribute of stages; see `keep_steps`


def give_steps(inputs: Any, stages: Sequence[Any], trains: bool) -> tuple[Any, Sequence[Any], int | None]:
    """Makes the first stage compute the global step, and values computed from it, in `inputs`.

    Returns:
      The inputs of the stages that are returned; the stages; and the position of the number of weight
      updates before the run among the leaves of the inputs, None if the global step is not among them.
    """
    split = split_steps(inputs)
    if split is None:
        return inputs, stages, None

    def wrap(stage: Callable[..., Any]) -> Callable[..., Any]:
        if hasattr(stage, _HAS_STEPS):
            return stage

        @functools.wraps(stage)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            begin, symbols = split.put_back(arguments[: split.number])
            with at_run_begin(begin if trains else update_count()):
                given = jax.tree.map(lambda leaf: leaf, symbols)  # their values are their leaves
            return stage(*given, *arguments[split.number :], **named)

        return wrapped

    first = stages[0]
    wrapped = [wrap(one) for one in first] if isinstance(first, (list, tuple)) else wrap(first)
    return split.rest, [wrapped, *stages[1:]], split.position


def keep_steps(stage: Callable[..., Any], position: int | None) -> Callable[..., Any]:
    """Marks a first stage that was made of one of `give_steps`, with the same inputs: it computes them."""
    if position is None:
        return stage

    @functools.wraps(stage)
    def kept(*arguments: Any, **named: Any) -> Any:
        return stage(*arguments, **named)

    setattr(kept, _HAS_STEPS, True)
    return kept
