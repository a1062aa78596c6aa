"""The inputs of an exported program: examples of micro-batches, and larger batches, which are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ipu_pipeline.ground.values import cast_exactly
from ipu_pipeline.tf1.graph.placeholders import Placeholder

__all__ = ["join_rows", "make_example", "split_rows"]


def make_example(described: Any, what: str) -> Any:
    """Makes arrays of zeros, with the described shapes and dtypes."""

    def make(path: Any, leaf: Any) -> np.ndarray[Any, Any]:
        where = f"{what}{jax.tree_util.keystr(path)}"
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise TypeError(
                f"{where} must be a jax.ShapeDtypeStruct, a placeholder or an array; got {leaf!r}."
            )
        sizes = tuple(shape)
        if not all(isinstance(size, (int, np.integer)) for size in sizes):
            raise ValueError(
                f"{where} must have a static shape; got {sizes}. A loaded program takes any multiple of "
                "the batch size that it is exported with."
            )
        return np.zeros(sizes, jax.dtypes.canonicalize_dtype(dtype))

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Placeholder)

    return jax.tree_util.tree_map_with_path(make, described, is_leaf=is_leaf)


def split_rows(arguments: Sequence[Any], named: Mapping[str, Any], element: Any) -> list[Any]:
    """Cuts the inputs of a loaded program into micro-batches, along the first axis."""
    given = _arrange(arguments, named, element)
    tree: Any
    wanted, tree = jax.tree_util.tree_flatten_with_path(element)
    leaves = tree.flatten_up_to(given)
    arrays, counts = [], {}
    for (path, shape), leaf in zip(wanted, leaves, strict=True):
        what = f"LoadedProgram: input{jax.tree_util.keystr(path)}"
        array = cast_exactly(np.asarray(leaf), shape.dtype, what)
        size = shape.shape[0] if shape.shape else None
        if size is None and array.shape:
            raise ValueError(f"{what} must be a scalar; got the shape {array.shape}.")
        if size is not None:
            rest = array.shape[1:] == shape.shape[1:]
            if array.ndim != len(shape.shape) or not rest or size == 0 or len(array) % size:
                raise ValueError(
                    f"{what} must have the shape {shape.shape} that was exported, or a multiple of its "
                    f"{size} rows; got {array.shape}. Predict the rest with copies of a row, or export "
                    "with a batch size that divides."
                )
            counts[what] = len(array) // size
        arrays.append(array)
    if len(set(counts.values())) > 1:
        described = ", ".join(f"{what} has {count}" for what, count in counts.items())
        raise ValueError(f"All inputs must have the same number of micro-batches: {described}.")
    count = next(iter(counts.values()), 1)

    def cut(number: int) -> Any:
        return tree.unflatten(
            [
                array.reshape(count, *shape.shape)[number] if shape.shape else array
                for array, (_path, shape) in zip(arrays, wanted, strict=True)
            ]
        )

    return [cut(number) for number in range(count)]


def _arrange(arguments: Sequence[Any], named: Mapping[str, Any], element: Any) -> Any:
    """Arranges the inputs in the structure of an element."""
    if isinstance(element, dict) and not arguments:
        if named.keys() != element.keys():
            raise TypeError(
                f"LoadedProgram: the inputs must be {', '.join(map(repr, element))}; got "
                f"{', '.join(map(repr, named)) or 'none'}."
            )
        return dict(named)
    if named:
        raise TypeError(
            f"LoadedProgram: inputs are given by position; got {', '.join(map(repr, named))} by name."
        )
    number = len(element) if isinstance(element, (tuple, list)) else 1
    if len(arguments) != number:
        raise TypeError(f"LoadedProgram: it takes {number} inputs; got {len(arguments)}.")
    return type(element)(arguments) if isinstance(element, (tuple, list)) else arguments[0]


def join_rows(stacks: Any, shapes: Any, rows: int | None) -> Any:
    """Joins the results of a loaded program: outputs with rows lose the axis of micro-batches."""

    def join(stack: Any, shape: Any) -> Any:
        has_rows = rows is not None and shape.shape[:1] == (rows,)
        return stack.reshape(-1, *shape.shape[1:]) if has_rows else stack

    return jax.tree.map(join, stacks, shapes)
