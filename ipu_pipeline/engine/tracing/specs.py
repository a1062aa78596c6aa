"""The specification of a variable before it has a value, and its initial value."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.tracing.initializers import draw, glorot_uniform
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.checks import hash_name
from ipu_pipeline.ground.errors import drop_traceback_note
from ipu_pipeline.ground.pytrees import is_of_numbers

Initializer: TypeAlias = "Callable[[jax.Array, tuple[int, ...], Any], jax.Array]"


@dataclass(frozen=True, eq=False)
class VariableSpec:
    """The specification of a variable before it has a value.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4)], num_micro_batches=1)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> spec = pipeline.variables["dense/kernel"]
      >>> spec.shape, spec.dtype, spec.trainable
      ((8, 4), dtype('float32'), True)

    Attributes:
      name: the full name.
      shape: its shape.
      dtype: its dtype.
      initializer: `init(key, shape, dtype) -> array`.
      trainable: whether it has a gradient; always False for dtypes that have none.
      is_on_host: whether it stays in host memory, as an array of NumPy.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    initializer: Initializer
    trainable: bool
    is_on_host: bool = False

    @property
    def is_row(self) -> bool:
        """Whether it is one layer's row of a variable of a model that `engine.split` has cut."""
        return getattr(self.initializer, "is_of_row", False)

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype.name}{list(self.shape)}"


# JAX caches the traces of inner functions. A function that asks for variables or keys must be traced
# again in every stage, so each stage is traced within `jax_compat.fresh_trace`. Within one stage a trace
# that is used twice shows by the serial numbers of its markers.
serial_numbers = itertools.count()


def initial_value(spec: VariableSpec, key: jax.Array) -> Any:
    """The value that a variable starts with.

    Returns:
      An array of the variable's shape and dtype; a NumPy array if it stays on the host.
    """
    if not spec.is_on_host:
        initial = _make_initial(spec, key)
        # A copy, since updates take its memory. Copying arrays compiles nothing.
        if isinstance(initial, jax.Array):
            value = jax.device_put(initial, initial.sharding, may_alias=False)
        elif isinstance(initial, np.ndarray):
            value = jax.device_put(initial.copy())
        else:
            value = jnp.array(initial)
    else:
        with jax.default_device(_find_cpu()):
            value = np.array(_make_initial(spec, key))
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"The initializer of variable {spec.name} must return {spec.dtype.name}{list(spec.shape)}; "
            f"it returned {value.dtype.name}{list(value.shape)}."
        )
    return value


def _find_cpu() -> Any:
    """JAX's CPU device, where big arrays can be made; None if only other platforms are enabled."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _make_initial(spec: VariableSpec, key: jax.Array) -> Any:
    if 0 in spec.shape:  # Keras's initializers divide by the sizes
        return jnp.zeros(spec.shape, spec.dtype)
    variable_key = key
    if getattr(spec.initializer, "needs_key", True):
        variable_key = jax.random.fold_in(key, np.uint32(hash_name(spec.name)))
    try:
        value: Any = draw(spec.initializer, variable_key, spec.shape, spec.dtype)
        if value is None:
            value = spec.initializer(variable_key, spec.shape, spec.dtype)
        if jax_compat.is_traced(value):
            value = jnp.array(value)  # raises if its trace has ended
    except Exception as error:
        drop_traceback_note(error)
        error.add_note(f"This happened while making the initial value of variable {spec!r}")
        if isinstance(error, jax.errors.UnexpectedTracerError):
            error.add_note(
                "  The initializer keeps a value that was computed in the function that asked for the "
                "variable, where values have no content yet. Compute it in the initializer, or outside."
            )
        if jnp.issubdtype(spec.dtype, jnp.floating) and spec.dtype.itemsize < 4:
            error.add_note(
                f"  An initializer that factorizes matrices, as orthogonal does, has no {spec.dtype.name}. "
                "Pass one that computes in float32 and casts: lambda key, shape, dtype: "
                "initializer(key, shape, jnp.float32).astype(dtype)."
            )
        raise
    return value


def dtype_of_constant(value: Any) -> np.dtype[Any]:
    """The dtype that TensorFlow 1 gives a variable whose initializer is a constant, if JAX has it."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))
    constant_dtype = np.asarray(value).dtype
    return _DTYPES_OF_PYTHON.get(constant_dtype.kind, constant_dtype)


_DTYPES_OF_PYTHON = {kind: np.dtype(dtype) for kind, dtype in {"i": "i4", "f": "f4", "c": "c8"}.items()}


def make_spec(full_name: str, shape: Any, dtype: Any, initializer: Any, trainable: bool) -> VariableSpec:
    """Makes the specification of a variable that was asked for; see `get_variable`."""
    requested = dtype
    try:
        dtype = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"Variable {full_name}: {dtype!r} is not a dtype.") from error
    if requested is None or not is_of_numbers(dtype):
        raise ValueError(f"Variable {full_name}: {requested!r} is not a dtype of numbers or booleans.")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"Variable {full_name}: dtype {dtype.name} needs 64-bit mode; call "
            'jax.config.update("jax_enable_x64", True) first, or ask for another dtype.'
        )
    is_constant = initializer is not None and not callable(initializer)
    constant = cast_constant(full_name, initializer, dtype) if is_constant else None
    if shape is None:
        if constant is None:
            raise ValueError(
                f"Shape of a new variable ({full_name}) must be fully defined, but instead was None."
            )
        shape = constant.shape
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape):
        raise ValueError(
            f"Shape of a new variable ({full_name}) must be non-negative integers, but instead was {shape}."
        )
    shape = tuple(int(size) for size in shape)
    is_inexact = bool(jnp.issubdtype(dtype, jnp.inexact))
    if constant is not None:
        check_shape(full_name, constant.shape, shape)
        initializer = _constant_initializer(constant)
    elif initializer is None:
        initializer = glorot_uniform if is_inexact else jax.nn.initializers.zeros
    return VariableSpec(full_name, shape, dtype, initializer, bool(trainable) and is_inexact)


def check_shape(full_name: str, actual: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises a ValueError if a constant initializer is neither a scalar nor of the variable's shape."""
    if actual not in ((), shape):
        raise ValueError(
            f"Variable {full_name}: the initializer is an array of shape {actual}, but shape={shape}."
        )


def cast_constant(full_name: str, constant: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Makes a constant initializer an array of a variable's dtype."""
    array = np.asarray(constant)
    is_inexact = bool(jnp.issubdtype(dtype, jnp.inexact))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's warnings, about what is an error here
        cast = array.astype(dtype)
        is_exact = is_inexact or np.array_equal(cast, array)
    if not is_exact or (np.iscomplexobj(array) and not np.issubdtype(dtype, np.complexfloating)):
        raise ValueError(
            f"Variable {full_name}: the initializer {constant!r} has values that {dtype.name} does not "
            "have. Give it another dtype, or a constant of its own."
        )
    return cast


def _constant_initializer(constant: np.ndarray[Any, Any]) -> Initializer:
    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key
        return jnp.broadcast_to(jnp.array(constant, dtype), shape)  # array copies, asarray need not

    return initialize
