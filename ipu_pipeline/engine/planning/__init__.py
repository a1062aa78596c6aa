"""Plans memory and costs, and chooses by them.

Modules are imported when a name is first used, so that those without JAX are there without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipu_pipeline.engine.planning.pipelines import (
        measure_costs,
        measure_scenario,
        plan_host_memory,
        plan_ipu_memory,
        plan_memory,
        with_dispatch_plan,
        with_recomputation,
    )

__all__ = [
    "measure_costs",
    "measure_scenario",
    "plan_host_memory",
    "plan_ipu_memory",
    "plan_memory",
    "with_dispatch_plan",
    "with_recomputation",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.pipelines"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
