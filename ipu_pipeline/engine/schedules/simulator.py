"""Turns a schedule and the costs of its actions into a timeline, with IPUs that wait for data only. No JAX.

The schedule says in which order each IPU does its actions. The host starts them one at a time, in the order
in which they can begin, and is never ahead of what it depends on.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.actions import Action, ActionKind
from ipu_pipeline.engine.schedules.units import Unit

__all__ = ["Timeline", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """What was simulated.

    Attributes:
      order: the units, as the host starts them. None comes before one that it depends on.
      begins: when each of them begins, in the unit of the costs; the first one at 0 or later.
      ends: when each of them ends.
    """

    order: tuple[Unit, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def length(self) -> float:
        """When all is done."""
        return max(self.ends, default=0.0)


def simulate(
    rows: Sequence[Sequence[Unit]],
    levels: Sequence[int],
    cost: Callable[[Unit], float],
    host_cost: float = 0.0,
) -> Timeline:
    """Simulates IPUs that each follow a row of units.

    Args:
      rows: one per IPU, without gaps.
      levels: the level of each stage, ascending from 0.
      cost: how long an IPU takes for a unit.
      host_cost: how long the host takes to start one.

    Returns:
      The timeline.

    Raises:
      ValueError: units wait for each other.
    """
    unit_of: dict[Action, tuple[int, int]] = {}
    for ipu, row in enumerate(rows):
        for position, unit in enumerate(row):
            unit_of.update(dict.fromkeys(unit, (ipu, position)))
    num_missing: dict[tuple[int, int], int] = {}
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {place: [] for place in unit_of.values()}
    for ipu, row in enumerate(rows):
        for position, unit in enumerate(row):
            place = (ipu, position)
            needed = {unit_of[a] for action in unit for a in _needed(action, levels) if a in unit_of}
            if position:
                needed.add((ipu, position - 1))
            needed.discard(place)
            num_missing[place] = len(needed)
            for other in needed:
                readers[other].append(place)

    earliest = dict.fromkeys(num_missing, 0.0)
    ready = [(0.0, ipu, position) for (ipu, position), number in num_missing.items() if not number]
    heapq.heapify(ready)
    order: list[Unit] = []
    begins: list[float] = []
    ends: list[float] = []
    host_time = 0.0
    while ready:
        time, ipu, position = heapq.heappop(ready)
        host_time += host_cost
        begin = max(time, host_time)
        unit = rows[ipu][position]
        end = begin + cost(unit)
        order.append(unit)
        begins.append(begin)
        ends.append(end)
        for place in readers[ipu, position]:
            earliest[place] = max(earliest[place], end)
            num_missing[place] -= 1
            if not num_missing[place]:
                heapq.heappush(ready, (earliest[place], *place))
    if len(order) < len(num_missing):
        raise ValueError("simulate: units wait for each other.")
    return Timeline(tuple(order), tuple(begins), tuple(ends))


def _needed(action: Action, levels: Sequence[int]) -> list[Action]:
    """What an action waits for."""
    kind, stage, micro_batch = action
    level = levels[stage] + (-1 if kind is ActionKind.FORWARD else 1)
    others = range(bisect.bisect_left(levels, level), bisect.bisect_right(levels, level))
    needed = [Action(kind, other, micro_batch) for other in others]
    if kind is ActionKind.BACKWARD:
        needed.append(Action(ActionKind.FORWARD, stage, micro_batch))
    return needed
