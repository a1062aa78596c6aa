"""Fills idle time of devices with weight gradients, by following time-steps of equal length.

Each device does its forwards in a given order and its input gradients in another, and weight gradients in
the order of the input gradients. In each time-step it takes the first of these that it can:

1. weight gradients, if its next forward is ready but it holds as many micro-batches as it may,
2. of its next forward and its next input gradients, the one that is due first,
3. weight gradients.

There is no deadlock if doing all actions of all devices in the order in which they are due is one of the
possible ways: of what is left, the one due first can always be done, now or after weight gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ipu_pipeline.engine.schedules.actions import Action, ActionKind, Rows

__all__ = ["Due", "fill"]


class Due(NamedTuple):
    """A forward or input gradients, and when they are due: a number that is less for what goes first."""

    time: int
    action: Action


def fill(forwards: Sequence[Sequence[Due]], inputs: Sequence[Sequence[Due]], limit: int) -> Rows:
    """Makes rows of forwards and halves of backwards.

    Args:
      forwards: the forwards of each device, in their order.
      inputs: the input gradients of each device, in their order.
      limit: the most micro-batches of its stages that a device may hold from a forward to the weight
        gradients.

    Returns:
      One row per device.
    """
    ipus = range(len(forwards))
    last_stage = max(due.action.stage for own in forwards for due in own)
    # Micro-batches done by each stage, which is the number of the next one. The last entry is for what is
    # before the first stage and after the last one: nothing waits there.
    num_forwards, num_inputs = [0] * (last_stage + 2), [0] * (last_stage + 2)
    num_forwards[-1] = num_inputs[-1] = sum(map(len, forwards))
    next_forward, next_input, next_weights = ([0] * len(ipus) for _count in range(3))
    rows: list[list[Action]] = [[] for _ipu in ipus]
    num_left = 3 * sum(map(len, forwards))
    while num_left:
        done: list[Action] = []
        for ipu in ipus:
            f, i, w = next_forward[ipu], next_input[ipu], next_weights[ipu]
            forward = forwards[ipu][f] if f < len(forwards[ipu]) else None
            if forward and num_forwards[forward.action.stage - 1] <= forward.action.micro_batch:
                forward = None
            own = inputs[ipu][i] if i < len(inputs[ipu]) else None
            if own:
                _kind, stage, micro_batch = own.action
                if num_forwards[stage] <= micro_batch or num_inputs[stage + 1] <= micro_batch:
                    own = None
            is_full = f - w >= limit
            if forward and is_full:
                if w < i:
                    own = None
                forward = None
            if forward and (own is None or forward.time < own.time):
                next_forward[ipu] += 1
                action = forward.action
            elif own:
                next_input[ipu] += 1
                action = own.action
            elif w < i:
                next_weights[ipu] += 1
                action = inputs[ipu][w].action._replace(kind=ActionKind.WEIGHT_GRADIENTS)
            else:
                continue
            rows[ipu].append(action)
            done.append(action)
        assert done, "the order in which actions are due is not possible"
        for kind, stage, _micro_batch in done:  # only now: results are there for the next time-step
            if kind is ActionKind.FORWARD:
                num_forwards[stage] += 1
            elif kind is ActionKind.INPUT_GRADIENTS:
                num_inputs[stage] += 1
        num_left -= len(done)
    return tuple(map(tuple, rows))
