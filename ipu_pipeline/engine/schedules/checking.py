"""The checker that proves a schedule: complete, in order and free of deadlock.

`check` follows the rows and returns a `Timetable`: when every action runs, how many micro-batches each
stage holds at most, and one global order of the actions.

A stage with a split backward is called halved. All of its micro-batches are split: a whole backward in its
row becomes input gradients and weight gradients, one after the other.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.actions import (
    HALVES,
    Action,
    ActionKind,
    Row,
    Rows,
    ScheduleError,
    format_rows,
    split_backward,
)

__all__ = ["Timetable", "check"]

_KINDS = frozenset(ActionKind)


@dataclass(frozen=True)
class Timetable:
    """A checked schedule.

    Example:
      >>> timetable = schedules.timetable("interleaved", 2, 4, (0, 1), training=True)
      >>> timetable.in_flight
      (2, 1)

    Attributes:
      rows: one row of slots per device, as given except for the order of parallel stages and for whole
        backwards of halved stages.
      order: all actions, sorted by time-step and then by device. No action comes before one that it depends
        on.
      time_steps: the time-step (from 1) of the action at the same position in `order`.
      in_flight: for each stage, the largest number of micro-batches that have gone forward and whose
        backward, with weight gradients, is not done. 1 without training.
      fullest: for each stage, the moments at which it may hold most, as pairs of numbers of micro-batches:
        those before their backward or input gradients, and those before their weight gradients.
      num_time_steps: the last time-step with an action.
      halved: the stages with a split backward.
    """

    rows: Rows
    order: tuple[Action, ...]
    time_steps: tuple[int, ...]
    in_flight: tuple[int, ...]
    fullest: tuple[tuple[tuple[int, int], ...], ...]
    num_time_steps: int
    halved: frozenset[int]

    def fullest_after(
        self, stage: int, sending: Collection[tuple[int, ActionKind]]
    ) -> tuple[tuple[int, int], ...]:
        """`fullest` of a stage without a first half: gradients wait for the second one as they come.

        Args:
          stage: its number.
          sending: the stages that the gradients come from, and what they do then.
        """
        done = collections.Counter[tuple[int, ActionKind]]()
        moments = set()
        for action in self.order:
            done[action.stage, action.kind] += 1
            come = max(done[sender] for sender in sending)
            weights = done[stage, ActionKind.WEIGHT_GRADIENTS]
            moments.add((done[stage, ActionKind.FORWARD] - come, come - weights))
        return _find_fullest(moments)


def check(
    rows: Sequence[Sequence[Action | None]],
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool,
    levels: Sequence[int] | None = None,
    halved: frozenset[int] | None = None,
) -> Timetable:
    """Checks that a schedule is complete, in order and free of deadlock.

    Each device follows its own row, one slot per time-step, and waits at an action whose inputs are
    missing: a forward needs the forwards of the previous level, a backward or its input gradients need the
    stage's own forward and the same action of the next level, and weight gradients need the stage's input
    gradients, all in earlier time-steps. Parallel stages on one device are put in a fixed order, forwards
    by number and backwards in reverse, so that every micro-batch has the same last reader of a value.

    Example:
      >>> rows = schedules.grouped(2, 3, device_mapping=[0, 1])
      >>> timetable = schedules.check(rows, 2, 3, [0, 1], training=True)
      >>> timetable.num_time_steps
      8

    Args:
      rows: one row per device; None is a time-step in which the device waits.
      num_stages: the number of stages.
      num_micro_batches: micro-batches per weight update.
      device_mapping: the device of each stage.
      training: whether there are backwards.
      levels: as in `grouped`.
      halved: the stages with a split backward, whatever the rows have. None: the stages whose input or
        weight gradients are in the rows.

    Returns:
      The timetable.

    Raises:
      ScheduleError: an action is missing, unknown, doubled, on another device than its stage, or before an
        earlier micro-batch of the same stage and kind. Or the devices deadlock; the message then has the
        grid up to this point.
    """
    frozen: Rows = tuple(tuple(row) for row in rows)
    _check_slots(frozen)
    found = frozenset(a.stage for row in frozen for a in row if a is not None and a.kind in HALVES)
    if halved is None:
        halved = found
    elif found - halved:
        raise ScheduleError(
            f"Schedule: with {num_micro_batches} micro-batches, stage {min(found - halved)} splits its "
            "backward, but not with the number that the programs were made for. Split it with any "
            f"number.\n{format_rows(frozen)}"
        )
    if halved:
        frozen = _in_halves(frozen, halved)
    _check_complete(frozen, num_stages, num_micro_batches, device_mapping, training, halved)

    levels = range(num_stages) if levels is None else levels
    frozen = _in_turn(frozen, levels)
    # What a stage waits for: in a forward the level before, in a backward the level after.
    before = [_stages_of(levels, level - 1) for level in levels]
    after = [_stages_of(levels, level + 1) for level in levels]
    num_forwards = [0] * num_stages  # number done per stage, which is the next forward's micro-batch
    num_backwards = [0] * num_stages  # of backwards, or of input gradients
    num_weights = [0] * num_stages  # of weight gradients, where the stage is halved
    in_flight = [0] * num_stages
    fullest: list[set[tuple[int, int]]] = [set() for _stage in range(num_stages)]
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
            elif action.kind is ActionKind.WEIGHT_GRADIENTS:
                if num_backwards[action.stage] <= action.micro_batch:
                    continue
                done.append(action)
            elif _is_ready(action, before, after, num_forwards, num_backwards):
                done.append(action)
            else:
                continue
            positions[ipu] += 1
        if not done and not num_idle:
            raise ScheduleError(_describe_deadlock(frozen, positions, time_step))
        for action in done:  # only now: results of a time-step are there for the next one
            kind, stage = action.kind, action.stage
            if kind is ActionKind.FORWARD:
                num_forwards[stage] += 1
            elif kind is ActionKind.WEIGHT_GRADIENTS:
                num_weights[stage] += 1
            else:
                num_backwards[stage] += 1
            between = num_backwards[stage] - num_weights[stage] if stage in halved else 0
            held = num_forwards[stage] - num_backwards[stage]
            fullest[stage].add((held, between))
            in_flight[stage] = max(in_flight[stage], held + between)
        order += done
        time_steps += [time_step] * len(done)
        num_left -= len(done) + num_idle
    if not training:
        in_flight, fullest = [1] * num_stages, [{(1, 0)} for _stage in range(num_stages)]
    num_time_steps = time_steps[-1] if time_steps else 0
    return Timetable(
        frozen,
        tuple(order),
        tuple(time_steps),
        tuple(in_flight),
        tuple(map(_find_fullest, fullest)),
        num_time_steps,
        halved,
    )


def _find_fullest(moments: set[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The moments than which no other has more of both numbers."""
    found: list[tuple[int, int]] = []
    for moment in sorted(moments, reverse=True):
        if not found or moment[1] > found[-1][1]:
            found.append(moment)
    return tuple(found)


def _check_slots(rows: Rows) -> None:
    for ipu, row in enumerate(rows):
        for position, action in enumerate(row):
            if action is not None and not (isinstance(action, Action) and action.kind in _KINDS):
                raise ScheduleError(
                    f"Schedule: a slot must hold an Action or None; slot {position} of device {ipu} holds "
                    f"{action!r}."
                )


def _in_halves(rows: Rows, halved: frozenset[int]) -> Rows:
    """Puts both halves in the place of whole backwards of halved stages."""

    def find(action: Action | None) -> Row:
        return (action,) if action is None or action.stage not in halved else split_backward(action)

    return tuple(tuple(itertools.chain.from_iterable(map(find, row))) for row in rows)


def _check_complete(
    rows: Rows,
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool,
    halved: frozenset[int],
) -> None:
    next_micro_batch: dict[tuple[ActionKind, int], int] = {}
    for stage in range(num_stages):
        back = HALVES if stage in halved else (ActionKind.BACKWARD,)
        for kind in (ActionKind.FORWARD, *(back if training else ())):
            next_micro_batch[kind, stage] = 0
    for ipu, row in enumerate(rows):
        for position, action in enumerate(row):
            if action is None:
                continue
            fault = None
            key = (action.kind, action.stage)
            if key not in next_micro_batch or not 0 <= action.micro_batch < num_micro_batches:
                fault = (
                    f"is not one of this pipeline ({num_stages} stages, {num_micro_batches} "
                    f"micro-batches, {'training' if training else 'forwards only'})"
                )
            elif device_mapping[action.stage] != ipu:
                fault = f"is on device {ipu}, but its stage is on device {device_mapping[action.stage]}"
            elif action.micro_batch < next_micro_batch[key]:
                fault = "comes twice, or after a later micro-batch of its stage"
            elif action.micro_batch > next_micro_batch[key]:
                fault = f"comes before micro-batch {next_micro_batch[key]} of its stage"
            if fault:
                raise ScheduleError(
                    f"Schedule: the {action} {fault}. Every stage takes all its micro-batches once in each "
                    "direction, in order, also in both halves of a backward.\n"
                    f"{format_rows(rows, (ipu, position))}"
                )
            next_micro_batch[key] += 1
    for (kind, stage), micro_batch in next_micro_batch.items():
        if micro_batch < num_micro_batches:
            if kind in HALVES and all(next_micro_batch[half, stage] == micro_batch for half in HALVES):
                kind = ActionKind.BACKWARD
            raise ScheduleError(
                f"Schedule: the {Action(kind, stage, micro_batch)} is missing.\n{format_rows(rows)}"
            )


def _in_turn(rows: Rows, levels: Sequence[int]) -> Rows:
    """Changes the turns of parallel stages of one device, which need the same actions done before them."""
    if len(set(levels)) == len(levels):
        return rows
    changed = [list(row) for row in rows]
    for row in changed:
        alike: dict[tuple[ActionKind, int, int], list[tuple[int, Action]]] = {}  # places and actions
        for position, action in enumerate(row):
            if action is not None:
                # Whole backwards and input gradients take turns with each other.
                is_first_half = action.kind is ActionKind.INPUT_GRADIENTS
                kind: ActionKind = ActionKind.BACKWARD if is_first_half else action.kind
                key = kind, levels[action.stage], action.micro_batch
                alike.setdefault(key, []).append((position, action))
        for (kind, *_others), own in alike.items():
            actions = [action for _position, action in own]
            actions.sort(key=lambda action: action.stage, reverse=kind is not ActionKind.FORWARD)
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
    lines = [f"device {ipu} waits with the {rows[ipu][position]}" for ipu, position in waiting]
    return (
        f"Schedule: deadlock at time-step {time_step}: " + "; ".join(lines) + ". None of them has its "
        f"inputs.\n{format_rows(rows, waiting[0])}"
    )
