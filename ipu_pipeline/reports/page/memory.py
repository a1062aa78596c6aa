"""The memory of IPUs over time, as columns that `page.js` draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from ipu_pipeline.engine.inspect import IpuMemory, PipelineFacts
from ipu_pipeline.engine.schedules import Timeline
from ipu_pipeline.reports.memory_over_time import profile_memory_over_time
from ipu_pipeline.reports.page.columns import pack_column
from ipu_pipeline.reports.profile import Profile

_NAMES = {"feed": "micro-batches"}

__all__ = ["pack_measured", "pack_memory", "pack_simulated"]


def pack_memory(ipu: int, times: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Packs the memory of an IPU.

    Args:
      ipu: its number.
      times: times in microseconds, ascending.
      parts: name -> bytes from each time on, or one number for all the time. Parts that are 0 are left out.

    Returns:
      A value for JSON: "ipu", "count" of times, "times" (in nanoseconds, each from the one before) and
      "parts" with "name" and "values"; columns are as `pack_column` makes them.
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


def pack_measured(profile: Profile, pipeline: int) -> list[dict[str, Any]]:
    """Packs the memory of each IPU while a pipeline ran, by the plan and the measured times.

    The list is empty without a plan.

    Args:
      profile: the trace.
      pipeline: the pipeline's number in it.
    """
    return [
        pack_memory(
            held.ipu, held.times, {_NAMES.get(name, name): part for name, part in held.parts.items()}
        )
        for held in profile_memory_over_time(profile, pipeline)
    ]


def pack_simulated(facts: PipelineFacts, timeline: Timeline) -> list[dict[str, Any]]:
    """Packs the memory of each IPU in a simulated step, with times in seconds; empty if it is not known."""
    plans = {plan.ipu: plan for plan in facts.memory}
    packed = []
    for ipu, (times, sizes) in sorted(timeline.memory.items()):
        parts: dict[str, Any] = {"all": sizes}
        plan = plans.get(ipu % facts.num_ipus_each)
        if plan is not None:
            parts = _constant(plan)
            parts["activations"] = np.maximum(0, sizes - sum(parts.values()))
        packed.append(pack_memory(ipu, times * 1e6, parts))
    return packed


def _constant(plan: IpuMemory) -> dict[str, int]:
    """The memory that an IPU holds all the time, by the plan."""
    variables, optimizer_state, accumulators = plan.num_state_bytes
    return {
        "variables": variables,
        "optimizer state": optimizer_state,
        "accumulators": accumulators,
        "micro-batches": plan.num_feed_bytes,
        "temporaries": plan.num_temporary_bytes or 0,
    }
