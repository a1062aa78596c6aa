"""Exports inference pipelines as directories, to run without their Python code; see `loaded_program`.

The directory is a checkpoint of the variables, with one file per stage, which `jax.export` made, and a
description of the routes between them in the checkpoint's document. It has no Python code, and nothing in
it is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np

from ipu_pipeline.checkpointing import checkpoints
from ipu_pipeline.checkpointing.session_state import SessionState
from ipu_pipeline.checkpointing.snapshots import Snapshot, describe_array
from ipu_pipeline.data import json_trees
from ipu_pipeline.engine import VariableSpec
from ipu_pipeline.engine.fronts import export_stages
from ipu_pipeline.processes import selection
from ipu_pipeline.tf1.graph.placeholders import Placeholder
from ipu_pipeline.tf1.program.calls import PipelineCall
from ipu_pipeline.tf1.program.program import Program

__all__ = ["FORMAT_VERSION", "PROGRAM", "Exported", "export", "input_name"]

PROGRAM = "program"  # its key in the document's extra
FORMAT_VERSION = 2  # 1 encoded trees in another way, and is still read


@dataclass(frozen=True, eq=False)
class Exported:
    """The parts of a session that an export needs."""

    variable: Callable[[VariableSpec], Any]  # returns the value of a variable
    key: Callable[[], Any]  # returns the key that all random keys are folded from; starts JAX's backend
    seed: int  # the seed that the key was made from
    execution_count: Callable[[str], int]  # returns how often the pipelines of a name have run
    update_count: Callable[[str], int]  # returns the global step of their weights


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
    if program.function.outputs:
        raise NotImplementedError(
            "export: the compiled function returns values of its own; an exported program has what the "
            "pipeline's last stage returns. Return only the pipeline's operation."
        )
    if program.host_tables:
        raise NotImplementedError(
            f"export: the program looks up rows of {program.host_tables[0].spec.name!r}, a host embedding, "
            "which a session has. Export one that takes the rows as its data, and look them up before."
        )
    if call.pipeline.options.num_devices_per_ipu > 1:
        raise NotImplementedError(
            "export: an exported program has one device for each stage, and this pipeline has "
            f"{call.pipeline.options.num_devices_per_ipu} (tensor_parallel). Compile it without that; its "
            "variables are the same."
        )
    for placeholder in inputs:
        if placeholder not in program.placeholders:
            raise ValueError(f"export: {placeholder!r} in `inputs` is not an input of this program.")
    platform = selection.devices_for(program.ipu_device, program.num_ipus)[0].platform
    operands = program.find_operands(call, inputs, exported.variable)[call.has_count_operand :]
    pipeline = call.pipeline
    variables = {name: exported.variable(spec) for name, spec in call.variables.items()}
    given = list(dict.fromkeys(value for value in operands if isinstance(value, Placeholder)))
    given_names = [placeholder.name for placeholder in given]
    if len(set(given_names)) < len(given_names):
        raise ValueError(
            "export: placeholders are known by their names afterwards, but there are "
            f"{', '.join(given_names)}. "
            "Give each another `name`."
        )
    key = exported.key()
    avals = [value.aval if isinstance(value, Placeholder) else value for value in operands]
    made = export_stages(pipeline, avals, key, platform)
    collecting = pipeline.built.collecting
    snapshot = Snapshot(
        SessionState({**variables, **_as_variables(operands)}),
        exported.seed,
        str(jax.random.key_impl(key)),
        extra={
            PROGRAM: {
                "version": FORMAT_VERSION,
                "jax": jax.__version__,
                "platform": platform,
                "has_wide_dtypes": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
                "num_ipus": program.num_ipus,
                "element": _encode(call.infeed_queue.element) if call.infeed_queue else None,
                "num_micro_batches": pipeline.options.num_micro_batches or 1,
                "placeholders": {
                    placeholder.name: describe_array(placeholder.aval) for placeholder in given
                },
                "inputs": [
                    {"placeholder": value.name} if isinstance(value, Placeholder) else {"value": number}
                    for number, value in enumerate(operands)
                ],
                "execution_count": exported.execution_count(call.name),
                "update_count": exported.update_count(call.name),
                "stages": made.stages,
                "outputs": made.outputs,
                "output_tree": _encode(call.outfeed_tree.unflatten(collecting.avals)),
            }
        },
    )
    checkpoints.write_checkpoint(path, snapshot, made.files)


def _encode(tree: Any) -> Any:
    """A pytree of shapes as JSON."""

    def encode_shape(leaf: Any) -> str:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return describe_array(leaf)
        raise NotImplementedError(
            f"export: a {type(leaf).__name__} needs its Python class; use a dict, list or tuple of arrays."
        )

    return json_trees.encode(tree, encode_shape)


def _describe(call: Any) -> str:
    if not isinstance(call, PipelineCall):
        return "a loop"
    return f"a pipeline that trains ({call.name})" if call.trains else f"a pipeline ({call.name})"


def input_name(number: int) -> str:
    """The name of an input of the program among its variables."""
    return f"input {number} of the program"


def _as_variables(operands: Sequence[Any]) -> dict[str, Any]:
    """Inputs with a value, to be stored among the variables."""
    return {
        input_name(number): np.asarray(value)
        for number, value in enumerate(operands)
        if not isinstance(value, Placeholder)
    }
