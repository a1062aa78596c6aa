"""What fronts and reports may ask about a pipeline or loop: what it is, what it takes, and what it does.

Modules are imported when a name is first used, so that what is data is there without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipu_pipeline.engine import watching
    from ipu_pipeline.engine.devices.elsewhere import is_here
    from ipu_pipeline.engine.execution.contract import Runner
    from ipu_pipeline.engine.inspect.counting import Work, count_work
    from ipu_pipeline.engine.inspect.layers import fold_names
    from ipu_pipeline.engine.inspect.live_bytes import LiveBytes
    from ipu_pipeline.engine.inspect.summary import PipelineSummary, StageSummary, describe_numbers
    from ipu_pipeline.engine.planning.memory_plans import Flow, IpuMemory, StageMemory
    from ipu_pipeline.engine.watching import Launch, LaunchKind

__all__ = [
    "Flow",
    "IpuMemory",
    "Launch",
    "LaunchKind",
    "LiveBytes",
    "PipelineSummary",
    "Runner",
    "StageMemory",
    "StageSummary",
    "Work",
    "count_work",
    "describe_numbers",
    "fold_names",
    "is_here",
    "watching",
]

_HOMES = {
    "Flow": "planning.memory_plans",
    "IpuMemory": "planning.memory_plans",
    "Launch": "watching",
    "LaunchKind": "watching",
    "LiveBytes": "inspect.live_bytes",
    "PipelineSummary": "inspect.summary",
    "Runner": "execution.contract",
    "StageMemory": "planning.memory_plans",
    "StageSummary": "inspect.summary",
    "Work": "inspect.counting",
    "count_work": "inspect.counting",
    "describe_numbers": "inspect.summary",
    "fold_names": "inspect.layers",
    "is_here": "devices.elsewhere",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "watching":
        value = importlib.import_module("ipu_pipeline.engine.watching")
    else:
        value = getattr(importlib.import_module(f"ipu_pipeline.engine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
