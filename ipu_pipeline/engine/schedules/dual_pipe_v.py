"""The DualPipeV schedule: two stages on each device in a V, one forward while the other goes backward.

With p devices, device r has the stages r (F, I, W) and 2p-1-r (f, i, w). With B = I W and m >= 2p
micro-batches its row is

    2(p-r-1) times F | r+1 times F f | p-r-1 times i w f | m-2p+r+1 times F b f B |
    p-r-1 times b f B | r+1 times b B, the second half of them only i or I | p-r-1 times W I |
    the other weight gradients

The two actions of a pair F b or f B belong to different micro-batches. DeepSeek computes one while it sends
data of the other; here they run one after the other. So the schedule suits slow transfers.

Where F, I and W of a stage take one time-step each, the bubble per step is p-1 time-steps; with fewer than
2p micro-batches, where the missing ones are left out of the rows, it is longer. (DeepSeek's formula is
(p-1)(F&B + B - 3W), where F&B is the time of an overlapped pair.) A device holds up to 2p+1 activations of
such a stage.

Source: DualPipe of DeepSeek-V3 (arXiv 2412.19437), cut in half as in the DualPipe repository's DualPipeV.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipu_pipeline.engine.schedules.actions import ActionKind, Rows
from ipu_pipeline.engine.schedules.lock_step import forwards_only
from ipu_pipeline.engine.schedules.v_shape import check_v_shape, number_actions

__all__ = ["dual_pipe_v"]

_KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENTS, ActionKind.WEIGHT_GRADIENTS)


def dual_pipe_v(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the DualPipeV schedule. Arguments and result are those of `grouped`.

    Example:
      >>> print(schedules.format_rows(schedules.dual_pipe_v(4, 2, device_mapping=[0, 1, 1, 0])))
      device 0: F0.0 F0.1 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 I0.1 W0.1
      device 1: F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1

    Raises:
      ScheduleError: device_mapping has no V shape, such as [0, 1, 1, 0], or some stages are parallel.
    """
    num_ipus = check_v_shape("DualPipeV", num_stages, device_mapping, levels)
    if not training:
        return forwards_only(levels, num_micro_batches, device_mapping)
    num_steady = max(0, num_micro_batches - 2 * num_ipus)
    rows = []
    for ipu in range(num_ipus):
        (f0, i0, w0), (f1, i1, w1) = (
            [(kind, stage) for kind in _KINDS] for stage in (ipu, num_stages - 1 - ipu)
        )
        num_after = num_ipus - 1 - ipu
        pattern = [
            *[f0] * (2 * num_after),
            *[f0, f1] * (ipu + 1),
            *[i1, w1, f1] * num_after,
            *[f0, i1, w1, f1, i0, w0] * (num_steady + ipu + 1),
            *[i1, w1, f1, i0, w0] * num_after,
        ]
        waiting: list[tuple[ActionKind, int]] = []  # weight gradients
        for place in range(2 * (ipu + 1)):
            inputs, weights = (i0, w0) if place % 2 else (i1, w1)
            pattern.append(inputs)
            (pattern if place <= ipu else waiting).append(weights)
        for _ipu in range(num_after):
            pattern += [waiting.pop(0), i0]
            waiting.append(w0)
        rows.append(number_actions([*pattern, *waiting], num_micro_batches))
    return tuple(rows)
