"""The LoopedZeroBubble schedule: Looped with a split backward, and no bubble across steps.

Stages go around the devices and micro-batches in groups as in Looped. Device 0 can do its first backward
after (v-1)g + 2(p-1) + 1 forwards, where p is the number of devices, v the number of stages on each, and g
the size of a group. In Looped only device 0 holds so many stage activations; here every device may, as in
ZeroBubbleH2. A device does input gradients as soon as it can, then forwards if it holds less than this
limit, then weight gradients.

Where forwards, input gradients and weight gradients take one time-step each, the bubble between steps that
follow each other at once is 0 for m >= 2p-1 micro-batches, and 2p-1-m time-steps for p <= m < 2p-1. With
fewer than p micro-batches it is longer.

Sources: the groups are from Megatron's interleaved schedule (arXiv 2104.04473), the split backward from Qi
et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241). PyTorch's ScheduleInterleavedZeroBubble holds
less, (v-1)g + p on device 0, and has a larger bubble.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipu_pipeline.engine.schedules.actions import ActionKind, Rows
from ipu_pipeline.engine.schedules.filling import Due, fill
from ipu_pipeline.engine.schedules.looped import check_looped, looped, make_groups, take_in_groups

__all__ = ["looped_zero_bubble"]


def looped_zero_bubble(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the LoopedZeroBubble schedule. Arguments and result are those of `grouped`.

    With p <= m < 2p-1 micro-batches on p devices, the bubble per step is 2p-1-m time-steps.

    Example:
      >>> print(schedules.format_rows(schedules.looped_zero_bubble(4, 2, device_mapping=[0, 1, 0, 1])))
      device 0: F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 I2.1 I0.0 I0.1 W2.1 W0.0 W0.1
      device 1: F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 I1.0 I1.1 W3.0 W3.1 W1.0 W1.1

    Raises:
      ScheduleError: device_mapping does not go around, such as [0, 1, 0, 1], or some stages are parallel.
    """
    check_looped("LoopedZeroBubble", num_stages, device_mapping, levels)
    if not training:
        return looped(num_stages, num_micro_batches, device_mapping, training)
    num_ipus = max(device_mapping) + 1
    groups = make_groups(num_micro_batches, num_ipus)
    forwards, inputs = [], []
    for ipu in range(num_ipus):
        own = range(ipu, num_stages, num_ipus)
        inputs.append([Due(0, a) for a in take_in_groups(ActionKind.INPUT_GRADIENTS, own[::-1], groups)])
        forwards.append([Due(1, a) for a in take_in_groups(ActionKind.FORWARD, own, groups)])
    size = max(num_ipus, len(groups[0]))
    return fill(forwards, inputs, (num_stages // num_ipus - 1) * size + 2 * (num_ipus - 1) + 1)
