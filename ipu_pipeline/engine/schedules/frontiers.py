"""The gain of more memory: the best orders of a scenario under rising limits. No JAX."""

from __future__ import annotations

import dataclasses

from ipu_pipeline.engine.schedules.costs import Memory
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.searching import Effort, Point, frontier

__all__ = ["find_frontier"]

_LEAST_GAIN = 1e-3  # of the step time; for less nobody gives memory


def find_frontier(scenario: Scenario, effort: Effort | None = None) -> tuple[Point, ...]:
    """Finds the points of memory and step time to choose from.

    Limits go from a third to twice of the micro-batches' memory with Interleaved, on the fullest device. A
    limit that gains less than a thousandth of the step time is left out.

    Example:
      >>> scenario = engine.Scenario(engine.Costs.of(3, forward=1.0, backward=2.0), num_micro_batches=6)
      >>> for point in schedules.find_frontier(scenario, schedules.QUICK):
      ...     print(point.num_bytes_per_ipu, point.searched.step_time)
      1 42.0
      2 25.0
      3 20.0

    Args:
      scenario: the pipeline; its schedule does not matter. If its memory is not known or 0, each stage is
        assumed to hold one unit per micro-batch in flight, and limits are in these units.
      effort: as for `search`, at each point; None: about two seconds.

    Returns:
      The points, from the lowest limit.

    Raises:
      ValueError: see `Scenario.problem`.
    """
    problem = scenario.problem()
    if not any(problem.num_held_bytes):
        number = scenario.costs.num_stages
        memory = Memory((0,) * scenario.num_ipus, (1,) * number)
        problem = dataclasses.replace(scenario, memory=memory, chunk_size=1).problem()
    points: list[Point] = []
    for point in frontier(problem, effort=effort):
        if not points or point.searched.step_time < (1 - _LEAST_GAIN) * points[-1].searched.step_time:
            points.append(point)
    return tuple(points)
