"""The AllForwards schedule: all forwards, then all backwards.

Stages on one device take turns: all micro-batches run in one stage, then in the next, and backwards in
reverse order. With p devices of one stage each, the bubble per step is (p-1)(F+B), as with Interleaved, and
a device holds all m micro-batches. With v stages on each device, mapped as for Looped, it holds v m stage
activations, and if m >= p, the bubble is (p-1)(F+B) of one such stage.

It is not Grouped, in which forwards and backwards take turns as soon as there is a backward.

Sources: GPipe (Huang et al., 2018, arXiv 1811.06965); with several stages on a device, Breadth-First
Pipeline Parallelism (Lamy-Poirier, 2022, arXiv 2211.05953).
"""

from __future__ import annotations

from collections.abc import Sequence

from ipu_pipeline.engine.schedules.actions import Action, ActionKind, Rows
from ipu_pipeline.engine.schedules.lock_step import forwards_only

__all__ = ["all_forwards"]


def all_forwards(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the AllForwards schedule. Arguments and result are those of `grouped`.

    Example:
      >>> print(schedules.format_rows(schedules.all_forwards(2, 3, device_mapping=[0, 1])))
      device 0: F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
      device 1: F1.0 F1.1 F1.2 B1.0 B1.1 B1.2
    """
    if not training:
        return forwards_only(levels, num_micro_batches, device_mapping)
    rows: list[list[Action]] = [[] for _ipu in range(max(device_mapping) + 1)]
    stages = range(num_stages)
    for kind, in_turn in ((ActionKind.FORWARD, stages), (ActionKind.BACKWARD, stages[::-1])):
        for stage in in_turn:
            numbers = range(num_micro_batches)
            rows[device_mapping[stage]] += [Action(kind, stage, number) for number in numbers]
    return tuple(map(tuple, rows))
