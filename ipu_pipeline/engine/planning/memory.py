"""How much memory micro-batches in flight take: a prediction from the programs and the schedule.

Between its forward and its backward of a micro-batch a stage holds what the backward reads: the residuals
that its forward returns, and those of its inputs that the backward takes. The formula for a stage is

    live activation bytes = micro-batches in flight x bytes that are held per micro-batch

where a stage has 2(N-i)-1 micro-batches in flight with Grouped, N-i with Interleaved and 1 with Sequential
(stage i of N, never more than there are micro-batches; see `schedules`), or so many chunks of them. The
last stage holds nothing: its forward and backward are one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine.jaxprs.shapes import num_bytes
from ipu_pipeline.engine.programs.stage_programs import StagePrograms, ValueKind
from ipu_pipeline.engine.tracing.traced import TracedPipeline

__all__ = ["StageMemory", "plan_memory"]


@dataclass(frozen=True)
class StageMemory:
    """What a stage holds between forwards and backwards. All sizes are in bytes.

    Attributes:
      stage: its number.
      ipu: the IPU that it runs on.
      in_flight: the largest number of micro-batches that have gone forward and not come back.
      num_residual_bytes: per micro-batch, what the forward returns for the backward.
      num_input_bytes: per micro-batch, the inputs that the backward takes. Those of a value that several
        stages on the IPU take are counted in each.
    """

    stage: int
    ipu: int
    in_flight: int
    num_residual_bytes: int
    num_input_bytes: int

    @property
    def num_held_bytes(self) -> int:
        """Per micro-batch, what is held."""
        return self.num_residual_bytes + self.num_input_bytes

    @property
    def num_live_bytes(self) -> int:
        """What is held of all micro-batches in flight."""
        return self.in_flight * self.num_held_bytes


def plan_memory(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    ipus: Sequence[int],
    in_flight: Sequence[int],
) -> tuple[StageMemory, ...]:
    """Predicts what each stage holds.

    Args:
      traced: the pipeline.
      programs: the programs of its stages.
      ipus: the IPU of each stage.
      in_flight: the largest number of micro-batches that each stage has in flight.
    """
    element = jax.tree.leaves(traced.element)

    def aval_of(source: Any) -> Any:
        if source.kind == "element":
            return element[source.index]
        return traced.stages[source.stage].output_avals[source.index]

    plans = []
    for index, (stage, own) in enumerate(zip(traced.stages, programs, strict=True)):
        arguments = () if own.backward is None else own.backward.arguments
        taken = {stage.inputs[value.index] for value in arguments if value.kind is ValueKind.INPUT}
        held = [aval_of(source) for source in taken if source.kind != "input"]
        sizes = (num_bytes(own.residuals), num_bytes(held))
        plans.append(StageMemory(index, ipus[index], in_flight[index], *sizes))
    return tuple(plans)
