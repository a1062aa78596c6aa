"""Scopes, and the names that a program gives out while its functions are traced.

A program is what is traced together: all stages of a pipeline and what surrounds them. `ProgramNames`
holds what must be unique or counted within it, so that neither variable names, nor automatic layer
names, nor random keys depend on how layers are split into stages.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipu_pipeline.engine.faults import Faults
    from ipu_pipeline.engine.recording import Recorder
    from ipu_pipeline.engine.variables import VariableSpec

__all__ = [
    "Frame",
    "ProgramNames",
    "absolute_scope",
    "current_frame",
    "current_scope",
    "failed_scope",
    "frame",
    "hash_name",
    "is_in_stage",
    "is_reusing",
    "join",
    "unchanged_on_error",
    "variable_scope",
]


@dataclass(eq=False)
class ProgramNames:
    """What one program has named so far.

    Attributes:
      variables: full name -> the variable's specification.
      layer_counts: (scope, kind of layer) -> how many there are.
      key_counts: scope -> how many random keys were drawn in it.
      markers: serial numbers of the variables and keys that were found in traced functions.
    """

    variables: dict[str, VariableSpec] = field(default_factory=dict)
    layer_counts: dict[tuple[str, str], int] = field(default_factory=dict)
    key_counts: dict[str, int] = field(default_factory=dict)
    markers: set[int] = field(default_factory=set)

    def layer_name(self, scope: str, kind: str) -> str:
        """The next name for a layer of this kind: `dense`, `dense_1`, ..."""
        count = self.layer_counts.get((scope, kind), 0)
        self.layer_counts[scope, kind] = count + 1
        return kind if count == 0 else f"{kind}_{count}"


@contextlib.contextmanager
def unchanged_on_error(program_names: ProgramNames) -> Iterator[None]:
    """Takes back the names that a `with` block gave out if it ends in an error."""
    kept = [
        (collection, collection.copy())
        for collection in (
            program_names.variables,
            program_names.layer_counts,
            program_names.key_counts,
            program_names.markers,
        )
    ]
    try:
        yield
    except BaseException:
        for collection, before in kept:
            collection.clear()
            collection.update(before)  # type: ignore[arg-type]  # each is updated with its own copy
        raise


@dataclass(frozen=True, eq=False)
class Frame:
    """One function being traced.

    Attributes:
      names: the program that it is part of.
      training: whether the program trains.
      place: what errors call the function, for example "stage 0 (encoder)".
      is_stage: whether the function is a stage, so that it may assign variables and draw keys.
      recorder: where a looped body's training step and what it enqueues are noted; None in a stage.
      given: what errors say that it was given, for example "x: float32[4, 12]".
      faults: where faults are noted that let its trace go on; None: they end it.
    """

    names: ProgramNames
    training: bool
    place: str
    is_stage: bool
    recorder: Recorder | None = None
    given: str = ""
    faults: Faults | None = None

    def is_training(self) -> bool:
        """Whether the program trains; for layers that then behave differently."""
        if self.recorder is not None:
            self.recorder.asks_for_training = True
        return self.training


_SCOPE_ATTRIBUTE = "_ipu_pipeline_scope"  # of an error
_frame: contextvars.ContextVar[Frame | None] = contextvars.ContextVar("frame", default=None)
_scope: contextvars.ContextVar[tuple[str, bool]] = contextvars.ContextVar("scope", default=("", False))


@contextlib.contextmanager
def frame(new_frame: Frame) -> Iterator[Frame]:
    """Makes `new_frame` the current one for a `with` block."""
    token = _frame.set(new_frame)
    try:
        yield new_frame
    finally:
        _frame.reset(token)


def current_frame(wanted_by: str) -> Frame:
    """The frame of the function being traced.

    Args:
      wanted_by: the public function that asks, for the error.

    Raises:
      RuntimeError: nothing is being traced.
    """
    current = _frame.get()
    if current is None:
        raise RuntimeError(
            f"{wanted_by} was called outside of a program. Call it in a computational stage, or in the "
            "function that is given to ipu_compiler.compile."
        )
    return current


def is_in_stage() -> bool:
    """Whether a stage is being traced."""
    current = _frame.get()
    return current is not None and current.is_stage


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
