"""Stage programs: pure functions on flat lists of arrays, cut out of a stage's jaxpr."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs.convolutions import has_convolutions, with_fast_convolutions
from ipu_pipeline.engine.jaxprs.costs import count_operations, find_uncounted
from ipu_pipeline.engine.jaxprs.random_bits import draws_bits, with_fast_random_bits
from ipu_pipeline.engine.tracing.traced import Source, TracedStage
from ipu_pipeline.ground import jax_core

__all__ = ["StageProgram", "StagePrograms", "Value", "ValueKind", "cut", "read_sources", "seed"]


class ValueKind(enum.Enum):
    """What an argument or a result of a stage program is; `Value.index` says which one."""

    ACCUMULATOR = enum.auto()  # index: position in the stage's variables
    VARIABLE = enum.auto()  # position in the stage's variables
    ASSIGNED = enum.auto()  # position in the stage's variables: its new value
    KEY = enum.auto()
    KEY_NUMBER = enum.auto()  # a number that random keys are folded with, uint32: the number itself
    EXECUTION_COUNT = enum.auto()
    UPDATE_COUNT = enum.auto()  # the number of weight updates so far, int32
    MICRO_BATCH = enum.auto()  # the micro-batch's index, int32; in loops the iteration
    ACCUMULATED = enum.auto()  # the number of micro-batches in the accumulators, int32
    INPUT = enum.auto()  # position in the stage's inputs
    OUTPUT = enum.auto()  # position in the stage's outputs
    RESIDUAL = enum.auto()  # counted per stage
    LOSS_SCALE = enum.auto()  # the scale that the backward starts from, float32
    COTANGENT = enum.auto()  # position in the stage's outputs, one for each consumer
    INPUT_COTANGENT = enum.auto()  # position in the stage's inputs
    ENQUEUED = enum.auto()  # the number of the leaf in the pipeline


@dataclass(frozen=True)
class Value:
    """An argument or a result of a stage program; `consumer` is the stage that a cotangent comes from."""

    kind: ValueKind
    index: int = 0
    consumer: int = -1


@dataclass(frozen=True, eq=False)
class StageProgram:
    """A pure function on flat lists of arrays."""

    name: str  # for profiles, for example "stage0_forward"
    function: Callable[..., list[Any]]  # takes `arguments`, returns `results`
    arguments: tuple[Value, ...]  # what they are; accumulators, which may be donated, come first
    results: tuple[tuple[Value, ...], ...]  # what they are. One result may stand for several values.
    num_operations: float  # what it costs, see `costs.count_operations`.
    uncounted: frozenset[str]  # calls whose cost is not known, see `costs.find_uncounted`.
    has_effects: bool  # whether it prints or calls back into Python
    has_convolutions: bool  # whether it has convolutions
    draws_bits: bool  # whether it draws random bits
    loops_by_data: bool  # whether it has a loop that ends when its data says so
    equations: Sequence[Any]  # of its jaxpr, for one micro-batch

    @property
    def reaches_python(self) -> bool:
        """Whether it prints or calls functions of the host, such as those of `jax.pure_callback`."""
        return self.has_effects or any("callback" in name for name in self.uncounted)

    def on(self, platform: str) -> StageProgram:
        """The program in the form that is fastest on a kind of device, as in `jax.Device.platform`."""
        if platform != "cpu":
            return self
        function = with_fast_convolutions(self.function) if self.has_convolutions else self.function
        function = with_fast_random_bits(function) if self.draws_bits else function
        return dataclasses.replace(self, function=function)

    @property
    def num_accumulators(self) -> int:
        """The number of arguments at the beginning that are accumulators."""
        return sum(value.kind is ValueKind.ACCUMULATOR for value in self.arguments)


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """The programs that one stage runs per micro-batch."""

    # the forward; on the last stage of a pipeline that trains, it does the backward, too, or its first half
    forward: StageProgram
    # the backward, or its first half: None if the forward does it, or if nothing needs a gradient
    backward: StageProgram | None
    # shapes and dtypes of what is stored between programs, without the stage's inputs, which the runner
    # holds anyway
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    trained: tuple[int, ...]  # the variables with an accumulator, as positions in the stage's
    is_halved: bool = False  # whether the backward is done in halves
    weights: StageProgram | None = None  # the second half: weight gradients. None if there are none.

    @property
    def backwards(self) -> tuple[StageProgram, ...]:
        """What runs after the forward, in order."""
        return tuple(program for program in (self.backward, self.weights) if program is not None)

    def map(self, change: Callable[[StageProgram], StageProgram]) -> StagePrograms:
        """Changes each program."""
        backward = None if self.backward is None else change(self.backward)
        weights = None if self.weights is None else change(self.weights)
        return dataclasses.replace(self, forward=change(self.forward), backward=backward, weights=weights)

    def on(self, platform: str) -> StagePrograms:
        """The programs in the form that is fastest on a kind of device; see `StageProgram.on`."""
        return self.map(lambda program: program.on(platform))


def read_sources(stage: TracedStage, *programs: StageProgram) -> set[Source]:
    """The sources of the values between stages that some programs of a stage read."""
    arguments = [value for program in programs for value in program.arguments]
    return {stage.inputs[value.index] for value in arguments if value.kind is ValueKind.INPUT}


def cut(
    name: str,
    flat: jaxprs.FlatJaxpr,
    results: Sequence[tuple[Value, Any]],
    labels: Mapping[Any, Value],
    stored: Collection[Any] = (),
    keep_effects_of: Callable[[Any], bool] | None = None,
    numbers: dict[Any, int] | None = None,
) -> StageProgram:
    """Cuts a program out of a jaxpr."""
    grouped: dict[Any, list[Value]] = {}
    for value, atom in results:
        grouped.setdefault(_Key(atom), []).append(value)
    atoms = [key.atom for key in grouped]
    program = jaxprs.turn_products(jaxprs.extract(flat, atoms, stored, keep_effects_of))
    arguments: list[Value] = []
    for var in program.inputs:
        if var in labels:
            arguments.append(labels[var])
        else:
            assert numbers is not None
            arguments.append(Value(ValueKind.RESIDUAL, numbers.setdefault(var, len(numbers))))
    labelled = tuple(tuple(values) for values in grouped.values())
    jaxpr = program.closed_jaxpr.jaxpr
    return StageProgram(
        name,
        program,
        tuple(arguments),
        labelled,
        num_operations=count_operations(jaxpr),
        uncounted=find_uncounted(jaxpr),
        has_effects=bool(jaxpr.effects),
        has_convolutions=has_convolutions(jaxpr),
        draws_bits=draws_bits(jaxpr),
        loops_by_data=any(jaxprs.has_primitive(equation, "while") for equation in jaxpr.eqns),
        equations=jaxpr.eqns,
    )


def seed(program: StageProgram, dtype: Any, is_scaled: bool) -> StageProgram:
    """Sets a program's COTANGENT argument of the loss to 1, or to a LOSS_SCALE argument."""
    is_seed = [value.kind is ValueKind.COTANGENT for value in program.arguments]

    def seeded(*arguments: Any) -> list[Any]:
        given = iter(arguments)
        one = jnp.ones((), dtype)
        values = [one if own and not is_scaled else next(given) for own in is_seed]
        return program.function(
            *(v.astype(dtype) if own else v for v, own in zip(values, is_seed, strict=True))
        )

    arguments = tuple(
        Value(ValueKind.LOSS_SCALE) if own else value
        for own, value in zip(is_seed, program.arguments, strict=True)
        if is_scaled or not own
    )
    return dataclasses.replace(program, function=seeded, arguments=arguments)


class _Key:
    """An atom as a dictionary key: the same variable is the same key, every literal is its own."""

    def __init__(self, atom: Any) -> None:
        self.atom = atom

    def __hash__(self) -> int:
        return id(self.atom)

    def __eq__(self, other: object) -> bool:
        is_literal = isinstance(self.atom, jax_core.Literal)
        return isinstance(other, _Key) and self.atom is other.atom and not is_literal
