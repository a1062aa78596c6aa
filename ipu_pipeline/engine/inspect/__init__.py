"""Facts about pipelines and loops: their stages, costs and memory, and events of their runs.

Modules are imported when a name is first used, so that the data classes are there without JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipu_pipeline.ground.lazy_initialization import import_later

if TYPE_CHECKING:
    from ipu_pipeline.engine import watching
    from ipu_pipeline.engine.execution.contract import Runner
    from ipu_pipeline.engine.execution.observation import LiveBytes
    from ipu_pipeline.engine.inspect.descriptions import Work, count_costs, count_work
    from ipu_pipeline.engine.inspect.estimates import find_layer_costs
    from ipu_pipeline.engine.inspect.facts import (
        Edge,
        LayerFacts,
        Part,
        PipelineDetails,
        PipelineFacts,
        Sent,
        StageDetails,
        StageFacts,
        select_fields,
    )
    from ipu_pipeline.engine.inspect.layers import fold_names
    from ipu_pipeline.engine.inspect.pipelines import (
        find_facts,
        find_searched,
        find_separate_variables,
        introduce,
        summarize,
    )
    from ipu_pipeline.engine.inspect.summary import PipelineSummary, describe_numbers
    from ipu_pipeline.engine.planning.memory_records import Flow, IpuMemory, StageMemory
    from ipu_pipeline.engine.watching import Launch, LaunchKind

__all__ = [
    "Edge",
    "Flow",
    "IpuMemory",
    "Launch",
    "LaunchKind",
    "LayerFacts",
    "LiveBytes",
    "Part",
    "PipelineDetails",
    "PipelineFacts",
    "PipelineSummary",
    "Runner",
    "Sent",
    "StageDetails",
    "StageFacts",
    "StageMemory",
    "Work",
    "count_costs",
    "count_work",
    "describe_numbers",
    "find_facts",
    "find_layer_costs",
    "find_searched",
    "find_separate_variables",
    "fold_names",
    "introduce",
    "select_fields",
    "summarize",
    "watching",
]

__getattr__, __dir__ = import_later(
    __name__,
    {
        "engine": "watching",
        "engine.execution.contract": "Runner",
        "engine.execution.observation": "LiveBytes",
        "engine.inspect.descriptions": "Work count_costs count_work",
        "engine.inspect.facts": (
            "Edge LayerFacts Part PipelineDetails PipelineFacts Sent StageDetails StageFacts select_fields"
        ),
        "engine.inspect.estimates": "find_layer_costs",
        "engine.inspect.layers": "fold_names",
        "engine.inspect.pipelines": "find_facts find_searched find_separate_variables introduce summarize",
        "engine.inspect.summary": "PipelineSummary describe_numbers",
        "engine.planning.memory_records": "Flow IpuMemory StageMemory",
        "engine.watching": "Launch LaunchKind",
    },
)
