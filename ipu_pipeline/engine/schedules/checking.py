"""The checker that proves a schedule: complete, in order and free of deadlock.

`check` follows the rows and returns a `Timetable`: when every action runs, how many micro-batches each
stage holds at most, and one global order of the actions.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.actions import Action, ActionKind, Rows, ScheduleError, format_rows

__all__ = ["Timetable", "check"]


@dataclass(frozen=True)
class Timetable:
    """A checked schedule.

    Attributes:
      rows: one row of slots per IPU, as given but for the turns of parallel stages.
      order: all actions in the order of their time-steps; within one time-step by IPU. No action comes
        before one that it depends on.
      time_steps: the time-step (from 1) of the action at the same position in `order`.
      in_flight: for each stage, the largest number of micro-batches that have gone forward and not yet
        come back. 1 without training.
      num_time_steps: the last time-step in which anything runs.
    """

    rows: Rows
    order: tuple[Action, ...]
    time_steps: tuple[int, ...]
    in_flight: tuple[int, ...]
    num_time_steps: int


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
    stage's own forward and the backwards of the level after, all in earlier time-steps. Parallel stages of
    one IPU take their places in its row in turn, forwards by their numbers and backwards the other way
    round, so that every micro-batch has the same last reader of a value.

    Args:
      rows: one row per IPU; None is a time-step in which the IPU waits.
      num_stages: the number of stages.
      num_micro_batches: micro-batches per weight update.
      device_mapping: the IPU of each stage.
      training: whether there are backwards.
      levels: as in `grouped`.

    Returns:
      The timetable.

    Raises:
      ScheduleError: an action is missing, unknown, doubled, on another IPU than its stage, or before an
        earlier micro-batch of the same stage and direction. Or the IPUs wait for each other; then the
        message has the grid up to there.
    """
    frozen: Rows = tuple(tuple(row) for row in rows)
    _check_complete(frozen, num_stages, num_micro_batches, device_mapping, training)

    levels = range(num_stages) if levels is None else levels
    frozen = _in_turn(frozen, levels)
    # What a stage waits for: in a forward the level before, in a backward the level after.
    before = [_stages_of(levels, level - 1) for level in levels]
    after = [_stages_of(levels, level + 1) for level in levels]
    num_forwards = [0] * num_stages  # number done per stage, which is the next forward's micro-batch
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
        for action in done:  # only now: results of a time-step are there for the next one
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


def _in_turn(rows: Rows, levels: Sequence[int]) -> Rows:
    """Changes the turns of parallel stages of one IPU, which need the same actions done before them."""
    if len(set(levels)) == len(levels):
        return rows
    changed = [list(row) for row in rows]
    for row in changed:
        alike: dict[tuple[ActionKind, int, int], list[tuple[int, Action]]] = {}  # places and actions
        for position, action in enumerate(row):
            if action is not None:
                key = action.kind, levels[action.stage], action.micro_batch
                alike.setdefault(key, []).append((position, action))
        for (kind, *_others), own in alike.items():
            actions = sorted((action for _position, action in own), reverse=kind is ActionKind.BACKWARD)
            for (position, _action), action in zip(own, actions, strict=True):
                row[position] = action
    return tuple(map(tuple, changed))


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
