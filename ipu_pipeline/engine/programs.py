"""Stage programs: pure functions on flat lists of arrays, cut out of a stage's jaxpr."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.costs import count_operations, has_convolutions
from ipu_pipeline.engine.shapes import check_float_dtype
from ipu_pipeline.engine.variables import VariableSpec

__all__ = [
    "Reduction",
    "StageProgram",
    "StagePrograms",
    "Value",
    "ValueKind",
    "accumulate",
    "count_dtype",
    "cut",
    "find_accumulator_dtype",
    "seed",
]


class Reduction(enum.Enum):
    """How the gradients of a weight update's micro-batches become one.

    SUM adds them. MEAN divides the sum by their number at the update. RUNNING_MEAN keeps the mean of
    those seen so far, `a * n/(n+1) + g * 1/(n+1)` for the n-th from 0, which no long sum can overflow.
    """

    SUM = "sum"
    MEAN = "mean"
    RUNNING_MEAN = "running_mean"


class ValueKind(enum.Enum):
    """What an argument or a result of a stage program is; `Value.index` says which one."""

    ACCUMULATOR = enum.auto()  # index: position in the stage's variables
    VARIABLE = enum.auto()  # position in the stage's variables
    ASSIGNED = enum.auto()  # position in the stage's variables: its new value
    KEY = enum.auto()
    EXECUTION_COUNT = enum.auto()
    MICRO_BATCH = enum.auto()  # the micro-batch's index, int32; in loops the iteration
    ACCUMULATED = enum.auto()  # how many micro-batches the accumulators have taken in, int32
    INPUT = enum.auto()  # position in the stage's inputs
    OUTPUT = enum.auto()  # position in the stage's outputs
    RESIDUAL = enum.auto()  # counted per stage
    LOSS_SCALE = enum.auto()  # what the backward starts from, float32
    COTANGENT = enum.auto()  # position in the stage's outputs, one for each consumer
    INPUT_COTANGENT = enum.auto()  # position in the stage's inputs


@dataclass(frozen=True)
class Value:
    """An argument or a result of a stage program; `consumer` is the stage that a cotangent is from."""

    kind: ValueKind
    index: int = 0
    consumer: int = -1


@dataclass(frozen=True, eq=False)
class StageProgram:
    """A pure function on flat lists of arrays.

    Attributes:
      name: for profiles, for example "stage0_forward".
      function: takes `arguments`, returns `results`.
      arguments: what they are; accumulators, which may be donated, come first.
      results: what they are. One result may stand for several values.
      num_operations: what it costs, see `costs.count_operations`.
      has_effects: whether it prints or calls back into Python.
      has_convolutions: whether it has convolutions.
    """

    name: str
    function: Callable[..., list[Any]]
    arguments: tuple[Value, ...]
    results: tuple[tuple[Value, ...], ...]
    num_operations: float
    has_effects: bool
    has_convolutions: bool

    @property
    def num_accumulators(self) -> int:
        """How many arguments at the beginning are accumulators."""
        return sum(value.kind is ValueKind.ACCUMULATOR for value in self.arguments)


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """What one stage runs per micro-batch.

    Attributes:
      forward: the forward; on the last stage of a pipeline that trains, forward and backward.
      backward: None if the forward does it, or if nothing needs a gradient.
      residuals: shapes and dtypes of what is stored between the two; the stage's inputs, which the
        executor holds anyway, are not among them.
      trained: positions in the stage's variables of those that have an accumulator.
    """

    forward: StageProgram
    backward: StageProgram | None
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    trained: tuple[int, ...]


def cut(
    name: str,
    flat: jaxprs.FlatJaxpr,
    results: Sequence[tuple[Value, Any]],
    labels: Mapping[Any, Value],
    stored: Collection[Any] = (),
    keep_effects_of: Callable[[Any], bool] | None = None,
) -> tuple[StageProgram, list[Any]]:
    """Cuts a program out of a jaxpr.

    Args:
      name: the program's name.
      flat: where to cut it out of.
      results: what the program returns, each with its atom in `flat`.
      labels: what the inputs of `flat` are. An input that is not in it, and any variable in `stored`,
        becomes a RESIDUAL argument.
      stored: variables that the program takes as arguments instead of computing them.
      keep_effects_of: as in `jaxprs.extract`.

    Returns:
      The program, and the variables that its RESIDUAL arguments stand for, by residual number.
    """
    grouped: dict[Any, list[Value]] = {}
    for value, atom in results:
        grouped.setdefault(_Key(atom), []).append(value)
    atoms = [key.atom for key in grouped]
    program = jaxprs.extract(flat, atoms, stored, keep_effects_of)
    arguments: list[Value] = []
    residuals: list[Any] = []
    for var in program.inputs:
        if var in labels:
            arguments.append(labels[var])
        else:
            arguments.append(Value(ValueKind.RESIDUAL, len(residuals)))
            residuals.append(var)
    labelled = tuple(tuple(values) for values in grouped.values())
    jaxpr = program.closed_jaxpr.jaxpr
    own = StageProgram(
        name,
        program,
        tuple(arguments),
        labelled,
        num_operations=count_operations(jaxpr),
        has_effects=bool(jaxpr.effects),
        has_convolutions=has_convolutions(jaxpr),
    )
    return own, residuals


def seed(program: StageProgram, dtype: Any, is_scaled: bool) -> StageProgram:
    """The program with the loss's COTANGENT argument set to 1, or to a LOSS_SCALE argument."""
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


def count_dtype(dtype: Any) -> Any:
    """The dtype to divide gradients of some dtype by counts in: 16 bits do not hold these."""
    return dtype if np.dtype(dtype).itemsize >= 4 else np.dtype(np.float32)


def find_accumulator_dtype(spec: VariableSpec, wanted: Any, argument: str) -> np.dtype[Any]:
    """The dtype of a variable's accumulator.

    Args:
      spec: the variable.
      wanted: None for the variable's dtype, a dtype, or a function from the variable to one of these.
      argument: what errors call `wanted`.

    Raises:
      ValueError: it is no floating-point dtype, or JAX does not mix it with the variable's.
    """
    if callable(wanted) and not isinstance(wanted, type):
        wanted = wanted(spec)
    if wanted is None:
        return np.dtype(spec.dtype)
    dtype = check_float_dtype(wanted, argument)
    try:
        with jax.numpy_dtype_promotion("standard"):
            jnp.promote_types(spec.dtype, dtype)
    except jax.dtypes.TypePromotionError as error:
        raise ValueError(
            f"{argument}: JAX does not mix {dtype.name} with the {spec.dtype.name} of variable "
            f"{spec.name}; give another dtype."
        ) from error
    return dtype


def accumulate(program: StageProgram, reduction: Reduction) -> StageProgram:
    """The program with accumulators.

    Args:
      program: its ACCUMULATOR results are gradients.
      reduction: how the accumulators take a gradient in.

    Returns:
      The program which takes the accumulators as its first arguments, and returns their new values where
      it returned the gradients. An accumulator keeps its dtype.
    """
    places = [
        (place, value)
        for place, values in enumerate(program.results)
        for value in values
        if value.kind is ValueKind.ACCUMULATOR
    ]
    if not places:
        return program
    # A result that stands for two values is returned twice where one of them is a gradient.
    kept = [
        (place, tuple(v for v in values if v.kind is not ValueKind.ACCUMULATOR))
        for place, values in enumerate(program.results)
    ]
    kept = [(place, values) for place, values in kept if values]
    inner_arguments = arguments = program.arguments
    if reduction is Reduction.RUNNING_MEAN:
        arguments = (*arguments, Value(ValueKind.ACCUMULATED))

    def accumulated(*values: Any) -> list[Any]:
        accumulators, rest = values[: len(places)], values[len(places) :]
        results = program.function(*rest[: len(inner_arguments)])
        taken = []
        for accumulator, (place, _value) in zip(accumulators, places, strict=True):
            gradient = results[place]
            if reduction is Reduction.RUNNING_MEAN:
                wide = count_dtype(accumulator.dtype)
                number = rest[-1].astype(wide)
                share = 1 / (number + 1)
                mean = accumulator.astype(wide) * (number * share) + gradient.astype(wide) * share
                taken.append(mean.astype(accumulator.dtype))
            else:
                taken.append(accumulator + gradient.astype(accumulator.dtype))
        return [*taken, *(results[place] for place, _values in kept)]

    return dataclasses.replace(
        program,
        function=accumulated,
        arguments=(*(value for _place, value in places), *arguments),
        results=(*((value,) for _place, value in places), *(values for _place, values in kept)),
    )


class _Key:
    """An atom as a dictionary key: the same variable is the same key, every literal is its own."""

    def __init__(self, atom: Any) -> None:
        self.atom = atom

    def __hash__(self) -> int:
        return id(self.atom)

    def __eq__(self, other: object) -> bool:
        is_literal = isinstance(self.atom, jex_core.Literal)
        return isinstance(other, _Key) and self.atom is other.atom and not is_literal
