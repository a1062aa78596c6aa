"""What a looped body does besides computing: it trains, and it enqueues.

`record_training_step` leaves a marker in the jaxpr being traced, as variables and `enqueue` do, and notes
what it marks in the body's `Recorder`. What traces the body (`bodies`) turns the markers into outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.gradient_maps import GradientMap
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.updates.optimizer_tracing import TracedOptimizer
from ipu_pipeline.ground import jax_compat

__all__ = [
    "BodyFrame",
    "Recorder",
    "TrainingStep",
    "current_recorder",
    "minimize_p",
    "record_training_step",
]


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """A recorded training step.

    Attributes:
      name: its optimizer state is kept under it.
      optimizer: traced; what it captured of the body counts as outputs.
      num_mini_batches: iterations per weight update.
      reduction: of the gradients over these.
      gradient_map: applied to each iteration's gradients, before accumulation.
      accumulator_dtypes: by full name of the variable.
      offloads_state: whether the optimizer's state lies in host memory between updates.
      shards_state: whether the replicas share out the optimizer's state.
      averages_replicas: whether gradients are averaged over replicas.
    """

    name: str
    optimizer: TracedOptimizer
    num_mini_batches: int
    reduction: Reduction
    gradient_map: GradientMap | None
    accumulator_dtypes: Mapping[str, Any]
    offloads_state: bool
    shards_state: bool = False
    averages_replicas: bool = False


@dataclass(eq=False)
class Recorder:
    """What a body did while it was traced.

    Attributes:
      variables: those that it asked for, by full name.
      training_step: the recorded one.
      asks_for_training: whether a layer asked whether the program trains.
    """

    variables: dict[str, VariableSpec] = field(default_factory=dict)
    training_step: TrainingStep | None = None
    asks_for_training: bool = False


@dataclass(frozen=True, eq=False)
class BodyFrame(frames.Frame):
    """A body being traced, with its recorder."""

    recorder: Recorder = field(default_factory=Recorder)

    @property
    def has_metrics(self) -> bool:
        """Loops have none: their iterations enqueue."""
        return False

    @property
    def may_recompute(self) -> bool:
        """Loops do not recompute."""
        return False

    def is_training(self) -> bool:
        """Whether it is traced as one that trains; that a layer asked is noted."""
        self.recorder.asks_for_training = True
        return self.training

    def note_variable(self, spec: VariableSpec) -> None:
        """Notes it."""
        self.recorder.variables[spec.name] = spec


minimize_p = jex_core.Primitive("minimize")


@minimize_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _minimize_abstract(*values: Any) -> Any:
    del values  # the loss, and what the optimizer captured
    return jax_compat.shaped_array((), np.dtype(np.int32))  # nobody reads it; a marker needs a result


def current_recorder(what: str, advice_in_stage: str) -> tuple[frames.Frame, Recorder]:
    """The frame of the body being traced, and its recorder.

    Args:
      what: the public function that asks, for the error.
      advice_in_stage: what the error tells who calls it in a stage of a pipeline.

    Raises:
      RuntimeError: no body of a loop is being traced.
    """
    frame = frames.current_frame(what)
    if not isinstance(frame, BodyFrame):
        advice = "Call it in the body of ipu.loops.repeat; repeat(1, ...) runs it once."
        raise frames.OutsideOfBodyError(
            f"{what} was called in {frame.place}. {advice_in_stage if frame.is_stage else advice}"
        )
    return frame, frame.recorder


def record_training_step(
    recorder: Recorder, step: TrainingStep, loss: jax.Array, captured: Sequence[Any]
) -> None:
    """Records the training step of a body, at this point of its trace.

    Args:
      recorder: the body's.
      step: the training step.
      loss: what it makes small, a scalar.
      captured: the values of the body that its optimizer reads.

    Raises:
      NotImplementedError: there is one already.
    """
    if recorder.training_step is not None:
        raise NotImplementedError(
            "minimize was called twice in the body of one loop, or in one compiled function without loops; "
            "each has one training step. Add the losses, or train in two loops."
        )
    recorder.training_step = step
    minimize_p.bind(loss, *captured)
