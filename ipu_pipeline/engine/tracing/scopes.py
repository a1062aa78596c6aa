"""Variable scopes: what stands before the names of the variables that are asked for within them."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


__all__ = [
    "absolute_scope",
    "current_scope",
    "failed_scope",
    "hash_name",
    "is_reusing",
    "join",
    "variable_scope",
]

_SCOPE_ATTRIBUTE = "_ipu_pipeline_scope"  # of an error
_scope: contextvars.ContextVar[tuple[str, bool]] = contextvars.ContextVar("scope", default=("", False))


def current_scope() -> str:
    """The full name of the innermost variable scope, without a slash at the end; "" outside of all."""
    return _scope.get()[0]


def is_reusing() -> bool:
    """Whether the innermost scope, or one around it, was opened with `reuse=True`."""
    return _scope.get()[1]


def join(scope: str, name: str) -> str:
    """The full name of `name` within `scope`."""
    return f"{scope}/{name}" if scope else name


@contextlib.contextmanager
def variable_scope(name: str, reuse: bool | None = None, use_resource: bool = True) -> Iterator[str]:
    """Puts `name/` before the names of the variables that are asked for within the `with` block.

    Scopes nest. A scope may be opened again, but a variable that exists already may only be asked for
    again with `reuse=True`, which inner scopes inherit; one that does not exist yet is then created.

    Args:
      name: one or more names joined by "/".
      reuse: True lets the block share variables that exist; None or False leaves that to the scopes
        around it.
      use_resource: only True is possible; there for TensorFlow 1 code.

    Yields:
      The scope's full name.

    Raises:
      ValueError: the name is empty or has an empty part, or `use_resource` is False.

    Example:
      with variable_scope("encoder"):
          kernel = get_variable("kernel", (4, 4))  # encoder/kernel
    """
    if not isinstance(name, str) or not all(name.split("/")):
        raise ValueError(
            f"variable_scope: name must be a non-empty string without empty parts; got {name!r}."
        )
    if not use_resource:
        raise ValueError(
            "variable_scope: use_resource must be True; variables here are always resource variables."
        )
    scope, reusing = _scope.get()
    full_name = join(scope, name)
    token = _scope.set((full_name, reusing or bool(reuse)))
    try:
        yield full_name
    except BaseException as error:
        _record_scope(error, full_name)
        raise
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def absolute_scope(full_name: str, reuse: bool) -> Iterator[None]:
    """A variable scope by its full name, wherever it is opened."""
    token = _scope.set((full_name, reuse or is_reusing()))
    try:
        yield
    except BaseException as error:
        _record_scope(error, full_name)
        raise
    finally:
        _scope.reset(token)


def failed_scope(error: BaseException) -> str:
    """The full name of the innermost variable scope that an error left; "" if it left none."""
    return str(vars(error).get(_SCOPE_ATTRIBUTE, ""))


def _record_scope(error: BaseException, full_name: str) -> None:
    vars(error).setdefault(_SCOPE_ATTRIBUTE, full_name)  # the innermost one comes first


def hash_name(name: str) -> int:
    """The first 32 bits of the SHA-256 of a name, as an unsigned integer."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
