"""Variables are asked for by name while a function is traced, and collected from its jaxpr afterwards.

`get_variable` leaves a marker equation in the jaxpr that is being traced, and `assign` another. What traces
the function (`stages`) turns the markers into inputs and outputs. A function is therefore traced only once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.tracing import frames, scopes
from ipu_pipeline.engine.tracing.computed_initializers import as_constant, make_variable
from ipu_pipeline.engine.tracing.initializers import find_initializer
from ipu_pipeline.engine.tracing.specs import VariableSpec, dtype_of_constant, serial_numbers
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.names import join

__all__ = ["assign", "assign_add", "assign_sub", "assign_variable_p", "get_variable", "read_variable_p"]

read_variable_p = jax_core.Primitive("read_variable")
assign_variable_p = jax_core.Primitive("assign_variable")


@read_variable_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _read_abstract(*, spec: VariableSpec, serial: int) -> Any:
    del serial
    return jax_compat.shaped_array(spec.shape, spec.dtype)


@assign_variable_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _assign_abstract(value: Any, *, spec: VariableSpec) -> Any:
    del value, spec
    return jax_compat.shaped_array((), np.dtype(np.int32))  # never read; a marker needs a result


@read_variable_p.def_impl  # type: ignore[untyped-decorator]
def _read_value(*, spec: VariableSpec, serial: int) -> Any:
    del serial
    variables = frames.current_values("get_variable").variables
    if spec.name not in variables:
        raise RuntimeError(
            f"Op by op, a stage asks for a variable {spec.name}, which it did not when it was traced. The "
            "body of a loop is called for each iteration then, so names that are counted differ: give "
            "layers in it names."
        )
    return variables[spec.name]


@assign_variable_p.def_impl  # type: ignore[untyped-decorator]
def _assign_nothing(value: Any, *, spec: VariableSpec) -> Any:
    del value, spec
    return np.int32(0)


def get_variable(
    name: str,
    shape: tuple[int, ...] | list[int] | None = None,
    dtype: Any = None,
    initializer: Any = None,
    trainable: bool = True,
    *,
    regularizer: Any = None,
    use_resource: bool | None = True,
) -> jax.Array:
    """Returns the value of a variable in the function being traced.

    Example:
      >>> def stage(x):
      ...     kernel = ipu.get_variable("kernel", [16, 10], initializer=jax.nn.initializers.orthogonal())
      ...     return x @ kernel
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 16], np.float32))
      >>> pipeline.variables
      {'kernel': kernel: float32[16, 10]}

    Args:
      name: the name within the current scope.
      shape: its shape; None if `initializer` is an array, or if the variable exists.
      dtype: its dtype; None: the scope's, if it was opened with one; else the dtype of `initializer`, if
        this is a constant (int32 for `initializer=1`, as in TensorFlow 1); else float32.
      initializer: `init(key, shape, dtype)` as in `jax.nn.initializers`, its name in Keras
        ("glorot_uniform"), or a constant array or scalar, which the stage may compute (`jnp.zeros(3)`).
        None: the scope's, by default Glorot uniform for floating-point variables of any rank, as in
        TensorFlow 1, and zeros for others.
      trainable: whether a pipeline with an optimizer trains it. Integers and booleans are never trained.
      regularizer: warns: TensorFlow 1 collects what it gives, for programs that add it to their loss. Add
        it where the loss is computed, or use `optax.add_decayed_weights`.
      use_resource: only True (or None) is possible; there for TensorFlow 1 code.

    Returns:
      The value, a traced array of that shape and dtype. Within a stage, after `assign`, the new value.

    Raises:
      ValueError: the name, shape, dtype or initializer is not usable, or `use_resource` is False. Or the
        variable exists, and neither its scope nor one around it was opened with `reuse=True`; or it
        exists with another shape or dtype.
      RuntimeError: nothing is being traced.
    """
    frames.current_frame("get_variable")
    if not isinstance(name, str) or not all(name.split("/")):
        raise ValueError(
            f"get_variable: name must be a non-empty string without empty parts; got {name!r}."
        )
    if use_resource not in (None, True):
        raise ValueError(
            "get_variable: use_resource must be True; variables here are always resource variables."
        )
    if regularizer is not None:
        warnings.warn(
            f"The regularizer of variable {name!r} has no effect: TensorFlow 1 collects what it gives, for "
            "programs that add it to their loss. Add it where the loss is computed, or use "
            "optax.add_decayed_weights.",
            stacklevel=2,
        )
    scope = scopes.current()
    initializer = scope.initializer if initializer is None else find_initializer(as_constant(initializer))
    dtype = scope.dtype if dtype is None else dtype
    if dtype is None:
        is_constant = initializer is not None and not callable(initializer)
        dtype = dtype_of_constant(initializer) if is_constant else jnp.float32
    getter: Callable[..., Any] = _get
    for custom_getter in scope.custom_getters:
        getter = functools.partial(custom_getter, getter)
    value: jax.Array = getter(
        join(scope.name, name),
        shape=shape,
        dtype=dtype,
        initializer=initializer,
        regularizer=None,
        trainable=trainable and scope.trainable,
    )
    return value


def _get(
    full_name: str,
    shape: Any = None,
    dtype: Any = jnp.float32,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool = True,
) -> jax.Array:
    """Returns the value of a variable, after the scopes' defaults; custom getters call it."""
    del regularizer  # `get_variable` has warned about it
    current = frames.current_frame("get_variable")
    existing = current.names.variables.get(full_name)
    if existing is None:
        spec = make_variable(full_name, shape, dtype, initializer, trainable)
        current.names.variables[full_name] = spec
    else:
        spec = existing
        # Op by op, the body of a loop is called for each iteration.
        conflict = _find_conflict(spec, shape, dtype) if current.values is None else None
        if conflict is not None:
            if current.faults is None:
                raise conflict
            # Other faults show with the shape that was asked for.
            current.faults.add_here(current.place, conflict, current.given)
            shape = spec.shape if shape is None else shape
            spec = make_variable(full_name, shape, dtype, initializer, trainable)
            current.faults.stand_ins[full_name] = spec
    current.note_variable(spec)
    value: jax.Array = read_variable_p.bind(spec=spec, serial=next(serial_numbers))
    current.names.reads[id(value)] = value, spec
    return value


def _find_conflict(spec: VariableSpec, shape: Any, dtype: Any) -> ValueError | None:
    """The error if a variable that exists cannot be asked for in this way; else None."""
    if not scopes.is_reusing():
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


def assign(name: str | jax.Array, value: Any) -> None:
    """Gives a non-trainable variable a new value, once per micro-batch, within a stage.

    The value is a new array: with all stages on one device, `donate` lets it take the old one's memory.

    Example:
      >>> def stage(x):
      ...     count = ipu.get_variable("count", [], initializer="zeros", trainable=False)
      ...     ipu.assign("count", count + 1)
      ...     return x
      >>> x = np.ones(4, np.float32)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=3)
      >>> state, _ = pipeline.step(pipeline.init(jax.random.key(0), x), [x, x, x])
      >>> state.variables["count"]
      Array(3., dtype=float32)

    Args:
      name: the variable's name within the current scope, or its full name; or the array that
        `get_variable` returned for it, as TensorFlow 1 takes the variable.
      value: the new value, of the variable's shape and dtype. No gradient flows through it.

    Raises:
      TypeError: the variable is given neither by its name nor as what `get_variable` returned.
      ValueError: there is no such variable, it is trainable, or the shape or dtype differs.
      RuntimeError: not called within a stage.
    """
    _give("assign", name, lambda _before: value)


def assign_add(name: str | jax.Array, value: Any) -> None:
    """Adds to a non-trainable variable, as `assign` gives it a new value.

    Example:
      >>> def stage(x):
      ...     ipu.assign_add(ipu.get_variable("count", [], np.int32, trainable=False), 1)
      ...     return x
      >>> x = np.ones(4, np.float32)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=3)
      >>> state, _ = pipeline.step(pipeline.init(jax.random.key(0), x), [x, x, x])
      >>> state.variables["count"]
      Array(3, dtype=int32)

    Args:
      name: see `assign`.
      value: what is added to the variable's value here, after what was assigned before.

    Raises:
      Others: the errors of `assign`.
    """
    _give("assign_add", name, lambda before: before + value)


def assign_sub(name: str | jax.Array, value: Any) -> None:
    """Subtracts from a non-trainable variable, as `assign_add` adds.

    Example:
      >>> def stage(x):
      ...     ipu.assign_sub(ipu.get_variable("left", [], initializer=9, trainable=False), 2)
      ...     return x
      >>> x = np.ones(4, np.float32)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=3)
      >>> state, _ = pipeline.step(pipeline.init(jax.random.key(0), x), [x, x, x])
      >>> state.variables["left"]
      Array(3, dtype=int32)
    """
    _give("assign_sub", name, lambda before: before - value)


def _give(what: str, name: str | jax.Array, compute: Callable[[jax.Array], Any]) -> None:
    """Gives a variable the value that is computed from the one that it has."""
    current = frames.current_frame(what)
    if not current.is_stage:
        raise frames.OutsideOfBodyError(
            f"{what}({name!r}, ...) was called outside of a computational stage."
        )
    known = current.names.variables
    if current.faults is not None:
        known = {**known, **current.faults.stand_ins}
    if isinstance(name, str):
        spec = known.get(join(scopes.current_scope(), name)) or known.get(name)
    elif id(name) in current.names.reads:
        spec = current.names.reads[id(name)][1]
    else:
        raise TypeError(
            f"{what}: name must be a variable's name, or the array that get_variable returned for it, and "
            f"not what was computed from that; got {type(name).__name__}."
        )
    if spec is None:
        raise ValueError(
            f"{what}: there is no variable {name!r} in scope {scopes.current_scope()!r}; get_variable "
            f"creates it. There are: {', '.join(known) or 'none'}."
        )
    if spec.trainable:
        raise ValueError(
            f"{what}: variable {spec.name} is trainable, so the optimizer updates it. Create it with "
            "trainable=False to assign it in a stage."
        )
    value = jnp.asarray(compute(read_variable_p.bind(spec=spec, serial=next(serial_numbers))))
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"{what}: variable {spec.name} is {spec.dtype.name}{list(spec.shape)}, but the value is "
            f"{value.dtype.name}{list(value.shape)}."
        )
    assign_variable_p.bind(jax.lax.stop_gradient(value), spec=spec)
