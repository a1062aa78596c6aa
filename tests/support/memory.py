"""The memory over time (see `memory_over_time`) of each IPU of a pipeline that is at hand."""

from __future__ import annotations

from collections.abc import Iterable

from ipu_pipeline.engine import Pipeline
from ipu_pipeline.reports.memory_over_time import MemoryOverTime, TimedAction, lay_out_memory

__all__ = ["pipeline_memory_over_time"]


def pipeline_memory_over_time(
    pipeline: Pipeline, actions: Iterable[TimedAction], num_micro_batches: int | None = None
) -> tuple[MemoryOverTime, ...]:
    """The memory of each IPU of a pipeline over time.

    Args:
      pipeline: a traced pipeline. The temporaries of its programs are known once they have been compiled.
      actions: its actions, in any order.
      num_micro_batches: micro-batches in a step, if the pipeline has no fixed number.

    Raises:
      ValueError: see `lay_out_memory`, and `Pipeline.plan_ipu_memory`.
    """
    stages = pipeline.plan_memory(num_micro_batches)
    planned, flows = pipeline.plan_ipu_memory(num_micro_batches), pipeline.facts().flows
    return lay_out_memory(stages, planned, flows, actions)
