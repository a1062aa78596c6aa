"""The engine: pipelines as plain JAX, state in and state out."""

from ipu_pipeline.engine.errors import OutOfRangeError, ProcessError
from ipu_pipeline.engine.measuring import measure_dispatch_plan
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.planning.dispatch_plans import DispatchPlan
from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.recomputation import Recomputation
from ipu_pipeline.engine.schedules.actions import Action, ActionKind, ScheduleError
from ipu_pipeline.engine.schedules.advice import advise
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.clusters import Cluster, LinkSpeed
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.schedules.scenarios import Costs, Scenario
from ipu_pipeline.engine.schedules.simulator import simulate
from ipu_pipeline.engine.schedules.variants import what_if
from ipu_pipeline.engine.state import PipelineState, StepOutputs
from ipu_pipeline.engine.tracing.checkpoints import recomputation_checkpoint
from ipu_pipeline.engine.tracing.keys import micro_batch_tag, next_rng_key
from ipu_pipeline.engine.tracing.metrics import metric
from ipu_pipeline.engine.tracing.replicas import cross_replica_sum, replica_count, replica_index
from ipu_pipeline.engine.tracing.stage_lists import Stage
from ipu_pipeline.engine.tracing.stage_parameters import Shared
from ipu_pipeline.engine.tracing.tensor_parallel import TensorParallel, constrain
from ipu_pipeline.engine.tracing.variable_scopes import variable_scope
from ipu_pipeline.engine.tracing.variables import assign, get_variable
from ipu_pipeline.engine.updates.reporting import with_metrics

__all__ = [
    "Action",
    "ActionKind",
    "Cluster",
    "Costs",
    "DispatchPlan",
    "ExecutionPhases",
    "HostMemory",
    "LinkSpeed",
    "OutOfRangeError",
    "Pipeline",
    "PipelineState",
    "ProcessError",
    "Recomputation",
    "Reduction",
    "Scenario",
    "ScheduleError",
    "Shared",
    "Stage",
    "StepOutputs",
    "TensorParallel",
    "Timetable",
    "advise",
    "assign",
    "constrain",
    "cross_replica_sum",
    "get_variable",
    "measure_dispatch_plan",
    "metric",
    "micro_batch_tag",
    "next_rng_key",
    "recomputation_checkpoint",
    "replica_count",
    "replica_index",
    "simulate",
    "variable_scope",
    "what_if",
    "with_metrics",
]
