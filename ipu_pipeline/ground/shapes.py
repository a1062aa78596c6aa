"""Shapes and dtypes of pytrees of arrays, and checks against them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.values import as_own, is_key, is_of_numbers

__all__ = [
    "as_loss",
    "as_shape",
    "as_shapes",
    "check_dtype",
    "check_float_dtype",
    "check_like",
    "describe",
    "describe_structure",
    "describe_structures",
    "num_bytes",
    "trees_equal",
]


_BESIDE_LOSS = "Return other values from the last stage, or report them by engine.metric."


def as_loss(loss: Any, what: str, others: str = _BESIDE_LOSS) -> jax.Array:
    """A loss as an array, of any shape and dtype."""
    if not hasattr(loss, "__jax_array__") and not jax.tree_util.all_leaves([loss]):
        structure = describe_structure(jax.tree.structure(loss))
        raise TypeError(f"{what} must be a scalar by itself; got {structure}. {others}")
    return jnp.asarray(loss)


def as_shape(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that a value or a `ShapeDtypeStruct` has as a JAX array."""
    if is_key(value):
        return jax.ShapeDtypeStruct(tuple(value.shape), value.dtype)
    if not isinstance(getattr(value, "dtype", None), np.dtype):  # also a tensor of torch
        value = np.asarray(value)
    dtype = value.dtype
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        dtype = dtype.newbyteorder("=")
    return jax.ShapeDtypeStruct(tuple(value.shape), jax.dtypes.canonicalize_dtype(dtype))


def as_shapes(tree: Any, what: str) -> Any:
    """The shapes and dtypes of a pytree's leaves as JAX arrays."""

    def find(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        try:
            shape = as_shape(leaf)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{_place(what, path)} cannot be made an array: {error}") from error
        if not is_key(shape) and not is_of_numbers(shape.dtype):
            raise ValueError(
                f"{_place(what, path)} must hold numbers, booleans or random keys; got "
                f"{type(leaf).__name__} {leaf!r:.60}. Leave out what no stage reads. Bind a constant to "
                "the stages that read it (functools.partial)."
            )
        return shape

    return jax.tree_util.tree_map_with_path(find, tree)


def _place(what: str, path: Any) -> str:
    return f"{what}, at {jax.tree_util.keystr(path)}," if path else what


def check_dtype(dtype: Any, argument: str) -> np.dtype[Any]:
    """Checks a dtype that was given for an argument, and returns it."""
    try:
        checked: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{argument} must be a dtype; got {dtype!r}.") from error
    if jax.dtypes.canonicalize_dtype(checked) != checked:
        raise ValueError(f"{argument} {checked.name} needs JAX's 64-bit mode; give another one.")
    return checked


def check_float_dtype(dtype: Any, argument: str) -> np.dtype[Any]:
    """Does the same as `check_dtype` for a floating-point dtype."""
    checked = check_dtype(dtype, argument)
    if not jnp.issubdtype(checked, jnp.floating):
        raise ValueError(f"{argument} must be a floating-point dtype; got {checked.name}.")
    return checked


class _Bare(str):
    """A text that is shown without quotes in the text of a tree."""

    def __repr__(self) -> str:
        return str(self)


def describe(value: Any) -> str:
    """Describes shapes and dtypes of a pytree for errors, for example `{'x': float32[4, 12]}`."""
    leaves, tree = jax.tree.flatten(value)
    described = [_Bare(f"{leaf.dtype.name}{list(leaf.shape)}") for leaf in leaves]
    try:
        return str(jax.tree.unflatten(tree, described))
    except Exception:  # a class that computes with its leaves, as the error of `checkify.checkify`
        return f"{type(value).__name__}({', '.join(described)})"


def describe_structure(tree: Any) -> str:
    """Describes the structure of a pytree for errors, for example "a tuple of 2 arrays"."""
    node, children = tree.node_data(), tree.children()
    if node is None:
        return "an array" if tree.num_leaves else "None"
    kind, keys = node
    if kind is type(None):
        return "None"
    name, parts = f"a {kind.__name__}", [describe_structure(child) for child in children]
    if not parts:
        return f"an empty {kind.__name__}"
    are_arrays = all(part == "an array" for part in parts)
    if issubclass(kind, dict):
        if are_arrays:
            return f"{name} with the key{'s' * (len(parts) > 1)} {', '.join(map(repr, keys))}"
        return f"{name} {{{', '.join(f'{key!r}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
    if hasattr(kind, "_fields"):  # a namedtuple
        return (
            f"{name}({', '.join(f'{key}: {part}' for key, part in zip(kind._fields, parts, strict=True))})"
        )
    if are_arrays:
        return f"{name} of {len(parts)} array{'s' * (len(parts) > 1)}"
    return f"{name} of ({', '.join(parts)})"


def describe_structures(*trees: Any) -> list[str]:
    """Describes several structures that differ, such that the difference shows."""
    described = [describe_structure(tree) for tree in trees]
    return described if len(set(described)) > 1 else [str(tree) for tree in trees]


def num_bytes(shapes: Iterable[Any]) -> int:
    """The number of bytes that arrays of these shapes and dtypes take together."""
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)


def trees_equal(first: Any, second: Any) -> bool:
    """Whether two structures of pytrees are the same."""
    return bool(first == second)


def check_like(value: Any, expected: Any, what: str, *, may_vary: bool = False) -> list[Any]:
    """Checks that a value is like another one. Returns its leaves, NumPy arrays with JAX's dtypes."""
    leaves, tree = jax.tree.flatten(value)
    expected_tree = jax.tree.structure(expected)
    found, wanted = _shapes_by_path(value), _shapes_by_path(expected)
    different = [
        (f"at {path}, " if path else "", describe(known), describe(found[path]))
        for path, known in wanted.items()
        if path in found
        and (found[path].dtype != known.dtype or (not may_vary and found[path].shape != known.shape))
    ]
    if not trees_equal(tree, expected_tree):
        right, wrong = describe_structures(expected_tree, tree)
        parts = [f"{what} must be {right}, as the first one; got {wrong}."]
        is_one = (
            "" in wanted or "" in found
        )  # one array, whose path is empty: all leaves of the other would be named
        missing = [path for path in wanted if path not in found and not is_one]
        unexpected = [path for path in found if path not in wanted and not is_one]
        parts += [f"Missing: {', '.join(missing)}."] if missing else []
        parts += [f"Unexpected: {', '.join(unexpected)}."] if unexpected else []
        parts += [f"It must have, {path}{old}; got {new}." for path, old, new in different]
        raise ValueError(" ".join(parts))
    if different:
        described = "; ".join(f"{path}{old}; got {new}" for path, old, new in different)
        if may_vary:
            raise ValueError(f"{what} must have the dtype of the first one, {described}.")
        raise ValueError(
            f"{what} must have the shape and dtype of the first one, {described}. Sizes are fixed: drop "
            "the remainder of a data set that does not fill its last batch (drop_remainder)."
        )
    paths = [f"{what}, at {path}" if path else what for path in found]
    return [as_own(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]


def _shapes_by_path(value: Any) -> dict[str, jax.ShapeDtypeStruct]:
    paths_and_leaves = jax.tree_util.tree_flatten_with_path(value)[0]
    return {jax.tree_util.keystr(path): as_shape(leaf) for path, leaf in paths_and_leaves}
