"""Stages as jaxprs, and the routes of the values between them.

Every value is identified by its `Source`, the place where it is made, and goes straight from there to
where it is used. A variable that several stages share belongs to the first of them, its owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing.counting import count_aval
from ipu_pipeline.engine.tracing.frames import Enqueued
from ipu_pipeline.engine.tracing.recomputation_marks import has_marks
from ipu_pipeline.engine.tracing.replicas import uses_replicas
from ipu_pipeline.engine.tracing.specs import VariableSpec

__all__ = ["Source", "TracedPipeline", "TracedStage", "send_variables", "share_variables"]


@dataclass(frozen=True)
class Source:
    """Where a value between stages comes from.

    `kind` is "input" (an input that is constant during a step), "element" (a leaf of the micro-batch),
    "output" (of stage `stage`) or "update_count"; `index` is the position among the leaves there.
    """

    kind: str
    index: int
    stage: int = -1

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether each micro-batch has its own value."""
        return self.kind in ("element", "output")


@dataclass(frozen=True, eq=False)
class TracedStage:
    """One stage as a jaxpr."""

    place: str  # what errors call it, for example "stage 0 (encoder)"
    # takes `[*variables, key if uses_key, *inputs]`, returns `[*outputs, *assigned values, *enqueued]`
    flat: jaxprs.FlatJaxpr
    variables: tuple[VariableSpec, ...]  # the variables that it reads or assigns
    assigned: tuple[VariableSpec, ...]  # the variables that it assigns
    uses_key: bool  # whether it draws random keys
    inputs: tuple[Source, ...]  # where its inputs come from, each source once
    # where its outputs come from; it makes those of kind "output" with its own index itself
    outputs: tuple[Source, ...]
    output_avals: tuple[jax.ShapeDtypeStruct, ...]  # their shapes and dtypes
    enqueued: tuple[int, ...] = ()  # what it enqueues, by the number of the leaf in the pipeline

    @property
    def input_vars(self) -> list[Any]:
        """The jaxpr's variables of the inputs."""
        return self.flat.inputs[len(self.variables) + self.uses_key :]


@dataclass(frozen=True, eq=False)
class TracedPipeline:
    """All stages, and what surrounds them."""

    stages: tuple[TracedStage, ...]  # in order
    element: Any  # shapes and dtypes of a micro-batch, as it was given
    # shapes and dtypes of the inputs that are constant during a step; what was captured comes last
    inputs: tuple[Any, ...]
    output_tree: Any  # the structure of what the last stage returns
    # where the leaves of that come from, without the loss; then, what only the optimizer reads
    outputs: tuple[Source, ...]
    output_avals: tuple[jax.ShapeDtypeStruct, ...]  # their shapes and dtypes
    loss: Source | None  # where the loss comes from; None without training
    loss_avals: tuple[jax.ShapeDtypeStruct, ...]  # its shape and dtype; empty without training
    # full name of every variable -> its owner, the first stage that has it. All stages that share it have
    # it; only its owner assigns it.
    owners: dict[str, int]
    # the level of each stage, ascending from 0. Stages of one level are parallel: they take the same
    # values, and what they return is concatenated.
    levels: tuple[int, ...]
    num_captured: int = 0  # the number of inputs that were captured, not given
    enqueued: tuple[Enqueued, ...] = ()  # what stages enqueue, whose leaves are numbered through

    def with_captured(
        self, captured: Sequence[jax.ShapeDtypeStruct], read: Sequence[int]
    ) -> TracedPipeline:
        """Adds inputs to the pipeline, some of which are outputs, too."""
        given = self.given
        first = len(jax.tree.leaves(given))
        return dataclasses.replace(
            self,
            inputs=(*given, *captured),
            num_captured=len(captured),
            outputs=(*self.outputs, *(Source("input", first + number) for number in read)),
            output_avals=(*self.output_avals, *(captured[number] for number in read)),
        )

    @property
    def uses_replicas(self) -> bool:
        """Whether a stage computes with other replicas, or asks which one it is in."""
        return any(uses_replicas(stage.flat) for stage in self.stages)

    @property
    def places_with_marks(self) -> list[str]:
        """The names, in errors, of the stages that mark values to keep in recomputation."""
        return [stage.place for stage in self.stages if has_marks(stage.flat)]

    @property
    def given(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the inputs without those that were captured."""
        return self.inputs[: len(self.inputs) - self.num_captured]

    @property
    def captured(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the inputs that were captured."""
        return self.inputs[len(self.inputs) - self.num_captured :]

    @property
    def returned_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the leaves that the last stage returns."""
        return self.output_avals[: self.output_tree.num_leaves]

    @property
    def enqueued_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the leaves that are enqueued."""
        return tuple(aval for entry in self.enqueued for aval in entry.avals)

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables by full name."""
        return {spec.name: spec for stage in self.stages for spec in stage.variables}

    def aval(self, source: Source) -> Any:
        """Shape and dtype of a value between stages."""
        if source.kind == "output":
            return self.stages[source.stage].output_avals[source.index]
        if source.kind == "update_count":
            return jaxprs.aval_struct(count_aval())
        return jax.tree.leaves(self.inputs if source.kind == "input" else self.element)[source.index]

    def shared(self) -> set[str]:
        """Full names of the variables that several stages have."""
        return {
            spec.name
            for index, stage in enumerate(self.stages)
            for spec in stage.variables
            if self.owners[spec.name] != index
        }


def share_variables(
    stages: Sequence[TracedStage], levels: Sequence[int]
) -> tuple[list[TracedStage], dict[str, int]]:
    """Finds the owner of every variable.

    If the owner assigns a variable, later stages get it as a value between stages, because the owner may
    have gone on to other micro-batches by then. They no longer have that variable.
    """
    owners: dict[str, int] = {}
    sent: set[str] = set()
    for index, stage in enumerate(stages):
        for spec in stage.variables:
            home = owners.setdefault(spec.name, index)
            if home == index:
                continue
            assigning = [other for other in stages if spec in other.assigned]
            if assigning and (assigning != [stages[home]] or levels[home] == levels[index]):
                raise ValueError(
                    f"Variable {spec.name} is used by {stages[home].place} and by {stage.place}, and "
                    f"assigned by {' and by '.join(other.place for other in assigning)}. Stages are at "
                    "different micro-batches at the same time, so only the first stage that uses a "
                    "variable may assign it, and only later stages may read it too. Give each stage a "
                    "variable of its own, or return the value from the stage and pass it on."
                )
            if assigning:
                sent.add(spec.name)
    return send_variables(stages, owners, sent), owners


def send_variables(
    stages: Sequence[TracedStage], owners: Mapping[str, int], sent: Collection[str]
) -> list[TracedStage]:
    """Makes shared variables values between stages, instead of a variable in each of them."""
    changed = list(stages)
    for name in sorted(sent):
        home = owners[name]
        stage = changed[home]
        (position,) = (p for p, spec in enumerate(stage.variables) if spec.name == name)
        spec, number = stage.variables[position], len(stage.outputs)
        value = stage.flat.inputs[position]
        if spec in stage.assigned:
            value = stage.flat.outputs[number + stage.assigned.index(spec)]
        source = Source("output", number, home)
        aval = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        outputs = [*stage.flat.outputs[:number], value, *stage.flat.outputs[number:]]
        changed[home] = dataclasses.replace(
            stage,
            flat=dataclasses.replace(stage.flat, outputs=outputs),
            outputs=(*stage.outputs, source),
            output_avals=(*stage.output_avals, aval),
        )
        for index, stage in enumerate(changed):
            if index == home or spec not in stage.variables:
                continue
            position = stage.variables.index(spec)
            inputs = list(stage.flat.inputs)
            inputs.append(inputs.pop(position))
            changed[index] = dataclasses.replace(
                stage,
                flat=dataclasses.replace(stage.flat, inputs=inputs),
                variables=(*stage.variables[:position], *stage.variables[position + 1 :]),
                inputs=(*stage.inputs, source),
            )
    return changed
