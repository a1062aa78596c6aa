"""The memory over time of each IPU of a pipeline that is at hand."""

from ipu_pipeline.engine.inspect import find_facts
from ipu_pipeline.engine.planning import plan_ipu_memory, plan_memory
from ipu_pipeline.reports.memory_over_time import lay_out_memory

__all__ = ["pipeline_memory_over_time"]


def pipeline_memory_over_time(pipeline, actions, num_micro_batches=None):
    """Lays out what its actions hold, in any order; see `lay_out_memory`."""
    stages = plan_memory(pipeline, num_micro_batches)
    planned = plan_ipu_memory(pipeline, num_micro_batches)
    return lay_out_memory(stages, planned, find_facts(pipeline).flows, actions)
