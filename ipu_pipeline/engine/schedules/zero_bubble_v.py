"""The ZeroBubbleV schedule: two stages on each device in a V shape, and no bubble across steps.

It is ZB-V of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, section 6). With p devices,
device r has the stages r (F, I, W) and 2p-1-r (f, i, w). With m >= 2p-1 micro-batches, where all of these
take one time-step each, it starts r time-steps after device 0 and then runs without a pause:

    2(p-r)-1 times F | r times f F | p-r times f i w | m-2p+r+1 times F I W f i w |
    p-r-1 times I W f i w | r times I i | p-r times I W | r times w | r times W

It also ends r time-steps after device 0: if the next step follows at once, there is no bubble. With fewer
micro-batches, the missing ones are left out, and the bubble is 2(2p-1-m) time-steps. Each device holds up
to 2p activations of such a stage, as much as device 0 with Interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipu_pipeline.engine.schedules.actions import ActionKind, Rows
from ipu_pipeline.engine.schedules.lock_step import forwards_only
from ipu_pipeline.engine.schedules.v_shape import check_v_shape, number_actions

__all__ = ["zero_bubble_v"]

_KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENTS, ActionKind.WEIGHT_GRADIENTS)


def zero_bubble_v(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the ZeroBubbleV schedule. Arguments and result are those of `grouped`.

    With m < 2p-1 micro-batches on p devices, the bubble per step is 2(2p-1-m) time-steps.

    Example:
      >>> print(schedules.format_rows(schedules.zero_bubble_v(4, 2, device_mapping=[0, 1, 1, 0])))
      device 0: F0.0 F0.1 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 I0.1 W0.1
      device 1: F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1

    Raises:
      ScheduleError: device_mapping has no V shape, such as [0, 1, 1, 0], or some stages are parallel.
    """
    num_ipus = check_v_shape("ZeroBubbleV", num_stages, device_mapping, levels)
    if not training:
        return forwards_only(levels, num_micro_batches, device_mapping)
    num_steady = max(0, num_micro_batches - 2 * num_ipus + 1)
    rows = []
    for ipu in range(num_ipus):
        down, up = ([(kind, stage) for kind in _KINDS] for stage in (ipu, num_stages - 1 - ipu))
        (f0, i0, w0), (f1, i1, w1), rest = down, up, num_ipus - ipu
        pattern = [
            *[f0] * (2 * rest - 1),
            *[f1, f0] * ipu,
            *[f1, i1, w1] * rest,
            *[*down, *up] * (num_steady + ipu),
            *[i0, w0, *up] * (rest - 1),
            *[i0, i1] * ipu,
            *[i0, w0] * rest,
            *[w1] * ipu,
            *[w0] * ipu,
        ]
        rows.append(number_actions(pattern, num_micro_batches))
    return tuple(rows)
