"""Describes a pipeline in a few texts that several processes compare before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.building import Built
from ipu_pipeline.engine.execution.comparing import agree_on, describe_programs, digest
from ipu_pipeline.engine.pipeline_options import PipelineOptions
from ipu_pipeline.engine.planning.chunking import Chunking
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.named import schedule_name

__all__ = ["agree", "describe"]


def agree(
    built: Built,
    options: PipelineOptions,
    mapping: Sequence[int],
    timetable: Timetable,
    plan: Chunking | None,
    devices: Sequence[Any],
) -> None:
    """Compares a pipeline with the other processes' pipelines, if there are any; all processes call it."""
    if peers.current() is not None:
        told = _describe_options(built, options, mapping, timetable, plan)
        agree_on("pipeline", built.traced, built.updates, told, devices)


def describe(
    built: Built,
    options: PipelineOptions,
    mapping: Sequence[int],
    timetable: Timetable,
    plan: Chunking | None,
) -> dict[str, str]:
    """Describes a pipeline in texts, by subject; arguments as in `agree`."""
    told = _describe_options(built, options, mapping, timetable, plan)
    return {**told, **describe_programs(built.traced, built.updates)}


def _describe_options(
    built: Built,
    options: PipelineOptions,
    mapping: Sequence[int],
    timetable: Timetable,
    plan: Chunking | None,
) -> dict[str, str]:
    traced = built.traced
    return {
        "the number of stages": str(len(traced.stages)),
        "device_mapping": str(list(mapping)),
        "num_replicas": str(options.num_replicas),
        "num_micro_batches": str(options.num_micro_batches),
        "the micro-batch": _describe_leaves(traced.element),
        "the inputs of a step": _describe_leaves(traced.inputs),
        "the schedule": _describe_schedule(options.schedule, timetable),
        "micro-batches per program": str(None if plan is None else plan.chunk_size),
        "the reduction": str(options.reduction),
        "recompute": str(options.recompute),
        "offload": str(options.offload),
        "num_serialized": str(options.num_serialized),
        "tensor_parallel": f"{options.num_devices_per_ipu} devices, {dict(built.partitions)}",
    }


def _describe_leaves(tree: Any) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)) or "nothing"


def _describe_schedule(schedule: Any, timetable: Timetable) -> str:
    lines = [str(row) for row in timetable.rows]
    return f"{schedule_name(schedule)} ({digest(lines)})"
