"""All stage programs of a micro-batch, or of several, called one after another within one trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.offloading import load, store
from ipu_pipeline.engine.programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.residence import Residence
from ipu_pipeline.engine.traced import Source, TracedPipeline

__all__ = ["MicroBatches"]

_DIFFERENT = (ValueKind.MICRO_BATCH, ValueKind.ACCUMULATED, ValueKind.RESIDUAL, ValueKind.COTANGENT)
# The arguments of a program, and which of them differ by micro-batch -> its results, twice: those of the
# last micro-batch, and those of all.
_Call: TypeAlias = "Callable[[StageProgram, list[Any], list[bool]], tuple[Sequence[Any], Sequence[Any]]]"


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Forwards and backwards, to be called within a trace.

    Attributes:
      traced: the pipeline.
      programs: the programs of its stages.
      residence: says what lies in host memory, and which accumulators there are.
    """

    traced: TracedPipeline
    programs: Sequence[StagePrograms]
    residence: Residence

    def run(
        self,
        variables: Mapping[str, Any],
        accumulators: Mapping[str, Any],
        random: tuple[Any, Any, Any, Any, Any],
        given: Sequence[Any],
        num_inputs: int,
        size: int | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[Source, Any]]:
        """Forward and backward of one micro-batch, or of several, each program on all of them in turn.

        Args:
          variables: by full name.
          accumulators: by key.
          random: of the first micro-batch: the session's key, the execution count, the micro-batch's index,
            how many micro-batches the accumulators have taken in, and the scale that the backward starts
            from.
          given: the inputs' leaves, and then the micro-batch's. Of several, these are stacked.
          num_inputs: how many of them are inputs.
          size: None for one micro-batch, else how many.

        Returns:
          The accumulators, the new values of assigned variables by full name, and all values between
          stages, which are stacked of several micro-batches.
        """
        if size is None:
            return self._run(variables, accumulators, random, given, num_inputs, _call_once)
        key, execution, index, accumulated, loss_scale = random
        numbers = jnp.arange(size, dtype=jnp.int32)
        random = (key, execution, index + numbers, accumulated + numbers, loss_scale)
        call = functools.partial(_call_for_each, size)
        accumulators, assigned, found = self._run(variables, accumulators, random, given, num_inputs, call)
        for source, value in found.items():
            if source.kind == "input":
                found[source] = jnp.broadcast_to(value, (size, *jnp.shape(value)))
        return accumulators, assigned, found

    def _run(
        self,
        variables: Mapping[str, Any],
        accumulators: Mapping[str, Any],
        random: tuple[Any, Any, Any, Any, Any],
        given: Sequence[Any],
        num_inputs: int,
        call: _Call,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[Source, Any]]:
        found = {Source("input", number): value for number, value in enumerate(given[:num_inputs])}
        found |= {Source("element", number): value for number, value in enumerate(given[num_inputs:])}
        residuals: dict[tuple[int, int], Any] = {}
        cotangents: dict[tuple[Source, int], Any] = {}
        new_accumulators, assigned = dict(accumulators), {}
        keys = self.residence.accumulator_plan.keys
        kept: dict[tuple[int, Source], Any] = {}  # in host memory, what a stage's backward takes
        load_kept, store_kept = _transfers(self.residence.offloads_activations)
        load_accumulator, store_accumulator = _transfers(self.residence.offloads_accumulators)
        scalars = (
            ValueKind.KEY,
            ValueKind.EXECUTION_COUNT,
            ValueKind.MICRO_BATCH,
            ValueKind.ACCUMULATED,
            ValueKind.LOSS_SCALE,
        )
        constants = dict(zip(scalars, random, strict=True))
        order = [(index, stage.forward) for index, stage in enumerate(self.programs)]
        order += [
            (index, stage.backward)
            for index, stage in reversed(list(enumerate(self.programs)))
            if stage.backward
        ]
        for number, (index, program) in enumerate(order):
            stage = self.traced.stages[index]
            arguments, differs = [], []
            for value in program.arguments:
                own = value.kind in _DIFFERENT
                if value.kind in constants:
                    arguments.append(constants[value.kind])
                elif value.kind is ValueKind.ACCUMULATOR:
                    key = keys[index, stage.variables[value.index].name]
                    arguments.append(load_accumulator(new_accumulators[key]))
                elif value.kind is ValueKind.VARIABLE:
                    name = stage.variables[value.index].name
                    variable = variables[name]
                    arguments.append(load(variable) if name in self.residence.offloaded else variable)
                elif value.kind is ValueKind.INPUT:
                    source = stage.inputs[value.index]
                    own = source.kind != "input"
                    is_kept = own and number >= len(self.programs)
                    arguments.append(load_kept(kept[index, source]) if is_kept else found[source])
                elif value.kind is ValueKind.RESIDUAL:
                    arguments.append(load_kept(residuals[index, value.index]))
                else:
                    assert value.kind is ValueKind.COTANGENT
                    arguments.append(cotangents[stage.outputs[value.index], value.consumer])
                differs.append(own)
            for values, last, result in zip(
                program.results, *call(program, arguments, differs), strict=True
            ):
                for value in values:
                    if value.kind is ValueKind.ACCUMULATOR:
                        key = keys[index, stage.variables[value.index].name]
                        new_accumulators[key] = store_accumulator(last)
                    elif value.kind is ValueKind.ASSIGNED:
                        assigned[stage.variables[value.index].name] = last
                    elif value.kind is ValueKind.OUTPUT:
                        found[Source("output", value.index, index)] = result
                    elif value.kind is ValueKind.RESIDUAL:
                        residuals[index, value.index] = store_kept(result)
                    else:
                        assert value.kind is ValueKind.INPUT_COTANGENT
                        cotangents[stage.inputs[value.index], index] = result
            backward = self.programs[index].backward
            if program is self.programs[index].forward and backward is not None:
                places = [v.index for v in backward.arguments if v.kind is ValueKind.INPUT]
                for source in (stage.inputs[place] for place in places):
                    if source.kind != "input":
                        kept[index, source] = store_kept(found[source])
        return new_accumulators, assigned, found


def _call_once(program: StageProgram, arguments: list[Any], differs: list[bool]) -> Any:
    del differs
    results = program.function(*arguments)
    return results, results


def _call_for_each(size: int, program: StageProgram, arguments: list[Any], differs: list[bool]) -> Any:
    """Calls a program for one micro-batch after another."""
    carried = _carried(program)
    kept = [
        place
        for place, values in enumerate(program.results)
        if place not in carried.values() or len(values) > 1
    ]

    def one(state: list[Any], stacked: list[Any]) -> tuple[list[Any], list[Any]]:
        changed, fed = dict(zip(carried, state, strict=True)), iter(stacked)
        full = [next(fed) if own else value for value, own in zip(arguments, differs, strict=True)]
        results = program.function(*(changed.get(place, value) for place, value in enumerate(full)))
        return [results[place] for place in carried.values()], [results[place] for place in kept]

    state, stacks = jax.lax.scan(
        one,
        [arguments[place] for place in carried],
        [value for value, own in zip(arguments, differs, strict=True) if own],
        length=size,
    )
    all_results = dict(zip(kept, stacks, strict=True))
    last = {place: stack[-1] for place, stack in all_results.items()}
    last |= dict(zip(carried.values(), state, strict=True))
    places = range(len(program.results))
    return [last[place] for place in places], [all_results.get(place) for place in places]


def _transfers(is_offloaded: bool) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What brings values to the device, and what puts them into host memory."""
    return (load, store) if is_offloaded else (lambda value: value, lambda value: value)


def _carried(program: StageProgram) -> dict[int, int]:
    """Arguments that have another value in the next micro-batch -> the results that give it."""
    places = {value: place for place, value in enumerate(program.arguments)}
    carried = {}
    for place, values in enumerate(program.results):
        for value in values:
            is_assigned = value.kind is ValueKind.ASSIGNED
            argument = Value(ValueKind.VARIABLE, value.index) if is_assigned else value
            if (is_assigned or value.kind is ValueKind.ACCUMULATOR) and argument in places:
                carried[places[argument]] = place
    return carried
