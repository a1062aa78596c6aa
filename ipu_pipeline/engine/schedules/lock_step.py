"""The schedules of devices in lock-step: counts in, rows of actions out.

A schedule is one row of slots per device. A slot holds an `Action` or, in a lock-step schedule, None for
a time-step in which the device waits. `check` follows the rows and returns a `Timetable`: when every
action runs, how many micro-batches each stage holds at most, and one global order of the actions.

Time-steps are counted from 1, stages, devices and micro-batches from 0. With N stages and G micro-batches
in training, one stage per device:

* Grouped: time-steps 1..N are for forwards; then backward and forward time-steps alternate, and after the
  last stage's last forward only backwards remain.
* Interleaved: stage i runs forwards at i+1, i+3, ... and backwards at 2N-i, 2N-i+2, ..., so that
  neighbours never do the same. This is Graphcore's name for 1F1B. Megatron's "interleaved", with several
  stages on each device, is Looped.
* Sequential: a micro-batch goes forward through all stages and back before the next one starts.

Grouped and Interleaved end at time-step 2(G+N-1). Stage i holds at most 2(N-i)-1 micro-batches in
Grouped, N-i in Interleaved, 1 in Sequential, and never more than G. Without training (forwards only)
Grouped and Interleaved are the same: stage i takes micro-batch k at time-step i+k+1.

Source: the pipeline schedules of Graphcore's "Targeting the IPU from TensorFlow 1" user guide; with one
stage per device, Interleaved is the non-interleaved 1F1B schedule of PipeDream-Flush (Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training", 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import TypeAlias

from ipu_pipeline.engine.schedules.actions import Action, ActionKind, Rows

__all__ = ["forwards_only", "grouped", "interleaved", "make_rows", "sequential"]

StageTimes: TypeAlias = "Callable[[int, int], int]"


def grouped(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the Grouped schedule.

    Example:
      >>> print(schedules.format_rows(schedules.grouped(2, 3, device_mapping=[0, 1])))
      device 0: F0.0 F0.1 .    F0.2 B0.0 .    B0.1 B0.2
      device 1: .    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2

    Args:
      num_stages: the number of stages.
      num_micro_batches: micro-batches per weight update.
      device_mapping: the device of each stage, from 0.
      training: whether there are backwards.
      levels: the level of each stage, ascending from 0; stages of one level run in the same time-steps.
        None: each stage has its own.

    Returns:
      One row per device.
    """
    num_levels = num_stages if levels is None else levels[-1] + 1
    last_forward = num_levels + 2 * (num_micro_batches - 1)

    def forward(level: int, micro_batch: int) -> int:
        num_filled = num_levels - level  # forwards of this level in time-steps 1..num_levels
        if micro_batch < num_filled:
            return level + 1 + micro_batch
        return num_levels + 2 * (micro_batch - num_filled + 1)

    def backward(level: int, micro_batch: int) -> int:
        hops = num_levels - 1 - level
        start = num_levels + 1 + 2 * micro_batch  # the time-step on the last level
        slow_hops = min(hops, num_micro_batches - 1 - micro_batch)  # while forward time-steps remain
        assert start + 2 * slow_hops <= last_forward + 1
        return start + 2 * slow_hops + (hops - slow_hops)

    return _rows(
        levels or range(num_stages), num_micro_batches, device_mapping, training, forward, backward
    )


def interleaved(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the Interleaved schedule. Arguments and result are those of `grouped`.

    Example:
      >>> print(schedules.format_rows(schedules.interleaved(2, 3, device_mapping=[0, 1])))
      device 0: F0.0 .    F0.1 B0.0 F0.2 B0.1 .    B0.2
      device 1: .    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """
    num_levels = num_stages if levels is None else levels[-1] + 1

    def forward(level: int, micro_batch: int) -> int:
        return level + 1 + 2 * micro_batch

    def backward(level: int, micro_batch: int) -> int:
        return 2 * num_levels - level + 2 * micro_batch

    return _rows(
        levels or range(num_stages), num_micro_batches, device_mapping, training, forward, backward
    )


def sequential(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the Sequential schedule. Arguments and result are those of `grouped`.

    Example:
      >>> print(schedules.format_rows(schedules.sequential(2, 2, device_mapping=[0, 1])))
      device 0: F0.0 .    .    B0.0 F0.1 .    .    B0.1
      device 1: .    F1.0 B1.0 .    .    F1.1 B1.1
    """
    num_levels = num_stages if levels is None else levels[-1] + 1
    period = num_levels * (2 if training else 1)

    def forward(level: int, micro_batch: int) -> int:
        return period * micro_batch + level + 1

    def backward(level: int, micro_batch: int) -> int:
        return period * micro_batch + 2 * num_levels - level

    return _rows(
        levels or range(num_stages),
        num_micro_batches,
        device_mapping,
        training,
        forward,
        backward,
        inference=forward,
    )


def make_rows(
    levels: Sequence[int],
    num_micro_batches: int,
    device_mapping: Sequence[int],
    times: Mapping[ActionKind, StageTimes],
) -> Rows:
    """Makes rows from the time-steps that actions of a level have when every stage has its own device.

    A device with one stage keeps those time-steps. A device with several stages does their actions in that
    order, one after another, and then no device has fixed time-steps: each waits only for data.

    Args:
      levels: the level of each stage.
      num_micro_batches: micro-batches per weight update.
      device_mapping: the device of each stage, from 0.
      times: by kind of action, a function from a level and a micro-batch to the time-step, from 1.
    """
    counts = range(num_micro_batches)
    has_own_ipu = len(set(device_mapping)) == len(levels)
    rows: list[list[Action | None]] = [[] for _ in range(max(device_mapping) + 1)]
    timed: list[list[tuple[int, int, Action]]] = [[] for _row in rows]
    for stage, ipu in enumerate(device_mapping):
        for kind, find_time in times.items():
            found = [find_time(levels[stage], micro_batch) for micro_batch in counts]
            actions = map(Action._make, zip(repeat(kind), repeat(stage), counts, strict=False))
            if has_own_ipu:
                rows[ipu] += [None] * (found[-1] - len(rows[ipu]))
                for time_step, action in zip(found, actions, strict=True):
                    rows[ipu][time_step - 1] = action
            else:
                timed[ipu] += zip(found, repeat(stage), actions, strict=False)
    for row, entries in zip(rows, timed, strict=True):
        row += [action for _time_step, _stage, action in sorted(entries)]
    return tuple(map(tuple, rows))


def forwards_only(
    levels: Sequence[int] | None, num_micro_batches: int, device_mapping: Sequence[int]
) -> Rows:
    """Rows without backwards: a level takes each micro-batch one time-step after the level before.

    Args:
      levels: as in `grouped`.
      num_micro_batches: as in `grouped`.
      device_mapping: as in `grouped`.
    """
    levels = levels or range(len(device_mapping))
    return make_rows(levels, num_micro_batches, device_mapping, {ActionKind.FORWARD: _straight})


def _straight(level: int, micro_batch: int) -> int:
    return level + micro_batch + 1


def _rows(
    levels: Sequence[int],
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool,
    forward: StageTimes,
    backward: StageTimes,
    inference: StageTimes = _straight,
) -> Rows:
    times = {ActionKind.FORWARD: forward if training else inference}
    if training:
        times[ActionKind.BACKWARD] = backward
    return make_rows(levels, num_micro_batches, device_mapping, times)
