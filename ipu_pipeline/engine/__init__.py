"""The engine: pipelines as plain JAX, state in and state out.

Modules are imported when they are first used, so that `engine.schedules` is there without JAX.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from ipu_pipeline.ground import deprecated

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

_HOMES = {
    "AUTO_REUSE": "engine.tracing.variable_scopes",
    "Action": "engine.schedules.actions",
    "ActionKind": "engine.schedules.actions",
    "Adoption": "engine.adopting",
    "AutoStages": "engine.automatic_splits",
    "Chunking": "engine.planning.chunking",
    "Cluster": "engine.schedules.clusters",
    "Costs": "engine.schedules.costs",
    "ExecutionPhases": "engine.schedules.execution_phases",
    "Generator": "engine.generation.generator",
    "HostMemory": "engine.schedules.host_memory",
    "InMemoryCheckpoints": "checkpointing.engine_memory",
    "Layer": "engine.schedules.scenarios",
    "LinkSpeed": "engine.schedules.clusters",
    "ModelStages": "engine.automatic_splits",
    "Offload": "engine.devices.offloading",
    "OutOfRangeError": "ground.errors",
    "Pipeline": "engine.pipeline",
    "PipelineOptions": "engine.pipeline_options",
    "PipelineState": "engine.state",
    "PlacedMicroBatches": "engine.devices.feeds",
    "ProcessError": "ground.errors",
    "Recomputation": "engine.programs.recomputation",
    "Reduction": "engine.programs.accumulation",
    "Request": "engine.generation.requests",
    "Sampling": "engine.generation.sampling",
    "Scenario": "engine.schedules.scenarios",
    "ScheduleError": "engine.schedules.actions",
    "ScheduleFunction": "engine.schedules.actions",
    "Schedule": "engine.schedules.named",
    "SearchedSchedule": "engine.schedules.named",
    "Shard": "engine.devices.sharding",
    "Shared": "engine.tracing.stage_parameters",
    "SplitTable": "engine.automatic_splits",
    "Stage": "engine.tracing.stage_lists",
    "StageEntry": "engine.tracing.stage_lists",
    "StepOutputs": "engine.state",
    "TensorParallel": "engine.tracing.tensor_parallel",
    "Timetable": "engine.schedules.checking",
    "VariableSpec": "engine.tracing.specs",
    "advise": "engine.schedules.advice",
    "assign": "engine.tracing.variables",
    "assign_add": "engine.tracing.variables",
    "assign_sub": "engine.tracing.variables",
    "auto_stages": "engine.automatic_splits",
    "constrain": "engine.tracing.tensor_parallel",
    "cross_replica_sum": "engine.tracing.replicas",
    "emulate": "engine.emulation",
    "gathered": "engine.devices.gathered",
    "get_variable": "engine.tracing.variables",
    "get_variable_scope": "engine.tracing.variable_scopes",
    "measure_dispatch_plan": "engine.measuring",
    "metric": "engine.tracing.metrics",
    "micro_batch_tag": "engine.tracing.keys",
    "next_rng_key": "engine.tracing.keys",
    "recomputation_checkpoint": "engine.tracing.recomputation_marks",
    "replica_count": "engine.tracing.replicas",
    "replica_index": "engine.tracing.replicas",
    "resplit": "engine.resplitting",
    "restore": "checkpointing.engine_states",
    "save": "checkpointing.engine_states",
    "simulate": "engine.schedules.simulator",
    "split": "engine.automatic_splits",
    "stage_mesh": "engine.tracing.stage_meshes",
    "update_count": "engine.tracing.counting",
    "variable_scope": "engine.tracing.variable_scopes",
    "what_if": "engine.schedules.variants",
    "with_metrics": "engine.updates.reporting",
}


def __getattr__(name: str) -> Any:
    if (former := f"engine.{name}") in deprecated.NAMES:
        deprecated.warn_deprecated(former)
        name = deprecated.NAMES[former].instead.removeprefix("engine.")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"ipu_pipeline.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    full_name = f"{__name__}.{name}"
    if not name.startswith("_") and PathFinder.find_spec(full_name, __path__) is not None:
        return importlib.import_module(full_name)  # which enters it here
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
