"""The memory over time of each IPU of a pipeline that is at hand."""

from ipu_pipeline import engine
from ipu_pipeline.reports.memory_over_time import lay_out_memory

__all__ = ["pipeline_memory_over_time"]


def pipeline_memory_over_time(pipeline, actions, num_micro_batches=None):
    """Lays out what its actions hold, in any order; see `lay_out_memory`."""
    stages = engine.planning.plan_memory(pipeline, num_micro_batches)
    planned = engine.planning.plan_ipu_memory(pipeline, num_micro_batches)
    return lay_out_memory(stages, planned, engine.inspect.find_facts(pipeline).flows, actions)
