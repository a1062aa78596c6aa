"""Config files: a call on the options on each line. They are parsed, never executed.

A line is what follows `options.`: a chain of setters, such as
`Training.gradientAccumulation(4).setAutomaticLossScaling(True)`. Arguments are literals, members of
PopTorch's enumerations, dtypes of torch, and objects of PopTorch's classes, such as
`setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("B1").ipu(0)))`. Blank lines, comments and
indents are ignored.
"""

from __future__ import annotations

import ast
import os
import pathlib
from typing import Any

from ipu_pipeline.poptorch.options.base import OptionGroup
from ipu_pipeline.poptorch.options.names import find_class, find_setter, find_value

__all__ = ["ConfigFileError", "load"]

_ROOT = "options"


class ConfigFileError(Exception):
    """A line of a config file cannot be read, or sets what cannot be set."""


def load(options: OptionGroup, path: str | os.PathLike[str]) -> None:
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
