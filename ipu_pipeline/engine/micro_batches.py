"""All stage programs of a micro-batch called one after another, within one trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ipu_pipeline.engine.programs import StagePrograms, ValueKind
from ipu_pipeline.engine.stages import Source, TracedPipeline

__all__ = ["run_micro_batch"]


def run_micro_batch(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    variables: Mapping[str, Any],
    accumulators: Mapping[str, Any],
    random: tuple[Any, Any, Any, Any],
    given: Sequence[Any],
    num_inputs: int,
) -> tuple[dict[str, Any], dict[str, Any], dict[Source, Any]]:
    """Forward and backward of one micro-batch.

    Args:
      traced: the pipeline.
      programs: the programs of its stages.
      variables: by full name.
      accumulators: by full name.
      random: the session's key, the execution count, the micro-batch's index, and how many micro-batches
        the accumulators have taken in.
      given: the inputs' leaves and then the micro-batch's.
      num_inputs: how many of them are inputs.

    Returns:
      The accumulators, the new values of assigned variables by full name, and all values between stages.
    """
    found = {Source("input", number): value for number, value in enumerate(given[:num_inputs])}
    found |= {Source("element", number): value for number, value in enumerate(given[num_inputs:])}
    residuals: dict[tuple[int, int], Any] = {}
    cotangents: dict[tuple[Source, int], Any] = {}
    new_accumulators, assigned = dict(accumulators), {}
    scalars = (ValueKind.KEY, ValueKind.EXECUTION_COUNT, ValueKind.MICRO_BATCH, ValueKind.ACCUMULATED)
    constants = dict(zip(scalars, random, strict=True))
    order = [(index, stage.forward) for index, stage in enumerate(programs)]
    order += [
        (index, stage.backward) for index, stage in reversed(list(enumerate(programs))) if stage.backward
    ]
    for index, program in order:
        stage = traced.stages[index]
        arguments = []
        for value in program.arguments:
            if value.kind in constants:
                arguments.append(constants[value.kind])
            elif value.kind is ValueKind.ACCUMULATOR:
                arguments.append(new_accumulators[stage.variables[value.index].name])
            elif value.kind is ValueKind.VARIABLE:
                arguments.append(variables[stage.variables[value.index].name])
            elif value.kind is ValueKind.INPUT:
                arguments.append(found[stage.inputs[value.index]])
            elif value.kind is ValueKind.RESIDUAL:
                arguments.append(residuals[index, value.index])
            else:
                assert value.kind is ValueKind.COTANGENT
                arguments.append(cotangents[stage.outputs[value.index], value.consumer])
        for values, result in zip(program.results, program.function(*arguments), strict=True):
            for value in values:
                if value.kind is ValueKind.ACCUMULATOR:
                    new_accumulators[stage.variables[value.index].name] = result
                elif value.kind is ValueKind.ASSIGNED:
                    assigned[stage.variables[value.index].name] = result
                elif value.kind is ValueKind.OUTPUT:
                    found[Source("output", value.index, index)] = result
                elif value.kind is ValueKind.RESIDUAL:
                    residuals[index, value.index] = result
                else:
                    assert value.kind is ValueKind.INPUT_COTANGENT
                    cotangents[stage.inputs[value.index], index] = result
    return new_accumulators, assigned, found
