"""The function being traced, and the names that its program gives out meanwhile.

A program is what is traced together: all stages of a pipeline and what surrounds them. `ProgramNames`
holds what must be unique or counted within it, so that neither variable names, nor automatic layer
names, nor random keys depend on how layers are split into stages.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from ipu_pipeline.engine.tracing import scopes
from ipu_pipeline.engine.tracing.faults import Faults
from ipu_pipeline.engine.tracing.specs import VariableSpec

__all__ = [
    "Enqueued",
    "Frame",
    "InsideOfBodyError",
    "OutsideOfBodyError",
    "ProgramNames",
    "current_frame",
    "find_frame",
    "frame",
    "has_update_count",
    "is_in_stage",
    "is_traced_again",
    "is_tracing",
    "is_training",
    "program_names",
    "tracing_again",
    "unchanged",
    "unchanged_on_error",
]


class OutsideOfBodyError(RuntimeError):
    """What only a stage, or the body of a loop, may call was called elsewhere."""


class InsideOfBodyError(RuntimeError):
    """A pipeline or loop was called within a stage or the body of a loop."""


@dataclass(eq=False)
class ProgramNames:
    """What one program has named so far.

    Attributes:
      variables: full name -> the variable's specification.
      layer_counts: (scope, kind of layer) -> how many there are.
      key_counts: scope -> how many random keys were drawn in it.
      markers: serial numbers of the variables and keys that were found in traced functions.
      reads: what was returned for variables, and these, by its identity; while functions are traced.
      opened_scopes: full names of the variable scopes that were opened.
      holders: objects outside of the program that hold the values of its variables, by their identity:
        the object, which so stays alive, and the full name that stands for it.
      host_tables: full name -> a table in host memory; its `marker` is the full name of a variable that is
        trained where the table is.
    """

    variables: dict[str, VariableSpec] = field(default_factory=dict)
    layer_counts: dict[tuple[str, str], int] = field(default_factory=dict)
    key_counts: dict[str, int] = field(default_factory=dict)
    markers: set[int] = field(default_factory=set)
    opened_scopes: set[str] = field(default_factory=set)
    reads: dict[int, tuple[object, VariableSpec]] = field(default_factory=dict)
    holders: dict[int, tuple[object, str]] = field(default_factory=dict)
    host_tables: dict[str, Any] = field(default_factory=dict)

    def name_of_holder(self, holder: object, full_name: str) -> str:
        """The full name that stands for an object; at first the given one."""
        return self.holders.setdefault(id(holder), (holder, full_name))[1]

    def trained_name(self, name: str) -> str:
        """The variable that is trained if a name is to be: of a table in host memory its marker."""
        table = self.host_tables.get(name)
        return name if table is None else str(table.marker)

    def layer_name(self, scope: str, kind: str) -> str:
        """The next name for a layer of this kind: `dense`, `dense_1`, ..."""
        count = self.layer_counts.get((scope, kind), 0)
        self.layer_counts[scope, kind] = count + 1
        return kind if count == 0 else f"{kind}_{count}"


@contextlib.contextmanager
def unchanged(program_names: ProgramNames) -> Iterator[None]:
    """Takes back the names that a `with` block gives out."""
    take_back = _keep(program_names)
    try:
        yield
    finally:
        take_back()


@contextlib.contextmanager
def unchanged_on_error(program_names: ProgramNames) -> Iterator[None]:
    """Takes back the names that a `with` block gave out if it ends in an error."""
    take_back = _keep(program_names)
    try:
        yield
    except BaseException:
        take_back()
        raise


def _keep(program_names: ProgramNames) -> Callable[[], None]:
    """What makes the names be those that they are now."""
    kept = [
        (collection, collection.copy())
        for collection in (
            program_names.variables,
            program_names.layer_counts,
            program_names.key_counts,
            program_names.markers,
            program_names.holders,
            program_names.host_tables,
            program_names.opened_scopes,
        )
    ]

    def take_back() -> None:
        for collection, before in kept:
            collection.clear()
            collection.update(before)  # type: ignore[arg-type]  # each is updated with its own copy

    return take_back


@dataclass(frozen=True, eq=False)
class Enqueued:
    """What a function enqueues each time: whom it is for, its structure, shapes and dtypes."""

    target: Any
    tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, eq=False)
class Frame:
    """One function being traced. What traces another kind of function has a frame of its own (`loops`)."""

    names: ProgramNames  # the program that it is part of
    training: bool  # whether the program trains
    place: str  # what errors call the function, for example "stage 0 (encoder)"
    is_stage: bool  # whether the function is a stage, so that it may assign variables and draw keys
    given: str = ""  # what errors say that it was given, for example "x: float32[4, 12]"
    faults: Faults | None = None  # where faults are noted that let its trace go on; None: they end it
    # what the functions of its program enqueue; None: it may not enqueue anything
    enqueued: list[Enqueued] | None = None
    # whether the function was traced before, and what it enqueues was recorded then
    is_traced_again: bool = False

    @property
    def has_metrics(self) -> bool:
        """Whether the function may report metrics."""
        return self.enqueued is not None

    @property
    def may_recompute(self) -> bool:
        """Whether the function is one that may be recomputed for its backward."""
        return self.is_stage

    def is_training(self) -> bool:
        """Whether the program trains; for layers that then behave differently."""
        return self.training

    def note_variable(self, spec: VariableSpec) -> None:
        """Told each variable that the function asks for."""


_frame: contextvars.ContextVar[Frame | None] = contextvars.ContextVar("frame", default=None)


@contextlib.contextmanager
def frame(new_frame: Frame) -> Iterator[Frame]:
    """Makes `new_frame` the current one for a `with` block."""
    token = _frame.set(new_frame)
    try:
        with scopes.isolated():
            yield new_frame
    finally:
        _frame.reset(token)


def find_frame() -> Frame | None:
    """The frame of the function being traced; None outside of all."""
    return _frame.get()


def current_frame(wanted_by: str) -> Frame:
    """The frame of the function being traced.

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


def program_names(wanted_by: str) -> ProgramNames:
    """The names that the program of the function being traced gives out; raises as `current_frame`."""
    return current_frame(wanted_by).names


def is_training(wanted_by: str) -> bool:
    """Whether the program of the function being traced trains; raises as `current_frame`."""
    return current_frame(wanted_by).is_training()


def is_tracing() -> bool:
    """Whether a function is being traced."""
    return _frame.get() is not None


def is_in_stage() -> bool:
    """Whether a stage is being traced."""
    current = _frame.get()
    return current is not None and current.is_stage


def is_traced_again() -> bool:
    """Whether a function is being traced that was traced before, for another part of its program."""
    current = _frame.get()
    return current is not None and current.is_traced_again


def has_update_count() -> bool:
    """Whether the number of weight updates is known to the function being traced; not in a loop."""
    current = _frame.get()
    return current is not None and (current.has_metrics or current.is_traced_again)


def tracing_again(place: str) -> contextlib.AbstractContextManager[Frame]:
    """For while a function is traced that was traced before: its variables may be asked for again.

    Args:
      place: what errors call it.
    """
    return frame(Frame(ProgramNames(), training=True, place=place, is_stage=True, is_traced_again=True))
