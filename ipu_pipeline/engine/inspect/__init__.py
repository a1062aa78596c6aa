"""Facts about pipelines and loops: their stages, costs and memory, and events of their runs.

Modules are imported when a name is first used, so that the data classes are there without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipu_pipeline.engine import watching
    from ipu_pipeline.engine.execution.contract import Runner
    from ipu_pipeline.engine.execution.held import LiveBytes
    from ipu_pipeline.engine.inspect.counting import Work, count_costs, count_work
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
    from ipu_pipeline.engine.inspect.layer_costs import find_layer_costs
    from ipu_pipeline.engine.inspect.layers import fold_names
    from ipu_pipeline.engine.inspect.pipelines import (
        find_facts,
        find_searched,
        find_separate_variables,
        introduce,
        summarize,
    )
    from ipu_pipeline.engine.inspect.summary import PipelineSummary, describe_numbers
    from ipu_pipeline.engine.planning.memory_plans import Flow, IpuMemory, StageMemory
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

_FACTS = "Edge LayerFacts Part PipelineDetails PipelineFacts Sent StageDetails StageFacts select_fields"
_HOMES = {
    "": "watching",
    ".execution.contract": "Runner",
    ".execution.held": "LiveBytes",
    ".inspect.counting": "Work count_costs count_work",
    ".inspect.facts": _FACTS,
    ".inspect.layer_costs": "find_layer_costs",
    ".inspect.layers": "fold_names",
    ".inspect.pipelines": "find_facts find_searched find_separate_variables introduce summarize",
    ".inspect.summary": "PipelineSummary describe_numbers",
    ".planning.memory_plans": "Flow IpuMemory StageMemory",
    ".watching": "Launch LaunchKind",
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            value = getattr(importlib.import_module(f"ipu_pipeline.engine{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
