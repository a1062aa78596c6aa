"""Inference pipelines exported as a directory, to run without their Python code; see `loaded_program`.

The directory is a checkpoint of the variables, with one file per stage, which `jax.export` made, and a
description of the routes between them in the checkpoint's document. Nothing in it is code of Python, and
nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np

from ipu_pipeline import config
from ipu_pipeline.checkpointing import checkpoints
from ipu_pipeline.checkpointing.json_trees import describe_tree
from ipu_pipeline.checkpointing.session_state import SessionState
from ipu_pipeline.checkpointing.snapshots import Snapshot, describe_array
from ipu_pipeline.engine.programs.stage_programs import Value, ValueKind
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.traced import Source, TracedStage
from ipu_pipeline.graph.placeholders import Placeholder
from ipu_pipeline.program.calls import PipelineCall
from ipu_pipeline.program.program import Program

__all__ = ["FORMAT_VERSION", "PROGRAM", "Exported", "export", "input_name"]

PROGRAM = "program"  # in the document's extra
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Exported:
    """What a session gives to an export.

    Attributes:
      variable: gives the value of a variable.
      key: gives the random key that all others are folded from, and starts JAX's backend.
      seed: what that was made from.
      execution_count: says how often the pipelines of a name have run.
    """

    variable: Callable[[VariableSpec], Any]
    key: Callable[[], Any]
    seed: int
    execution_count: Callable[[str], int]


def export(
    path: str | os.PathLike[str], program: Program, inputs: Mapping[Placeholder, Any], exported: Exported
) -> None:
    """See `Session.export`."""
    calls = program.calls
    if len(calls) != 1 or not isinstance(calls[0], PipelineCall) or calls[0].trains:
        raise NotImplementedError(
            "export: the program must be one inference pipeline; it has "
            f"{', '.join(_describe(call) for call in calls) or 'neither a pipeline nor a loop'}."
        )
    call = calls[0]
    if program.has_results:
        raise NotImplementedError(
            "export: the compiled function returns values of its own; an exported program has what the "
            "pipeline's last stage returns. Return only the pipeline's operation."
        )
    for placeholder in inputs:
        if placeholder not in program.placeholders:
            raise ValueError(f"export: {placeholder!r} in `inputs` is not an input of this program.")
    platform = config.devices_for(program.ipu_device, program.num_ipus)[0].platform
    operands = program.find_operands(call, inputs, exported.variable)[call.has_count_operand :]
    pipeline = call.pipeline
    traced = pipeline.traced
    variables = {name: exported.variable(spec) for name, spec in call.variables.items()}
    given = list(dict.fromkeys(value for value in operands if isinstance(value, Placeholder)))
    given_names = [placeholder.name for placeholder in given]
    if len(set(given_names)) < len(given_names):
        raise ValueError(
            "export: placeholders are known by their names afterwards, but there are "
            f"{', '.join(given_names)}. "
            "Give each another `name`."
        )
    key = jax.random.key_data(exported.key())
    implementation = str(jax.random.key_impl(exported.key()))
    files: dict[str, bytes] = {}
    stages = []
    for number, (stage, own) in enumerate(zip(traced.stages, pipeline.programs, strict=True)):
        arguments = [_argument(value, stage) for value in own.forward.arguments]
        takes_key = [value.kind is ValueKind.KEY for value in own.forward.arguments]
        avals = [
            _aval(value, stage, traced.element, operands, traced.stages, key)
            for value in own.forward.arguments
        ]
        name = f"stage{number}.jax_export"
        forward = jax.export.export(
            jax.jit(_with_key_data(own.forward.function, takes_key, implementation)), platforms=[platform]
        )(*avals)
        files[name] = bytes(forward.serialize())
        stages.append(
            {
                "file": name,
                "place": stage.place,
                "ipu": pipeline.device_mapping[number],
                "arguments": arguments,
                "results": [[_result(value, stage) for value in values] for values in own.forward.results],
            }
        )
    collecting = pipeline.collecting
    snapshot = Snapshot(
        SessionState({**variables, **_as_variables(operands)}),
        exported.seed,
        implementation,
        extra={
            PROGRAM: {
                "version": FORMAT_VERSION,
                "jax": jax.__version__,
                "platform": platform,
                "has_wide_dtypes": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
                "num_ipus": program.num_ipus,
                "element": describe_tree(call.infeed_queue.element) if call.infeed_queue else None,
                "num_micro_batches": pipeline.num_micro_batches or 1,
                "placeholders": {
                    placeholder.name: describe_array(placeholder.aval) for placeholder in given
                },
                "inputs": [
                    {"placeholder": value.name} if isinstance(value, Placeholder) else {"value": number}
                    for number, value in enumerate(operands)
                ],
                "execution_count": exported.execution_count(call.name),
                "stages": stages,
                "outputs": [_source(source) for source in collecting.sources],
                "output_tree": describe_tree(call.outfeed_tree.unflatten(collecting.avals)),
            }
        },
    )
    checkpoints.write_checkpoint(path, snapshot, files)


def _describe(call: Any) -> str:
    if not isinstance(call, PipelineCall):
        return "a loop"
    return f"a pipeline that trains ({call.name})" if call.trains else f"a pipeline ({call.name})"


def _with_key_data(function: Any, takes_key: Sequence[bool], implementation: str) -> Any:
    """The function with the data of random keys in place of the keys, which files cannot hold."""

    def wrapped(*arguments: Any) -> Any:
        return function(
            *(
                jax.random.wrap_key_data(argument, impl=implementation) if is_key else argument
                for argument, is_key in zip(arguments, takes_key, strict=True)
            )
        )

    return wrapped


def _aval(
    value: Value,
    stage: TracedStage,
    element: Any,
    operands: Sequence[Any],
    stages: Sequence[TracedStage],
    key: Any,
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an argument of a forward."""
    if value.kind is ValueKind.VARIABLE:
        spec = stage.variables[value.index]
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    if value.kind is ValueKind.KEY:
        return jax.ShapeDtypeStruct(key.shape, key.dtype)
    if value.kind is ValueKind.INPUT:
        source = stage.inputs[value.index]
        if source.kind == "output":
            places = [place for place, own in enumerate(stages[source.stage].outputs) if own == source]
            return stages[source.stage].output_avals[places[0]]
        if source.kind == "element":
            leaf = jax.tree.leaves(element)[source.index]
        else:
            operand = operands[source.index]
            leaf = operand.aval if isinstance(operand, Placeholder) else operand
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct((), np.int32)


def _argument(value: Value, stage: TracedStage) -> dict[str, Any]:
    """What an argument of a forward is, as JSON."""
    if value.kind is ValueKind.VARIABLE:
        return {"kind": "variable", "name": stage.variables[value.index].name}
    if value.kind is ValueKind.INPUT:
        return _source(stage.inputs[value.index])
    return {"kind": value.kind.name.lower()}


def _result(value: Value, stage: TracedStage) -> dict[str, Any]:
    if value.kind is ValueKind.ASSIGNED:
        return {"kind": "assigned", "name": stage.variables[value.index].name}
    assert value.kind is ValueKind.OUTPUT
    return {"kind": "output", "index": value.index}


def _source(source: Source) -> dict[str, Any]:
    return {"kind": source.kind, "index": source.index, "stage": source.stage}


def input_name(number: int) -> str:
    """What an input of the program is called among its variables."""
    return f"input {number} of the program"


def _as_variables(operands: Sequence[Any]) -> dict[str, Any]:
    """Inputs with a value, to be stored among the variables."""
    return {
        input_name(number): np.asarray(value)
        for number, value in enumerate(operands)
        if not isinstance(value, Placeholder)
    }
