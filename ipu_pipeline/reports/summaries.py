"""What lies where in a pipeline or loop, and what crosses from IPU to IPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine.inspect.crossings import find_crossings
from ipu_pipeline.engine.planning.memory import find_copied
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.tracing.traced import TracedPipeline
from ipu_pipeline.engine.updates.accumulators import Accumulator
from ipu_pipeline.engine.updates.cutting import Updates
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["Edge", "Part", "Sent", "summarize", "summarize_shared", "summarize_update"]


@dataclass(frozen=True)
class Part:
    """A stage, or a run of operations of one shard.

    Attributes:
      index: its number.
      ipu: the IPU that it runs on.
      num_operations: JAX operations of its forward, those inside loops and conditionals not counted.
      variables: full names of the variables that live there, and of shared ones that are copied there.
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


@dataclass(frozen=True)
class Sent:
    """What a weight update sends from one IPU to another.

    Attributes:
      source: the IPU that sends.
      target: the IPU that receives.
      what: in words: the variable, gradient or leaf of the optimizer's state; dtype and shape of a value
        that the update makes. Scalars are counted together.
      num_bytes: how much it is.
      primitive: what reads it there: a JAX primitive, or a stage; empty for scalars.
    """

    source: int
    target: int
    what: str
    num_bytes: int
    primitive: str


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
        copied = find_copied(traced, ipus, index)
        parts.append(
            Part(
                index,
                ipus[index],
                len(stage.flat.equations),
                (*(spec.name for spec in own), *(f"{spec.name} (a copy)" for spec in copied)),
                num_bytes([*own, *copied]),
            )
        )
    crossing: dict[tuple[int | None, int], tuple[list[Any], list[Any]]] = {}
    for found in find_crossings(traced, programs, ipus, num_carried):
        on_edge = crossing.setdefault((found.source, found.target), ([], []))
        on_edge[found.is_backward].append(found.aval)
    edges = [
        Edge(*edge, *map(num_bytes, crossing[edge]))
        for edge in sorted(crossing, key=lambda edge: (edge[0] is not None, edge))
    ]
    return tuple(parts), tuple(edges)


def summarize_shared(
    traced: TracedPipeline, ipus: Sequence[int], extra: Mapping[str, Accumulator], dtypes: Mapping[str, Any]
) -> tuple[Sent, ...]:
    """Describes what variables that stages share send, once per weight update.

    Args:
      traced: the pipeline.
      ipus: the IPU of each stage.
      extra: the accumulators that are not their variable's owner's.
      dtypes: of accumulators, by the variable's full name.
    """
    sent = []
    for index in range(len(traced.stages)):
        for spec in find_copied(traced, ipus, index):
            home = ipus[traced.owners[spec.name]]
            sent.append(Sent(home, ipus[index], spec.name, num_bytes([spec]), f"stage {index}"))
    for variable, index in extra.values():
        spec, home = traced.variables[variable], ipus[traced.owners[variable]]
        if ipus[index] != home:
            aval = jax.ShapeDtypeStruct(spec.shape, dtypes[variable])
            what = f"gradient of {variable}"
            sent.append(Sent(ipus[index], home, what, num_bytes([aval]), "the sum at its owner"))
    return tuple(sent)


def summarize_update(updates: Updates | None, ipus: Sequence[int]) -> tuple[Sent, ...]:
    """Describes what a weight update sends.

    Args:
      updates: its programs; None without training.
      ipus: the IPU of each stage.

    Returns:
      What is sent, by source and target: scalars first, then arrays in the order in which they are read.
    """
    edges: dict[tuple[int, int], tuple[list[Any], list[Sent]]] = {}
    for move in () if updates is None else updates.moves:
        edge = (ipus[move.source], ipus[move.target])
        if edge[0] == edge[1]:
            continue
        scalars, arrays = edges.setdefault(edge, ([], []))
        if move.aval.size == 1:
            scalars.append(move.aval)
        else:
            what = move.what or f"{move.aval.dtype.name}{list(move.aval.shape)}"
            arrays.append(Sent(*edge, what, num_bytes([move.aval]), move.primitive))
    sent = []
    for edge, (scalars, arrays) in sorted(edges.items()):
        if scalars:
            what = f"{len(scalars)} scalar{'s' if len(scalars) > 1 else ''}"
            sent.append(Sent(*edge, what, num_bytes(scalars), ""))
        sent += arrays
    return tuple(sent)
