"""Captures of stages: traced values from around, and modules whose parameters become constants."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.tracing.faults import find_computing_line, is_of_library
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.pytrees import describe

Result = TypeVar("Result")
Rebind: TypeAlias = "Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]]"


class Captures:
    """The traced values that the functions of one pipeline captured.

    Attributes:
      values: the captured traced values, each once. The pipeline takes them as inputs, after those that it
        was given.
    """

    def __init__(
        self,
        may_capture: Callable[[Any], bool] | None = None,
        find_name: Callable[[Any], str | None] | None = None,
    ) -> None:
        """Begins without captured values.

        Args:
          may_capture: says whether a traced value is a placeholder's, and may be captured; None: none may.
          find_name: returns the name of a value that may not be captured, for the error about it.
        """
        self._may_capture = may_capture
        self._find_name = find_name
        self.values: list[Any] = []
        self._rebind: Rebind | None = None  # set by `release`

    def release(self, rebind: Rebind) -> None:
        """Forgets the values. `rebind` makes functions capture others in their place within a block."""
        self.values.clear()
        self._rebind = rebind

    def trace_again(
        self, avals: Sequence[jax.ShapeDtypeStruct], trace: Callable[[Captures], Result]
    ) -> Result:
        """Traces the functions once more; captured values keep their positions.

        Args:
          avals: shapes and dtypes of the captured values.
          trace: traces the functions, with the captures that it is given.

        Returns:
          What `trace` returns.
        """
        again, rebind = Captures(self._may_capture, self._find_name), self._rebind
        if rebind is None or not avals:  # they are still there, or there are none
            again.values += self.values
            return trace(again)
        results: list[Result] = []

        def trace_rebound(*values: Any) -> tuple[()]:
            again.values += values
            with rebind(values):
                results.append(trace(again))
            return ()

        jax.make_jaxpr(trace_rebound)(*avals)
        return results[0]

    def find_number(self, value: Any) -> int | None:
        """The position of a traced function's constant among `values`; None if it is not a traced value."""
        if not jax_compat.is_traced(value):
            return None
        for number, captured in enumerate(self.values):
            if captured is value:
                return number
        self.values.append(value)
        return len(self.values) - 1

    def check(
        self,
        constants: Iterable[Any],
        place: str,
        reads: Mapping[int, tuple[object, VariableSpec]] = MappingProxyType({}),
    ) -> None:
        """Raises if a traced function captured a value that it may not capture.

        Args:
          constants: the constants of the function's jaxpr.
          place: what errors call it.
          reads: the values of variables that functions of the same program got, see `frames.ProgramNames`.

        Raises:
          ValueError: it did.
        """
        allowed = self._may_capture
        traced = [value for value in constants if jax_compat.is_traced(value)]
        wrong = [value for value in traced if allowed is None or not allowed(value)]
        for value in wrong:
            if id(value) in reads:
                raise ValueError(_describe_variable(reads[id(value)][1], place))
        if wrong:
            described = ", ".join(map(self._describe, wrong))
            raise ValueError(
                f"Trying to capture the tensor {described} in {place}, which may only use its arguments"
                f"{'' if allowed is None else ' and placeholders'}: pass the value through `inputs` or the "
                "infeed, and on through the stages in between."
            )

    def _describe(self, value: Any) -> str:
        name, shape = self._find_name(value) if self._find_name else None, describe(value)
        if name:
            return f"{name} ({shape})"
        line = find_computing_line(value)
        return f"{shape} (computed at {line})" if line else f"{shape} (a computed value)"


def _describe_variable(spec: VariableSpec, place: str) -> str:
    scope, _separator, name = spec.name.rpartition("/")
    return (
        f"{place} uses the value of variable {spec.name} that another function got. Each stage asks for "
        f"the variables that it uses: `with variable_scope({scope!r}, reuse=True): "
        f"get_variable({name!r})`. The gradients of stages that share a variable are added. Or return the "
        "value from the other stage, and pass it on."
    )


# Modules whose parameters have become constants of a stage, where an optimizer does not train them.
#
# A module of Flax nnx has its parameters in it. If a stage only calls it, they are arrays from around the
# stage, of which JAX makes constants. Arrays as such may be meant to be constants. The parameters of a
# module are not, in training. No library of modules is imported for this.

_DEPTH = 8  # of values within values in which modules are looked for
_MAX_VALUES = 10_000  # that are looked at


def check_modules(function: Callable[..., Any], constants: Iterable[Any], place: str) -> None:
    """Raises if parameters of a module are constants of a stage that is to be trained."""
    constant_ids = {id(value) for value in constants if jnp.issubdtype(value.dtype, jnp.floating)}
    nnx = sys.modules.get("flax.nnx")
    if not constant_ids:
        return
    if nnx is not None:
        for name, value in itertools.islice(_walk(function, "", _DEPTH, set()), _MAX_VALUES):
            is_module = isinstance(value, nnx.Module)
            if is_module and _has(jax.tree.leaves(nnx.state(value, nnx.Param)), constant_ids):
                uses = f"uses {name}," if name else "is"
                raise ValueError(
                    f"{place} {uses} the Flax module {type(value).__name__}: its parameters would be "
                    "constants, which are not trained. Take them out by nnx.split, give them to the "
                    "pipeline (parameters=) and merge them in the stage, as examples/flax_nnx.py does. Or "
                    "call ipu_pipeline.layers.Flax(module) in the stage, with trainable=False if it is not "
                    "to be trained."
                )
    if not jax.tree_util.all_leaves([function]) and _has(jax.tree.leaves(function), constant_ids):
        raise ValueError(
            f"{place} is a pytree that can be called: its arrays would be constants, which are not "
            "trained. Give it as parameters of a stage that calls it: Pipeline([lambda module, *inputs: "
            "module(*inputs)], parameters=[module]). If it is not to be trained, make the stage a function "
            "around it: lambda *inputs: module(*inputs)."
        )


def _has(leaves: Iterable[Any], ids: set[int]) -> bool:
    return any(id(leaf) in ids for leaf in leaves)


def _walk(value: Any, name: str, depth: int, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields all that a function can use: its closure, globals that it names, partials, attributes, ...

    Values come with their names, which are empty for the function itself and what only wraps it.
    """
    if id(value) in visited:
        return
    visited.add(id(value))
    yield name, value
    if depth > 0:
        for part_name, part in _parts(value, name):
            yield from _walk(part, part_name, depth - 1, visited)


def _parts(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        bound = [(name or "a value bound to it", part) for part in value.args]
        return [(name, value.func), *bound, *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [(name, value.__self__), (name, value.__func__)]
    if isinstance(value, types.FunctionType):
        return list(_parts_of_function(value, name))
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(name, part) for part in value]
    if isinstance(value, dict):
        return [(name, part) for part in value.values()]
    if hasattr(value, "__wrapped__"):  # as of jax.jit
        return [(name, value.__wrapped__)]
    attributes = getattr(value, "__dict__", {})
    if type(value).__module__.startswith("ipu_pipeline."):  # as a Stage, whose names are not the user's
        return [(name, part) for part in attributes.values()]
    if isinstance(value, (type, types.ModuleType)) or is_of_library(type(value).__module__):
        return []
    return [(f"{name}.{key}" if name else key, part) for key, part in attributes.items()]


def _parts_of_function(function: types.FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    is_own = is_of_library(str(function.__module__))
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name if is_own else variable, cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    for default in function.__defaults__ or ():
        yield name, default
    if not is_own:
        for variable in _names(function.__code__):
            if variable in function.__globals__:
                yield variable, function.__globals__[variable]


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function and those in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
