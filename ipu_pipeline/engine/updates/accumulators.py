"""Which accumulators a pipeline has, and on which stage's group each lies.

The owner of a variable accumulates its gradients under the variable's full name. Every other stage that
shares the variable has an accumulator of its own on its group, which is added to the owner's once per
weight update. On the same device both use one accumulator, except for a running mean, whose formula takes
one gradient per micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.stage_programs import StagePrograms, ValueKind
from ipu_pipeline.engine.tracing.traced import TracedPipeline

__all__ = ["Accumulator", "AccumulatorPlan", "plan_accumulators", "variable_of"]

_OF_STAGE = " of stage "  # in the keys of accumulators that are not the owner's


class Accumulator(NamedTuple):
    """The full name of its variable, and the stage on whose group it lies."""

    variable: str
    stage: int


@dataclass(frozen=True, eq=False)
class AccumulatorPlan:
    """The accumulators of a pipeline, by their keys."""

    # (stage, full name of a variable) -> the key of what that stage's programs accumulate into
    keys: Mapping[tuple[int, str], str]
    extra: Mapping[str, Accumulator]  # the accumulators besides the owners', whose keys are the full names


def variable_of(key: str) -> str:
    """The variable that a key's accumulator belongs to, in any pipeline."""
    return key.rpartition(_OF_STAGE)[0] or key


def plan_accumulators(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    ipus: Sequence[int],
    reduction: Reduction,
) -> AccumulatorPlan:
    """Plans which program accumulates where."""
    keys: dict[tuple[int, str], str] = {}
    extra: dict[str, Accumulator] = {}
    holders: dict[tuple[str, int], str] = {}  # (variable, device) -> the key there
    for index, (stage, own) in enumerate(zip(traced.stages, programs, strict=True)):
        accumulated = {
            value.index
            for program in (own.forward, *own.backwards)
            for value in program.arguments
            if value.kind is ValueKind.ACCUMULATOR
        }
        for position in own.trained:
            name = stage.variables[position].name
            place = (name, ipus[index])
            if traced.owners[name] == index:
                keys[index, name] = holders[place] = name
            elif place in holders and reduction is not Reduction.RUNNING_MEAN:
                keys[index, name] = holders[place]
            elif position in accumulated:
                key = f"{name}{_OF_STAGE}{index}"
                keys[index, name] = holders[place] = key
                extra[key] = Accumulator(name, index)
    return AccumulatorPlan(keys, extra)
