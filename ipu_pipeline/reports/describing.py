"""Describes pipelines, loops and their devices for a profile."""

from __future__ import annotations

from collections.abc import Sequence

from ipu_pipeline.engine.inspect import (
    Launch,
    LaunchKind,
    PipelineFacts,
    StageFacts,
    select_fields,
)
from ipu_pipeline.reports.profile import DeviceFacts
from ipu_pipeline.reports.recorder import Introduced

__all__ = ["describe_devices", "describe_pipeline"]


def describe_devices(introduced: Sequence[Introduced]) -> tuple[DeviceFacts, ...]:
    """The devices of some pipelines, by IPU."""
    found = {(ipu, device) for one in introduced for device, ipu in one.runner.find_ipus().items()}
    facts = {DeviceFacts(ipu, d.id, d.device_kind, d.platform, d.process_index) for ipu, d in found}
    return tuple(sorted(facts, key=lambda device: (device.ipu, device.id)))


def describe_pipeline(one: Introduced, launches: Sequence[Launch]) -> PipelineFacts:
    """Describes a pipeline or loop that ran.

    Args:
      one: the pipeline.
      launches: its programs that were started.
    """
    facts, owner = one.facts, one.owner
    count = 1 if facts.kind == "loop" else _count_micro_batches(launches)
    given = None if owner.num_micro_batches is not None else max(1, count // facts.num_serialized)
    stages = [
        select_fields(
            StageFacts,
            stage,
            layers=stage.whole_layers,
            num_held_bytes=held.num_held_bytes,
            in_flight=held.in_flight,
            num_between_bytes=held.num_between_bytes,
        )
        for stage, held in zip(facts.stages, owner.plan_memory(given), strict=True)
    ]
    return select_fields(
        PipelineFacts,
        facts,
        name=one.name,
        num_micro_batches=count,
        stages=tuple(stages),
        memory=tuple(owner.plan_ipu_memory(given)),
    )


def _count_micro_batches(launches: Sequence[Launch]) -> int:
    """Micro-batches per step of each replica, as they were seen."""
    everies = [launch.every for launch in launches if launch.kind == LaunchKind.BLOCK]
    numbers = [launch.first + launch.count for launch in launches if launch.kind != LaunchKind.BLOCK]
    return max([*everies, *numbers], default=1)
