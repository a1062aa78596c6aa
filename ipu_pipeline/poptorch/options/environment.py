"""Options from JSON and from the environment.

POPTORCH_DEFAULT_OPTIONS is JSON as `Options.from_json` takes it. POPTORCH_CACHE_DIR is a directory, as
for `Options.enableExecutableCaching`. Both are read when options are made.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ipu_pipeline.poptorch.options.base import OptionGroup
from ipu_pipeline.poptorch.options.names import find_setter, find_value

__all__ = ["CACHE_VARIABLE", "DEFAULTS_VARIABLE", "apply", "load_json"]

CACHE_VARIABLE = "POPTORCH_CACHE_DIR"
DEFAULTS_VARIABLE = "POPTORCH_DEFAULT_OPTIONS"


def apply(options: OptionGroup) -> None:
    """Sets options from the environment variables."""
    if directory := os.environ.get(CACHE_VARIABLE):
        options.set(executable_cache_path=directory)
    if text := os.environ.get(DEFAULTS_VARIABLE):
        load_json(options, text, f"The environment variable {DEFAULTS_VARIABLE}")


def load_json(options: OptionGroup, text: str, what: str = "from_json: the string") -> None:
    """Sets options from JSON; see `Options.from_json`."""
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} must be JSON; {error}. It is {text!r}.") from None
    if not isinstance(calls, dict):
        raise ValueError(f'{what} must be a JSON object, as {{"deviceIterations": 4}}; it is {text!r}.')
    for name, argument in calls.items():
        arguments = argument if isinstance(argument, list) else [argument]
        try:
            _find(options, name)(*map(_as_member, arguments))
        except Exception as error:
            error.add_note(f"{what} has {name!r}: {json.dumps(argument)}.")
            raise


def _find(options: OptionGroup, name: str) -> Any:
    *groups, setter = name.split(".")
    target = options
    for group in groups:
        if group not in target.groups:
            raise AttributeError(f"{name!r} is no setter: there is no group {group!r} of options.")
        target = vars(target)[group]
    if target is options and setter == "loadFromFile":  # files cannot load themselves; this can
        return vars(type(options))[setter].__get__(options)
    return find_setter(target, setter)


def _as_member(value: Any) -> Any:
    """Returns the enumeration's member or dtype that a string names; other values unchanged."""
    found = find_value(value) if isinstance(value, str) else None
    return value if found is None else found
