"""Frames of functions being traced, the names that a program gives out, and its surroundings."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from ipu_pipeline.engine.tracing import scopes
from ipu_pipeline.engine.tracing.faults import Faults
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.context_variables import bound

# A program is all that is traced together: all stages of a pipeline and what surrounds them. `ProgramNames`
# holds what must be unique or counted within it, so that neither variable names, nor automatic layer
# names, nor random keys depend on how layers are split into stages.

_AGAIN = "traced_again_by_ipu_pipeline"  # a scope's name


class OutsideOfBodyError(RuntimeError):
    """A function that only a stage, or the body of a loop, may call was called elsewhere."""


class InsideOfBodyError(RuntimeError):
    """A pipeline or loop was called within a stage or the body of a loop."""


@dataclass(eq=False)
class ProgramNames:
    """The names that one program has given out so far.

    Attributes:
      variables: full name -> the variable's specification.
      layer_counts: (scope, kind of layer) -> the number of such layers.
      key_counts: scope -> the number of random keys drawn in it.
      markers: serial numbers of the variables and keys that were found in traced functions.
      reads: identity of a value -> the value and the variable that it was returned for, during traces.
      opened_scopes: full names of the variable scopes that were opened.
      holders: identity of an object outside of the program that holds a variable's value -> the object,
        which is thus kept alive, and the full name that stands for it.
      model_stages: identity of a cut model -> its stages for the shapes that are being traced.
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
    model_stages: dict[int, Any] = field(default_factory=dict)
    host_tables: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> ProgramNames:
        """Copies the names as they are now."""
        copies = {part.name: getattr(self, part.name).copy() for part in dataclasses.fields(self)}
        return ProgramNames(**copies)

    def name_of_holder(self, holder: object, full_name: str) -> str:
        """The full name that stands for an object: the one given at the first call."""
        return self.holders.setdefault(id(holder), (holder, full_name))[1]

    def trained_name(self, name: str) -> str:
        """The variable that is trained in order to train a name: for a table in host memory, its marker."""
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
    restore = _make_restore(program_names)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def unchanged_on_error(program_names: ProgramNames) -> Iterator[None]:
    """Takes back the names that a `with` block gave out if it ends in an error."""
    restore = _make_restore(program_names)
    try:
        yield
    except BaseException:
        restore()
        raise


def _make_restore(program_names: ProgramNames) -> Callable[[], None]:
    """Returns a function that restores the names as they are now."""
    copies = [
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

    def restore() -> None:
        for collection, before in copies:
            collection.clear()
            collection.update(before)  # type: ignore[arg-type]  # each is updated with its own copy

    return restore


@dataclass(frozen=True, eq=False)
class Enqueued:
    """One thing that a function enqueues each time: its target, structure, shapes and dtypes."""

    target: Any
    tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, eq=False)
class Values:
    """The values that a function called op by op gets where a traced one leaves markers."""

    variables: Mapping[str, Any]  # full name -> value
    key: Any  # the micro-batch's random key
    update_count: Any  # the number of weight updates so far, int32


@dataclass(frozen=True, eq=False)
class Frame:
    """One function being traced. What traces another kind of function has a frame of its own (`loops`)."""

    names: ProgramNames  # the program that it is part of
    training: bool  # whether the program trains
    place: str  # what errors call the function, for example "stage 0 (encoder)"
    is_stage: bool  # whether the function is a stage, so that it may assign variables and draw keys
    given: str = ""  # its arguments in errors, for example "x: float32[4, 12]"
    faults: Faults | None = None  # notes faults that let its trace go on; None: they end it
    # what the functions of its program enqueue; None: it may not enqueue anything
    enqueued: list[Enqueued] | None = None
    # whether the function was traced before, and what it enqueues was recorded then
    is_traced_again: bool = False
    values: Values | None = None  # what it asks for, where it is called op by op; None: it is traced

    @property
    def has_metrics(self) -> bool:
        """Whether the function may report metrics."""
        return self.enqueued is not None

    @property
    def has_update_count(self) -> bool:
        """Whether the function knows the number of weight updates; False in a loop."""
        return self.has_metrics or self.is_traced_again

    @property
    def may_recompute(self) -> bool:
        """Whether the function may be recomputed for its backward."""
        return self.is_stage

    def is_training(self) -> bool:
        """Whether the program trains, for layers that then behave differently."""
        return self.training

    def note_variable(self, spec: VariableSpec) -> None:
        """Receives each variable that the function asks for."""


_frame: contextvars.ContextVar[Frame | None] = contextvars.ContextVar("frame", default=None)


@contextlib.contextmanager
def frame(new_frame: Frame) -> Iterator[Frame]:
    """Makes `new_frame` the current one for a `with` block."""
    with bound(_frame, new_frame), scopes.isolated():
        yield new_frame


def find_frame() -> Frame | None:
    """The frame of the function being traced; None if there is none."""
    return _frame.get()


def is_outside() -> bool:
    """Whether no function is being traced."""
    return _frame.get() is None


def current_frame(caller: str) -> Frame:
    """The frame of the function being traced."""
    current = _frame.get()
    if current is None:
        raise RuntimeError(
            f"{caller} was called outside of a program. Call it in a computational stage, or in the "
            "function that is given to ipu_compiler.compile."
        )
    return current


def current_values(caller: str) -> Values:
    """The values for the function that is called op by op; raises like `current_frame`."""
    values = current_frame(caller).values
    assert values is not None, "a marker was evaluated in a function that is traced"
    return values


@contextlib.contextmanager
def tracing_again(place: str) -> Iterator[Frame]:
    """Traces a function again inside a `with` block: it may ask for its variables again.

    What it prints, or calls back for, is left out of a weight update (see `is_repeated`): it has its effect
    where the function was traced before.
    """
    new_frame = Frame(ProgramNames(), training=True, place=place, is_stage=True, is_traced_again=True)
    with jax.named_scope(_AGAIN), frame(new_frame):
        yield new_frame


def is_repeated(equation: Any) -> bool:
    """Whether an equation was traced by a function that `tracing_again` traced."""
    return _AGAIN in jax_compat.scope_names(equation)


# What a trace depends on beside the function and its arguments, saved so that more can be traced alike.

Result = TypeVar("Result")

# JAX's settings that decide what is traced, each with what sets it within a block.
_SETTINGS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
}


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The surroundings of a trace.

    Attributes:
      context: the context variables, such as open scopes.
      names: the names of the program before the trace.
      settings: JAX's settings, which may hold for a `with` block and a thread only.
    """

    context: contextvars.Context
    names: ProgramNames
    settings: Mapping[str, Any]

    @staticmethod
    def now(names: ProgramNames) -> Surroundings:
        """The surroundings as they are now, with a copy of the program's names."""
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        return Surroundings(contextvars.copy_context(), names.copy(), settings)

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function in these surroundings, except for the names; what it changes of them is lost."""
        with contextlib.ExitStack() as stack:
            for name, value in self.settings.items():
                if getattr(jax.config, name) != value:
                    stack.enter_context(_SETTINGS[name](value))
            return self.context.copy().run(function, *arguments)
