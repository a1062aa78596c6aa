"""Makes users' values NumPy arrays of dtypes that JAX has; if that would change them, it is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["as_objects", "as_own", "as_plain", "cast_exactly", "is_key", "is_of_numbers", "is_readable"]


def as_objects(arrays: Sequence[Any]) -> np.ndarray[Any, Any]:
    """An array of objects with one axis, whose elements are the given arrays, of whatever shapes."""
    objects = np.empty(len(arrays), object)
    for number, array in enumerate(arrays):
        objects[number] = array
    return objects


def as_plain(value: Any, what: str) -> np.ndarray[Any, Any]:
    """Makes a value an array without a mask, in the byte order of this machine."""
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            number = np.ma.getmaskarray(value).sum()
            raise ValueError(
                f"{what} is a masked array: {number} of its {value.size} elements are masked, and "
                "arrays on devices have no masks. Fill them, array.filled(0), or pass the mask as an array "
                "of its own."
            )
        value = value.data
    array: np.ndarray[Any, Any] = np.asarray(value)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_own(value: Any, what: str) -> Any:
    """Makes a value an array of the dtype that it has in JAX. A JAX array is returned as it is.

    An array that has this dtype already is neither copied nor looked at.
    """
    if isinstance(value, jax.Array):
        return value
    array = value if type(value) is np.ndarray and value.dtype.isnative else as_plain(value, what)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if dtype == array.dtype else cast_exactly(array, dtype, what)


def cast_exactly(array: np.ndarray[Any, Any], dtype: Any, what: str) -> np.ndarray[Any, Any]:
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
    raise ValueError(f"{what}, of dtype {array.dtype}, does not fit {dtype.name}{reason}.")


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
