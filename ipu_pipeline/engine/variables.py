"""Variables: asked for by name while a function is traced, collected from its jaxpr afterwards.

`get_variable` leaves a marker equation in the jaxpr that is being traced, and `assign` another. What
traces the function (`stages`) turns the markers into inputs and outputs. A function is so traced once
only.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ipu_pipeline.engine import names

__all__ = [
    "Initializer",
    "VariableSpec",
    "assign",
    "assign_variable_p",
    "fresh_trace",
    "get_variable",
    "initial_value",
    "read_variable_p",
    "serial_numbers",
]

Initializer: TypeAlias = "Callable[[jax.Array, tuple[int, ...], Any], jax.Array]"


@dataclass(frozen=True, eq=False)
class VariableSpec:
    """What a variable is before it has a value.

    Attributes:
      name: the full name.
      shape: its shape.
      dtype: its dtype.
      initializer: `init(key, shape, dtype) -> array`.
      trainable: whether it has a gradient; always False for dtypes that have none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    initializer: Initializer
    trainable: bool

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype.name}{list(self.shape)}"


# JAX caches the traces of inner functions. A function that asks for variables or keys must be traced
# again in every stage, so each stage is traced in a context of its own, which the caches respect. Within
# one stage a trace that is used twice shows by the serial numbers of its markers.
_stage_trace = jax.make_user_context(None)
serial_numbers = itertools.count()


def fresh_trace() -> contextlib.AbstractContextManager[None]:
    """A context in which inner functions are traced anew."""
    context: contextlib.AbstractContextManager[None] = _stage_trace(next(serial_numbers))
    return context


read_variable_p = jex_core.Primitive("read_variable")
assign_variable_p = jex_core.Primitive("assign_variable")


@read_variable_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _read_abstract(*, spec: VariableSpec, serial: int) -> jax.core.ShapedArray:
    del serial
    return jax.core.ShapedArray(spec.shape, spec.dtype)


@assign_variable_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _assign_abstract(value: jax.core.ShapedArray, *, spec: VariableSpec) -> jax.core.ShapedArray:
    del value, spec
    return jax.core.ShapedArray((), np.dtype(np.int32))  # nobody reads it; a marker needs a result


def get_variable(
    name: str,
    shape: tuple[int, ...] | list[int] | None = None,
    dtype: Any = jnp.float32,
    initializer: Any = None,
    trainable: bool = True,
) -> jax.Array:
    """The value of a variable in the function being traced.

    Args:
      name: the name within the current scope.
      shape: its shape; None if `initializer` is an array, or if the variable exists.
      dtype: its dtype.
      initializer: `init(key, shape, dtype)` as in `jax.nn.initializers`, or a constant array or scalar.
        None: Glorot uniform for floating-point variables of rank 2 and more, zeros for others.
      trainable: whether a pipeline with an optimizer trains it. Integers and booleans are never trained.

    Returns:
      The value, a traced array of that shape and dtype. Within a stage, after `assign`, the new value.

    Raises:
      ValueError: the name, shape, dtype or initializer is not usable; or the variable exists, and
        neither its scope nor one around it was opened with `reuse=True`; or it exists with another
        shape or dtype.
      RuntimeError: nothing is being traced.
    """
    current = names.current_frame("get_variable")
    if not isinstance(name, str) or not all(name.split("/")):
        raise ValueError(
            f"get_variable: name must be a non-empty string without empty parts; got {name!r}."
        )
    full_name = names.join(names.current_scope(), name)
    existing = current.names.variables.get(full_name)
    if existing is None:
        spec = _make_spec(full_name, shape, dtype, initializer, trainable)
        current.names.variables[full_name] = spec
    else:
        spec = existing
        conflict = _find_conflict(spec, shape, dtype)
        if conflict is not None:
            if current.faults is None:
                raise conflict
            # What else is wrong shows with the shape that was asked for.
            current.faults.add_here(current, conflict)
            shape = spec.shape if shape is None else shape
            spec = _make_spec(full_name, shape, dtype, initializer, trainable)
            current.faults.stand_ins[full_name] = spec
    if current.recorder is not None:
        current.recorder.variables[full_name] = spec
    value: jax.Array = read_variable_p.bind(spec=spec, serial=next(serial_numbers))
    return value


def _find_conflict(spec: VariableSpec, shape: Any, dtype: Any) -> ValueError | None:
    """Why a variable that exists cannot be asked for in this way."""
    if not names.is_reusing():
        return ValueError(
            f"Variable {spec.name} already exists, disallowed. Did you mean to set reuse=True in "
            "variable_scope?"
        )
    wanted_shape = spec.shape if shape is None else tuple(shape)
    if wanted_shape != spec.shape or np.dtype(dtype) != spec.dtype:
        return ValueError(
            f"Trying to share variable {spec.name}, but specified shape {wanted_shape} and dtype "
            f"{np.dtype(dtype).name}, and found shape {spec.shape} and dtype {spec.dtype.name}."
        )
    return None


def assign(name: str, value: Any) -> None:
    """Gives a non-trainable variable a new value, once per micro-batch, within a stage.

    Args:
      name: the variable's name within the current scope, or its full name.
      value: the new value; the variable's shape and dtype. No gradient flows through it.

    Raises:
      ValueError: there is no such variable, it is trainable, or the shape or dtype differs.
      RuntimeError: not called within a stage.
    """
    current = names.current_frame("assign")
    if not current.is_stage:
        raise RuntimeError(f"assign({name!r}, ...) was called outside of a computational stage.")
    known = current.names.variables
    if current.faults is not None:
        known = {**known, **current.faults.stand_ins}
    spec = known.get(names.join(names.current_scope(), name)) or known.get(name)
    if spec is None:
        raise ValueError(
            f"assign: there is no variable {name!r} in scope {names.current_scope()!r}; get_variable "
            f"creates it. There are: {', '.join(known) or 'none'}."
        )
    if spec.trainable:
        raise ValueError(
            f"assign: variable {spec.name} is trainable, so the optimizer updates it. Create it with "
            "trainable=False to assign it in a stage."
        )
    value = jnp.asarray(value)
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"assign: variable {spec.name} is {spec.dtype.name}{list(spec.shape)}, but the value is "
            f"{value.dtype.name}{list(value.shape)}."
        )
    assign_variable_p.bind(jax.lax.stop_gradient(value), spec=spec)


def initial_value(spec: VariableSpec, key: jax.Array) -> jax.Array:
    """The value that a variable starts with.

    Args:
      spec: the variable.
      key: the session's random key; the variable's own is `fold_in(key, hash_name(name))`, so that the
        value depends on the seed and the name alone.

    Returns:
      An array of the variable's shape and dtype.

    Raises:
      ValueError: the initializer returns another shape or dtype.
    """
    own_key = key
    if getattr(spec.initializer, "needs_key", True):
        own_key = jax.random.fold_in(key, np.uint32(names.hash_name(spec.name)))
    made: Any = spec.initializer(own_key, spec.shape, spec.dtype)
    # A copy, since updates take its memory. That of a NumPy array compiles nothing.
    value = jax.device_put(made.copy()) if isinstance(made, np.ndarray) else jnp.array(made)
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"The initializer of variable {spec.name} must return {spec.dtype.name}{list(spec.shape)}; "
            f"it returned {value.dtype.name}{list(value.shape)}."
        )
    return value


def _make_spec(full_name: str, shape: Any, dtype: Any, initializer: Any, trainable: bool) -> VariableSpec:
    try:
        dtype = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"Variable {full_name}: {dtype!r} is not a dtype.") from error
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"Variable {full_name}: dtype {dtype.name} needs 64-bit mode; call "
            'jax.config.update("jax_enable_x64", True) first, or ask for another dtype.'
        )
    is_constant = initializer is not None and not callable(initializer)
    constant = np.asarray(initializer, dtype) if is_constant else None
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
        if constant.shape not in ((), shape):
            raise ValueError(
                f"Variable {full_name}: the initializer is an array of shape {constant.shape}, but "
                f"shape={shape}."
            )
        initializer = _constant_initializer(constant)
    elif initializer is None:
        initializer = (
            jax.nn.initializers.glorot_uniform()
            if is_inexact and len(shape) >= 2
            else jax.nn.initializers.zeros
        )
    return VariableSpec(full_name, shape, dtype, initializer, bool(trainable) and is_inexact)


def _constant_initializer(constant: np.ndarray[Any, Any]) -> Initializer:
    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key
        return jnp.broadcast_to(jnp.array(constant, dtype), shape)  # array copies, asarray need not

    return initialize
