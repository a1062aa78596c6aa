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

__all__ = ["Timeline", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """What was simulated.

    Attributes:
      order: the actions, as the host starts them. None comes before one that it depends on.
      begins: when each of them begins, in the unit of the costs; the first one at 0 or later.
      ends: when each of them ends.
    """

    order: tuple[Action, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def length(self) -> float:
        """When all is done."""
        return max(self.ends, default=0.0)


def simulate(
    rows: Sequence[Sequence[Action]],
    levels: Sequence[int],
    cost: Callable[[Action], float],
    host_cost: float = 0.0,
) -> Timeline:
    """Simulates IPUs that each follow a row of actions.

    Args:
      rows: one per IPU, without gaps.
      levels: the level of each stage, ascending from 0.
      cost: how long an IPU takes for an action.
      host_cost: how long the host takes to start one.

    Returns:
      The timeline.

    Raises:
      ValueError: actions wait for each other.
    """
    place_of = {action: (ipu, at) for ipu, row in enumerate(rows) for at, action in enumerate(row)}
    num_missing: dict[tuple[int, int], int] = {}
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {place: [] for place in place_of.values()}
    for action, place in place_of.items():
        ipu, position = place
        needed = {place_of[other] for other in _needed(action, levels) if other in place_of}
        if position:
            needed.add((ipu, position - 1))
        num_missing[place] = len(needed)
        for other in needed:
            readers[other].append(place)

    earliest = dict.fromkeys(num_missing, 0.0)
    ready = [(0.0, ipu, position) for (ipu, position), number in num_missing.items() if not number]
    heapq.heapify(ready)
    order: list[Action] = []
    begins: list[float] = []
    ends: list[float] = []
    host_time = 0.0
    while ready:
        time, ipu, position = heapq.heappop(ready)
        host_time += host_cost
        begin = max(time, host_time)
        action = rows[ipu][position]
        end = begin + cost(action)
        order.append(action)
        begins.append(begin)
        ends.append(end)
        for place in readers[ipu, position]:
            earliest[place] = max(earliest[place], end)
            num_missing[place] -= 1
            if not num_missing[place]:
                heapq.heappush(ready, (earliest[place], *place))
    if len(order) < len(num_missing):
        raise ValueError("simulate: actions wait for each other.")
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
