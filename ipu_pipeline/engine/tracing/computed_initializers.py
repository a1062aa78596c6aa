"""Initial values that a stage computes: `get_variable("w", initializer=jnp.zeros(3))`.

In a function that is being traced, `jnp.zeros(3)` has no value yet. `get_variable` leaves a marker that
takes it. When the function has been traced, the equations that it depends on become a program of its own,
which makes the initial value whenever one is wanted. It may depend on nothing that the function is given.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing.faults import find_computing_line
from ipu_pipeline.engine.tracing.specs import VariableSpec, cast_constant, check_shape, make_spec
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["ComputedInitializer", "as_constant", "initial_value_p", "make_variable", "resolve"]

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
        given: tuple[int, ...] = tuple(initializer.shape)
        spec = make_spec(full_name, given if shape is None else shape, dtype, _no_value, trainable)
        check_shape(full_name, given, spec.shape)
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
    """Makes a list that has computed values one value; anything else is returned as it is."""
    is_list = isinstance(initializer, (list, tuple))
    if is_list and any(map(jax_compat.is_traced, jax.tree.leaves(initializer))):
        return jnp.asarray(initializer)
    return initializer


def _no_value(key: Any, shape: Any, dtype: Any) -> Any:
    raise AssertionError((key, shape, dtype))


def _lift(spec: VariableSpec) -> tuple[list[Any], Callable[[Sequence[Any], Any], Any] | None]:
    """The traced values that an initializer was made with, and a function of these and a key."""
    initializer = spec.initializer
    if not any(_captured(initializer, _DEPTH, set())):
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
        known = {*jaxpr.constvars, *(var for equation in jaxpr.eqns for var in equation.outvars)}
        needed = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
        if not all(isinstance(atom, jax_core.Literal) or atom in known for atom in needed):
            raise initializer.depends(place)
        initializer.resolve(program)


def _captured(value: Any, depth: int, seen: set[int]) -> Iterator[bool]:
    """True for each traced value that a function has: in its closure, its defaults, or its partials."""
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
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
                yield from _captured(leaf, depth - 1, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty: a name that has no value yet
        return None
