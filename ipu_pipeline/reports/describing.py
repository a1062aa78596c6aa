"""What pipelines and loops are, as data for a profile."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax

from ipu_pipeline.engine.inspect import Launch, LaunchKind
from ipu_pipeline.engine.inspect.crossings import find_flows
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground.shapes import num_bytes
from ipu_pipeline.reports.profile import (
    DeviceFacts,
    EdgeFacts,
    FlowFacts,
    LayerFacts,
    PipelineFacts,
    StageFacts,
)
from ipu_pipeline.reports.recorder import Introduced
from ipu_pipeline.reports.summaries import summarize

__all__ = ["describe_devices", "describe_layers", "describe_pipeline"]


def describe_devices(introduced: Sequence[Introduced]) -> tuple[DeviceFacts, ...]:
    """The devices of some pipelines, by IPU."""
    found = {(ipu, device) for one in introduced for device, ipu in one.runner.find_ipus().items()}
    facts = {DeviceFacts(ipu, d.id, d.device_kind, d.platform, d.process_index) for ipu, d in found}
    return tuple(sorted(facts, key=lambda device: (device.ipu, device.id)))


def describe_layers(specs: Sequence[VariableSpec]) -> tuple[LayerFacts, ...]:
    """The layers of some variables, in the order of their first variables.

    The parts of a name are divided by slashes, or by the dots of torch's names.
    """
    layers: dict[str, list[VariableSpec]] = defaultdict(list)
    for spec in specs:
        ends = [0, *(match.start() for match in re.finditer(r"[/.]", spec.name))]
        layers[spec.name[: ends[-1]]].append(spec)
    return tuple(
        LayerFacts(name, sum(math.prod(spec.shape) for spec in own), num_bytes(own))
        for name, own in layers.items()
    )


def describe_pipeline(one: Introduced, launches: Sequence[Launch]) -> PipelineFacts:
    """A pipeline or loop that ran.

    Args:
      one: the pipeline.
      launches: the programs of its that were started.
    """
    runner, owner, shares = one.runner, one.owner, one.shares
    traced = runner.residence.traced
    is_loop = runner.iterated is not None
    kind = "loop" if is_loop else "inference" if runner.residence.updates is None else "training"
    schedule, plan = owner.options.schedule, owner.dispatch_plan
    count = 1 if is_loop else _count_micro_batches(launches)
    chunk_size = 1 if plan is None else plan.chunk_size
    given = None if owner.num_micro_batches is not None else max(1, count // shares.num_serialized)
    held, planned = owner.plan_memory(given), owner.plan_ipu_memory(given)
    stages = [
        StageFacts(
            index=index,
            name=stage.place,
            ipu=shares.ipus[index],
            level=traced.levels[index],
            layers=describe_layers([spec for spec in stage.variables if traced.owners[spec.name] == index]),
            forward_operations=shares.forward[index],
            backward_operations=shares.backward[index],
            is_fused=shares.is_fused and index == len(traced.stages) - 1,
            num_held_bytes=held[index].num_held_bytes,
            in_flight=held[index].in_flight,
        )
        for index, stage in enumerate(traced.stages)
    ]
    _parts, edges = summarize(traced, runner.programs, shares.ipus)
    return PipelineFacts(
        name=one.name,
        kind=kind,
        schedule=schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "a function"),
        num_micro_batches=count,
        num_serialized=shares.num_serialized,
        chunk_size=chunk_size,
        is_one_program=owner.is_one_program,
        micro_batch_size=_find_batch_size(traced.element),
        stages=tuple(stages),
        edges=tuple(
            EdgeFacts(edge.source, edge.target, edge.num_forward_bytes, edge.num_backward_bytes)
            for edge in edges
        ),
        flows=tuple(
            FlowFacts(**flow._asdict()) for flow in find_flows(traced, runner.programs, shares.ipus)
        ),
        memory=tuple(planned),
        num_replicas=shares.num_replicas,
    )


def _count_micro_batches(launches: Sequence[Launch]) -> int:
    """Micro-batches per step of each replica, as they were seen."""
    everies = [launch.every for launch in launches if launch.kind == LaunchKind.BLOCK]
    numbers = [launch.first + launch.count for launch in launches if launch.kind != LaunchKind.BLOCK]
    return max([*everies, *numbers], default=1)


def _find_batch_size(element: Any) -> int | None:
    """The first axis that all arrays of a micro-batch have in common."""
    leaves = jax.tree.leaves(element)
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None
