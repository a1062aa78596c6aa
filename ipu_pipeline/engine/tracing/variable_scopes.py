"""`variable_scope` opens a scope for variables, as in TensorFlow 1."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ipu_pipeline.engine.tracing import frames, scopes
from ipu_pipeline.engine.tracing.initializers import find_initializer
from ipu_pipeline.ground.names import join
from ipu_pipeline.ground.values import is_of_numbers

__all__ = ["AUTO_REUSE", "VariableScope", "get_variable_scope", "variable_scope"]


class _Reuse(enum.Enum):
    AUTO_REUSE = 1


AUTO_REUSE = _Reuse.AUTO_REUSE  # the same as True


class VariableScope(str):
    """A scope's full name. `variable_scope` takes it to open the scope again, from anywhere."""

    _scope: scopes.Scope

    @staticmethod
    def of(scope: scopes.Scope) -> VariableScope:
        """Makes the full name of a scope."""
        made = VariableScope(scope.name)
        made._scope = scope
        return made

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
        _check("default_name", default_name)
        opened = frames.current_frame("variable_scope with a default_name").names.opened_scopes
        endings = itertools.chain([""], (f"_{number}" for number in itertools.count(1)))
        candidates = (join(around, default_name + ending) for ending in endings)
        chosen = next(candidate for candidate in candidates if candidate not in opened)
        opened.add(chosen)
        return chosen
    _check("name", name)
    frame = frames.find_frame()
    if frame is not None:
        frame.names.opened_scopes.add(join(around, name))
    return join(around, name)


def _check(argument: str, name: Any) -> None:
    if not isinstance(name, str) or not all(name.split("/")):
        raise ValueError(
            f"variable_scope: {argument} must be a non-empty string without empty parts; got {name!r}."
        )
