"""Accumulation over micro-batches: gradients are mapped and added up, outputs collected or summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.option_types import Reduction
from ipu_pipeline.engine.programs.stage_programs import StageProgram, Value, ValueKind
from ipu_pipeline.engine.state import Collected
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline
from ipu_pipeline.ground.pytrees import check_dtype, check_float_dtype

# User functions applied to each micro-batch's gradients, before accumulation.
GradientMap: TypeAlias = "Callable[[jax.Array, jax.Array], jax.Array]"


@dataclass(frozen=True, eq=False)
class GradientTarget:
    """A target that gets each micro-batch's gradients, as they are accumulated.

    Attributes:
      target: the target that they are enqueued for, as a dict by full name.
      choose: takes the full names of all trained variables, returns those whose gradients are wanted.
    """

    target: Any
    choose: Callable[[Iterable[str]], Iterable[str]]


def join_gradient_maps(gradient_maps: Sequence[GradientMap]) -> GradientMap | None:
    """Joins several maps into one, which applies them in their order; None if there are none."""
    if not gradient_maps:
        return None

    def mapped(gradient: jax.Array, variable: jax.Array) -> jax.Array:
        for gradient_map in gradient_maps:
            gradient = gradient_map(gradient, variable)
        return gradient

    return mapped


def check_gradient_map(gradient_map: GradientMap, trained: Iterable[VariableSpec], called: str) -> None:
    """Raises if a gradient map does not keep shapes and dtypes."""
    label = f"the {called}"
    for spec in trained:
        aval = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        try:
            closed_jaxpr = jax.make_jaxpr(gradient_map)(aval, aval)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(
                f"Trying to capture the tensor of a stage in {label}, which may only use its arguments, a "
                "gradient and its variable."
            ) from error
        except AttributeError as error:
            if error.name == "name":
                error.add_note(
                    f"The second argument of {label} is the variable's value, an array without a name. "
                    "Choose variables by their names in the loss, as ipu.trainable_variables() has them, "
                    "or by optax.masked."
                )
            raise
        Captures().check(closed_jaxpr.consts, label)
        results = closed_jaxpr.out_avals
        if len(results) != 1 or results[0].shape != spec.shape or results[0].dtype != spec.dtype:
            described = ", ".join(f"{aval.dtype.name}{list(aval.shape)}" for aval in results)
            raise ValueError(
                f"{called} must return the gradient's shape and dtype, for {spec}; it returned "
                f"{described or 'nothing'}."
            )


def count_dtype(dtype: Any) -> Any:
    """The dtype in which to divide gradients of some dtype by counts, which 16 bits do not hold."""
    return dtype if np.dtype(dtype).itemsize >= 4 else np.dtype(np.float32)


def find_accumulator_dtype(spec: VariableSpec, requested: Any, argument: str) -> np.dtype[Any]:
    """The dtype of a variable's accumulator."""
    if callable(requested) and not isinstance(requested, type):
        requested, argument = requested(spec), f"{argument} of variable {spec.name}"
    if requested is None:
        return np.dtype(spec.dtype)
    dtype = check_float_dtype(requested, argument)
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
    other_results = [
        (place, tuple(v for v in values if v.kind is not ValueKind.ACCUMULATOR))
        for place, values in enumerate(program.results)
    ]
    other_results = [(place, values) for place, values in other_results if values]
    inner_arguments = arguments = program.arguments
    if reduction is Reduction.RUNNING_MEAN:
        arguments = (*arguments, Value(ValueKind.ACCUMULATED))

    def accumulated(*values: Any) -> list[Any]:
        accumulators, inputs = values[: len(places)], values[len(places) :]
        results = program.function(*inputs[: len(inner_arguments)])
        new_accumulators = []
        for accumulator, (place, _value) in zip(accumulators, places, strict=True):
            gradient = results[place]
            if reduction is Reduction.RUNNING_MEAN:
                wide = count_dtype(accumulator.dtype)
                number = inputs[-1].astype(wide)
                share = 1 / (number + 1)
                mean = accumulator.astype(wide) * (number * share) + gradient.astype(wide) * share
                new_accumulators.append(mean.astype(accumulator.dtype))
            else:
                new_accumulators.append(accumulator + gradient.astype(accumulator.dtype))
        return [*new_accumulators, *(results[place] for place, _values in other_results)]

    return dataclasses.replace(
        program,
        function=accumulated,
        arguments=(*(value for _place, value in places), *arguments),
        results=(*((value,) for _place, value in places), *(values for _place, values in other_results)),
    )


@dataclass(frozen=True, eq=False)
class Collecting:
    """The values that are collected from the last stage, for each micro-batch or as a sum."""

    places: tuple[int, ...]  # positions among the leaves of what the last stage returns
    has_loss: bool  # whether the loss is collected, too, behind them
    sources: tuple[Source, ...]  # the values
    avals: tuple[jax.ShapeDtypeStruct, ...]  # shapes and dtypes; where values are summed, those of the sums
    is_summed: bool  # whether they are summed over the micro-batches of an execution

    def collect(self, values: Sequence[Any], size: int | None) -> Collected:
        """Makes a `Collected` of the values of one micro-batch or sum (size None), or of `size` stacked."""
        num_outputs = len(self.places)
        return Collected(list(values[:num_outputs]), values[num_outputs] if self.has_loss else None, size)


def make_collecting(
    traced: TracedPipeline,
    outputs: bool | Callable[[Any], Sequence[bool]] = True,
    losses: bool = True,
    is_summed: bool = False,
    sum_dtype: Any = None,
    called: str = "sum_dtype",
) -> Collecting:
    """Works out what is collected."""
    leaves = list(traced.returned_avals)
    chosen = [bool(outputs)] * len(leaves)
    if callable(outputs):
        chosen = list(outputs(traced.output_tree.unflatten(leaves)))
        if len(chosen) != len(leaves):
            raise ValueError(
                f"collect_outputs must return one boolean for each of the {len(leaves)} leaves of what the "
                f"last stage returns; it returned {len(chosen)}."
            )
    places = tuple(place for place, is_chosen in enumerate(chosen) if is_chosen)
    has_loss = losses and traced.loss is not None
    sources = [traced.outputs[place] for place in places]
    avals = [leaves[place] for place in places]
    if has_loss and traced.loss is not None:
        sources.append(traced.loss)
        avals += traced.loss_avals
    if is_summed:
        avals = [
            jax.ShapeDtypeStruct(aval.shape, find_sum_dtype(aval, sum_dtype, called)) for aval in avals
        ]
    return Collecting(places, has_loss, tuple(sources), tuple(avals), is_summed)


def find_sum_dtype(aval: jax.ShapeDtypeStruct, requested: Any, argument: str) -> np.dtype[Any]:
    """The dtype in which an output is summed over micro-batches."""
    label = f"an output of the last stage, {aval.dtype.name}{list(aval.shape)}"
    is_boolean = aval.dtype == np.bool_
    if not is_boolean and not jnp.issubdtype(aval.dtype, jnp.number):
        raise ValueError(f"{argument}: {label}, cannot be summed; do not collect it (mask it out).")
    if callable(requested) and not isinstance(requested, type):
        requested = requested(aval)
    if requested is None and is_boolean:
        raise ValueError(
            f"{argument}: {label}, has no sum of its own dtype; give one, for example int32, which counts."
        )
    dtype = np.dtype(aval.dtype) if requested is None else check_dtype(requested, argument)
    order = (jnp.integer, jnp.floating, jnp.complexfloating)

    def rank(candidate: Any) -> int:
        return next((number for number, kind in enumerate(order) if jnp.issubdtype(candidate, kind)), -1)

    if rank(dtype) < max(0, rank(aval.dtype)):
        raise ValueError(f"{argument}: {label}, is summed in a dtype that can hold it; got {dtype.name}.")
    return dtype
