"""What fronts are built on, besides what `engine` gives every user.

A front has an interface of its own and passes what it is told on to pipelines and loops: it traces
functions that call them, has layers that ask the function being traced, keeps state, and hands on results.
It does not drive steps or trace with the engine's frames itself: `Pipeline.run`, `Loop.iterate`,
`SegmentedFunction.trace` and `Loop.of_body` do.
"""

from __future__ import annotations

from ipu_pipeline.engine.devices.feeds import Take
from ipu_pipeline.engine.devices.placement import keep
from ipu_pipeline.engine.execution.compilation import KeptPrograms
from ipu_pipeline.engine.exporting import StageRunner, export_stages
from ipu_pipeline.engine.jaxprs.flat import split_results
from ipu_pipeline.engine.loop import Loop, look_at_body
from ipu_pipeline.engine.loop_markers import current_body, ipu_shard, record_training_step
from ipu_pipeline.engine.pipeline_options import Hooks
from ipu_pipeline.engine.pipeline_states import initial_values
from ipu_pipeline.engine.programs.accumulation import (
    GradientMap,
    GradientTarget,
    count_dtype,
    join_gradient_maps,
)
from ipu_pipeline.engine.progress import watched_by
from ipu_pipeline.engine.resplitting import check_pipeline, move_state
from ipu_pipeline.engine.segments import SegmentedFunction, fit_replicas, mark_call, read_count
from ipu_pipeline.engine.state import Collected, Progress, check_state, leaves_by_path
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.faults import find_calling_line
from ipu_pipeline.engine.tracing.frames import (
    Enqueued,
    InsideOfBodyError,
    OutsideOfBodyError,
    ProgramNames,
    current_frame,
    find_frame,
    tracing_again,
)
from ipu_pipeline.engine.tracing.initializers import find_initializer
from ipu_pipeline.engine.tracing.scopes import absolute_scope
from ipu_pipeline.engine.tracing.side_outputs import NUMBERS, Reported, enqueue_to, find_leaves
from ipu_pipeline.engine.tracing.specs import make_spec
from ipu_pipeline.engine.tracing.stage_lists import as_level, join_layers
from ipu_pipeline.engine.tracing.stage_markers import draw_key
from ipu_pipeline.engine.tracing.stages import check_signature
from ipu_pipeline.engine.updates.optimizer_tracing import describe_other_optimizer
from ipu_pipeline.engine.updates.optimizer_wrappers import (
    LossScaled,
    LossScaleState,
    is_loss_weight,
    scale_loss,
    weigh,
)
from ipu_pipeline.engine.watching import read_outfeed

__all__ = [
    "NUMBERS",
    "Captures",
    "Collected",
    "Enqueued",
    "GradientMap",
    "GradientTarget",
    "Hooks",
    "InsideOfBodyError",
    "KeptPrograms",
    "Loop",
    "LossScaleState",
    "LossScaled",
    "OutsideOfBodyError",
    "ProgramNames",
    "Progress",
    "Reported",
    "SegmentedFunction",
    "StageRunner",
    "Take",
    "absolute_scope",
    "as_level",
    "check_pipeline",
    "check_signature",
    "check_state",
    "count_dtype",
    "current_body",
    "current_frame",
    "describe_other_optimizer",
    "draw_key",
    "enqueue_to",
    "export_stages",
    "find_calling_line",
    "find_frame",
    "find_initializer",
    "find_leaves",
    "fit_replicas",
    "initial_values",
    "ipu_shard",
    "is_loss_weight",
    "join_gradient_maps",
    "join_layers",
    "keep",
    "leaves_by_path",
    "look_at_body",
    "make_spec",
    "mark_call",
    "move_state",
    "read_count",
    "read_outfeed",
    "record_training_step",
    "scale_loss",
    "split_results",
    "tracing_again",
    "watched_by",
    "weigh",
]
