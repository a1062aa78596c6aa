"""Options as text: names, lines of config files, JSON, and the environment's variables.

A config file has a call on the options on each line. Lines are parsed, never executed. A line is what
follows `options.`: a chain of setters, such as
`Training.gradientAccumulation(4).setAutomaticLossScaling(True)`. Arguments are literals, members of
PopTorch's enumerations, dtypes of torch, and objects of PopTorch's classes, such as
`setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("B1").ipu(0)))`. Blank lines, comments and
indents are ignored.

POPTORCH_DEFAULT_OPTIONS is JSON as `Options.from_json` takes it. POPTORCH_CACHE_DIR is a directory, as for
`Options.enableExecutableCaching`. Both are read when options are made.
"""

from __future__ import annotations

import ast
import enum
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from ipu_pipeline.poptorch import enums
from ipu_pipeline.poptorch.options import strategies
from ipu_pipeline.poptorch.options.base import OptionGroup, is_configurable
from ipu_pipeline.poptorch.options.inner_groups import TensorLocationSettings

# Names.

_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        strategies.ParallelPhasedExecution,
        strategies.Phase,
        strategies.PipelinedExecution,
        strategies.SerialPhasedExecution,
        strategies.ShardedExecution,
        strategies.Stage,
        TensorLocationSettings,
    )
}


def find_class(name: str) -> type | None:
    """Finds a class that a file may make objects of, such as "poptorch.Stage"."""
    return _CLASSES.get(name.removeprefix("poptorch.")) if name.startswith("poptorch.") else None


def find_value(name: str) -> Any:
    """Finds an enumeration's member, such as "poptorch.OutputMode.All", or a dtype; None if it is neither.

    "poptorch." and "poptorch.enums." may be left out.
    """
    module, _dot, member = name.rpartition(".")
    if module == "torch":
        dtype = getattr(torch, member, None)
        return dtype if isinstance(dtype, torch.dtype) else None
    kind = module.removeprefix("poptorch.").removeprefix("enums.")
    if kind not in enums.__all__:
        return None
    members: type[enum.Enum] = getattr(enums, kind)
    return members.__members__.get(member)


def find_setter(target: Any, name: str) -> Callable[..., Any]:
    """Finds a method of options, stages or strategies that a file may call."""
    method = getattr(type(target), name, None)
    if not is_configurable(method):
        setters = [key for key in dir(type(target)) if is_configurable(getattr(type(target), key))]
        if isinstance(target, OptionGroup):
            setters += [f"{group}..." for group in target.groups]
        kind = type(target).__name__
        raise AttributeError(f"{kind} has no setter {name!r}. It has: {', '.join(setters)}.")
    setter: Callable[..., Any] = getattr(target, name)
    return setter


# Config files.

_ROOT = "options"


class ConfigFileError(Exception):
    """A line of a config file cannot be read, or sets what cannot be set."""


def load_file(options: OptionGroup, path: str | os.PathLike[str]) -> None:
    """Sets options line by line."""
    file = pathlib.Path(path)
    for number, line in enumerate(file.read_text("utf-8").split("\n"), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            _set(options, text)
        except Exception as error:
            detail = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ConfigFileError(
                f"{type(error).__name__} at line {number} of {file.name}: {detail}\n> {_ROOT}.{text}"
            ) from error


def _set(options: OptionGroup, text: str) -> None:
    expression = ast.parse(f"{_ROOT}.{text}", mode="eval").body
    if not isinstance(expression, ast.Call):
        raise SyntaxError("a line must be a call of a setter")
    _call(options, expression)


def _call(options: OptionGroup, node: ast.Call) -> Any:
    """Calls a setter, after the setters before it in its chain. Arguments are read first."""
    if not isinstance(node.func, ast.Attribute):
        raise SyntaxError(f"{ast.unparse(node.func)} is no setter")
    args = [_argument(arg) for arg in node.args]
    kwargs = _keywords(node)
    target = _target(options, node.func.value)
    return find_setter(target, node.func.attr)(*args, **kwargs)


def _target(options: OptionGroup, node: ast.expr) -> Any:
    """Returns what a setter is called on: the options, a group of them, or an earlier setter's result."""
    if isinstance(node, ast.Name) and node.id == _ROOT:
        return options
    if isinstance(node, ast.Call):
        return _call(options, node)
    if isinstance(node, ast.Attribute):
        before = _target(options, node.value)
        if isinstance(before, OptionGroup) and node.attr in before.groups:
            return getattr(before, node.attr)
    raise SyntaxError(f"{ast.unparse(node)} is no group of options")


def _argument(node: ast.expr) -> Any:
    """Reads the value of an argument."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements):
            return [_argument(element) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple(_argument(element) for element in elements)
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                _argument(key): _argument(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case ast.Attribute():
            value = find_value(ast.unparse(node))
            if value is not None:
                return value
        case ast.Call():
            return _make(node)
    raise SyntaxError(
        f"{ast.unparse(node)} is not allowed as an argument. Allowed are literals, as 4 and 'name', and "
        "PopTorch's names, as poptorch.OutputMode.All"
    )


def _make(node: ast.Call) -> Any:
    """Makes an object of one of PopTorch's classes, or returns what its setter returns."""
    args = [_argument(arg) for arg in node.args]
    kwargs = _keywords(node)
    if isinstance(node.func, ast.Attribute):
        kind = find_class(ast.unparse(node.func))
        if kind is not None:
            return kind(*args, **kwargs)
        if isinstance(node.func.value, ast.Call):
            return find_setter(_make(node.func.value), node.func.attr)(*args, **kwargs)
    raise SyntaxError(f"{ast.unparse(node.func)} is not allowed as an argument")


def _keywords(node: ast.Call) -> dict[str, Any]:
    kwargs = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise SyntaxError(f"**{ast.unparse(keyword.value)} is not allowed")
        kwargs[keyword.arg] = _argument(keyword.value)
    return kwargs


# JSON, and the environment's variables.

CACHE_VARIABLE = "POPTORCH_CACHE_DIR"
DEFAULTS_VARIABLE = "POPTORCH_DEFAULT_OPTIONS"


def apply_environment(options: OptionGroup) -> None:
    """Sets options from the environment variables."""
    if directory := os.environ.get(CACHE_VARIABLE):
        options.set(executable_cache_path=directory)
    if text := os.environ.get(DEFAULTS_VARIABLE):
        load_json(options, text, f"The environment variable {DEFAULTS_VARIABLE}")


def load_json(options: OptionGroup, text: str, source: str = "from_json: the string") -> None:
    """Sets options from JSON; see `Options.from_json`."""
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} must be JSON; {error}. It is {text!r}.") from None
    if not isinstance(calls, dict):
        raise ValueError(f'{source} must be a JSON object, as {{"deviceIterations": 4}}; it is {text!r}.')
    for name, argument in calls.items():
        arguments = argument if isinstance(argument, list) else [argument]
        try:
            _find(options, name)(*map(_as_member, arguments))
        except Exception as error:
            error.add_note(f"{source} has {name!r}: {json.dumps(argument)}.")
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
    member = find_value(value) if isinstance(value, str) else None
    return value if member is None else member
