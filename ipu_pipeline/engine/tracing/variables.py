"""Variables of stages: `get_variable`, `assign`, scopes of names, and computed initial values."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames, scopes
from ipu_pipeline.engine.tracing.faults import find_computing_line
from ipu_pipeline.engine.tracing.initializers import find_initializer
from ipu_pipeline.engine.tracing.specs import (
    VariableSpec,
    cast_constant,
    check_shape,
    dtype_of_constant,
    make_spec,
    serial_numbers,
)
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.checks import check_name, join
from ipu_pipeline.ground.pytrees import is_of_numbers


class _Reuse(enum.Enum):
    AUTO_REUSE = 1


AUTO_REUSE = _Reuse.AUTO_REUSE  # the same as True


class VariableScope(str):
    """A scope's full name. `variable_scope` takes it to open the scope again, from anywhere."""

    _scope: scopes.Scope

    @staticmethod
    def of(scope: scopes.Scope) -> VariableScope:
        """Makes the full name of a scope."""
        name = VariableScope(scope.name)
        name._scope = scope
        return name

    @property
    def scope(self) -> scopes.Scope:
        """The scope itself, with the defaults for variables."""
        return self._scope

    @property
    def name(self) -> str:
        """The full name."""
        return str(self)

    def reuse_variables(self) -> None:
        """Lets the rest of the scope's block share variables that exist.

        Raises:
          RuntimeError: the scope is not the innermost one, or nothing is being traced.
        """
        if not self:
            frames.current_frame("reuse_variables of the outermost scope")
        if scopes.current_scope() != self:
            raise RuntimeError(
                f"reuse_variables: the scope {self.name!r} is not the innermost one, which is "
                f"{scopes.current_scope()!r}. Call it within its own block."
            )
        scopes.start_reusing()


def get_variable_scope() -> VariableScope:
    """Returns the innermost variable scope; outside of all scopes its name is "".

    Example:
      >>> def stage(x):
      ...     with ipu.variable_scope("encoder"):
      ...         print(ipu.get_variable_scope().name)
      ...     return x
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones(4, np.float32))
      encoder
    """
    return VariableScope.of(scopes.current())


@contextlib.contextmanager
def variable_scope(
    name: str | VariableScope | None = None,
    default_name: str | None = None,
    *,
    initializer: Any = None,
    custom_getter: Callable[..., Any] | None = None,
    reuse: Any = None,
    dtype: Any = None,
    use_resource: bool | None = True,
) -> Iterator[VariableScope]:
    """Puts `name/` before the names of variables inside the `with` block.

    Scopes nest. A scope may be opened again, but `get_variable` returns an existing variable only with
    `reuse=True`, which inner scopes inherit; a variable that does not exist yet is then created.

    Example:
      >>> def stage(x):
      ...     with ipu.variable_scope("encoder"):
      ...         kernel = ipu.get_variable("kernel", [16, 16])
      ...     with ipu.variable_scope("encoder", reuse=True):
      ...         return x @ kernel @ ipu.get_variable("kernel", [16, 16])
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 16], np.float32))
      >>> list(pipeline.variables)
      ['encoder/kernel']

    Args:
      name: one or more names joined by "/"; or a scope that `variable_scope` yielded, which is opened
        again. None: `default_name`.
      default_name: used if `name` is None: this name, or with `_1`, `_2`, ... the first one that is new in
        the surrounding scope.
      initializer: the default initializer of variables inside, see `get_variable`.
      custom_getter: called in place of `get_variable` inside, as
        `custom_getter(getter, full_name, shape=, dtype=, initializer=, regularizer=, trainable=)`; its
        result is the result of `get_variable`. `getter` takes the same arguments except itself, and makes
        or finds the variable. An inner scope's function is called first, with the outer one as its getter.
      reuse: True or `AUTO_REUSE` lets the block share existing variables; with None or False the
        surrounding scopes decide.
      dtype: the default dtype of variables inside.
      use_resource: only True (or None) is possible; accepted for TensorFlow 1 code.

    Yields:
      The scope.

    Raises:
      TypeError: `custom_getter` cannot be called, or the dtype is not one of numbers or booleans.
      ValueError: the name is empty or has an empty part, `reuse` is something else, there is no
        initializer of that name, or `use_resource` is False.
      RuntimeError: `default_name` is used, and nothing is being traced.
    """
    if reuse not in (None, True, False, AUTO_REUSE):
        raise ValueError(f"variable_scope: reuse must be True, AUTO_REUSE, False or None; got {reuse!r}.")
    if use_resource not in (None, True):
        raise ValueError(
            "variable_scope: use_resource must be True; variables here are always resource variables."
        )
    if custom_getter is not None and not callable(custom_getter):
        raise TypeError(f"variable_scope: custom_getter must be a function; got {custom_getter!r}.")
    if dtype is not None and not is_of_numbers(np.dtype(dtype)):
        raise TypeError(f"variable_scope: dtype must be one of numbers or booleans; got {dtype!r}.")
    current = scopes.current()
    full_name = _full_name(current.name, name, default_name)
    around = name.scope if isinstance(name, VariableScope) else current
    scope = dataclasses.replace(
        around,
        name=full_name,
        reuse=current.reuse or around.reuse or bool(reuse),
        dtype=around.dtype if dtype is None else dtype,
        initializer=around.initializer if initializer is None else find_initializer(initializer),
        custom_getters=(*around.custom_getters, *([] if custom_getter is None else [custom_getter])),
    )
    with scopes.opened(scope):
        yield VariableScope.of(scope)


def _full_name(around: str, name: Any, default_name: Any) -> str:
    if isinstance(name, VariableScope):
        return str(name)
    if name is None and default_name is not None:
        check_name("variable_scope: default_name", default_name)
        opened = frames.current_frame("variable_scope with a default_name").names.opened_scopes
        endings = itertools.chain([""], (f"_{number}" for number in itertools.count(1)))
        candidates = (join(around, default_name + ending) for ending in endings)
        chosen = next(candidate for candidate in candidates if candidate not in opened)
        opened.add(chosen)
        return chosen
    check_name("variable_scope: name", name)
    frame = frames.find_frame()
    if frame is not None:
        frame.names.opened_scopes.add(join(around, name))
    return join(around, name)


# `get_variable` leaves a marker equation in the jaxpr that is being traced, and `assign` another. What
# traces the function (`stages`) turns the markers into inputs and outputs.

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
    check_name("get_variable: name", name)
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
    if existing is None:  # also with reuse=True: a program that evaluates is traced before any exists
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
    """Finds the error if an existing variable cannot be asked for in this way; else None."""
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


def _give(caller: str, name: str | jax.Array, compute: Callable[[jax.Array], Any]) -> None:
    """Assigns a variable the value that is computed from its present one."""
    current = frames.current_frame(caller)
    if not current.is_stage:
        raise frames.OutsideOfBodyError(
            f"{caller}({name!r}, ...) was called outside of a computational stage."
        )
    variables = current.names.variables
    if current.faults is not None:
        variables = {**variables, **current.faults.stand_ins}
    if isinstance(name, str):
        spec = variables.get(join(scopes.current_scope(), name)) or variables.get(name)
    elif id(name) in current.names.reads:
        spec = current.names.reads[id(name)][1]
    else:
        raise TypeError(
            f"{caller}: name must be a variable's name, or the array that get_variable returned for it, "
            f"and not what was computed from that; got {type(name).__name__}."
        )
    if spec is None:
        raise ValueError(
            f"{caller}: there is no variable {name!r} in scope {scopes.current_scope()!r}; get_variable "
            f"creates it. There are: {', '.join(variables) or 'none'}."
        )
    if spec.trainable:
        raise ValueError(
            f"{caller}: variable {spec.name} is trainable, so the optimizer updates it. Create it with "
            "trainable=False to assign it in a stage."
        )
    value = jnp.asarray(compute(read_variable_p.bind(spec=spec, serial=next(serial_numbers))))
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"{caller}: variable {spec.name} is {spec.dtype.name}{list(spec.shape)}, but the value is "
            f"{value.dtype.name}{list(value.shape)}."
        )
    assign_variable_p.bind(jax.lax.stop_gradient(value), spec=spec)


# Initial values that a stage computes: `get_variable("w", initializer=jnp.zeros(3))`.
#
# In a function that is being traced, `jnp.zeros(3)` has no value yet. `get_variable` leaves a marker that
# takes it. When the function has been traced, the equations that it depends on become a program of its own,
# which makes the initial value. It may depend on nothing that the function is given.
# (`jax.ensure_compile_time_eval` would start a backend, and make constants of all arrays of a stage.)

_DEPTH = 4  # of functions within functions in which traced values are looked for

initial_value_p = jax_core.Primitive("initial_value")


@initial_value_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _abstract(*values: Any, spec: VariableSpec) -> Any:
    del values, spec
    return jax_compat.shaped_array((), np.dtype(np.int32))  # never read; a marker needs a result


class ComputedInitializer:
    """An initializer that needs values which the function being traced computes."""

    def __init__(
        self, full_name: str, values: Sequence[Any], finish: Callable[[Sequence[Any], Any], Any] | None
    ) -> None:
        """Begins without the values."""
        self._full_name = full_name
        self._finish = finish
        self._line = find_computing_line(values[0])
        self._program: Callable[[], Sequence[Any]] | None = None
        self.needs_key = finish is not None  # see `initial_value`

    def resolve(self, program: Callable[[], Sequence[Any]]) -> None:
        """Takes the program that computes the values."""
        self._program = program

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes the initial value."""
        assert self._program is not None
        values = self._program()
        if self._finish is not None:
            return self._finish(values, key)
        (value,) = values
        return jnp.broadcast_to(jnp.asarray(cast_constant(self._full_name, value, np.dtype(dtype))), shape)

    def depends(self, place: str) -> ValueError:
        """The error if a value depends on what a function is given."""
        line = f" (computed at {self._line})" if self._line else ""
        return ValueError(
            f"Variable {self._full_name}: its initializer needs a value{line} that depends on what {place} "
            "is given: inputs, variables or random keys. A variable starts before there are any. Give an "
            "array that depends on none of them, or a function init(key, shape, dtype)."
        )


def make_variable(
    full_name: str, shape: Any, dtype: Any, initializer: Any, trainable: bool
) -> VariableSpec:
    """Makes the specification of a variable that a function being traced asks for; see `get_variable`."""
    if callable(initializer):
        spec = make_spec(full_name, shape, dtype, initializer, trainable)
        values, finish = _lift(spec)
    elif jax_compat.is_traced(initializer):
        constant_shape: tuple[int, ...] = tuple(initializer.shape)
        spec = make_spec(full_name, constant_shape if shape is None else shape, dtype, _no_value, trainable)
        check_shape(full_name, constant_shape, spec.shape)
        values, finish = [initializer], None
    else:
        return make_spec(full_name, shape, dtype, initializer, trainable)
    if not values:
        return spec
    computed = ComputedInitializer(full_name, values, finish)
    spec = dataclasses.replace(spec, initializer=computed)
    try:
        initial_value_p.bind(*values, spec=spec)
    except NotImplementedError:  # within jax.grad or jax.vmap, which have no rule for it
        raise computed.depends("the function that is transformed") from None
    return spec


def as_constant(initializer: Any) -> Any:
    """Joins a list that has computed values to one value; anything else is returned as it is."""
    is_list = isinstance(initializer, (list, tuple))
    if is_list and any(map(jax_compat.is_traced, jax.tree.leaves(initializer))):
        return jnp.asarray(initializer)
    return initializer


def _no_value(key: Any, shape: Any, dtype: Any) -> Any:
    raise AssertionError((key, shape, dtype))


def _lift(spec: VariableSpec) -> tuple[list[Any], Callable[[Sequence[Any], Any], Any] | None]:
    """The traced values that an initializer was made with, and a function of these and a key."""
    initializer = spec.initializer
    if not any(_find_traced(initializer, _DEPTH, set())):
        return [], None
    try:
        closed_jaxpr = jax.make_jaxpr(lambda key: initializer(key, spec.shape, spec.dtype))(
            jax.eval_shape(jax.random.key, 0)
        )
    except jax.errors.JAXTypeError:  # it computes with NumPy, so it cannot be traced
        return [], None
    lifted, values = jaxprs.lift_captures(closed_jaxpr)

    def finish(values: Sequence[Any], key: Any) -> Any:
        return jax_core.jaxpr_as_fun(lifted)(*values, key)[0]

    return values, finish


def resolve(
    equations: list[Any],
    constants: dict[Any, Any],
    marked: Iterable[tuple[VariableSpec, Sequence[Any]]],
    place: str,
) -> None:
    """Makes the programs of initial values that a function computes."""
    for spec, atoms in marked:
        initializer = spec.initializer
        assert isinstance(initializer, ComputedInitializer)
        program = jaxprs.extract(jaxprs.FlatJaxpr([], equations, [], constants), atoms)
        jaxpr = program.closed_jaxpr.jaxpr
        computed = {*jaxpr.constvars, *(var for equation in jaxpr.eqns for var in equation.outvars)}
        read_atoms = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
        if not computed.issuperset(jaxprs.variables_in(read_atoms)):
            raise initializer.depends(place)
        initializer.resolve(program)


def _find_traced(value: Any, depth: int, visited: set[int]) -> Iterator[bool]:
    """Yields True for each traced value that a function has: in its closure, defaults or partials."""
    if id(value) in visited or depth == 0:
        return
    visited.add(id(value))
    parts: list[Any] = []
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, types.FunctionType):
        parts = [_content(cell) for cell in value.__closure__ or ()]
        parts += [value.__defaults__, value.__kwdefaults__]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif hasattr(value, "__wrapped__"):  # as of jax.jit
        parts = [value.__wrapped__]
    for part in parts:
        for leaf in jax.tree.leaves(part):
            if jax_compat.is_traced(leaf):
                yield True
            elif callable(leaf):
                yield from _find_traced(leaf, depth - 1, visited)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty: a name that has no value yet
        return None
