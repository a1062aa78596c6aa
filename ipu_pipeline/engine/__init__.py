"""The engine: pipelines as plain JAX, state in and state out.

Modules are imported when they are first used, so that `engine.schedules` is there without JAX.
"""

from __future__ import annotations

import importlib
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from ipu_pipeline.ground import deprecated
from ipu_pipeline.ground.lazy_names import import_later

if TYPE_CHECKING:
    # Named for type checkers; imported when somebody asks for it, as all here (`NAMED_LATER` of the rooms).
    from ipu_pipeline.checkpointing.engine_memory import InMemoryCheckpoints
    from ipu_pipeline.checkpointing.engine_states import restore, save
    from ipu_pipeline.engine.adopting import Adoption
    from ipu_pipeline.engine.automatic_splits import AutoStages, ModelStages, SplitTable, auto_stages, split
    from ipu_pipeline.engine.devices.feeds import PlacedMicroBatches
    from ipu_pipeline.engine.devices.gathered import gathered
    from ipu_pipeline.engine.devices.offloading import Offload
    from ipu_pipeline.engine.devices.sharding import Shard
    from ipu_pipeline.engine.emulation import emulate
    from ipu_pipeline.engine.generation.generator import Generator
    from ipu_pipeline.engine.generation.requests import Request
    from ipu_pipeline.engine.generation.sampling import Sampling
    from ipu_pipeline.engine.measuring import measure_dispatch_plan
    from ipu_pipeline.engine.pipeline import Pipeline
    from ipu_pipeline.engine.pipeline_options import PipelineOptions
    from ipu_pipeline.engine.planning.chunking import Chunking
    from ipu_pipeline.engine.programs.accumulation import Reduction
    from ipu_pipeline.engine.programs.recomputation import Recomputation
    from ipu_pipeline.engine.resplitting import resplit
    from ipu_pipeline.engine.schedules.actions import Action, ActionKind, ScheduleError, ScheduleFunction
    from ipu_pipeline.engine.schedules.advice import advise
    from ipu_pipeline.engine.schedules.checking import Timetable
    from ipu_pipeline.engine.schedules.clusters import Cluster, LinkSpeed
    from ipu_pipeline.engine.schedules.costs import Costs
    from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
    from ipu_pipeline.engine.schedules.host_memory import HostMemory
    from ipu_pipeline.engine.schedules.named import Schedule, SearchedSchedule
    from ipu_pipeline.engine.schedules.scenarios import Layer, Scenario
    from ipu_pipeline.engine.schedules.simulator import simulate
    from ipu_pipeline.engine.schedules.variants import what_if
    from ipu_pipeline.engine.state import PipelineState, StepOutputs
    from ipu_pipeline.engine.tracing.counting import update_count
    from ipu_pipeline.engine.tracing.keys import micro_batch_tag, next_rng_key
    from ipu_pipeline.engine.tracing.metrics import metric
    from ipu_pipeline.engine.tracing.recomputation_marks import recomputation_checkpoint
    from ipu_pipeline.engine.tracing.replicas import cross_replica_sum, replica_count, replica_index
    from ipu_pipeline.engine.tracing.specs import VariableSpec
    from ipu_pipeline.engine.tracing.stage_lists import Stage, StageEntry
    from ipu_pipeline.engine.tracing.stage_meshes import stage_mesh
    from ipu_pipeline.engine.tracing.stage_parameters import Shared
    from ipu_pipeline.engine.tracing.tensor_parallel import TensorParallel, constrain
    from ipu_pipeline.engine.tracing.variable_scopes import AUTO_REUSE, get_variable_scope, variable_scope
    from ipu_pipeline.engine.tracing.variables import assign, assign_add, assign_sub, get_variable
    from ipu_pipeline.engine.updates.reporting import with_metrics
    from ipu_pipeline.ground.errors import OutOfRangeError, ProcessError

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
        "checkpointing.engine_memory": "InMemoryCheckpoints",
        "checkpointing.engine_states": "restore save",
        "engine.adopting": "Adoption",
        "engine.automatic_splits": "AutoStages ModelStages SplitTable auto_stages split",
        "engine.devices.feeds": "PlacedMicroBatches",
        "engine.devices.gathered": "gathered",
        "engine.devices.offloading": "Offload",
        "engine.devices.sharding": "Shard",
        "engine.emulation": "emulate",
        "engine.generation.generator": "Generator",
        "engine.generation.requests": "Request",
        "engine.generation.sampling": "Sampling",
        "engine.measuring": "measure_dispatch_plan",
        "engine.pipeline": "Pipeline",
        "engine.pipeline_options": "PipelineOptions",
        "engine.planning.chunking": "Chunking",
        "engine.programs.accumulation": "Reduction",
        "engine.programs.recomputation": "Recomputation",
        "engine.resplitting": "resplit",
        "engine.schedules.actions": "Action ActionKind ScheduleError ScheduleFunction",
        "engine.schedules.advice": "advise",
        "engine.schedules.checking": "Timetable",
        "engine.schedules.clusters": "Cluster LinkSpeed",
        "engine.schedules.costs": "Costs",
        "engine.schedules.execution_phases": "ExecutionPhases",
        "engine.schedules.host_memory": "HostMemory",
        "engine.schedules.named": "Schedule SearchedSchedule",
        "engine.schedules.scenarios": "Layer Scenario",
        "engine.schedules.simulator": "simulate",
        "engine.schedules.variants": "what_if",
        "engine.state": "PipelineState StepOutputs",
        "engine.tracing.counting": "update_count",
        "engine.tracing.keys": "micro_batch_tag next_rng_key",
        "engine.tracing.metrics": "metric",
        "engine.tracing.recomputation_marks": "recomputation_checkpoint",
        "engine.tracing.replicas": "cross_replica_sum replica_count replica_index",
        "engine.tracing.specs": "VariableSpec",
        "engine.tracing.stage_lists": "Stage StageEntry",
        "engine.tracing.stage_meshes": "stage_mesh",
        "engine.tracing.stage_parameters": "Shared",
        "engine.tracing.tensor_parallel": "TensorParallel constrain",
        "engine.tracing.variable_scopes": "AUTO_REUSE get_variable_scope variable_scope",
        "engine.tracing.variables": "assign assign_add assign_sub get_variable",
        "engine.updates.reporting": "with_metrics",
        "ground.errors": "OutOfRangeError ProcessError",
    },
)


def __getattr__(name: str) -> Any:
    if (former := f"engine.{name}") in deprecated.NAMES:
        deprecated.warn_deprecated(former)
        name = deprecated.NAMES[former].instead.removeprefix("engine.")
    full_name = f"{__name__}.{name}"
    is_module = name not in __all__ and not name.startswith("_")
    if is_module and PathFinder.find_spec(full_name, __path__) is not None:
        return importlib.import_module(full_name)  # which enters it here
    return _find(name)
