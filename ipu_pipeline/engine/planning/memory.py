"""Adds up how much memory a pipeline or loop takes: the only place that does.

Between its forward and its backward of a micro-batch a stage holds what the backward reads: the residuals
that its forward returns, and those of its inputs that the backward takes. Between the halves of a backward
it holds what the second half, the weight gradients, reads. The formula for a stage is

    live activation bytes = micro-batches in flight x bytes that are held per micro-batch

where a stage has 2(N-i)-1 micro-batches in flight with Grouped, N-i with Interleaved and 1 with Sequential
(stage i of N, never more than there are micro-batches; see `schedules`), or the same number of chunks of
them; with halves, micro-batches before the first one and between the two count each with their own bytes.
The last stage holds nothing where its forward and backward are one program, and only what is between the
halves where its forward does the first half.

A device takes what its stages hold, the state that lives there, its accumulators, the micro-batches that
wait there, and the temporary memory of the program that runs. What execution phases bring from host memory
counts as it is at the fullest moment (`execution.phase_memory`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.planning.memory_plans import Brought, IpuMemory, Moments, StageMemory
from ipu_pipeline.engine.programs.stage_programs import (
    StageProgram,
    StagePrograms,
    Value,
    ValueKind,
    read_sources,
)
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline, TracedStage
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["find_copies", "find_fed", "find_moments", "plan_ipus", "plan_stages"]


def plan_stages(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    ipus: Sequence[int],
    fullest: Sequence[Moments],
    residual_bytes: Mapping[int, int] = MappingProxyType({}),
) -> tuple[StageMemory, ...]:
    """Plans what each stage holds of micro-batches in flight."""
    plans = []
    for index, (stage, own, moments) in enumerate(zip(traced.stages, programs, fullest, strict=True)):
        share = residual_bytes[index] / num_bytes(own.residuals) if index in residual_bytes else 1
        of_forward = _find_residuals(itertools.chain.from_iterable(own.forward.results))
        sizes = _find_held(traced, stage, own, own.backwards, of_forward)
        between = (0, 0) if own.weights is None else _find_held(traced, stage, own, [own.weights])
        plans.append(
            StageMemory(
                index,
                ipus[index],
                max(before + after for before, after in moments),
                round(share * sizes[0]),
                sizes[1],
                round(share * between[0]) + between[1],
                moments if own.is_halved else (),
            )
        )
    return tuple(plans)


def find_moments(programs: Sequence[StagePrograms], timetable: Timetable) -> list[Moments]:
    """When each stage may hold most; see `StageMemory.fullest`."""
    found = list(timetable.fullest)
    for stage, own in enumerate(programs):
        if own.backward is None and own.weights is not None:
            gradients = [value for value in own.weights.arguments if value.kind is ValueKind.COTANGENT]
            sending = {(value.consumer, _sends_in(programs[value.consumer])) for value in gradients}
            found[stage] = timetable.fullest_after(stage, sending) if sending else found[stage]
    return found


def _sends_in(programs: StagePrograms) -> ActionKind:
    """The action in which a stage makes the gradients of its inputs."""
    if programs.backward is None:
        return ActionKind.FORWARD
    return ActionKind.INPUT_GRADIENTS if programs.is_halved else ActionKind.BACKWARD


def _find_held(
    traced: TracedPipeline,
    stage: TracedStage,
    own: StagePrograms,
    readers: Sequence[StageProgram],
    among: Collection[int] | None = None,
) -> tuple[int, int]:
    """The bytes of what programs read of a micro-batch: residuals, and values that come from other stages.

    `among`: residuals that count. None: all, and gradients that have come from other stages.
    """
    values = {value for program in readers for value in program.arguments}
    read = _find_residuals(values)
    residuals = [own.residuals[number] for number in read if among is None or number in among]
    taken = [traced.aval(source) for source in read_sources(stage, *readers) if source.is_of_micro_batch]
    if among is None:
        taken += [stage.output_avals[v.index] for v in values if v.kind is ValueKind.COTANGENT]
    return num_bytes(residuals), num_bytes(taken)


def _find_residuals(values: Iterable[Value]) -> set[int]:
    return {value.index for value in values if value.kind is ValueKind.RESIDUAL}


def find_copies(traced: TracedPipeline, ipus: Sequence[int]) -> list[list[VariableSpec]]:
    """Per stage, the variables copied to its device, if the stage is the first there that reads them."""
    known: set[tuple[str, int]] = set()
    found = []
    for stage, ipu in zip(traced.stages, ipus, strict=True):
        new = [spec for spec in stage.variables if (spec.name, ipu) not in known]
        found.append([spec for spec in new if ipus[traced.owners[spec.name]] != ipu])
        known.update((spec.name, ipu) for spec in new)
    return found


def find_fed(
    traced: TracedPipeline, programs: Sequence[StagePrograms], ipus: Sequence[int], first: int = 0
) -> dict[int, list[Any]]:
    """Finds shapes and dtypes of a micro-batch's leaves, by the device that reads them."""
    read: dict[int, set[Source]] = {ipu: set() for ipu in ipus}
    read[ipus[-1]].update(traced.outputs)  # outputs are collected where the last stage is
    for ipu, stage, own in zip(ipus, traced.stages, programs, strict=True):
        read[ipu] |= read_sources(stage, own.forward, *own.backwards)

    def is_fed(source: Source) -> bool:
        return source.kind == "element" and source.index >= first

    return {ipu: [traced.aval(source) for source in found if is_fed(source)] for ipu, found in read.items()}


def plan_ipus(
    placement: StatePlacement,
    accumulator_dtypes: Mapping[str, Any],
    activations: Mapping[int, int],
    feeds: Mapping[int, int],
    temporaries: Mapping[int, int],
    brought: Mapping[int, Brought] = MappingProxyType({}),
) -> tuple[IpuMemory, ...]:
    """Plans what each device takes."""
    traced, updates = placement.traced, placement.updates
    ipus = [group.ipu for group in placement.groups]
    held: dict[tuple[str, int, bool], list[Any]] = {}  # by kind, device, and whether it is in host memory

    def add(kind: str, stage: int, is_offloaded: bool, aval: Any) -> None:
        held.setdefault((kind, ipus[stage], is_offloaded), []).append(aval)

    for name in traced.variables:
        add("variables", traced.owners[name], name in placement.offloaded, placement.part_of_variable(name))
    for stage, copies in enumerate(find_copies(traced, ipus)):
        for spec in copies:
            if spec.name not in placement.offloaded:
                add("variables", stage, False, spec)
    if updates is not None:
        for number, leaf in enumerate(updates.state_leaves):
            add("state", leaf.stage, placement.offloads_state, placement.part_of_leaf(number))
        owned = [(name, traced.owners[name]) for name in accumulator_dtypes]
        for name, stage in (*owned, *placement.accumulator_plan.extra.values()):
            aval = placement.part_of_gradient(name, accumulator_dtypes[name])
            add("accumulators", stage, placement.offloads_accumulators, aval)

    def size(kind: str, ipu: int, is_offloaded: bool = False) -> int:
        return num_bytes(held.get((kind, ipu, is_offloaded), ()))

    def of_micro_batches(ipu: int) -> int:
        return brought[ipu].num_activation_bytes if ipu in brought else activations.get(ipu, 0)

    nothing = Brought(0, 0, 0, 0)
    return tuple(
        IpuMemory(
            ipu=ipu,
            num_variable_bytes=size("variables", ipu),
            num_optimizer_bytes=size("state", ipu),
            num_accumulator_bytes=size("accumulators", ipu),
            num_activation_bytes=of_micro_batches(ipu),
            num_feed_bytes=feeds.get(ipu, 0),
            num_temporary_bytes=temporaries.get(ipu),
            num_host_bytes=sum(size(kind, ipu, True) for kind in ("variables", "state", "accumulators")),
            num_brought_variable_bytes=brought.get(ipu, nothing).num_variable_bytes,
            num_brought_optimizer_bytes=brought.get(ipu, nothing).num_optimizer_bytes,
            num_brought_accumulator_bytes=brought.get(ipu, nothing).num_accumulator_bytes,
        )
        for ipu in sorted(set(ipus))
    )
