"""What a stage computes for one request, from a chunk of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.programs.stage_programs import StageProgram, ValueKind
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline, TracedStage

__all__ = ["POSITION", "TOKENS", "Given", "StageRun", "make_runs", "scanned"]

TOKENS, POSITION = Source("element", 0), Source("element", 1)  # of what the first stage takes
_COUNT = Source("update_count", 0)


class Given(NamedTuple):
    """What a stage gets for a request besides values of other stages: scalars."""

    position: Any  # the place of the first token, int32
    key: Any  # the request's random key
    update_count: Any  # of the state, int32


@dataclass(frozen=True, eq=False)
class StageRun:
    """A stage for one request. Calling it is pure.

    Attributes:
      place: what errors call it.
      weights: full names of the variables that it reads from the state.
      caches: full names of the variables that it assigns, of which each request has its own.
      inputs: the values that it takes, without `POSITION`.
      input_avals: their shapes and dtypes.
      outputs: the values that it makes for other stages, or that are wanted.
    """

    place: str
    weights: tuple[str, ...]
    caches: tuple[str, ...]
    inputs: tuple[Source, ...]
    input_avals: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[Source, ...]
    _program: StageProgram
    _stage: TracedStage
    _index: int

    def __call__(
        self, caches: Sequence[Any], weights: Sequence[Any], inputs: Sequence[Any], given: Given
    ) -> tuple[list[Any], list[Any]]:
        """Computes the outputs, and the new caches."""
        variables = dict(zip(self.weights, weights, strict=True)) | dict(
            zip(self.caches, caches, strict=True)
        )
        values = dict(zip(self.inputs, inputs, strict=True))
        values |= {POSITION: given.position, _COUNT: given.update_count}
        names = [spec.name for spec in self._stage.variables]
        scalars = {
            ValueKind.KEY: lambda: given.key,
            ValueKind.EXECUTION_COUNT: lambda: jnp.int32(0),
            ValueKind.MICRO_BATCH: lambda: given.position,
            ValueKind.UPDATE_COUNT: lambda: given.update_count,
        }
        arguments = []
        for value in self._program.arguments:
            if value.kind is ValueKind.VARIABLE:
                arguments.append(variables[names[value.index]])
            elif value.kind is ValueKind.INPUT:
                arguments.append(values[self._stage.inputs[value.index]])
            elif value.kind is ValueKind.KEY_NUMBER:
                arguments.append(np.uint32(value.index))
            else:
                arguments.append(scalars[value.kind]())
        made: dict[Any, Any] = {}
        try:
            results = self._program.function(*arguments)
        except Exception as error:  # such as a callback that cannot be vmapped
            error.add_note(f"This happened in {self.place}, while its program for a generator was made")
            raise
        for meanings, result in zip(self._program.results, results, strict=True):
            for value in meanings:
                if value.kind is ValueKind.ASSIGNED:
                    made[names[value.index]] = result
                elif value.kind is ValueKind.OUTPUT:
                    made[Source("output", value.index, self._index)] = result
        return [made[source] for source in self.outputs], [made[name] for name in self.caches]


def make_runs(pipeline: Pipeline, platform: str) -> list[StageRun]:
    """The stages of a traced pipeline that only runs forwards. The last one takes or makes its output."""
    traced = pipeline.traced
    programs = [own.on(platform).forward for own in pipeline.programs]
    takes = [_inputs_of(stage, program) for stage, program in zip(traced.stages, programs, strict=True)]
    (logits,) = traced.outputs
    last = len(programs) - 1
    if logits.stage != last and logits not in takes[last]:
        takes[last] = (*takes[last], logits)
    wanted = {logits}.union(*takes)
    return [
        _make_run(traced, index, program, takes[index], wanted) for index, program in enumerate(programs)
    ]


def _inputs_of(stage: TracedStage, program: StageProgram) -> tuple[Source, ...]:
    read = [stage.inputs[value.index] for value in program.arguments if value.kind is ValueKind.INPUT]
    return tuple(dict.fromkeys(source for source in read if source not in (POSITION, _COUNT)))


def _make_run(
    traced: TracedPipeline,
    index: int,
    program: StageProgram,
    inputs: tuple[Source, ...],
    wanted: set[Source],
) -> StageRun:
    stage = traced.stages[index]
    caches = tuple(spec.name for spec in stage.assigned)
    read = [
        stage.variables[value.index].name for value in program.arguments if value.kind is ValueKind.VARIABLE
    ]
    weights = tuple(dict.fromkeys(name for name in read if name not in caches))
    outputs = tuple(
        source
        for position, source in enumerate(stage.outputs)
        if source == Source("output", position, index) and source in wanted
    )
    avals = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(traced.aval, inputs))
    return StageRun(stage.place, weights, caches, inputs, avals, outputs, program, stage, index)


def scanned(
    run: StageRun,
    length: int,
    caches: Sequence[Any],
    weights: Sequence[Any],
    inputs: Sequence[Any],
    given: Given,
) -> tuple[list[Any], list[Any]]:
    """What a stage that takes one token at a time computes for a chunk: inputs and outputs are stacked."""

    def step(caches: Any, one: Any) -> Any:
        number, own = one
        outputs, caches = run(caches, weights, own, given._replace(position=given.position + number))
        return caches, outputs

    numbers = jnp.arange(length, dtype=jnp.int32)
    after, stacked = jax.lax.scan(step, list(caches), (numbers, list(inputs)))
    return list(stacked), list(after)
