"""The ZeroBubbleH2 schedule: ZeroBubble with more activations in memory and no bubble across steps.

It is ZB-H2 of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241). With p stages of one device
each, where forwards (F), input gradients (I) and weight gradients (W) of m >= 2p-1 micro-batches take one
time-step each, device r starts r time-steps after device 0 and then runs without a pause:

    2(p-r)-1 times F | 2r times I F | m-2p+1 times I W F | 2(p-r)-1 times I W | 2r times W

It also ends r time-steps after device 0. So if the next step follows at once, the bubble per step is
(p-1)(F+I-2W), here 0; otherwise it is p-1 time-steps longer. If the times differ, this holds as long as W
takes no longer than F and I. With fewer micro-batches, the missing ones are left out of the rows, and the
bubble is 2p-1-m time-steps across steps.

Each device holds up to 2p-1 stage activations, nearly twice as many as device 0 with Interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipu_pipeline.engine.schedules.actions import ActionKind, Rows
from ipu_pipeline.engine.schedules.lock_step import forwards_only, make_rows

__all__ = ["zero_bubble_h2"]


def zero_bubble_h2(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the ZeroBubbleH2 schedule. Arguments and result are those of `grouped`.

    With m < 2p-1 micro-batches on p devices, the bubble per step is 2p-1-m time-steps.

    Example:
      >>> print(schedules.format_rows(schedules.zero_bubble_h2(2, 4, device_mapping=[0, 1])))
      device 0: F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3
      device 1: F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 F1.3 I1.3 W1.1 W1.2 W1.3
    """
    if not training:
        return forwards_only(levels, num_micro_batches, device_mapping)
    levels = levels or range(num_stages)
    most = 2 * levels[-1] + 1  # in flight
    num_steady = max(0, num_micro_batches - most)
    # Time-steps before the groups `I W F` and before the groups `I W` of a level.
    steady = [most + 3 * level for level in range(levels[-1] + 1)]
    last = [begin + 3 * num_steady for begin in steady]

    def forward(level: int, micro_batch: int) -> int:
        if micro_batch < most - 2 * level:
            return level + 1 + micro_batch
        if micro_batch < most:
            return steady[level] - 2 * (most - micro_batch - 1)
        return steady[level] + 3 * (micro_batch - most + 1)

    def inputs(level: int, micro_batch: int) -> int:
        number = micro_batch - 2 * level
        if number < 0:
            return steady[level] + 2 * number + 1
        if number < num_steady:
            return steady[level] + 3 * number + 1
        return last[level] + 2 * (number - num_steady) + 1

    def weights(level: int, micro_batch: int) -> int:
        number, num_pairs = micro_batch - num_steady, most - 2 * level
        if number < 0:
            return steady[level] + 3 * micro_batch + 2
        return last[level] + 2 * min(number + 1, num_pairs) + max(0, number + 1 - num_pairs)

    times = {
        ActionKind.FORWARD: forward,
        ActionKind.INPUT_GRADIENTS: inputs,
        ActionKind.WEIGHT_GRADIENTS: weights,
    }
    rows = make_rows(levels, num_micro_batches, device_mapping, times)
    # After a first wait none is needed: there is always something to do, or data to wait for.
    return tuple(tuple(action for action in row if action is not None) for row in rows)
