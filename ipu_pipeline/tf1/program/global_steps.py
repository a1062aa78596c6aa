"""The global step among the `inputs` of a pipeline: not a constant, so the first stage asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipu_pipeline.tf1.graph.symbols import StepSymbol, split_steps

__all__ = ["drop_steps", "give_steps"]


def give_steps(inputs: Any, stages: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Makes the first stage ask for the global step, and values computed from it, in `inputs`."""
    rest, number, put_back = split_steps(inputs)
    if put_back is None:
        return inputs, stages

    def wrap(stage: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stage)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            # Symbols have their values as their leaves here.
            given = jax.tree.map(lambda leaf: leaf, put_back(arguments[:number]))
            return stage(*given, *arguments[number:], **named)

        return wrapped

    first = stages[0]
    wrapped = [wrap(one) for one in first] if isinstance(first, (list, tuple)) else wrap(first)
    return rest, [wrapped, *stages[1:]]


def drop_steps(inputs: Any, stage: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves out what `give_steps` gives a first stage, for a stage that asks for it by itself."""
    _rest, number, put_back = split_steps(inputs)
    if put_back is None:
        return stage
    given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    known, tree = jax.tree.flatten(given, is_leaf=lambda leaf: isinstance(leaf, StepSymbol))

    @functools.wraps(stage)
    def dropped(*arguments: Any, **named: Any) -> Any:
        leaves = zip(known, jax.tree.leaves(arguments[:number]), strict=True)
        given = [None if isinstance(own, StepSymbol) else leaf for own, leaf in leaves]
        rest = jax.tree.unflatten(tree, given)
        return stage(*rest, *arguments[number:], **named)

    return dropped
