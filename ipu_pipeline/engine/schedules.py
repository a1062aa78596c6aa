"""Schedules: counts in, immutable actions out, and the checker that proves them. No JAX here.

Over 400 lines, since the schedules and the checker that proves them are read together.

A schedule is one row of slots per IPU. A slot holds an `Action` or, in a lock-step schedule, None for
a time-step in which the IPU waits. `check` follows the rows and returns a `Timetable`: when every
action runs, how many micro-batches each stage holds at most, and one global order of the actions.

Time-steps are counted from 1, stages, IPUs and micro-batches from 0. With N stages and G micro-batches
in training, one stage per IPU:

* Grouped: time-steps 1..N are for forwards, after them backward and forward time-steps take turns,
  and once the last stage has done its last forward only backwards remain.
* Interleaved: stage i runs forwards at i+1, i+3, ... and backwards at 2N-i, 2N-i+2, ..., so that
  neighbours are always doing different things.
* Sequential: a micro-batch goes forward through all stages and back before the next one starts.

Grouped and Interleaved end at time-step 2(G+N-1). Stage i holds at most 2(N-i)-1 micro-batches in
Grouped, N-i in Interleaved, 1 in Sequential, and never more than G. Without training (forwards only)
Grouped and Interleaved are the same: stage i takes micro-batch k at time-step i+k+1.

Source: the pipeline schedules of Graphcore's "Targeting the IPU from TensorFlow 1" user guide; with one
stage per IPU, Interleaved is the non-interleaved 1F1B schedule of PipeDream-Flush (Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training", 2021).
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

__all__ = [
    "Action",
    "ActionKind",
    "Row",
    "Rows",
    "ScheduleError",
    "ScheduleFunction",
    "Timetable",
    "check",
    "format_rows",
    "grouped",
    "interleaved",
    "named_schedules",
    "sequential",
    "timetable",
]


class ActionKind(enum.IntEnum):
    """What an action does. Input gradients and weight gradients of their own, and updates, come later."""

    FORWARD = 0
    BACKWARD = 1


class Action(NamedTuple):
    """One stage handling one micro-batch in one direction."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        direction = "forward" if self.kind is ActionKind.FORWARD else "backward"
        return f"{direction} of stage {self.stage}, micro-batch {self.micro_batch}"


Row: TypeAlias = "tuple[Action | None, ...]"
Rows: TypeAlias = "tuple[Row, ...]"
ScheduleFunction: TypeAlias = "Callable[..., Sequence[Sequence[Action | None]]]"
_MAX_ACTIONS = 2**22  # they are all written down and checked beforehand: half a minute, a gigabyte

StageTimes: TypeAlias = "Callable[[int, int], int]"


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order or deadlocked."""


@dataclass(frozen=True)
class Timetable:
    """A checked schedule.

    Attributes:
      rows: one row of slots per IPU, as they were given.
      order: all actions in the order of their time-steps; within one time-step by IPU. No action comes
        before one that it depends on.
      time_steps: the time-step (from 1) of the action at the same place in `order`.
      in_flight: for each stage, the largest number of micro-batches that have gone forward and not yet
        come back. 1 without training.
      num_time_steps: the last time-step in which anything runs.
    """

    rows: Rows
    order: tuple[Action, ...]
    time_steps: tuple[int, ...]
    in_flight: tuple[int, ...]
    num_time_steps: int


def grouped(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Rows of the Grouped schedule.

    Args:
      num_stages: how many stages there are.
      num_micro_batches: micro-batches per weight update.
      device_mapping: the IPU of each stage, from 0.
      training: whether there are backwards.
      levels: the level of each stage, ascending from 0; those of one level run in the same time-steps.
        None: each stage has its own.

    Returns:
      One row per IPU.
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
        start = num_levels + 1 + 2 * micro_batch  # on the last level
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
    """Rows of the Interleaved schedule; arguments and result as in `grouped`."""
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
    """Rows of the Sequential schedule; arguments and result as in `grouped`."""
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


def named_schedules() -> dict[str, ScheduleFunction]:
    """The schedules that have names."""
    return {"grouped": grouped, "interleaved": interleaved, "sequential": sequential}


@functools.lru_cache(maxsize=64)
def timetable(
    schedule: str | ScheduleFunction,
    num_stages: int,
    num_micro_batches: int,
    device_mapping: tuple[int, ...],
    training: bool,
    levels: tuple[int, ...] | None = None,
) -> Timetable:
    """The checked timetable of a schedule.

    Args:
      schedule: a name of `named_schedules`, or a function with the arguments of `grouped` that returns
        one sequence of actions (None: wait one time-step) per IPU. It gets `levels` only where there are
        parallel stages.
      num_stages: how many stages there are.
      num_micro_batches: micro-batches per weight update.
      device_mapping: the IPU of each stage, from 0.
      training: whether there are backwards.
      levels: as in `grouped`.

    Returns:
      The timetable; the same object for the same arguments.

    Raises:
      ScheduleError: what `check` finds.
      ValueError: no schedule has that name, or there are too many actions.
    """
    num_actions = num_stages * num_micro_batches * (2 if training else 1)
    if num_actions > _MAX_ACTIONS:
        raise ValueError(
            f"{num_micro_batches} micro-batches per weight update on {num_stages} stages are "
            f"{num_actions} actions; a schedule over several IPUs has up to {_MAX_ACTIONS}. Update more "
            "often, or put all stages on one IPU."
        )
    if isinstance(schedule, str):
        functions = named_schedules()
        if schedule not in functions:
            raise ValueError(
                f"schedule must be one of {', '.join(functions)} or a function; got {schedule!r}."
            )
        schedule = functions[schedule]
    if levels is None or len(set(levels)) == num_stages:
        rows = schedule(num_stages, num_micro_batches, device_mapping, training)
        levels = tuple(range(num_stages))
    else:
        rows = schedule(num_stages, num_micro_batches, device_mapping, training, levels)
    return check(rows, num_stages, num_micro_batches, device_mapping, training, levels)


def check(
    rows: Sequence[Sequence[Action | None]],
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool,
    levels: Sequence[int] | None = None,
) -> Timetable:
    """Proves that a schedule is complete, ordered and free of deadlock.

    Each IPU follows its own row, one slot per time-step, and waits at an action whose inputs are not
    there yet: a forward needs the stages of the level before to have gone forward, a backward needs the
    stage's own forward and the backwards of the level after, all in earlier time-steps.

    Args:
      rows: one row per IPU; None is a time-step in which the IPU waits.
      num_stages: how many stages there are.
      num_micro_batches: micro-batches per weight update.
      device_mapping: the IPU of each stage.
      training: whether there are backwards.
      levels: as in `grouped`.

    Returns:
      The timetable.

    Raises:
      ScheduleError: an action is missing, unknown, doubled, on another IPU than its stage, or before an
        earlier micro-batch of the same stage and direction; or the IPUs wait for each other, in which
        case the message holds the grid up to there.
    """
    frozen: Rows = tuple(tuple(row) for row in rows)
    _check_complete(frozen, num_stages, num_micro_batches, device_mapping, training)

    levels = range(num_stages) if levels is None else levels
    # What a stage waits for: in a forward the level before, in a backward the level after.
    before = [_stages_of(levels, level - 1) for level in levels]
    after = [_stages_of(levels, level + 1) for level in levels]
    num_forwards = [0] * num_stages  # done, per stage: the next forward's micro-batch
    num_backwards = [0] * num_stages
    in_flight = [0] * num_stages
    positions = [0] * len(frozen)
    order: list[Action] = []
    time_steps: list[int] = []
    num_left = sum(len(row) for row in frozen)
    time_step = 0
    while num_left:
        time_step += 1
        done: list[Action] = []
        num_idle = 0
        for ipu, row in enumerate(frozen):
            if positions[ipu] == len(row):
                continue
            action = row[positions[ipu]]
            if action is None:
                num_idle += 1
            elif _is_ready(action, before, after, num_forwards, num_backwards):
                done.append(action)
            else:
                continue
            positions[ipu] += 1
        if not done and not num_idle:
            raise ScheduleError(_describe_deadlock(frozen, positions, time_step))
        for action in done:  # only now: what a time-step produces is there for the next one
            if action.kind is ActionKind.FORWARD:
                num_forwards[action.stage] += 1
            else:
                num_backwards[action.stage] += 1
            held = num_forwards[action.stage] - num_backwards[action.stage]
            in_flight[action.stage] = max(in_flight[action.stage], held)
        order += done
        time_steps += [time_step] * len(done)
        num_left -= len(done) + num_idle
    if not training:
        in_flight = [1] * num_stages
    num_time_steps = time_steps[-1] if time_steps else 0
    return Timetable(frozen, tuple(order), tuple(time_steps), tuple(in_flight), num_time_steps)


def format_rows(rows: Rows, marked: tuple[int, int] | None = None) -> str:
    """A grid of a schedule: an IPU per line, a slot per column.

    `F0.3` is the forward of stage 0 for micro-batch 3, `B` a backward, `.` a time-step of waiting.

    Args:
      rows: one row per IPU.
      marked: the (IPU, position) of a slot to put in brackets.

    Returns:
      The lines, joined.
    """
    cells = [
        [
            "." if action is None else f"{'FB'[action.kind]}{action.stage}.{action.micro_batch}"
            for action in row
        ]
        for row in rows
    ]
    if marked is not None:
        cells[marked[0]][marked[1]] = f"[{cells[marked[0]][marked[1]]}]"
    width = max((len(cell) for row in cells for cell in row), default=1)
    return "\n".join(
        f"IPU {ipu}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for ipu, row in enumerate(cells)
    )


def _rows(
    levels: Sequence[int],
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool,
    forward: StageTimes,
    backward: StageTimes,
    inference: StageTimes = lambda level, micro_batch: level + micro_batch + 1,
) -> Rows:
    """Rows from the time-steps that actions of a level have when every stage has an IPU of its own.

    An IPU with one stage keeps those time-steps. An IPU with several stages does their actions in that
    order, one after another, and then no IPU has a fixed time-step: it waits for data only.
    """
    timed: list[list[tuple[int, int, Action]]] = [[] for _ in range(max(device_mapping) + 1)]
    for stage, ipu in enumerate(device_mapping):
        for micro_batch in range(num_micro_batches):
            level = levels[stage]
            time_step = forward(level, micro_batch) if training else inference(level, micro_batch)
            timed[ipu].append((time_step, stage, Action(ActionKind.FORWARD, stage, micro_batch)))
            if training:
                time_step = backward(level, micro_batch)
                timed[ipu].append((time_step, stage, Action(ActionKind.BACKWARD, stage, micro_batch)))
    is_lock_step = len(set(device_mapping)) == len(levels)
    rows = []
    for entries in timed:
        row: list[Action | None] = []
        for time_step, _stage, action in sorted(entries):
            if is_lock_step:
                row += [None] * (time_step - 1 - len(row))
            row.append(action)
        rows.append(tuple(row))
    return tuple(rows)


def _check_complete(
    rows: Rows,
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool,
) -> None:
    next_micro_batch = {
        (kind, stage): 0
        for kind in (ActionKind if training else (ActionKind.FORWARD,))
        for stage in range(num_stages)
    }
    for ipu, row in enumerate(rows):
        for position, action in enumerate(row):
            if action is None:
                continue
            if not isinstance(action, Action):
                raise ScheduleError(
                    f"Schedule: a slot must hold an Action or None; slot {position} of IPU {ipu} holds "
                    f"{action!r}."
                )
            fault = None
            key = (action.kind, action.stage)
            if key not in next_micro_batch or not 0 <= action.micro_batch < num_micro_batches:
                fault = (
                    f"is not one of this pipeline ({num_stages} stages, {num_micro_batches} "
                    f"micro-batches, {'training' if training else 'forwards only'})"
                )
            elif device_mapping[action.stage] != ipu:
                fault = f"is on IPU {ipu}, but its stage is on IPU {device_mapping[action.stage]}"
            elif action.micro_batch < next_micro_batch[key]:
                fault = "comes twice, or after a later micro-batch of its stage"
            elif action.micro_batch > next_micro_batch[key]:
                fault = f"comes before micro-batch {next_micro_batch[key]} of its stage"
            if fault:
                raise ScheduleError(
                    f"Schedule: the {action} {fault}. Every stage takes all its micro-batches once "
                    f"in each direction, in order.\n{format_rows(rows, (ipu, position))}"
                )
            next_micro_batch[key] += 1
    for (kind, stage), micro_batch in next_micro_batch.items():
        if micro_batch < num_micro_batches:
            raise ScheduleError(
                f"Schedule: the {Action(kind, stage, micro_batch)} is missing.\n{format_rows(rows)}"
            )


def _stages_of(levels: Sequence[int], level: int) -> range:
    return range(bisect.bisect_left(levels, level), bisect.bisect_right(levels, level))


def _is_ready(
    action: Action,
    before: Sequence[range],
    after: Sequence[range],
    num_forwards: Sequence[int],
    num_backwards: Sequence[int],
) -> bool:
    kind, stage, micro_batch = action
    if kind is ActionKind.FORWARD:
        done, needed = num_forwards, before[stage]
    else:
        done, needed = num_backwards, after[stage]
        if num_forwards[stage] <= micro_batch:
            return False
    for other in needed:  # noqa: SIM110  # `all` takes twice as long, and this is asked for every action
        if done[other] <= micro_batch:
            return False
    return True


def _describe_deadlock(rows: Rows, positions: Sequence[int], time_step: int) -> str:
    waiting = [(ipu, position) for ipu, position in enumerate(positions) if position < len(rows[ipu])]
    lines = [f"IPU {ipu} waits with the {rows[ipu][position]}" for ipu, position in waiting]
    return (
        f"Schedule: deadlock at time-step {time_step}: " + "; ".join(lines) + ". None of them has its "
        f"inputs.\n{format_rows(rows, waiting[0])}"
    )
