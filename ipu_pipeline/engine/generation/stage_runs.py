"""What a stage computes for one request: from a chunk of its tokens, or what the stages before make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.programs.stage_programs import StageProgram, ValueKind
from ipu_pipeline.engine.tracing.traced import Source, TracedStage

__all__ = ["POSITION", "TOKENS", "Given", "StageRun", "make_runs", "scanned"]

TOKENS, POSITION = Source("element", 0), Source("element", 1)  # of what the first stage takes
_COUNT = Source("update_count", 0)


@dataclass(frozen=True)
class Given:
    """What a stage gets for a request besides values of other stages; a pytree of scalars within programs."""

    position: Any  # the place of the first token, int32
    key: Any  # the request's random key
    update_count: Any  # of the state, int32


jax.tree_util.register_dataclass(Given, ["position", "key", "update_count"], [])


@dataclass(frozen=True, eq=False)
class StageRun:
    """A stage for one request. Calling it is pure.

    Attributes:
      place: what errors call it.
      weights: full names of the variables that it reads from the state.
      caches: full names of the variables that it assigns, of which each request has its own.
      inputs: the values that it takes, without `POSITION`.
      outputs: the values that it makes for other stages, or that are wanted.
    """

    place: str
    weights: tuple[str, ...]
    caches: tuple[str, ...]
    inputs: tuple[Source, ...]
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
        results = self._program.function(*arguments)
        for meanings, result in zip(self._program.results, results, strict=True):
            for value in meanings:
                if value.kind is ValueKind.ASSIGNED:
                    made[names[value.index]] = result
                elif value.kind is ValueKind.OUTPUT:
                    made[Source("output", value.index, self._index)] = result
        return [made[source] for source in self.outputs], [made[name] for name in self.caches]


def make_runs(pipeline: Pipeline, platform: str) -> list[StageRun]:
    """The stages of a traced pipeline that only runs forwards. The last one takes or makes its output.

    Args:
      pipeline: its micro-batch is `TOKENS` and `POSITION`.
      platform: of the devices, as in `jax.Device.platform`.
    """
    traced = pipeline.traced
    programs = [own.on(platform).forward for own in pipeline.programs]
    takes = [_inputs_of(stage, program) for stage, program in zip(traced.stages, programs, strict=True)]
    (logits,) = traced.outputs
    last = len(programs) - 1
    if logits.stage != last and logits not in takes[last]:
        takes[last] = (*takes[last], logits)
    wanted = {logits}.union(*takes)
    return [
        _make_run(index, stage, program, takes[index], wanted)
        for index, (stage, program) in enumerate(zip(traced.stages, programs, strict=True))
    ]


def _inputs_of(stage: TracedStage, program: StageProgram) -> tuple[Source, ...]:
    read = [stage.inputs[value.index] for value in program.arguments if value.kind is ValueKind.INPUT]
    return tuple(dict.fromkeys(source for source in read if source not in (POSITION, _COUNT)))


def _make_run(
    index: int,
    stage: TracedStage,
    program: StageProgram,
    inputs: tuple[Source, ...],
    wanted: set[Source],
) -> StageRun:
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
    return StageRun(stage.place, weights, caches, inputs, outputs, program, stage, index)


def scanned(
    run: StageRun,
    length: int,
    caches: Sequence[Any],
    weights: Sequence[Any],
    inputs: Sequence[Any],
    given: Given,
) -> tuple[list[Any], list[Any]]:
    """What a stage that takes one token at a time computes for a chunk: inputs and outputs are stacked.

    Args:
      run: the stage for a chunk of one token.
      length: the number of tokens.
      inputs: as for the stage, with a first axis for the tokens.
      given: of the first token.
    """

    def step(caches: list[Any], one: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        number, own = one
        position = given.position + number
        outputs, caches = run(caches, weights, own, Given(position, given.key, given.update_count))
        return caches, outputs

    caches, outputs = jax.lax.scan(step, list(caches), (jnp.arange(length, dtype=jnp.int32), list(inputs)))
    return outputs, caches
