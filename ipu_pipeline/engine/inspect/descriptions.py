"""Descriptions of traced pipelines: stages, what crosses between them, and counts of operations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.inspect.facts import (
    Edge,
    Part,
    PipelineDetails,
    Sent,
    SharedVariables,
    StageDetails,
)
from ipu_pipeline.engine.inspect.layers import find_layers, find_whole_layers
from ipu_pipeline.engine.jaxprs.costs import count_equations, count_operations, count_primitives
from ipu_pipeline.engine.plan.memory import find_copies
from ipu_pipeline.engine.planning.dispatch_plans import HOST_SECONDS, nominal_speed
from ipu_pipeline.engine.planning.memory_records import Flow, StageMemory
from ipu_pipeline.engine.programs.stage_programs import StagePrograms, ValueKind, read_sources
from ipu_pipeline.engine.schedules.scenarios import Costs, StageEdge
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline, TracedStage
from ipu_pipeline.engine.updates.update_programs import Accumulator, Updates
from ipu_pipeline.ground.pytrees import num_bytes

# Crossings and flows of values.


class Crossing(NamedTuple):
    """A value that goes to another device, once per micro-batch."""

    stage: int | None  # the stage that sends it; None for a leaf of the micro-batch
    source: int | None  # the device that sends it; None for the host's feed
    target: int  # the device that gets it
    aval: Any  # its shape and dtype
    is_backward: bool  # whether it is a gradient on its way back
    value: Source  # the value, or the one that it is a gradient of


def find_crossings(
    traced: TracedPipeline, programs: Sequence[StagePrograms], ipus: Sequence[int], num_carried: int = 0
) -> list[Crossing]:
    """Finds the crossings. The last stage's device sends the `num_carried` first leaves of a loop."""
    forward: dict[tuple[Source, int], Crossing] = {}
    backward: list[Crossing] = []

    def ipu_of(source: Source) -> int | None:
        if source.kind == "output":
            return ipus[source.stage]
        return ipus[-1] if source.index < num_carried else None

    def read(source: Source, target: int) -> None:
        if source.is_of_micro_batch and ipu_of(source) != target:
            stage = source.stage if source.kind == "output" else None
            crossing = Crossing(stage, ipu_of(source), target, traced.aval(source), False, source)
            forward.setdefault((source, target), crossing)

    for index, (stage, stage_programs) in enumerate(zip(traced.stages, programs, strict=True)):
        for source in read_sources(stage, stage_programs.forward, *stage_programs.backwards):
            read(source, ipus[index])
        for source in _find_differentiated(stage, stage_programs):
            if ipu_of(source) not in (None, ipus[index]):
                target, aval = ipus[source.stage], traced.aval(source)
                backward.append(Crossing(index, ipus[index], target, aval, True, source))
    for source in traced.outputs:  # outputs are collected where the last stage is
        read(source, ipus[-1])
    return [*forward.values(), *backward]


def _find_differentiated(stage: TracedStage, stage_programs: StagePrograms) -> Iterator[Source]:
    """The inputs of a stage whose gradients it returns."""
    backward = () if stage_programs.backward is None else stage_programs.backward.results
    for value in itertools.chain(*stage_programs.forward.results, *backward):
        if value.kind is ValueKind.INPUT_COTANGENT:
            yield stage.inputs[value.index]


def find_flows(
    traced: TracedPipeline, programs: Sequence[StagePrograms], ipus: Sequence[int]
) -> tuple[Flow, ...]:
    """Finds the flows from stage to stage, also on one device; values with the same ends are one flow."""
    uses: dict[tuple[Source, int], tuple[set[int], set[int]]] = {}
    sizes: dict[tuple[int, bool, int, tuple[int, ...], tuple[int, ...]], int] = {}
    for index, (stage, stage_programs) in enumerate(zip(traced.stages, programs, strict=True)):
        held_sources = read_sources(stage, *stage_programs.backwards)
        for source in read_sources(stage, stage_programs.forward, *stage_programs.backwards):
            if source.kind == "output":
                readers, holders = uses.setdefault((source, ipus[index]), (set(), set()))
                (holders if source in held_sources else readers).add(index)
        for source in _find_differentiated(stage, stage_programs):
            if source.kind == "output":
                way = (index, True, ipus[source.stage], (source.stage,), ())
                sizes[way] = sizes.get(way, 0) + num_bytes([traced.aval(source)])
    for (source, target), (readers, holders) in uses.items():
        forward = (source.stage, False, target, tuple(sorted(readers)), tuple(sorted(holders)))
        sizes[forward] = sizes.get(forward, 0) + num_bytes([traced.aval(source)])
    return tuple(Flow(*way, size) for way, size in sorted(sizes.items()))


# Counts of operations.

_PER_TRAINED = 10.0  # operations of a weight update per element


class Work(NamedTuple):
    """The operations of a function.

    Attributes:
      num_primitives: the number of JAX primitives, before XLA fuses any.
      num_flop: estimated floating-point operations, see `jaxprs.costs.count_operations`.
    """

    num_primitives: int
    num_flop: float


def count_work(function: Callable[..., Any], *arguments: Any) -> Work:
    """Traces a function as part of a stage, and counts its operations. Runs nothing.

    Example:
      >>> engine.inspect.count_work(lambda x: x @ x, np.ones([64, 64], np.float32))
      Work(num_primitives=1, num_flop=524288.0)

    Args:
      function: the function; it may use `get_variable` and `next_rng_key`.
      *arguments: its arguments, or their shapes and dtypes.
    """
    stage = frames.Frame(frames.ProgramNames(), training=False, place="an operation", is_stage=True)
    with frames.frame(stage):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return Work(count_primitives(jaxpr), count_operations(jaxpr))


def count_costs(details: PipelineDetails) -> Costs:
    """Estimates the costs of a pipeline's stages from counted operations, in seconds.

    Transfers are included only if each stage has its own device, because the bytes of stages that share a
    device are not known separately.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(4)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> costs = engine.inspect.count_costs(engine.inspect.find_facts(pipeline))
      >>> costs.num_stages
      2
    """
    speed, stages = nominal_speed("cpu"), details.stages
    stage_of = {stage.ipu: stage.index for stage in stages}
    is_told_apart = len(stage_of) == len(stages)
    transfers: dict[StageEdge, float] = {
        (stage_of[edge.source], stage_of[edge.target]): speed.per_transfer
        + (edge.num_forward_bytes + edge.num_backward_bytes) * speed.per_byte
        for edge in details.edges
        if is_told_apart and edge.source is not None
    }
    return Costs.of(
        len(stages),
        forward=[stage.forward_operations * speed.per_operation + speed.per_dispatch for stage in stages],
        backward=[
            stage.backward_operations * speed.per_operation
            + (0.0 if stage.is_fused or not stage.backward_operations else speed.per_dispatch)
            for stage in stages
        ],
        weight_gradients=[
            stage.weight_operations * speed.per_operation
            if stage.is_halved
            else stage.backward_operations * speed.per_operation / 2
            for stage in stages
        ],
        update=[_PER_TRAINED * stage.num_trained * speed.per_operation for stage in stages],
        transfer=transfers,
        host=HOST_SECONDS,
        is_fused=stages[-1].is_fused,
    )


# Facts of stages.

_BACKWARD_PER_FORWARD = 2.0  # if a stage's operations cannot be counted: two products for each one


def describe(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    memory: Sequence[StageMemory],
    trained: Collection[str] | None,
    num_carried: int,
    left_out: Collection[str],
    **facts: Any,
) -> PipelineDetails:
    """Makes the facts of a pipeline or loop from its stages and programs; the other ones are `facts`.

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
        **facts,
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
    details = []
    columns = zip(traced.stages, programs, memory, strict=True)
    for index, (stage, stage_programs, stage_memory) in enumerate(columns):
        variables = tuple(
            spec
            for spec in stage.variables
            if traced.owners[spec.name] == index and spec.name not in left_out
        )
        copies, values = all_copies[index], sent.get(index, ())
        names = (*(spec.name for spec in variables), *(f"{spec.name} (a copy)" for spec in copies))
        num_operations, size = len(stage.flat.equations), num_bytes([*variables, *copies])
        # Where there is a loss, the last stage's forward program also computes its gradients, or the first
        # half of them.
        is_last = index == len(traced.stages) - 1
        is_fused = trained is not None and stage_programs.backward is None and is_last
        forward, backward = _find_operations(stage_programs, stage.flat.equations if is_fused else None)
        weights = 0.0 if stage_programs.weights is None else max(stage_programs.weights.num_operations, 1.0)
        details.append(
            StageDetails(
                index=index,
                name=stage.place,
                ipu=stage_memory.ipu,
                level=traced.levels[index],
                layers=find_layers(variables),
                whole_layers=find_whole_layers(stage, index, {spec.name for spec in variables}),
                forward_operations=forward,
                backward_operations=backward + weights,
                is_halved=stage_programs.is_halved,
                weight_operations=weights,
                num_between_bytes=stage_memory.num_between_bytes,
                num_live_bytes=stage_memory.num_live_bytes,
                is_fused=is_fused,
                num_held_bytes=stage_memory.num_held_bytes,
                in_flight=stage_memory.in_flight,
                variables=variables,
                num_trained=_count(spec for spec in variables if spec.name in (trained or ())),
                part=Part(index, stage_memory.ipu, num_operations, names, size),
                num_sent_bytes=num_bytes(value.aval for value in values if not value.is_backward),
                num_returned_bytes=num_bytes(value.aval for value in values if value.is_backward),
                num_forward_flop=stage_programs.forward.num_operations,
                num_backward_flop=sum(program.num_operations for program in stage_programs.backwards),
                uncounted=frozenset[str]().union(
                    *(program.uncounted for program in (stage_programs.forward, *stage_programs.backwards))
                ),
            )
        )
    return tuple(details)


def _find_operations(stage_programs: StagePrograms, equations: Iterable[Any] | None) -> tuple[float, float]:
    """The operations of forward and backward, or the first half of it.

    `equations` are the forward's, if its program does both.
    """
    total = stage_programs.forward.num_operations
    if equations is None:
        backward = stage_programs.backward
        return max(total, 1.0), 0.0 if backward is None else max(backward.num_operations, 1.0)
    alone = count_equations(equations)
    if stage_programs.forward.uncounted or alone >= total:
        alone = max(total, 1.0) / (1.0 + _BACKWARD_PER_FORWARD)
        return alone, _BACKWARD_PER_FORWARD * alone
    return max(alone, 1.0), max(total - alone, 1.0)


def _count(variables: Iterable[VariableSpec]) -> int:
    """The number of elements of some variables."""
    return sum(math.prod(spec.shape) for spec in variables)


def _add_up_edges(crossings: Iterable[Crossing]) -> tuple[Edge, ...]:
    """The edges with anything on them, by source and target, the feed first."""
    avals: dict[tuple[int | None, int], tuple[list[Any], list[Any]]] = {}
    for crossing in crossings:
        on_edge = avals.setdefault((crossing.source, crossing.target), ([], []))
        on_edge[crossing.is_backward].append(crossing.aval)
    return tuple(
        Edge(*edge, *map(num_bytes, avals[edge]))
        for edge in sorted(avals, key=lambda edge: (edge[0] is not None, edge))
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
    """Finds what is sent for shared variables per weight update; `extra`: the sharers' accumulators."""
    sent = []
    for index, copies in enumerate(find_copies(traced, ipus)):
        for spec in copies:
            home = ipus[traced.owners[spec.name]]
            sent.append(Sent(home, ipus[index], spec.name, num_bytes([spec]), f"stage {index}"))
    for variable, index in extra.values():
        spec, home = traced.variables[variable], ipus[traced.owners[variable]]
        if ipus[index] != home:
            aval = jax.ShapeDtypeStruct(spec.shape, dtypes[variable])
            description = f"gradient of {variable}"
            sent.append(Sent(ipus[index], home, description, num_bytes([aval]), "the sum at its owner"))
    return tuple(sent)


def find_update_sends(updates: Updates | None, ipus: Sequence[int]) -> tuple[Sent, ...]:
    """Finds what a weight update sends, by source and target: scalars, then arrays as they are read."""
    edges: dict[tuple[int, int], tuple[list[Any], list[Sent]]] = {}
    for move in () if updates is None else updates.moves:
        edge = (ipus[move.source], ipus[move.target])
        if edge[0] == edge[1]:
            continue
        scalars, arrays = edges.setdefault(edge, ([], []))
        if move.aval.size == 1:
            scalars.append(move.aval)
        else:
            description = move.what or f"{move.aval.dtype.name}{list(move.aval.shape)}"
            arrays.append(Sent(*edge, description, num_bytes([move.aval]), move.primitive))
    sent = []
    for edge, (scalars, arrays) in sorted(edges.items()):
        if scalars:
            description = f"{len(scalars)} scalar{'s' if len(scalars) > 1 else ''}"
            sent.append(Sent(*edge, description, num_bytes(scalars), ""))
        sent += arrays
    return tuple(sent)


def _find_batch_size(element: Any) -> int | None:
    """The size of the first axis, if all arrays of a micro-batch have the same."""
    leaves = jax.tree.leaves(element)
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None
