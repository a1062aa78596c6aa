"""All stage programs of a micro-batch, or of several, called one after another within one trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ipu_pipeline.engine.devices.offloading import load, store
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.devices.rows import Row
from ipu_pipeline.engine.programs.chunks import chunk_programs
from ipu_pipeline.engine.programs.stage_programs import StagePrograms, ValueKind
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline

__all__ = ["MicroBatches"]


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
        programs = self.programs if size is None else chunk_programs(self.traced, self.programs, size)
        accumulators, assigned, found = self._run(
            programs, variables, accumulators, random, given, num_inputs
        )
        if size is None:
            return accumulators, assigned, found
        for source, value in found.items():
            if source.kind == "input":
                found[source] = jnp.broadcast_to(value, (size, *jnp.shape(value)))
        return accumulators, assigned, found

    def _run(
        self,
        programs: Sequence[StagePrograms],
        variables: Mapping[str, Any],
        accumulators: Mapping[str, Any],
        random: tuple[Any, Any, Any, Any, Any],
        given: Sequence[Any],
        num_inputs: int,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[Source, Any]]:
        found = {Source("input", number): value for number, value in enumerate(given[:num_inputs])}
        found |= {Source("element", number): value for number, value in enumerate(given[num_inputs:])}
        residuals: dict[tuple[int, int], Any] = {}
        cotangents: dict[tuple[Source, int], Any] = {}
        new_accumulators, assigned = dict(accumulators), {}
        keys = self.residence.accumulator_plan.keys
        kept: dict[tuple[int, Source], Any] = {}  # in host memory, what a stage's backward takes
        row = self.residence.rows[0]
        load_kept, store_kept = _transfers(self.residence.offloads_activations, row)
        load_accumulator, store_accumulator = _transfers(self.residence.offloads_accumulators, row)
        scalars = (
            ValueKind.KEY,
            ValueKind.EXECUTION_COUNT,
            ValueKind.MICRO_BATCH,
            ValueKind.ACCUMULATED,
            ValueKind.LOSS_SCALE,
        )
        constants = dict(zip(scalars, random, strict=True))
        order = [(index, stage.forward) for index, stage in enumerate(programs)]
        order += [
            (index, stage.backward)
            for index, stage in reversed(list(enumerate(programs)))
            if stage.backward
        ]
        for number, (index, program) in enumerate(order):
            stage = self.traced.stages[index]
            arguments = []
            for value in program.arguments:
                if value.kind in constants:
                    arguments.append(constants[value.kind])
                elif value.kind is ValueKind.ACCUMULATOR:
                    key = keys[index, stage.variables[value.index].name]
                    arguments.append(load_accumulator(new_accumulators[key]))
                elif value.kind is ValueKind.VARIABLE:
                    name = stage.variables[value.index].name
                    variable = variables[name]
                    is_away = name in self.residence.offloaded
                    arguments.append(load(variable, row) if is_away else variable)
                elif value.kind is ValueKind.INPUT:
                    source = stage.inputs[value.index]
                    is_kept = source.kind != "input" and number >= len(programs)
                    arguments.append(load_kept(kept[index, source]) if is_kept else found[source])
                elif value.kind is ValueKind.RESIDUAL:
                    arguments.append(load_kept(residuals[index, value.index]))
                else:
                    assert value.kind is ValueKind.COTANGENT
                    arguments.append(cotangents[stage.outputs[value.index], value.consumer])
            for values, result in zip(program.results, program.function(*arguments), strict=True):
                for value in values:
                    if value.kind is ValueKind.ACCUMULATOR:
                        key = keys[index, stage.variables[value.index].name]
                        new_accumulators[key] = store_accumulator(result)
                    elif value.kind is ValueKind.ASSIGNED:
                        assigned[stage.variables[value.index].name] = result
                    elif value.kind is ValueKind.OUTPUT:
                        found[Source("output", value.index, index)] = result
                    elif value.kind is ValueKind.RESIDUAL:
                        residuals[index, value.index] = store_kept(result)
                    else:
                        assert value.kind is ValueKind.INPUT_COTANGENT
                        cotangents[stage.inputs[value.index], index] = result
            backward = programs[index].backward
            if program is programs[index].forward and backward is not None:
                places = [v.index for v in backward.arguments if v.kind is ValueKind.INPUT]
                for source in (stage.inputs[place] for place in places):
                    if source.kind != "input":
                        kept[index, source] = store_kept(found[source])
        return new_accumulators, assigned, found


def _transfers(is_offloaded: bool, row: Row) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What brings values to the device, and what puts them into host memory."""
    if not is_offloaded:
        return (lambda value: value), (lambda value: value)
    return functools.partial(load, row=row), functools.partial(store, row=row)
