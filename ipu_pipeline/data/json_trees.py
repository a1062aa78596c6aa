"""Trees of lists, tuples and dicts as JSON, and what lies in them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["decode", "encode", "encode_plain"]

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


def encode(tree: Any, encode_leaf: Callable[[Any], Any] = encode_plain) -> Any:
    """A tree as JSON."""
    if tree is None:
        return None
    if isinstance(tree, list):
        return [encode(part, encode_leaf) for part in tree]
    if type(tree) is tuple:
        return {_TUPLE: [encode(part, encode_leaf) for part in tree]}
    if isinstance(tree, dict):
        return {_DICT: [[encode(key), encode(part, encode_leaf)] for key, part in tree.items()]}
    return encode_leaf(tree)


def decode(encoded: Any, decode_leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """The inverse of `encode`."""
    if isinstance(encoded, list):
        return [decode(part, decode_leaf) for part in encoded]
    if not isinstance(encoded, dict):
        return None if encoded is None else decode_leaf(encoded)
    ((kind, content),) = encoded.items()
    if kind == _BYTES:
        return base64.b64decode(content)
    if kind == _ARRAY:
        return np.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False)
    if kind in (_DICT, "dict"):  # the latter in programs that earlier versions exported
        return {decode(key): decode(part, decode_leaf) for key, part in content}
    parts = [decode(part, decode_leaf) for part in content]
    if kind == _TUPLE:
        return tuple(parts)
    return None if kind == "none" else parts  # "list" is such an earlier kind, too
