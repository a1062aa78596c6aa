"""The engine: pipelines as plain JAX, state in and state out."""

from ipu_pipeline.engine.dispatch_plans import DispatchPlan
from ipu_pipeline.engine.errors import OutOfRangeError
from ipu_pipeline.engine.keys import next_rng_key
from ipu_pipeline.engine.names import variable_scope
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.plain_stages import Stage
from ipu_pipeline.engine.plan_measuring import measure_dispatch_plan
from ipu_pipeline.engine.programs import Reduction
from ipu_pipeline.engine.recomputation import Recomputation, recomputation_checkpoint
from ipu_pipeline.engine.schedules import Action, ActionKind, ScheduleError, Timetable
from ipu_pipeline.engine.state import PipelineState, StepOutputs
from ipu_pipeline.engine.variables import assign, get_variable

__all__ = [
    "Action",
    "ActionKind",
    "DispatchPlan",
    "OutOfRangeError",
    "Pipeline",
    "PipelineState",
    "Recomputation",
    "Reduction",
    "ScheduleError",
    "Stage",
    "StepOutputs",
    "Timetable",
    "assign",
    "get_variable",
    "measure_dispatch_plan",
    "next_rng_key",
    "recomputation_checkpoint",
    "variable_scope",
]
