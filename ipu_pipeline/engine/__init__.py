"""The engine: pipelines as plain JAX, state in and state out.

Modules are imported when they are first used, so that `engine.schedules` is there without JAX.
"""

from __future__ import annotations

import importlib
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from ipu_pipeline.ground import user_warnings
from ipu_pipeline.ground.lazy_initialization import import_later

if TYPE_CHECKING:
    # Named for type checkers; imported when somebody asks for it, as all here (`NAMED_LATER` of the rooms).
    from ipu_pipeline.engine.automatic_splits import AutoStages, ModelStages, SplitTable, auto_stages, split
    from ipu_pipeline.engine.devices.feeds import PlacedMicroBatches
    from ipu_pipeline.engine.devices.process_exchange import gathered
    from ipu_pipeline.engine.emulation import emulate
    from ipu_pipeline.engine.generation.generator import Generator
    from ipu_pipeline.engine.generation.requests import Request
    from ipu_pipeline.engine.generation.sampling import Sampling
    from ipu_pipeline.engine.measuring import measure_dispatch_plan
    from ipu_pipeline.engine.option_types import Chunking, Offload, Recomputation, Reduction, Shard
    from ipu_pipeline.engine.pipeline import Pipeline
    from ipu_pipeline.engine.pipeline_options import PipelineOptions
    from ipu_pipeline.engine.pipeline_states import Adoption
    from ipu_pipeline.engine.resplitting import resplit
    from ipu_pipeline.engine.schedules.advice import advise, what_if
    from ipu_pipeline.engine.schedules.clusters import Cluster, ExecutionPhases, HostMemory, LinkSpeed
    from ipu_pipeline.engine.schedules.scenarios import Costs, Layer, Scenario
    from ipu_pipeline.engine.schedules.schedule_arguments import Schedule, SearchedSchedule
    from ipu_pipeline.engine.schedules.simulator import simulate
    from ipu_pipeline.engine.schedules.timetables import (
        Action,
        ActionKind,
        ScheduleError,
        ScheduleFunction,
        Timetable,
    )
    from ipu_pipeline.engine.state import PipelineState, StepOutputs
    from ipu_pipeline.engine.tracing.side_outputs import metric
    from ipu_pipeline.engine.tracing.specs import VariableSpec
    from ipu_pipeline.engine.tracing.stage_lists import Stage, StageEntry
    from ipu_pipeline.engine.tracing.stage_markers import (
        micro_batch_tag,
        next_rng_key,
        recomputation_checkpoint,
        update_count,
    )
    from ipu_pipeline.engine.tracing.stage_meshes import (
        TensorParallel,
        constrain,
        cross_replica_sum,
        replica_count,
        replica_index,
        stage_mesh,
    )
    from ipu_pipeline.engine.tracing.stage_parameters import Shared
    from ipu_pipeline.engine.tracing.variables import (
        AUTO_REUSE,
        assign,
        assign_add,
        assign_sub,
        get_variable,
        get_variable_scope,
        variable_scope,
    )
    from ipu_pipeline.engine.updates.optimizer_wrappers import with_metrics
    from ipu_pipeline.ground.errors import OutOfRangeError, ProcessError
    from ipu_pipeline.saved_states import (  # above; for type checkers only
        InMemoryCheckpoints,
        restore,
        save,
    )

__all__ = [
    "AUTO_REUSE",
    "Action",
    "ActionKind",
    "Adoption",
    "AutoStages",
    "Chunking",
    "Cluster",
    "Costs",
    "ExecutionPhases",
    "Generator",
    "HostMemory",
    "InMemoryCheckpoints",
    "Layer",
    "LinkSpeed",
    "ModelStages",
    "Offload",
    "OutOfRangeError",
    "Pipeline",
    "PipelineOptions",
    "PipelineState",
    "PlacedMicroBatches",
    "ProcessError",
    "Recomputation",
    "Reduction",
    "Request",
    "Sampling",
    "Scenario",
    "Schedule",
    "ScheduleError",
    "ScheduleFunction",
    "SearchedSchedule",
    "Shard",
    "Shared",
    "SplitTable",
    "Stage",
    "StageEntry",
    "StepOutputs",
    "TensorParallel",
    "Timetable",
    "VariableSpec",
    "advise",
    "assign",
    "assign_add",
    "assign_sub",
    "auto_stages",
    "constrain",
    "cross_replica_sum",
    "emulate",
    "gathered",
    "get_variable",
    "get_variable_scope",
    "measure_dispatch_plan",
    "metric",
    "micro_batch_tag",
    "next_rng_key",
    "recomputation_checkpoint",
    "replica_count",
    "replica_index",
    "resplit",
    "restore",
    "save",
    "simulate",
    "split",
    "stage_mesh",
    "update_count",
    "variable_scope",
    "what_if",
    "with_metrics",
]

_find, __dir__ = import_later(
    __name__,
    {
        "saved_states": "InMemoryCheckpoints restore save",
        "engine.pipeline_states": "Adoption",
        "engine.automatic_splits": "AutoStages ModelStages SplitTable auto_stages split",
        "engine.devices.feeds": "PlacedMicroBatches",
        "engine.devices.process_exchange": "gathered",
        "engine.emulation": "emulate",
        "engine.generation.generator": "Generator",
        "engine.generation.requests": "Request",
        "engine.generation.sampling": "Sampling",
        "engine.measuring": "measure_dispatch_plan",
        "engine.option_types": "Chunking Offload Recomputation Reduction Shard",
        "engine.pipeline": "Pipeline",
        "engine.pipeline_options": "PipelineOptions",
        "engine.resplitting": "resplit",
        "engine.schedules.timetables": "Action ActionKind ScheduleError ScheduleFunction Timetable",
        "engine.schedules.advice": "advise what_if",
        "engine.schedules.clusters": "Cluster ExecutionPhases HostMemory LinkSpeed",
        "engine.schedules.scenarios": "Costs Layer Scenario",
        "engine.schedules.schedule_arguments": "Schedule SearchedSchedule",
        "engine.schedules.simulator": "simulate",
        "engine.state": "PipelineState StepOutputs",
        "engine.tracing.stage_markers": (
            "micro_batch_tag next_rng_key recomputation_checkpoint update_count"
        ),
        "engine.tracing.side_outputs": "metric",
        "engine.tracing.stage_meshes": (
            "TensorParallel constrain cross_replica_sum replica_count replica_index stage_mesh"
        ),
        "engine.tracing.specs": "VariableSpec",
        "engine.tracing.stage_lists": "Stage StageEntry",
        "engine.tracing.stage_parameters": "Shared",
        "engine.tracing.variables": (
            "AUTO_REUSE assign assign_add assign_sub get_variable get_variable_scope variable_scope"
        ),
        "engine.updates.optimizer_wrappers": "with_metrics",
        "ground.errors": "OutOfRangeError ProcessError",
    },
)


def __getattr__(name: str) -> Any:
    if (former := f"engine.{name}") in user_warnings.DEPRECATED_NAMES:
        user_warnings.warn_deprecated(former)
        name = user_warnings.DEPRECATED_NAMES[former].instead.removeprefix("engine.")
    full_name = f"{__name__}.{name}"
    is_module = name not in __all__ and not name.startswith("_")
    if is_module and PathFinder.find_spec(full_name, __path__) is not None:
        return importlib.import_module(full_name)  # which enters it here
    return _find(name)
