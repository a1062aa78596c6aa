"""Plans memory and costs, and chooses by them.

Modules are imported when a name is first used, so that those without JAX are there without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipu_pipeline.ground.lazy_initialization import import_later

if TYPE_CHECKING:
    from ipu_pipeline.engine.inspect.pipelines import (
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

__getattr__, __dir__ = import_later(__name__, {"engine.inspect.pipelines": " ".join(__all__)})
