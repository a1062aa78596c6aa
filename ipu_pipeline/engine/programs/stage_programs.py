"""Stage programs: pure functions on flat lists of arrays, and what their values stand for."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs.convolutions import has_convolutions, with_fast_convolutions
from ipu_pipeline.engine.jaxprs.costs import count_operations, find_uncounted
from ipu_pipeline.engine.jaxprs.cpu_forms import draws_bits, with_fast_random_bits
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline, TracedStage
from ipu_pipeline.ground import jax_core


class ValueKind(enum.Enum):
    """The kind of an argument or a result of a stage program; `Value.index` says which one."""

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
        """The programs that run after the forward, in order."""
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
        argument_values = iter(arguments)
        unit = jnp.ones((), dtype)
        values = [unit if is_loss and not is_scaled else next(argument_values) for is_loss in is_seed]
        return program.function(
            *(v.astype(dtype) if is_loss else v for v, is_loss in zip(values, is_seed, strict=True))
        )

    arguments = tuple(
        Value(ValueKind.LOSS_SCALE) if is_loss else value
        for is_loss, value in zip(is_seed, program.arguments, strict=True)
        if is_scaled or not is_loss
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


# A program for several micro-batches merges nothing into one batch. It is a scan, in which each micro-batch
# takes over the accumulators and assigned variables from the one before it.

_COUNTS = (ValueKind.MICRO_BATCH, ValueKind.ACCUMULATED)


@dataclass(frozen=True)
class ChunkForm:
    """The layout of a chunk's values: several micro-batches on a first axis, a single one as it is."""

    size: int  # the number of micro-batches of a chunk

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes before those of a micro-batch's value."""
        return () if self.size == 1 else (self.size,)

    @property
    def num_stacked(self) -> int | None:
        """The number of stacked values; None if there is only one, as it is."""
        return self.axes[0] if self.axes else None


def chunk_programs(
    traced: TracedPipeline, programs: Sequence[StagePrograms], size: int
) -> tuple[StagePrograms, ...]:
    """Makes the programs for `size` micro-batches at once.

    Values of a micro-batch (those between stages, residuals, cotangents) are stacked on a first axis.
    MICRO_BATCH and ACCUMULATED are the first micro-batch's. New values of variables and accumulators are
    those after the last one.
    """
    if size == 1:
        return tuple(programs)
    return tuple(
        stage_programs.map(functools.partial(_chunk, stage=stage, size=size))
        for stage_programs, stage in zip(programs, traced.stages, strict=True)
    )


def _chunk(program: StageProgram, stage: TracedStage, size: int) -> StageProgram:
    carried = _find_carried(program)
    counts = [place for place, value in enumerate(program.arguments) if value.kind in _COUNTS]
    stacked = [
        place
        for place, value in enumerate(program.arguments)
        if value.kind in (ValueKind.RESIDUAL, ValueKind.COTANGENT)
        or (value.kind is ValueKind.INPUT and stage.inputs[value.index].is_of_micro_batch)
    ]
    stacked_results, last = [], []  # results returned for all, and state that is not carried but made anew
    for place, values in enumerate(program.results):
        state = tuple(value for value in values if _is_state(value))
        stacked_values = tuple(value for value in values if not _is_state(value))
        if stacked_values:
            stacked_results.append((place, stacked_values))
        if state and place not in carried.values():
            last.append((place, state))

    def chunked(*arguments: Any) -> list[Any]:
        def step(state: list[Any], element: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            number, values = element
            full = list(arguments)
            for places, group in ((carried, state), (stacked, values)):
                for place, value in zip(places, group, strict=True):
                    full[place] = value
            for place in counts:
                full[place] = full[place] + number
            results = program.function(*full)
            return (
                [results[place] for place in carried.values()],
                [results[place] for place, _values in (*stacked_results, *last)],
            )

        state, stacks = jax.lax.scan(
            step,
            [arguments[place] for place in carried],
            (jnp.arange(size, dtype=jnp.int32), [arguments[place] for place in stacked]),
        )
        return [
            *state,
            *stacks[: len(stacked_results)],
            *(stack[-1] for stack in stacks[len(stacked_results) :]),
        ]

    results = [tuple(v for v in program.results[place] if _is_state(v)) for place in carried.values()]
    results += [values for _place, values in (*stacked_results, *last)]
    return dataclasses.replace(
        program,
        function=chunked,
        results=tuple(results),
        num_operations=size * program.num_operations,
    )


def _is_state(value: Value) -> bool:
    return value.kind in (ValueKind.ACCUMULATOR, ValueKind.ASSIGNED)


def _find_carried(program: StageProgram) -> dict[int, int]:
    """Maps arguments that change with each micro-batch to the results that are their next values."""
    places = {value: place for place, value in enumerate(program.arguments)}
    carried = {}
    for place, values in enumerate(program.results):
        for value in values:
            is_assigned = value.kind is ValueKind.ASSIGNED
            argument = Value(ValueKind.VARIABLE, value.index) if is_assigned else value
            if _is_state(value) and argument in places:
                carried[places[argument]] = place
    return carried


# Bindings: what the arguments and results of programs stand for, across stages.
#
# A program names its values by their position in its own stage (`stage_programs.Value`). Here they get the
# names that are used outside: a variable its full name, an accumulator its key, a value between stages its
# source. What one program returns under a name is what another one takes under it.


class BindingKind(enum.Enum):
    """The kinds of names; the comment behind each says what `Binding.key` is."""

    SCALAR = enum.auto()  # the ValueKind: a random key, a count, or the scale of the loss
    KEY_NUMBER = enum.auto()  # the number, which a random key is folded with
    VARIABLE = enum.auto()  # the full name
    ASSIGNED = enum.auto()  # the full name: the variable's new value
    ACCUMULATOR = enum.auto()  # the key, see `AccumulatorPlan`
    INPUT = enum.auto()  # the position among the pipeline's inputs, which are the same during a step
    VALUE = enum.auto()  # the Source, of the micro-batch or of a stage
    RESIDUAL = enum.auto()  # the stage, and the number there
    COTANGENT = enum.auto()  # the Source that it is a cotangent of, and the stage that sends it
    ENQUEUED = enum.auto()  # the number of the leaf


class Binding(NamedTuple):
    """The name of a value outside of its program."""

    kind: BindingKind
    key: Any

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether each micro-batch has its own value, made by a program or brought by the feed."""
        return self.kind in _OF_MICRO_BATCH


_OF_MICRO_BATCH = (BindingKind.VALUE, BindingKind.RESIDUAL, BindingKind.COTANGENT)
_NAMED = {
    ValueKind.VARIABLE: BindingKind.VARIABLE,
    ValueKind.ASSIGNED: BindingKind.ASSIGNED,
}


@dataclass(frozen=True, eq=False)
class Bindings:
    """Finds the names of programs' values."""

    traced: TracedPipeline  # the pipeline
    # (stage, full name of a variable) -> the key of what that stage accumulates into
    accumulator_keys: Mapping[tuple[int, str], str]

    def find(self, index: int, value: Value) -> Binding:
        """Finds the name of an argument or a result of a program of stage `index`."""
        stage = self.traced.stages[index]
        kind = value.kind
        if kind in _NAMED:
            return Binding(_NAMED[kind], stage.variables[value.index].name)
        if kind is ValueKind.ACCUMULATOR:
            name = stage.variables[value.index].name
            return Binding(BindingKind.ACCUMULATOR, self.accumulator_keys[index, name])
        if kind is ValueKind.INPUT:
            source = stage.inputs[value.index]
            if source.kind == "input":
                return Binding(BindingKind.INPUT, source.index)
            if source.kind == "update_count":
                return Binding(BindingKind.SCALAR, ValueKind.UPDATE_COUNT)
            return Binding(BindingKind.VALUE, source)
        if kind is ValueKind.OUTPUT:
            return Binding(BindingKind.VALUE, Source("output", value.index, index))
        if kind is ValueKind.RESIDUAL:
            return Binding(BindingKind.RESIDUAL, (index, value.index))
        if kind is ValueKind.COTANGENT:
            return Binding(BindingKind.COTANGENT, (stage.outputs[value.index], value.consumer))
        if kind is ValueKind.KEY_NUMBER:
            return Binding(BindingKind.KEY_NUMBER, value.index)
        if kind is ValueKind.ENQUEUED:
            return Binding(BindingKind.ENQUEUED, value.index)
        if kind is ValueKind.INPUT_COTANGENT:
            return Binding(BindingKind.COTANGENT, (stage.inputs[value.index], index))
        return Binding(BindingKind.SCALAR, kind)

    def arguments(self, index: int, program: StageProgram) -> list[Binding]:
        """The names of the arguments of a program of stage `index`."""
        return [self.find(index, value) for value in program.arguments]

    def results(self, index: int, program: StageProgram) -> list[list[Binding]]:
        """The names of the results of the program; one result may stand for several values."""
        return [[self.find(index, value) for value in values] for values in program.results]
