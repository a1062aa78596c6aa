"""The VHalf and VMin schedules: two stages on each device in a V shape, holding less than ZeroBubbleV.

Every micro-batch goes forward down and up the devices, and backward down and up, with the same timing, its
block. Blocks start 6 time-steps apart, 3 for each of a device's stages. A block's actions on one device are
at different time-steps modulo 6, so that blocks interlock. The longer a block, the more activations are
held: in VMin each hop takes one time-step, in VHalf hops down take two, which shortens the bubble at both
ends of a step. All devices hold about the same amount. `fill` follows the order of the blocks, and fills
idle time with weight gradients.

Where F, I and W of a stage take one time-step each, with p > 1 devices and m micro-batches:

| | most stage activations on a device | bubble in time-steps, also across steps |
| VHalf | 2 ((p+2) // 2): half of ZeroBubbleV's, and 1 or 2 | 3p-4 if p is odd, max(3p-6, 1) if it is even |
| VMin | 2 ((p+4) // 3): a third, and 2 at most | 4p-3 if 3 divides p, 4p-5 otherwise |

The bubbles hold for at least p micro-batches. If times are not equal, every block has a bubble.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), whose search finds
blocks; the distances here are our own, the least with which no two places are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.actions import Action, ActionKind, Rows
from ipu_pipeline.engine.schedules.filling import Due, fill
from ipu_pipeline.engine.schedules.lock_step import forwards_only
from ipu_pipeline.engine.schedules.v_shape import check_v_shape

__all__ = ["v_half", "v_min"]

_PERIOD = 6


@dataclass(frozen=True)
class _Block:
    """When a micro-batch's actions are due, in time-steps.

    Attributes:
      down: from a device to the next one, for forwards of the first half of the stages and input gradients
        of the second one.
      pauses: the time-steps from the last action of each way to the first one of the next: on the last
        device, on the first one, and on the last one again.
    """

    down: int
    pauses: tuple[int, int, int]

    def find_times(self, ipu: int, num_ipus: int) -> tuple[int, int, int, int]:
        """When a device's forwards and input gradients are due, on each of the four ways."""
        last = num_ipus - 1
        down, up = ipu * self.down, last * self.down + last - ipu
        back = last * self.down + last + self.pauses[0] + self.pauses[1]  # the last stage's input gradients
        return down, up + self.pauses[0], back + down, back + up + self.pauses[2]


def v_half(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the VHalf schedule. Arguments and result are those of `grouped`.

    For equal times and m >= p micro-batches on p devices, the bubble is 3p-4 of 6m time-steps if p is odd,
    and max(3p-6, 1) if p is even.

    Example:
      >>> print(schedules.format_rows(schedules.v_half(4, 2, device_mapping=[0, 1, 1, 0])))
      device 0: F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1
      device 1: F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W1.0 W2.1 W1.1

    Raises:
      ScheduleError: device_mapping has no V shape, such as [0, 1, 1, 0], or some stages are parallel.
    """
    num_ipus = check_v_shape("VHalf", num_stages, device_mapping, levels)
    if not training:
        return forwards_only(levels, num_micro_batches, device_mapping)
    block = _Block(2, (2, 1, 1) if num_ipus % 2 else (4, 1, 5))
    return _fill(block, num_ipus, num_micro_batches, 2 * ((num_ipus + 2) // 2))


def v_min(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the VMin schedule. Arguments and result are those of `grouped`.

    For equal times and m >= p micro-batches on p devices, the bubble is 4p-3 of 6m time-steps if 3 divides
    p, and 4p-5 otherwise.

    Example:
      >>> print(schedules.format_rows(schedules.v_min(4, 2, device_mapping=[0, 1, 1, 0])))
      device 0: F0.0 F3.0 I3.0 F0.1 W3.0 I0.0 W0.0 F3.1 I3.1 W3.1 I0.1 W0.1
      device 1: F1.0 F2.0 I2.0 I1.0 F1.1 F2.1 W2.0 W1.0 I2.1 I1.1 W2.1 W1.1

    Raises:
      ScheduleError: device_mapping has no V shape, such as [0, 1, 1, 0], or some stages are parallel.
    """
    num_ipus = check_v_shape("VMin", num_stages, device_mapping, levels)
    if not training:
        return forwards_only(levels, num_micro_batches, device_mapping)
    block = _Block(1, (1, 1 if num_ipus % 3 else 3, 1))
    return _fill(block, num_ipus, num_micro_batches, 2 * ((num_ipus + 4) // 3))


def _fill(block: _Block, num_ipus: int, num_micro_batches: int, limit: int) -> Rows:
    def lay_out(kind: ActionKind, stages_and_times: Sequence[tuple[int, int]]) -> list[Due]:
        return sorted(
            Due(time + _PERIOD * number, Action(kind, stage, number))
            for stage, time in stages_and_times
            for number in range(num_micro_batches)
        )

    forwards, inputs = [], []
    for ipu in range(num_ipus):
        first, last = ipu, 2 * num_ipus - 1 - ipu
        times = block.find_times(ipu, num_ipus)
        forwards.append(lay_out(ActionKind.FORWARD, [(first, times[0]), (last, times[1])]))
        inputs.append(lay_out(ActionKind.INPUT_GRADIENTS, [(last, times[2]), (first, times[3])]))
    return fill(forwards, inputs, limit)
