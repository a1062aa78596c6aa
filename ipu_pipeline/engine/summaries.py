"""What lies where in a pipeline or loop, and what crosses from IPU to IPU per micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine.programs import StagePrograms, ValueKind
from ipu_pipeline.engine.shapes import num_bytes
from ipu_pipeline.engine.stages import Source, TracedPipeline

__all__ = ["Edge", "Part", "summarize"]


@dataclass(frozen=True)
class Part:
    """A stage, or a run of operations of one shard.

    Attributes:
      index: its number.
      ipu: the IPU that it runs on.
      num_operations: JAX operations of its forward, those inside loops and conditionals not counted.
      variables: full names of the variables that live there.
      num_variable_bytes: how much they take.
    """

    index: int
    ipu: int
    num_operations: int
    variables: tuple[str, ...]
    num_variable_bytes: int


@dataclass(frozen=True)
class Edge:
    """What goes from one IPU to another, per micro-batch.

    Attributes:
      source: the IPU that sends; None for the host's feed. What a loop carries into the next iteration
        comes from the last stage's IPU.
      target: the IPU that receives.
      num_forward_bytes: values on their way to later operations.
      num_backward_bytes: gradients on their way back.
    """

    source: int | None
    target: int
    num_forward_bytes: int
    num_backward_bytes: int


def summarize(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    ipus: Sequence[int],
    num_carried: int = 0,
) -> tuple[tuple[Part, ...], tuple[Edge, ...]]:
    """Describes a traced pipeline or loop.

    Args:
      traced: the pipeline, or the body of the loop.
      programs: the programs of its stages.
      ipus: the IPU of each stage.
      num_carried: how many leaves at the beginning of a micro-batch are carried by a loop.

    Returns:
      The parts in order, and the edges with anything on them, by source and target, the feed first.
    """
    parts = []
    for index, stage in enumerate(traced.stages):
        own = [spec for spec in stage.variables if traced.owners[spec.name] == index]
        parts.append(
            Part(
                index,
                ipus[index],
                len(stage.flat.equations),
                tuple(spec.name for spec in own),
                num_bytes(own),
            )
        )
    element = jax.tree.leaves(traced.element)
    forward: dict[tuple[int | None, int], set[Source]] = {}
    backward: dict[tuple[int | None, int], list[Any]] = {}

    def ipu_of(source: Source) -> int | None:
        if source.kind == "output":
            return ipus[source.stage]
        return ipus[-1] if source.index < num_carried else None

    def read(source: Source, target: int) -> None:
        if source.kind != "input" and ipu_of(source) != target:
            forward.setdefault((ipu_of(source), target), set()).add(source)

    for index, (stage, stage_programs) in enumerate(zip(traced.stages, programs, strict=True)):
        for program in (stage_programs.forward, stage_programs.backward):
            if program is None:
                continue
            for value in program.arguments:
                if value.kind is ValueKind.INPUT:
                    read(stage.inputs[value.index], ipus[index])
            for value in (value for values in program.results for value in values):
                if value.kind is ValueKind.INPUT_COTANGENT:
                    source = stage.inputs[value.index]
                    if ipu_of(source) not in (None, ipus[index]):
                        edge = (ipus[index], ipus[source.stage])
                        backward.setdefault(edge, []).append(_aval_of(traced, source, element))
    for source in traced.outputs:  # they are collected where the last stage is
        read(source, ipus[-1])
    edges = []
    for source_ipu, target in sorted(
        forward.keys() | backward.keys(), key=lambda edge: (edge[0] is not None, edge)
    ):
        sent = [_aval_of(traced, source, element) for source in forward.get((source_ipu, target), ())]
        returned = backward.get((source_ipu, target), [])
        edges.append(Edge(source_ipu, target, num_bytes(sent), num_bytes(returned)))
    return tuple(parts), tuple(edges)


def _aval_of(traced: TracedPipeline, source: Source, element: Sequence[Any]) -> Any:
    if source.kind == "element":
        return element[source.index]
    return traced.stages[source.stage].output_avals[source.index]
