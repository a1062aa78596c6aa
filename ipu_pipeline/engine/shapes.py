"""Shapes and dtypes of pytrees of arrays, and checks against them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

__all__ = ["as_shape", "check_like", "num_bytes", "trees_equal"]


def as_shape(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that a value has as a JAX array; likewise for a `ShapeDtypeStruct`."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    return jax.ShapeDtypeStruct(tuple(value.shape), jax.dtypes.canonicalize_dtype(value.dtype))


def num_bytes(shapes: Iterable[Any]) -> int:
    """How many bytes arrays of these shapes and dtypes take together."""
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)


def trees_equal(first: Any, second: Any) -> bool:
    """Whether two structures of pytrees are the same."""
    return bool(first == second)


def check_like(value: Any, expected: Any, what: str) -> list[Any]:
    """The leaves of a value, if it is like another one.

    Args:
      value: a pytree of arrays.
      expected: a pytree of `ShapeDtypeStruct`s.
      what: what errors call the value.

    Raises:
      ValueError: structure, shape or dtype differ.
    """
    leaves, tree = jax.tree.flatten(value)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    if not trees_equal(tree, expected_tree):
        raise ValueError(f"{what} must have the structure {expected_tree}; got {tree}.")
    for leaf, known in zip(leaves, expected_leaves, strict=True):
        shape = as_shape(leaf)
        if shape.shape != known.shape or shape.dtype != known.dtype:
            raise ValueError(
                f"{what} must have the shape and dtype of the first one, "
                f"{known.dtype.name}{list(known.shape)}; got {shape.dtype.name}{list(shape.shape)}. "
                "Sizes are fixed: drop the remainder of a data set that does not fill its last batch "
                "(drop_remainder)."
            )
    return leaves
