"""What IPUs hold over time, as columns that `page.js` draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipu_pipeline.engine.schedules import Timeline
from ipu_pipeline.reports.events import Event, EventKind
from ipu_pipeline.reports.page.columns import pack_column
from ipu_pipeline.reports.profile import IpuFacts, PipelineFacts

__all__ = ["pack_measured", "pack_memory", "pack_simulated"]


def pack_memory(ipu: int, times: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """What an IPU holds.

    Args:
      ipu: its number.
      times: in microseconds, ascending.
      parts: name -> bytes from each time on, or one number for all the time. Those that are 0 are left out.

    Returns:
      What JSON can hold: "ipu", "count" of times, "times" (in nanoseconds, each from the one before) and
      "parts" with "name" and "values"; columns are as of `pack_column`.
    """
    rounded = np.round(np.asarray(times, np.float64) * 1000).astype(np.int64)
    return {
        "ipu": ipu,
        "count": len(rounded),
        "times": pack_column(np.diff(rounded, prepend=0).tolist()),
        "parts": [
            {"name": name, "values": pack_column(np.asarray(values, np.int64).reshape(-1).tolist())}
            for name, values in parts.items()
            if np.any(values)
        ],
    }


def pack_measured(facts: PipelineFacts, events: Sequence[Event]) -> list[dict[str, Any]]:
    """What each IPU held while a pipeline ran, by the plan: empty if there is none.

    What is there all the time is the plan's. A stage holds its part of a micro-batch (`num_held_bytes`)
    from the begin of the forward to the end of the backward, both as they were measured.

    Args:
      facts: the pipeline.
      events: those that are the pipeline's.
    """
    if not facts.memory or not events:
        return []
    begins = {_key(event): event.begin for event in events if event.kind is EventKind.FORWARD}
    first, last = min(event.begin for event in events), max(event.end for event in events)
    changes: dict[int, list[tuple[float, int]]] = {plan.ipu: [] for plan in facts.memory}
    for event in events:
        if event.kind is EventKind.BACKWARD and event.stage is not None and _key(event) in begins:
            stage = facts.stages[event.stage]
            if stage.num_held_bytes and not facts.is_one_program:  # whose temporaries have it all
                changes[stage.ipu] += [
                    (begins[_key(event)], stage.num_held_bytes),
                    (event.end, -stage.num_held_bytes),
                ]
    packed = []
    for plan in facts.memory:
        ordered = sorted([(first, 0), *changes[plan.ipu], (last, 0)])
        times = [time for time, _change in ordered]
        held = np.cumsum([change for _time, change in ordered])
        packed.append(pack_memory(plan.ipu, times, {**_constant(plan), "activations": held}))
    return packed


def _key(event: Event) -> tuple[int | None, int | None, int | None]:
    return event.stage, event.micro_batch, event.step


def pack_simulated(facts: PipelineFacts, timeline: Timeline) -> list[dict[str, Any]]:
    """What each IPU holds in a simulated step, whose times are in seconds; empty if that is not known."""
    plans = {plan.ipu: plan for plan in facts.memory}
    packed = []
    for ipu, (times, sizes) in sorted(timeline.memory.items()):
        parts: dict[str, Any] = {"all": sizes}
        if ipu in plans:
            parts = _constant(plans[ipu])
            parts["activations"] = np.maximum(0, sizes - sum(parts.values()))
        packed.append(pack_memory(ipu, times * 1e6, parts))
    return packed


def _constant(plan: IpuFacts) -> dict[str, int]:
    """What an IPU holds all the time, by the plan."""
    return {
        "variables": plan.num_variable_bytes,
        "optimizer state": plan.num_optimizer_bytes,
        "accumulators": plan.num_accumulator_bytes,
        "micro-batches": plan.num_feed_bytes,
        "temporaries": plan.num_temporary_bytes or 0,
    }
