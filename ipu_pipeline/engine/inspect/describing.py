"""Describes the stages of a traced pipeline or loop, and what crosses between them. Starts no backend.

Compute is counted from the jaxprs (`jaxprs.costs`), memory by `planning.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from ipu_pipeline.engine.inspect.crossings import Crossing, find_crossings, find_flows
from ipu_pipeline.engine.inspect.facts import (
    Edge,
    Part,
    PipelineDetails,
    Sent,
    SharedVariables,
    StageDetails,
)
from ipu_pipeline.engine.inspect.layers import find_layers
from ipu_pipeline.engine.inspect.whole_layers import find_whole_layers
from ipu_pipeline.engine.jaxprs.costs import count_equations
from ipu_pipeline.engine.planning.memory import find_copies
from ipu_pipeline.engine.planning.memory_plans import StageMemory
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.traced import TracedPipeline
from ipu_pipeline.engine.updates.accumulators import Accumulator
from ipu_pipeline.engine.updates.cutting import Updates
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["describe", "find_shared_sends", "find_update_sends"]

_BACKWARD_PER_FORWARD = 2.0  # if a stage's operations cannot be counted: two products for each one


def describe(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    memory: Sequence[StageMemory],
    trained: Collection[str] | None,
    num_carried: int,
    left_out: Collection[str],
    **known: Any,
) -> PipelineDetails:
    """Makes the facts of a pipeline or loop from its stages and programs; the other facts are `known`.

    Without training `trained` is None. Variables in `left_out` are not listed.
    """
    ipus = [stage.ipu for stage in memory]
    crossings = find_crossings(traced, programs, ipus, num_carried)
    return PipelineDetails(
        micro_batch_size=_find_batch_size(traced.element),
        stages=_describe_stages(traced, programs, memory, trained, crossings, left_out),
        edges=_add_up_edges(crossings),
        flows=find_flows(traced, programs, ipus),
        memory=(),
        shared=_find_shared(traced, left_out),
        **known,
    )


def _describe_stages(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    memory: Sequence[StageMemory],
    trained: Collection[str] | None,
    crossings: Sequence[Crossing],
    left_out: Collection[str],
) -> tuple[StageDetails, ...]:
    """Makes the details of each stage."""
    all_copies = find_copies(traced, [stage.ipu for stage in memory])
    sent: dict[int | None, list[Crossing]] = {}
    for crossing in crossings:
        sent.setdefault(crossing.stage, []).append(crossing)
    found = []
    for index, (stage, own, held) in enumerate(zip(traced.stages, programs, memory, strict=True)):
        variables = tuple(
            spec
            for spec in stage.variables
            if traced.owners[spec.name] == index and spec.name not in left_out
        )
        copies = all_copies[index]
        names = (*(spec.name for spec in variables), *(f"{spec.name} (a copy)" for spec in copies))
        num_operations, size = len(stage.flat.equations), num_bytes([*variables, *copies])
        # Where there is a loss, the last stage's forward program also computes its gradients, or the first
        # half of them.
        is_fused = trained is not None and own.backward is None and index == len(traced.stages) - 1
        forward, backward = _find_operations(own, stage.flat.equations if is_fused else None)
        weights = 0.0 if own.weights is None else max(own.weights.num_operations, 1.0)
        found.append(
            StageDetails(
                index=index,
                name=stage.place,
                ipu=held.ipu,
                level=traced.levels[index],
                layers=find_layers(variables),
                whole_layers=find_whole_layers(stage, index, {spec.name for spec in variables}),
                forward_operations=forward,
                backward_operations=backward + weights,
                is_halved=own.is_halved,
                weight_operations=weights,
                num_between_bytes=held.num_between_bytes,
                num_live_bytes=held.num_live_bytes,
                is_fused=is_fused,
                num_held_bytes=held.num_held_bytes,
                in_flight=held.in_flight,
                variables=variables,
                num_trained=_count(spec for spec in variables if spec.name in (trained or ())),
                part=Part(index, held.ipu, num_operations, names, size),
                num_sent_bytes=num_bytes(one.aval for one in sent.get(index, ()) if not one.is_backward),
                num_returned_bytes=num_bytes(one.aval for one in sent.get(index, ()) if one.is_backward),
                num_forward_flop=own.forward.num_operations,
                num_backward_flop=sum(program.num_operations for program in own.backwards),
                uncounted=frozenset[str]().union(
                    *(program.uncounted for program in (own.forward, *own.backwards))
                ),
            )
        )
    return tuple(found)


def _find_operations(own: StagePrograms, equations: Iterable[Any] | None) -> tuple[float, float]:
    """The operations of forward and backward, or the first half of it.

    `equations` are the forward's, if its program does both.
    """
    both = own.forward.num_operations
    if equations is None:
        backward = 0.0 if own.backward is None else max(own.backward.num_operations, 1.0)
        return max(both, 1.0), backward
    alone = count_equations(equations)
    if own.forward.uncounted or alone >= both:
        alone = max(both, 1.0) / (1.0 + _BACKWARD_PER_FORWARD)
        return alone, _BACKWARD_PER_FORWARD * alone
    return max(alone, 1.0), max(both - alone, 1.0)


def _count(variables: Iterable[VariableSpec]) -> int:
    """The number of elements of some variables."""
    return sum(math.prod(spec.shape) for spec in variables)


def _add_up_edges(crossings: Iterable[Crossing]) -> tuple[Edge, ...]:
    """The edges with anything on them, by source and target, the feed first."""
    crossing: dict[tuple[int | None, int], tuple[list[Any], list[Any]]] = {}
    for found in crossings:
        on_edge = crossing.setdefault((found.source, found.target), ([], []))
        on_edge[found.is_backward].append(found.aval)
    return tuple(
        Edge(*edge, *map(num_bytes, crossing[edge]))
        for edge in sorted(crossing, key=lambda edge: (edge[0] is not None, edge))
    )


def _find_shared(traced: TracedPipeline, left_out: Collection[str]) -> tuple[SharedVariables, ...]:
    """The variables that several stages have, grouped by these stages."""
    having: dict[str, list[int]] = {}
    for index, stage in enumerate(traced.stages):
        for spec in stage.variables:
            having.setdefault(spec.name, []).append(index)
    groups: dict[tuple[int, ...], list[VariableSpec]] = {}
    for name, stages in having.items():
        if len(stages) > 1 and name not in left_out:
            groups.setdefault(tuple(stages), []).append(traced.variables[name])
    return tuple(SharedVariables(stages, tuple(specs)) for stages, specs in groups.items())


def find_shared_sends(
    traced: TracedPipeline, ipus: Sequence[int], extra: Mapping[str, Accumulator], dtypes: Mapping[str, Any]
) -> tuple[Sent, ...]:
    """What is sent for shared variables per weight update; `extra`: accumulators besides the owners'."""
    sent = []
    for index, copies in enumerate(find_copies(traced, ipus)):
        for spec in copies:
            home = ipus[traced.owners[spec.name]]
            sent.append(Sent(home, ipus[index], spec.name, num_bytes([spec]), f"stage {index}"))
    for variable, index in extra.values():
        spec, home = traced.variables[variable], ipus[traced.owners[variable]]
        if ipus[index] != home:
            aval = jax.ShapeDtypeStruct(spec.shape, dtypes[variable])
            what = f"gradient of {variable}"
            sent.append(Sent(ipus[index], home, what, num_bytes([aval]), "the sum at its owner"))
    return tuple(sent)


def find_update_sends(updates: Updates | None, ipus: Sequence[int]) -> tuple[Sent, ...]:
    """What a weight update sends, by source and target: scalars first, then arrays as they are read."""
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


def _find_batch_size(element: Any) -> int | None:
    """The size of the first axis, if all arrays of a micro-batch have the same."""
    leaves = jax.tree.leaves(element)
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None
