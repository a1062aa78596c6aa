"""Finds modules whose parameters have become constants of a stage, where an optimizer does not train them.

A module of Flax nnx has its parameters in it. If a stage only calls it, they are arrays from around the
stage, of which JAX makes constants. Arrays as such may be meant to be constants. The parameters of a module
are not, in training. No library of modules is imported for this.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.tracing.faults import is_of_library

__all__ = ["check_modules"]

_DEPTH = 8  # of values within values in which modules are looked for
_MAX_VALUES = 10_000  # that are looked at


def check_modules(function: Callable[..., Any], constants: Iterable[Any], place: str) -> None:
    """Raises if parameters of a module are constants of a stage that is to be trained."""
    known = {id(value) for value in constants if jnp.issubdtype(value.dtype, jnp.floating)}
    nnx = sys.modules.get("flax.nnx")
    if not known:
        return
    if nnx is not None:
        for name, value in itertools.islice(_walk(function, "", _DEPTH, set()), _MAX_VALUES):
            is_module = isinstance(value, nnx.Module)
            if is_module and _has(jax.tree.leaves(nnx.state(value, nnx.Param)), known):
                uses = f"uses {name}," if name else "is"
                raise ValueError(
                    f"{place} {uses} the Flax module {type(value).__name__}: its parameters would be "
                    "constants, which are not trained. Take them out by nnx.split, give them to the "
                    "pipeline (parameters=) and merge them in the stage, as examples/flax_nnx.py does. Or "
                    "call ipu_pipeline.layers.Flax(module) in the stage, with trainable=False if it is not "
                    "to be trained."
                )
    if not jax.tree_util.all_leaves([function]) and _has(jax.tree.leaves(function), known):
        raise ValueError(
            f"{place} is a pytree that can be called: its arrays would be constants, which are not "
            "trained. Give it as parameters of a stage that calls it: Pipeline([lambda module, *inputs: "
            "module(*inputs)], parameters=[module]). If it is not to be trained, make the stage a function "
            "around it: lambda *inputs: module(*inputs)."
        )


def _has(leaves: Iterable[Any], known: set[int]) -> bool:
    return any(id(leaf) in known for leaf in leaves)


def _walk(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """All that a function can use: its closure, globals that it names, partials, attributes, and so on.

    Yields values with their names, which are empty for the function itself and what only wraps it.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    yield name, value
    if depth > 0:
        for own_name, part in _parts(value, name):
            yield from _walk(part, own_name, depth - 1, seen)


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
