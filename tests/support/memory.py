"""The memory over time of each IPU of a pipeline that is at hand."""

from ipu_pipeline.reports.memory_over_time import lay_out_memory

__all__ = ["pipeline_memory_over_time"]


def pipeline_memory_over_time(pipeline, actions, num_micro_batches=None):
    """Lays out what its actions hold, in any order; see `lay_out_memory`."""
    stages = pipeline.plan_memory(num_micro_batches)
    planned, flows = pipeline.plan_ipu_memory(num_micro_batches), pipeline.facts().flows
    return lay_out_memory(stages, planned, flows, actions)
