"""Finds what goes from stage to stage, and from device to device, while micro-batches run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ipu_pipeline.engine.planning.memory_plans import Flow
from ipu_pipeline.engine.programs.stage_programs import StagePrograms, ValueKind, read_sources
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["Crossing", "find_crossings", "find_flows"]


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
            found = Crossing(stage, ipu_of(source), target, traced.aval(source), False, source)
            forward.setdefault((source, target), found)

    for index, (stage, own) in enumerate(zip(traced.stages, programs, strict=True)):
        for source in read_sources(stage, own.forward, *own.backwards):
            read(source, ipus[index])
        for value in itertools.chain(*own.forward.results, *(own.backward.results if own.backward else ())):
            if value.kind is ValueKind.INPUT_COTANGENT:
                source = stage.inputs[value.index]
                if ipu_of(source) not in (None, ipus[index]):
                    target, aval = ipus[source.stage], traced.aval(source)
                    backward.append(Crossing(index, ipus[index], target, aval, True, source))
    for source in traced.outputs:  # outputs are collected where the last stage is
        read(source, ipus[-1])
    return [*forward.values(), *backward]


def find_flows(
    traced: TracedPipeline, programs: Sequence[StagePrograms], ipus: Sequence[int]
) -> tuple[Flow, ...]:
    """Finds the flows from stage to stage, also on one device; values with the same ends are one flow."""
    used: dict[tuple[Source, int], tuple[set[int], set[int]]] = {}
    sizes: dict[tuple[int, bool, int, tuple[int, ...], tuple[int, ...]], int] = {}
    for index, (stage, own) in enumerate(zip(traced.stages, programs, strict=True)):
        held = read_sources(stage, *own.backwards)
        for source in read_sources(stage, own.forward, *own.backwards):
            if source.kind == "output":
                readers, holders = used.setdefault((source, ipus[index]), (set(), set()))
                (holders if source in held else readers).add(index)
        for value in itertools.chain(*own.forward.results, *(own.backward.results if own.backward else ())):
            if value.kind is ValueKind.INPUT_COTANGENT:
                source = stage.inputs[value.index]
                if source.kind == "output":
                    way = (index, True, ipus[source.stage], (source.stage,), ())
                    sizes[way] = sizes.get(way, 0) + num_bytes([traced.aval(source)])
    for (source, target), (readers, holders) in used.items():
        forward = (source.stage, False, target, tuple(sorted(readers)), tuple(sorted(holders)))
        sizes[forward] = sizes.get(forward, 0) + num_bytes([traced.aval(source)])
    return tuple(Flow(*way, size) for way, size in sorted(sizes.items()))
