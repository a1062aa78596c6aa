"""Pytrees of users' arrays: values, shapes and dtypes, checks against them, and trees as JSON."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Values as arrays of dtypes that JAX has; if that would change them, it is an error.


def as_objects(arrays: Sequence[Any]) -> np.ndarray[Any, Any]:
    """An array of objects with one axis, whose elements are the given arrays, of whatever shapes."""
    objects = np.empty(len(arrays), object)
    for number, array in enumerate(arrays):
        objects[number] = array
    return objects


def as_plain(value: Any, name: str) -> np.ndarray[Any, Any]:
    """Makes a value an array without a mask, in the byte order of this machine."""
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            number = np.ma.getmaskarray(value).sum()
            raise ValueError(
                f"{name} is a masked array: {number} of its {value.size} elements are masked, and "
                "arrays on devices have no masks. Fill them, array.filled(0), or pass the mask as an array "
                "of its own."
            )
        value = value.data
    array: np.ndarray[Any, Any] = np.asarray(value)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_own(value: Any, name: str) -> Any:
    """Makes a value an array of the dtype that it has in JAX. A JAX array is returned as it is.

    An array that has this dtype already is neither copied nor looked at.
    """
    if isinstance(value, jax.Array):
        return value
    array = value if type(value) is np.ndarray and value.dtype.isnative else as_plain(value, name)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if dtype == array.dtype else cast_exactly(array, dtype, name)


def cast_exactly(array: np.ndarray[Any, Any], dtype: Any, name: str) -> np.ndarray[Any, Any]:
    """Casts an array to another dtype, if that holds its values."""
    dtype = np.dtype(dtype)
    is_numeric = array.dtype.kind in "biufcV" and array.dtype.names is None
    reason = ""
    if is_numeric and not (array.dtype.kind == "c" and dtype.kind != "c"):
        with np.errstate(all="ignore"):
            cast = array.astype(dtype)
        if dtype.kind in "biu":
            overflows = cast != array
        elif dtype.kind in "fc":
            overflows = np.isinf(cast)
            if overflows.any():  # else the array need not be read again
                overflows &= ~np.isinf(array)
        else:  # bfloat16 and others that NumPy does not know
            return cast
        if not overflows.any():
            return cast
        reason = f": it has {array[overflows][0]}"
    raise ValueError(f"{name}, of dtype {array.dtype}, does not fit {dtype.name}{reason}.")


def is_key(value: Any) -> bool:
    """Whether a value is an array of typed random keys, or its shape and dtype."""
    is_of_jax = isinstance(value, (jax.Array, jax.ShapeDtypeStruct))
    return is_of_jax and bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def is_of_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of a dtype hold numbers or booleans."""
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.number))


def is_readable(array: Any) -> bool:
    """Whether this process has all of an array, which may be on devices of several processes."""
    if getattr(array, "is_fully_addressable", True):
        return True
    return bool(array.is_fully_replicated and array.addressable_shards)


# Shapes and dtypes.

_BESIDE_LOSS = "Return other values from the last stage, or report them by engine.metric."


def as_loss(loss: Any, name: str, advice: str = _BESIDE_LOSS) -> jax.Array:
    """A loss as an array, of any shape and dtype."""
    if not hasattr(loss, "__jax_array__") and not jax.tree_util.all_leaves([loss]):
        structure = describe_structure(jax.tree.structure(loss))
        raise TypeError(f"{name} must be a scalar by itself; got {structure}. {advice}")
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


def as_shapes(tree: Any, name: str) -> Any:
    """The shapes and dtypes of a pytree's leaves as JAX arrays."""

    def find(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        try:
            shape = as_shape(leaf)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{_place(name, path)} cannot be made an array: {error}") from error
        if not is_key(shape) and not is_of_numbers(shape.dtype):
            raise ValueError(
                f"{_place(name, path)} must hold numbers, booleans or random keys; got "
                f"{type(leaf).__name__} {leaf!r:.60}. Leave out what no stage reads. Bind a constant to "
                "the stages that read it (functools.partial)."
            )
        return shape

    return jax.tree_util.tree_map_with_path(find, tree)


def _place(name: str, path: Any) -> str:
    return f"{name}, at {jax.tree_util.keystr(path)}," if path else name


def check_dtype(dtype: Any, argument: str) -> np.dtype[Any]:
    """Checks a dtype that was given for an argument, and returns it."""
    try:
        numpy_dtype: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{argument} must be a dtype; got {dtype!r}.") from error
    if jax.dtypes.canonicalize_dtype(numpy_dtype) != numpy_dtype:
        raise ValueError(f"{argument} {numpy_dtype.name} needs JAX's 64-bit mode; give another one.")
    return numpy_dtype


def check_float_dtype(dtype: Any, argument: str) -> np.dtype[Any]:
    """Checks a floating-point dtype that was given for an argument, and returns it."""
    numpy_dtype = check_dtype(dtype, argument)
    if not jnp.issubdtype(numpy_dtype, jnp.floating):
        raise ValueError(f"{argument} must be a floating-point dtype; got {numpy_dtype.name}.")
    return numpy_dtype


class _Bare(str):
    """A text that is shown without quotes in the text of a tree."""

    def __repr__(self) -> str:
        return str(self)


def describe(value: Any) -> str:
    """Describes shapes and dtypes of a pytree for errors, for example `{'x': float32[4, 12]}`."""
    leaves, tree = jax.tree.flatten(value)
    texts = [_Bare(f"{leaf.dtype.name}{list(leaf.shape)}") for leaf in leaves]
    try:
        return str(jax.tree.unflatten(tree, texts))
    except Exception:  # a class that computes with its leaves, as the error of `checkify.checkify`
        return f"{type(value).__name__}({', '.join(texts)})"


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
    texts = [describe_structure(tree) for tree in trees]
    return texts if len(set(texts)) > 1 else [str(tree) for tree in trees]


def num_bytes(shapes: Iterable[Any]) -> int:
    """The number of bytes that arrays of these shapes and dtypes take together."""
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)


def trees_equal(first: Any, second: Any) -> bool:
    """Whether two structures of pytrees are the same."""
    return bool(first == second)


def leaves_if_like(value: Any, expected: Any, *, may_vary: bool = False) -> list[Any] | None:
    """The leaves of a value, if `check_like` would return them as they are; for a small one in a tenth."""
    leaves, tree = jax.tree.flatten(value)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    if not trees_equal(tree, expected_tree):
        return None
    for leaf, aval in zip(leaves, expected_leaves, strict=True):
        is_array = type(leaf) is np.ndarray or isinstance(leaf, jax.Array)
        if not is_array or leaf.dtype != aval.dtype or not (may_vary or leaf.shape == aval.shape):
            return None
    return leaves


def check_like(value: Any, expected: Any, name: str, *, may_vary: bool = False) -> list[Any]:
    """Checks that a value is like another one. Returns its leaves, arrays with JAX's dtypes."""
    if (alike := leaves_if_like(value, expected, may_vary=may_vary)) is not None:
        return alike
    leaves, tree = jax.tree.flatten(value)
    expected_tree = jax.tree.structure(expected)
    actual, expected_shapes = _shapes_by_path(value), _shapes_by_path(expected)
    different = [
        (f"at {path}, " if path else "", describe(shape), describe(actual[path]))
        for path, shape in expected_shapes.items()
        if path in actual
        and (actual[path].dtype != shape.dtype or (not may_vary and actual[path].shape != shape.shape))
    ]
    if not trees_equal(tree, expected_tree):
        right, wrong = describe_structures(expected_tree, tree)
        parts = [f"{name} must be {right}, as the first one; got {wrong}."]
        # One array, whose path is empty: all leaves of the other would be named.
        is_one = "" in expected_shapes or "" in actual
        missing = [path for path in expected_shapes if path not in actual and not is_one]
        unexpected = [path for path in actual if path not in expected_shapes and not is_one]
        parts += [f"Missing: {', '.join(missing)}."] if missing else []
        parts += [f"Unexpected: {', '.join(unexpected)}."] if unexpected else []
        parts += [f"It must have, {path}{old}; got {new}." for path, old, new in different]
        raise ValueError(" ".join(parts))
    if different:
        differences = "; ".join(f"{path}{old}; got {new}" for path, old, new in different)
        if may_vary:
            raise ValueError(f"{name} must have the dtype of the first one, {differences}.")
        raise ValueError(
            f"{name} must have the shape and dtype of the first one, {differences}. Sizes are fixed: drop "
            "the remainder of a data set that does not fill its last batch (drop_remainder)."
        )
    paths = [f"{name}, at {path}" if path else name for path in actual]
    return [as_own(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]


def _shapes_by_path(value: Any) -> dict[str, jax.ShapeDtypeStruct]:
    paths_and_leaves = jax.tree_util.tree_flatten_with_path(value)[0]
    return {jax.tree_util.keystr(path): as_shape(leaf) for path, leaf in paths_and_leaves}


# Trees of lists, tuples and dicts as JSON.

# A value that JSON lacks becomes a dict with one of these keys.
_BYTES, _ARRAY, _TUPLE, _DICT = "bytes in base64", "array as npy in base64", "tuple", "items"


def encode_plain(leaf: Any) -> Any:
    """A number, string, boolean, bytes or NumPy array as JSON."""
    if type(leaf) in (bool, int, float, str):
        return leaf
    if isinstance(leaf, bytes):
        return {_BYTES: base64.b64encode(leaf).decode()}
    if isinstance(leaf, (np.ndarray, np.generic)):
        buffer = io.BytesIO()
        np.save(buffer, leaf, allow_pickle=False)
        return {_ARRAY: base64.b64encode(buffer.getvalue()).decode()}
    raise TypeError(type(leaf).__name__)


def encode_tree(tree: Any, encode_leaf: Callable[[Any], Any] = encode_plain) -> Any:
    """A tree as JSON."""
    if tree is None:
        return None
    if isinstance(tree, list):
        return [encode_tree(part, encode_leaf) for part in tree]
    if type(tree) is tuple:
        return {_TUPLE: [encode_tree(part, encode_leaf) for part in tree]}
    if isinstance(tree, dict):
        return {_DICT: [[encode_tree(key), encode_tree(part, encode_leaf)] for key, part in tree.items()]}
    return encode_leaf(tree)


def decode_tree(encoded: Any, decode_leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """The inverse of `encode_tree`."""
    if isinstance(encoded, list):
        return [decode_tree(part, decode_leaf) for part in encoded]
    if not isinstance(encoded, dict):
        return None if encoded is None else decode_leaf(encoded)
    ((kind, content),) = encoded.items()
    if kind == _BYTES:
        return base64.b64decode(content)
    if kind == _ARRAY:
        return np.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False)
    if kind in (_DICT, "dict"):  # the latter in programs that earlier versions exported
        return {decode_tree(key): decode_tree(part, decode_leaf) for key, part in content}
    parts = [decode_tree(part, decode_leaf) for part in content]
    if kind == _TUPLE:
        return tuple(parts)
    return None if kind == "none" else parts  # "list" is such an earlier kind, too
