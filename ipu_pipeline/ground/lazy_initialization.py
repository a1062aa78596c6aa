"""Lazy initialization: modules imported when a name is asked for, and calls before the first run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def import_later(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the `__getattr__` and the `__dir__` of a package."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    module = sys.modules[package]

    def find(name: str) -> Any:
        if name in home_of:
            value = getattr(importlib.import_module(f"ipu_pipeline.{home_of[name]}"), name)
            setattr(module, name, value)
            return value
        if name in module.__all__:
            return importlib.import_module(f"{package}.{name}")  # which enters it in the package
        message = f"module {package!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=module)

    return find, lambda: sorted({*module.__all__, *vars(module)})


# Calls before the first run: the engine tells when that is, and what is called may be in rooms above it.

_waiting: list[Callable[[], None]] = []


def before_first_run(call: Callable[[], None]) -> None:
    """Registers a call, made once before the first pipeline or loop of the process is prepared."""
    _waiting.append(call)


def begin_first_run() -> None:
    """Calls what waits for the first run, each once."""
    while _waiting:
        _waiting.pop(0)()
