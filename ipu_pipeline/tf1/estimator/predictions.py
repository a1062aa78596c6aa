"""Splits the predictions of a micro-batch into examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

__all__ = ["choose_entries", "split_examples"]


def choose_entries(batch: Any, keys: Sequence[str] | None) -> Any:
    """Chooses entries of a dict of predictions; None for all.

    Raises:
      ValueError: one is missing, or the predictions are not a dict.
    """
    if keys is None:
        return batch
    if not isinstance(batch, dict):
        raise ValueError("predict_keys argument is not valid in case of non-dict predictions.")
    missing = [key for key in keys if key not in batch]
    if missing:
        raise ValueError(f"Expected to run at least one output from {list(batch)}, provided {list(keys)}.")
    return {key: batch[key] for key in keys}


def split_examples(batch: Any, into_examples: bool) -> Iterator[Any]:
    """Yields the examples of a micro-batch, along the first axis, or the micro-batch as it is.

    Raises:
      ValueError: the predictions do not all have the same first axis.
    """
    if not into_examples:
        yield batch
        return
    leaves = jax.tree.leaves(batch)
    if leaves and all(leaf.ndim == 0 for leaf in leaves):  # the micro-batch is one example
        yield batch
        return
    lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            "predict: what the last stage returns must have one first axis, over examples; the shapes are "
            f"{', '.join(str(leaf.shape) for leaf in leaves)}. With yield_single_examples=False it "
            "need not."
        )
    for number in range(lengths.pop()):
        yield jax.tree.map(lambda array, n=number: array[n], batch)
