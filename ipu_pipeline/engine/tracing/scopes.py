"""Variable scopes: prefixes of the names of the variables that are asked for within them.

They also carry defaults of `get_variable`: a dtype, an initializer, and functions that are called in its
place.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.ground.context_variables import bound

_SCOPE_ATTRIBUTE = "_ipu_pipeline_scope"  # attribute of an error


@dataclass(frozen=True)
class Scope:
    """A variable scope, with the defaults for variables that are asked for within it.

    Attributes:
      name: its full name, without a slash at the end; "" outside of all.
      reuse: whether it, or a scope around it, was opened with `reuse=True`.
      dtype: the dtype of variables that are asked for without one; None: float32.
      initializer: the initializer of variables that are asked for without one; None: `get_variable`'s.
      custom_getters: the custom getters of this scope and those around it, the outermost first.
      trainable: whether variables within may be trained.
    """

    name: str = ""
    reuse: bool = False
    dtype: Any = None
    initializer: Any = None
    custom_getters: tuple[Callable[..., Any], ...] = ()
    trainable: bool = True


_scope: contextvars.ContextVar[Scope] = contextvars.ContextVar("scope", default=Scope())  # noqa: B039  # frozen


def current() -> Scope:
    """The innermost scope."""
    return _scope.get()


def current_scope() -> str:
    """The full name of the innermost variable scope, without a slash at the end; "" outside of all."""
    return _scope.get().name


def is_reusing() -> bool:
    """Whether the innermost scope, or a scope around it, was opened with `reuse=True`."""
    return _scope.get().reuse


def start_reusing() -> None:
    """Lets the innermost scope share variables from here on, until its block ends."""
    _scope.set(dataclasses.replace(_scope.get(), reuse=True))


def isolated() -> contextlib.AbstractContextManager[None]:
    """Restores the innermost scope at the end of a `with` block."""
    return bound(_scope, _scope.get())


@contextlib.contextmanager
def opened(scope: Scope) -> Iterator[None]:
    """Makes a scope the innermost one for a `with` block."""
    token = _scope.set(scope)
    try:
        yield
    except BaseException as error:
        _record_scope(error, scope.name)
        raise
    finally:
        _scope.reset(token)


def absolute_scope(
    full_name: str, reuse: bool, trainable: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Opens a variable scope by its full name, whatever the scope around it."""
    around = _scope.get()
    return opened(
        dataclasses.replace(
            around,
            name=full_name,
            reuse=reuse or around.reuse,
            trainable=trainable and around.trainable,
        )
    )


def failed_scope(error: BaseException) -> str:
    """The full name of the innermost variable scope that an error left; "" if it left none."""
    return str(vars(error).get(_SCOPE_ATTRIBUTE, ""))


def _record_scope(error: BaseException, full_name: str) -> None:
    vars(error).setdefault(_SCOPE_ATTRIBUTE, full_name)  # the innermost scope comes first
