"""The ZeroBubble schedule: a split backward, whose weight gradients fill what would be bubble.

It is ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241): no device holds more
micro-batches than the first one does with Interleaved. With p stages of one device each and m >= p
micro-batches, where forwards (F), input gradients (I) and weight gradients (W) take one time-step each, the
last stage's row is

    F0 I0 F1 I1 ... Fp-1 Ip-1 W0 | Fp Ip W1 | Fp+1 Ip+1 W2 | ... Wm-p+1 ... Wm-1

without a pause, once the first micro-batch has arrived. The other stages follow it: each does a forward no
later than the last stage needs it, and weight gradients early enough to free memory for it. A step takes
3m + p-1 time-steps. Bubble per step: (p-1)(F + I - W), p-1 time-steps; with m < p, 2p-1-m time-steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ipu_pipeline.engine.schedules.actions import ActionKind, Rows
from ipu_pipeline.engine.schedules.lock_step import forwards_only, make_rows

__all__ = ["zero_bubble"]


def zero_bubble(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the ZeroBubble schedule. Arguments and result are those of `grouped`.

    Example:
      >>> print(schedules.format_rows(schedules.zero_bubble(2, 3, device_mapping=[0, 1])))
      device 0: F0.0 F0.1 .    I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2
      device 1: .    F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2
    """
    if not training:
        return forwards_only(levels, num_micro_batches, device_mapping)
    levels = levels or range(num_stages)
    times = _find_times(levels[-1] + 1, num_micro_batches)

    def of(kind: ActionKind) -> Callable[[int, int], int]:
        return lambda level, micro_batch: times[kind][level][micro_batch]

    return make_rows(levels, num_micro_batches, device_mapping, {kind: of(kind) for kind in times})


def _find_times(number: int, count: int) -> dict[ActionKind, list[list[int]]]:
    """Finds the time-step of each level's actions, by micro-batch, as if each level had its own device."""
    times: dict[ActionKind, list[list[int]]] = {
        kind: [[] for _level in range(number)]
        for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRADIENTS, ActionKind.WEIGHT_GRADIENTS)
    }
    forwards, inputs, weights = times.values()

    def find_needed(level: int) -> int:
        """The time-step in which a level's next forward is needed, for the last level not to wait."""
        micro_batch, hops = len(forwards[level]), number - 1 - level
        late = max(0, micro_batch - number)  # micro-batches that wait for weight gradients
        return number + 2 * micro_batch + (late + 1 if micro_batch >= number else 0) - hops

    def choose(level: int, now: int) -> list[int] | None:
        """Chooses what a level does, as the list that the time-step goes to; None: it waits."""
        done = len(forwards[level])
        has_forward = done < count and (not level or _has(forwards[level - 1], done, now))
        is_needed = done < count and now >= find_needed(level)
        is_full = done - len(weights[level]) == number
        next_input, has_weights = len(inputs[level]), len(weights[level]) < len(inputs[level])
        has_input = next_input < done and (level + 1 == number or _has(inputs[level + 1], next_input, now))
        if has_forward and is_needed and not is_full:
            return forwards[level]
        if is_full and has_weights and done < count and now + 1 >= find_needed(level):
            return weights[level]
        if has_input:
            return inputs[level]
        if has_forward and not is_full and not next_input:
            return forwards[level]
        if has_weights:
            return weights[level]
        return forwards[level] if has_forward and not is_full else None

    now = 0
    while len(weights[0]) < count:
        now += 1
        chosen = [choose(level, now) for level in range(number)]
        for list_of_times in chosen:
            if list_of_times is not None:
                list_of_times.append(now)
    return times


def _has(times: Sequence[int], place: int, now: int) -> bool:
    """Whether another level's result is there."""
    return place < len(times) and times[place] < now
