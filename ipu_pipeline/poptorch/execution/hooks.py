"""Hooks that are called before and after a model is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = [
    "Hooks",
    "RemovableHandle",
    "after_compiling",
    "before_compiling",
    "registerPostCompileHook",
    "registerPreCompileHook",
]

Hook: TypeAlias = "Callable[[], Any]"


class RemovableHandle:
    """Removes a hook."""

    def __init__(self, hooks: dict[int, Hook], number: int) -> None:
        self._hooks = hooks
        self._number = number

    def remove(self) -> None:
        """Removes the hook; a second call does nothing."""
        self._hooks.pop(self._number, None)


class Hooks:
    """Functions of a wrapped model, called in the order in which they were registered."""

    def __init__(self, name: str) -> None:
        """Starts without hooks."""
        self._name = name
        self._hooks: dict[int, Hook] = {}
        self._numbers = itertools.count()

    def register(self, hook: Hook) -> RemovableHandle:
        """Adds a hook."""
        if not callable(hook):
            raise RuntimeError(f"{self._name} hook must be callable; got {hook!r}.")
        number = next(self._numbers)
        self._hooks[number] = hook
        return RemovableHandle(self._hooks, number)

    def call(self) -> None:
        """Calls the hooks."""
        for hook in list(self._hooks.values()):
            hook()


before_compiling = Hooks("Pre-compile")
after_compiling = Hooks("Post-compile")


def registerPreCompileHook(hook: Hook) -> RemovableHandle:
    """Registers a function to call before each model is compiled.

    Args:
      hook: the function, called without arguments; its result is not used.

    Returns:
      A handle, whose `remove()` removes the hook.

    Raises:
      RuntimeError: the hook cannot be called.
    """
    return before_compiling.register(hook)


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Registers a function to call after each model is compiled.

    Args:
      hook: the function, called without arguments; its result is not used.

    Returns:
      A handle, whose `remove()` removes the hook.

    Raises:
      RuntimeError: the hook cannot be called.
    """
    return after_compiling.register(hook)
