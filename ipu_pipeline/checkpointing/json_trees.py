"""Pytrees of dicts, lists, tuples and shapes of arrays as JSON."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from ipu_pipeline.checkpointing.snapshots import describe_array

__all__ = ["describe_tree", "make_tree", "parse_array"]


def describe_tree(tree: Any) -> Any:
    """A pytree of shapes as JSON.

    Raises:
      NotImplementedError: a node is of another class.
    """
    if isinstance(tree, dict):
        return {"dict": [[key, describe_tree(part)] for key, part in tree.items()]}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        raise NotImplementedError(
            f"export: a {type(tree).__name__} needs its Python class; use a dict, list or tuple of arrays."
        )
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [describe_tree(part) for part in tree]}
    if tree is None:
        return {"none": []}
    if isinstance(tree, jax.ShapeDtypeStruct):
        return describe_array(tree)
    raise NotImplementedError(
        f"export: a {type(tree).__name__} needs its Python class; use a dict, list or tuple of arrays."
    )


def make_tree(described: Any) -> Any:
    """The inverse of `describe_tree`."""
    if isinstance(described, str):
        return parse_array(described)
    ((kind, parts),) = described.items()
    if kind == "dict":
        return {key: make_tree(part) for key, part in parts}
    if kind == "none":
        return None
    made = [make_tree(part) for part in parts]
    return tuple(made) if kind == "tuple" else made


def parse_array(text: str) -> jax.ShapeDtypeStruct:
    """The inverse of `describe_array`."""
    dtype, _bracket, shape = text.partition("[")
    return jax.ShapeDtypeStruct(tuple(json.loads("[" + shape)), np.dtype(dtype))
