"""A schedule that is searched for the costs of its pipeline. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.ground.checks import is_int

__all__ = ["SearchedSchedule"]


@dataclass(frozen=True)
class SearchedSchedule:
    """Requests a search for an order of actions with a short step; pass it as `schedule`.

    A pipeline measures its stages on its devices before its first step, and searches (see `search`). A
    `Scenario` already has the costs. The backward of every stage is split into input and weight gradients.
    It needs one process, several devices, and no parallel stages.

    Example:
      >>> costs = engine.Costs.of(2, forward=[1.0, 2.0], backward=[2.0, 4.0])
      >>> scenario = engine.Scenario(costs, engine.SearchedSchedule(), num_micro_batches=4)
      >>> engine.simulate(scenario).free_running.step_time
      25.0

    Attributes:
      bytes_per_ipu: the most bytes that a device may hold: variables, optimizer state, accumulators,
        micro-batches and the largest program, as in `plan_ipu_memory`. None: no limit.
    """

    bytes_per_ipu: int | None = None

    def __post_init__(self) -> None:
        """Checks the field.

        Raises:
          ValueError: it is not a number of bytes.
        """
        if self.bytes_per_ipu is not None and not is_int(self.bytes_per_ipu, 1):
            raise ValueError(
                "PipelineSchedule.searched: bytes_per_ipu must be an integer of at least 1, or None; got "
                f"{self.bytes_per_ipu!r}."
            )

    def __str__(self) -> str:
        """The name that reports have for it."""
        return "searched"
