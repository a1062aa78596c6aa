"""The shapes and dtypes of what stage programs are called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.tracing.keys import key_aval
from ipu_pipeline.engine.tracing.traced import TracedPipeline

__all__ = ["argument_shapes"]


def argument_shapes(
    traced: TracedPipeline,
    index: int,
    own: StagePrograms,
    program: StageProgram,
    dtypes: Mapping[str, Any],
    axes: tuple[int, ...] = (),
) -> list[jax.ShapeDtypeStruct]:
    """Finds the shapes and dtypes of a program's arguments.

    Args:
      traced: the pipeline.
      index: the stage that the program belongs to.
      own: the stage's programs, for one micro-batch.
      program: one of these, or what `chunk_programs` made of it.
      dtypes: dtype of each trained variable's accumulators, by full name.
      axes: the leading axes that a chunk adds to a micro-batch's values, see `ChunkForm`.
    """
    stage = traced.stages[index]

    def of_micro_batch(aval: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*axes, *aval.shape), aval.dtype)

    def find(value: Value) -> jax.ShapeDtypeStruct:
        kind = value.kind
        if kind in (ValueKind.VARIABLE, ValueKind.ACCUMULATOR):
            spec = stage.variables[value.index]
            dtype = dtypes[spec.name] if kind is ValueKind.ACCUMULATOR else spec.dtype
            return jax.ShapeDtypeStruct(spec.shape, dtype)
        if kind is ValueKind.INPUT:
            source = stage.inputs[value.index]
            aval = traced.aval(source)
            return of_micro_batch(aval) if source.is_of_micro_batch else aval
        if kind is ValueKind.RESIDUAL:
            return of_micro_batch(own.residuals[value.index])
        if kind is ValueKind.COTANGENT:
            return of_micro_batch(stage.output_avals[value.index])
        if kind is ValueKind.KEY_NUMBER:
            return jax.ShapeDtypeStruct((), np.uint32)
        if kind is ValueKind.KEY:
            return jax.ShapeDtypeStruct((), key_aval().dtype)
        return jax.ShapeDtypeStruct((), np.float32 if kind is ValueKind.LOSS_SCALE else np.int32)

    return [find(value) for value in program.arguments]
