"""What the arguments and results of stage programs stand for, across stages.

A program names its values by their position in its own stage (`stage_programs.Value`). Here they get the
names that are used outside: a variable its full name, an accumulator its key, a value between stages its
source. What one program returns under a name is what another one takes under it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ipu_pipeline.engine.programs.stage_programs import StageProgram, Value, ValueKind
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline

__all__ = ["Binding", "BindingKind", "Bindings"]


class BindingKind(enum.Enum):
    """The kinds of names; the comment behind each says what `Binding.key` is."""

    SCALAR = enum.auto()  # the ValueKind: a random key, a count, or the scale of the loss
    KEY_NUMBER = enum.auto()  # the number, which a random key is folded with
    VARIABLE = enum.auto()  # the full name
    ASSIGNED = enum.auto()  # the full name: the variable's new value
    ACCUMULATOR = enum.auto()  # the key, see `AccumulatorPlan`
    INPUT = enum.auto()  # the position among the pipeline's inputs, which are the same during a step
    VALUE = enum.auto()  # the Source, of the micro-batch or of a stage
    RESIDUAL = enum.auto()  # the stage, and the number there
    COTANGENT = enum.auto()  # the Source that it is a cotangent of, and the stage that sends it
    ENQUEUED = enum.auto()  # the number of the leaf


class Binding(NamedTuple):
    """What a value stands for."""

    kind: BindingKind
    key: Any

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether each micro-batch has its own value, made by a program or brought by the feed."""
        return self.kind in _OF_MICRO_BATCH


_OF_MICRO_BATCH = (BindingKind.VALUE, BindingKind.RESIDUAL, BindingKind.COTANGENT)
_NAMED = {
    ValueKind.VARIABLE: BindingKind.VARIABLE,
    ValueKind.ASSIGNED: BindingKind.ASSIGNED,
}


@dataclass(frozen=True, eq=False)
class Bindings:
    """Finds what values of programs stand for."""

    traced: TracedPipeline  # the pipeline
    # (stage, full name of a variable) -> the key of what that stage accumulates into
    accumulator_keys: Mapping[tuple[int, str], str]

    def find(self, index: int, value: Value) -> Binding:
        """What an argument or a result of a program of stage `index` stands for."""
        stage = self.traced.stages[index]
        kind = value.kind
        if kind in _NAMED:
            return Binding(_NAMED[kind], stage.variables[value.index].name)
        if kind is ValueKind.ACCUMULATOR:
            name = stage.variables[value.index].name
            return Binding(BindingKind.ACCUMULATOR, self.accumulator_keys[index, name])
        if kind is ValueKind.INPUT:
            source = stage.inputs[value.index]
            if source.kind == "input":
                return Binding(BindingKind.INPUT, source.index)
            if source.kind == "update_count":
                return Binding(BindingKind.SCALAR, ValueKind.UPDATE_COUNT)
            return Binding(BindingKind.VALUE, source)
        if kind is ValueKind.OUTPUT:
            return Binding(BindingKind.VALUE, Source("output", value.index, index))
        if kind is ValueKind.RESIDUAL:
            return Binding(BindingKind.RESIDUAL, (index, value.index))
        if kind is ValueKind.COTANGENT:
            return Binding(BindingKind.COTANGENT, (stage.outputs[value.index], value.consumer))
        if kind is ValueKind.KEY_NUMBER:
            return Binding(BindingKind.KEY_NUMBER, value.index)
        if kind is ValueKind.ENQUEUED:
            return Binding(BindingKind.ENQUEUED, value.index)
        if kind is ValueKind.INPUT_COTANGENT:
            return Binding(BindingKind.COTANGENT, (stage.inputs[value.index], index))
        return Binding(BindingKind.SCALAR, kind)

    def arguments(self, index: int, program: StageProgram) -> list[Binding]:
        """What the arguments of a program of stage `index` stand for."""
        return [self.find(index, value) for value in program.arguments]

    def results(self, index: int, program: StageProgram) -> list[list[Binding]]:
        """What the results of the program stand for; one result may stand for several values."""
        return [[self.find(index, value) for value in values] for values in program.results]
