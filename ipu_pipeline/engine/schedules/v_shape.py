"""What schedules with V-shaped device mappings share: each device has one stage down and one up.

With p devices, device r has the stages r and 2p-1-r. So the first and the last stage are on the first
device, and a micro-batch goes from the last device's first stage to its second one without leaving it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from ipu_pipeline.engine.schedules.actions import Action, ActionKind, Row, ScheduleError

__all__ = ["check_v_shape", "number_actions"]


def check_v_shape(
    name: str, num_stages: int, device_mapping: Sequence[int], levels: Sequence[int] | None
) -> int:
    """Checks that the stages of the schedule `name` go down the devices and up again.

    Returns:
      The number of devices.

    Raises:
      ScheduleError: they do not, or some stages are parallel.
    """
    half = range(max(device_mapping) + 1)
    if list(device_mapping) != [*half, *half[::-1]] or len(device_mapping) != num_stages:
        raise ScheduleError(
            f"Schedule: {name} needs a device_mapping that goes from the first device to the last and "
            f"back, such as [0, 1, 1, 0] for four stages on two devices; got {list(device_mapping)}. With "
            "one stage per device, take Interleaved or ZeroBubble."
        )
    if levels is not None and len(set(levels)) < num_stages:
        raise ScheduleError(
            f"Schedule: {name} has no parallel stages; got levels {list(levels)}. Take Grouped, "
            "Interleaved or ZeroBubble."
        )
    return len(half)


def number_actions(pattern: Iterable[tuple[ActionKind, int]], num_micro_batches: int) -> Row:
    """Makes a row of kinds and stages: each stage takes its micro-batches in order.

    A pattern may be for more micro-batches than there are; their actions are left out.
    """
    counts: dict[tuple[ActionKind, int], int] = collections.defaultdict(int)
    row = []
    for key in pattern:
        number = counts[key]
        counts[key] += 1
        if number < num_micro_batches:
            row.append(Action(*key, number))
    return tuple(row)
