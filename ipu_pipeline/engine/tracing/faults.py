"""Collects the faults of a pipeline's stages, with where they happened, in one error.

If the shapes of what a stage returns are known in spite of a fault, the fault is noted and tracing goes on.
One error therefore reports every fault that can be found, and none that would only follow from another.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import linecache
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.engine.tracing import scopes
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.errors import drop_traceback_note
from ipu_pipeline.ground.pytrees import describe

_NOT_THE_USERS = {"flax", "ipu_pipeline", "jax", "jaxlib", "numpy", "optax", *sys.stdlib_module_names}
# The modules in which a search for the user's line ends; tests see that they have these names.
_TRACES_STAGES = "ipu_pipeline.engine.tracing.stages"
_DIFFERENTIATES = "ipu_pipeline.engine.programs.differentiation"
_PACKAGE = str(pathlib.Path(__file__).parents[2])
# What JAX says of meshes -> the mend in a stage.
_MESH_MENDS = {
    "not found in mesh": "A stage's mesh has the axes 'model', of TensorParallel.size, and 'replica', of "
    "size 1: name these or None, in Flax's rules of logical axes, too. Replicas divide batches.",
    "unbound axis name": "In a stage an axis has a name within jax.shard_map, over engine.stage_mesh(): "
    "'model'. For all replicas there are engine.cross_replica_sum, replica_index and replica_count.",
    "should match the mesh passed to shard_map": "A stage is computed by devices of its own: pass "
    "mesh=engine.stage_mesh(), or no mesh.",
}
_TF1_OPTIMIZER_METHODS = ("minimize", "compute_gradients", "apply_gradients")
_TF1_METHODS = {  # of variables and tensors
    "assign": "assign(variable, value) gives it a new value",
    "assign_add": "assign_add(variable, value) adds to it",
    "assign_sub": "assign_sub(variable, value) subtracts from it",
    "eval": "Session.run and outfeeds give values, and Session.variables those of variables",
    "get_shape": "its shape is .shape",
    "initialized_value": "it is the value",
    "read_value": "it is the value",
    "set_shape": "shapes are static",
    "value": "it is the value",
}


@dataclass(frozen=True, eq=False)
class _Fault:
    """An error, the stage or other place that it belongs to, and lines about where it happened."""

    place: str
    error: Exception
    where: list[str]


class Faults:
    """The faults of a pipeline that have been found so far; false if there are none.

    Attributes:
      stand_ins: variables with which tracing goes on, in place of conflicting ones, by full name.
      has_constant_modules: whether parameters of modules were found as constants. That no stage has
        variables may then be due to this.
    """

    def __init__(self) -> None:
        """Begins without faults."""
        self.stand_ins: dict[str, VariableSpec] = {}
        self.has_constant_modules = False
        self._faults: list[_Fault] = []
        self._failure: Exception | None = None  # what ended the trace of a stage

    def __bool__(self) -> bool:
        return bool(self._faults)

    def add(self, place: str, error: Exception, arguments: str | None = None) -> None:
        """Notes an error that ended something."""
        where: list[str] = []
        if arguments is not None:
            self._failure, where = error, _end_location(error, arguments)
        self._faults.append(_Fault(place, error, where))

    def add_known(self, place: str, error: Exception | None) -> None:
        """Notes an error that has not been raised; None means no error."""
        if error is not None:
            self._faults.append(_Fault(place, error, []))

    def add_here(self, place: str, error: Exception, arguments: str) -> None:
        """Notes an error that would have been raised here, in the function that is being traced."""
        stack = traceback.walk_stack(inspect.currentframe())
        inside = itertools.takewhile(lambda entry: _module_of(entry[0]) != _TRACES_STAGES, stack)
        where = _location(scopes.current_scope(), arguments, _user_line(inside))
        if not any(fault.place == place and str(fault.error) == str(error) for fault in self._faults):
            self._faults.append(_Fault(place, error, where))

    @contextlib.contextmanager
    def collecting(self, place: str) -> Iterator[None]:
        """Notes an error that ends a `with` block, and continues after the block."""
        try:
            yield
        except Exception as error:
            self.add(place, error)

    def as_error(self) -> Exception:
        """The error to raise."""
        if len(self._faults) == 1:
            (fault,) = self._faults
            if fault.where:
                fault.error.add_note(_note(fault.place, fault.where))
            return fault.error
        errors = [fault.error for fault in self._faults]
        kinds = (TypeError, NotImplementedError, RuntimeError)
        kind = next((k for k in kinds if all(isinstance(error, k) for error in errors)), ValueError)
        lines = [f"{len(errors)} faults were found in the pipeline:"]
        for number, fault in enumerate(self._faults, 1):
            text = str(fault.error).rstrip()
            if not text.startswith(fault.place):
                named = "" if isinstance(fault.error, kind) else f"{type(fault.error).__name__}: "
                text = f"{fault.place}: {named}{text}"
            first, *more_lines = [*text.splitlines(), *fault.where]
            lines += [f"{number}. {first}", *(f"   {line}" for line in more_lines)]
        joined = kind("\n".join(lines))
        joined.__cause__ = self._failure
        return joined


def add_note(error: BaseException, place: str, arguments: str) -> None:
    """Adds a note to an error that ended a function's trace: where that happened."""
    error.add_note(_note(place, _end_location(error, arguments)))


def add_derivative_note(error: BaseException, place: str) -> None:
    """Adds a note to an error that ended a stage's differentiation: the stage, and where that happened."""
    entries = reversed(list(traceback.walk_tb(error.__traceback__)))
    line = _user_line(itertools.takewhile(lambda entry: _module_of(entry[0]) != _DIFFERENTIATES, entries))
    if not line and error.__cause__ is not None:  # JAX's error: where the operation was traced
        line = _user_line(reversed(list(traceback.walk_tb(error.__cause__.__traceback__))))
    drop_traceback_note(error)
    error.add_note(f"This happened while differentiating {place}" + (f"\n  at {line}" if line else ""))


def find_calling_line() -> str:
    """File, line and source text of the user's innermost call that leads here; "" if there is none."""
    return _user_line(traceback.walk_stack(inspect.currentframe()))


def find_line_of(frame: Any) -> str:
    """File, line and source text of the user's innermost call that a frame belongs to; "" if none."""
    return _user_line(traceback.walk_stack(frame))


def find_computing_line(value: Any) -> str:
    """File, line and source text that computed a traced value; "" if not known."""
    for name, line_number in jax_compat.lines_of(value):
        if _is_users(name):
            return _describe_line(name, line_number)
    return ""


def find_function(equation: Any) -> str:
    """The user's function and line that made an equation, such as "block:12"; "" if not known."""
    for name, line_number, function in jax_compat.functions_of(equation):
        if _is_users(name):
            return f"{function.rpartition('.')[2]}:{line_number}"
    return ""


def find_line(equation: Any) -> str:
    """File, line and source text of the user's that made an equation; "" if not known."""
    for name, line_number, _function in jax_compat.functions_of(equation):
        if _is_users(name):
            return _describe_line(name, line_number)
    return ""


def is_of_library(module: str) -> bool:
    """Whether a module, by its full name, is of this package, of Python, or of a library that it uses."""
    return module.partition(".")[0] in _NOT_THE_USERS


def _is_users(name: str) -> bool:
    """Whether a file is neither of this package, nor of Python, nor of a library that it uses."""
    top = pathlib.PurePath(name).parts
    is_installed = "site-packages" in top or "dist-packages" in top
    is_library = is_installed and not _NOT_THE_USERS.isdisjoint(top)
    return (
        not is_library
        and not name.startswith(_PACKAGE)
        and (is_installed or not name.startswith(os.path.dirname(os.__file__)))
    )


def describe_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describes a function's arguments, for errors: `x: float32[4, 12], labels: int32[4]`."""
    named = [(str(position), value) for position, value in enumerate(args)]
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args).arguments if args else {}
    except (TypeError, ValueError):
        bound = {}
    if bound:
        named = []
        for name, value in bound.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                named += [(f"{name}[{position}]", item) for position, item in enumerate(value)]
            else:
                named.append((name, value))
    named += kwargs.items()
    return ", ".join(f"{name}: {describe(value)}" for name, value in named) or "no arguments"


def find_signature_fault(function: Callable[..., Any], place: str) -> TypeError | None:
    """The reason why a later stage cannot be called, whatever the stage before it returns; else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function without a Python signature
        return None
    required = [p for p in signature.parameters.values() if p.default is inspect.Parameter.empty]
    by_position = [p.name for p in required if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    by_name = [p.name for p in required if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if not (by_position and by_name):
        return None
    return TypeError(
        f"{place} takes {signature}: {', '.join(by_position)} by position only and {', '.join(by_name)} by "
        "name only, but what the stage before it returns comes all by position or, from a dict, by name."
    )


def _note(place: str, where: list[str]) -> str:
    return "\n  ".join([f"This happened while tracing {place}", *where])


def _location(scope: str, arguments: str, line: str) -> list[str]:
    parts = {"in scope": scope, "on": arguments, "at": line}
    return [f"{word} {text}" for word, text in parts.items() if text]


def _end_location(error: BaseException, arguments: str) -> list[str]:
    entries = reversed(list(traceback.walk_tb(error.__traceback__)))
    where = _location(scopes.failed_scope(error) or scopes.current_scope(), arguments, _user_line(entries))
    return [*where, *_mends(error)]


def _mends(error: BaseException) -> list[str]:
    """Advice on an error of a library that does not know of pipelines."""
    mends = [mend for text, mend in _MESH_MENDS.items() if text in str(error)]
    if mends:
        return mends
    mends = [
        f"{name} was a method in TensorFlow. Here it is an array, as get_variable returns one: {mend}."
        for name, mend in _TF1_METHODS.items()
        if isinstance(error, AttributeError) and str(error).endswith(f"Tracer has no attribute {name}")
    ]
    if mends:
        return mends
    if not isinstance(error, AttributeError) or error.name not in _TF1_OPTIMIZER_METHODS:
        return []
    if not type(error.obj).__module__.startswith("optax."):
        return []
    return [
        f"{error.name}() is a method of TensorFlow's optimizers, and Optax's have none. An "
        "optimizer_function returns OptimizerFunctionOutput(optimizer, loss). The body of a loop wraps "
        "the optimizer: ipu.optimizers.GradientAccumulationOptimizerV2(optimizer, 1).minimize(loss)."
    ]


def _user_line(entries: Iterable[tuple[Any, int]]) -> str:
    """File, line and source text of the first frame of the user's code; "" if there is none."""
    for frame, line_number in entries:
        name = frame.f_code.co_filename
        if is_of_library(_module_of(frame)) or name.startswith(_PACKAGE):
            continue
        return _describe_line(name, line_number, frame.f_globals)
    return ""


def _describe_line(name: str, line_number: int, module_globals: dict[str, Any] | None = None) -> str:
    source = linecache.getline(name, line_number, module_globals).strip()
    return f"{name}, line {line_number}{': ' if source else ''}{source}"


def _module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))
