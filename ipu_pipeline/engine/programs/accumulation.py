"""Accumulates the gradients of a weight update's micro-batches."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.programs.stage_programs import StageProgram, Value, ValueKind
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground.shapes import check_float_dtype

__all__ = ["Reduction", "ReductionName", "accumulate", "count_dtype", "find_accumulator_dtype"]


class Reduction(enum.Enum):
    """The way in which the gradients of a weight update's micro-batches are combined.

    SUM adds them. MEAN divides the sum by their number at the update. RUNNING_MEAN keeps the mean of the
    gradients so far, `a * n/(n+1) + g * 1/(n+1)` for the n-th from 0, so that no long sum overflows.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4)],
      ...     num_micro_batches=2,
      ...     loss=jnp.mean,
      ...     optimizer=optax.sgd(0.1),
      ...     reduction=engine.Reduction.MEAN,  # or "mean"
      ... )
    """

    SUM = "sum"
    MEAN = "mean"
    RUNNING_MEAN = "running_mean"


ReductionName: TypeAlias = Literal["sum", "mean", "running_mean"]  # their values


def count_dtype(dtype: Any) -> Any:
    """The dtype in which to divide gradients of some dtype by counts, which 16 bits do not hold."""
    return dtype if np.dtype(dtype).itemsize >= 4 else np.dtype(np.float32)


def find_accumulator_dtype(spec: VariableSpec, wanted: Any, argument: str) -> np.dtype[Any]:
    """The dtype of a variable's accumulator."""
    if callable(wanted) and not isinstance(wanted, type):
        wanted, argument = wanted(spec), f"{argument} of variable {spec.name}"
    if wanted is None:
        return np.dtype(spec.dtype)
    dtype = check_float_dtype(wanted, argument)
    try:
        with jax.numpy_dtype_promotion("standard"):
            jnp.promote_types(spec.dtype, dtype)
    except ValueError as error:  # a TypePromotionError, which JAX 0.9 does not publish
        raise ValueError(
            f"{argument}: JAX does not mix {dtype.name} with the {spec.dtype.name} of variable "
            f"{spec.name}; give another dtype."
        ) from error
    return dtype


def accumulate(program: StageProgram, reduction: Reduction) -> StageProgram:
    """Adds accumulators to a program."""
    places = [
        (place, value)
        for place, values in enumerate(program.results)
        for value in values
        if value.kind is ValueKind.ACCUMULATOR
    ]
    if not places:
        return program
    # A result that stands for two values is returned twice if one of them is a gradient.
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
