"""Actions, rows of actions, the checker that makes a timetable of them, and timetables as text."""

from __future__ import annotations

import bisect
import collections
import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, TypeAlias

# Actions and rows.


class ActionKind(enum.IntEnum):
    """The kinds of actions.

    A backward may be split in two: input gradients, for which the previous stages wait, and weight
    gradients, for which only the weight update waits.

    Example:
      >>> list(engine.ActionKind)
      [<ActionKind.FORWARD: 0>, <ActionKind.BACKWARD: 1>,
       <ActionKind.INPUT_GRADIENTS: 2>, <ActionKind.WEIGHT_GRADIENTS: 3>]
    """

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENTS = 2
    WEIGHT_GRADIENTS = 3

    @property
    def letter(self) -> str:
        """The letter in grids: F, B, I or W."""
        return "FBIW"[self]

    @property
    def words(self) -> str:
        """The name, in words."""
        return self.name.lower().replace("_", " ")


HALVES = (ActionKind.INPUT_GRADIENTS, ActionKind.WEIGHT_GRADIENTS)  # of a backward, in their order

# What ends a step, numbered behind the kinds of actions.
UPDATE = len(ActionKind)
REDUCE = UPDATE + 1  # a device's gradients are reduced over replicas: an all-reduce, or a reduce-scatter
GATHER = UPDATE + 2  # replicas that share the optimizer's state gather what they have updated


class Action(NamedTuple):
    """One stage's forward, backward, input gradients or weight gradients for one micro-batch.

    Example:
      >>> engine.Action(engine.ActionKind.FORWARD, stage=1, micro_batch=2)
      Action(kind=<ActionKind.FORWARD: 0>, stage=1, micro_batch=2)
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{ActionKind(self.kind).words} of stage {self.stage}, micro-batch {self.micro_batch}"


def split_backward(action: Action) -> tuple[Action, ...]:
    """Returns a whole backward as both halves, another action as it is."""
    if action.kind is not ActionKind.BACKWARD:
        return (action,)
    return tuple(action._replace(kind=kind) for kind in HALVES)


Row: TypeAlias = "tuple[Action | None, ...]"
Rows: TypeAlias = "tuple[Row, ...]"
ScheduleFunction: TypeAlias = Callable[..., Sequence[Sequence[Action | None]]]


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order or deadlocked."""


def number_actions(steps: Iterable[tuple[int, int]], num_micro_batches: int | None = None) -> Row:
    """Makes a row of kinds and stages: each takes its micro-batches in order, at most so many."""
    following: dict[tuple[int, int], Iterator[Action]] = {}
    row: list[Action] = []
    for step in steps:
        if step not in following:
            kind, stage = step
            numbers = itertools.islice(itertools.count(), num_micro_batches)
            following[step] = map(Action, repeat(ActionKind(kind)), repeat(stage), numbers)
        row += itertools.islice(following[step], 1)
    return tuple(row)


def format_rows(rows: Rows, marked: tuple[int, int] | None = None) -> str:
    """Formats a schedule as a grid: a device per line, a slot per column.

    `F0.3` is the forward of stage 0 for micro-batch 3, `B` a backward, `I` input gradients, `W` weight
    gradients, and `.` a time-step of waiting.

    Example:
      >>> rows = schedules.grouped(2, 2, device_mapping=[0, 1], training=False)
      >>> print(schedules.format_rows(rows))
      device 0: F0.0 F0.1
      device 1: .    F1.0 F1.1

    Args:
      rows: one row per device.
      marked: the (device, position) of a slot to put in brackets.

    Returns:
      The lines, joined.
    """
    cells = [
        [
            "." if action is None else f"{action.kind.letter}{action.stage}.{action.micro_batch}"
            for action in row
        ]
        for row in rows
    ]
    if marked is not None:
        cells[marked[0]][marked[1]] = f"[{cells[marked[0]][marked[1]]}]"
    width = max((len(cell) for row in cells for cell in row), default=1)
    return "\n".join(
        f"device {ipu}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for ipu, row in enumerate(cells)
    )


# The checker. A stage with a split backward is called halved, and all of its micro-batches are split: a
# whole backward in its row becomes both halves, so that a stage has one set of programs.

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
        counts = collections.Counter[tuple[int, ActionKind]]()
        moments = set()
        for action in self.order:
            counts[action.stage, action.kind] += 1
            come = max(counts[sender] for sender in sending)
            weights = counts[stage, ActionKind.WEIGHT_GRADIENTS]
            moments.add((counts[stage, ActionKind.FORWARD] - come, come - weights))
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
    split_stages = frozenset(a.stage for row in frozen for a in row if a is not None and a.kind in HALVES)
    if halved is None:
        halved = split_stages
    elif split_stages - halved:
        raise ScheduleError(
            f"Schedule: with {num_micro_batches} micro-batches, stage {min(split_stages - halved)} splits "
            "its backward, but not with the number that the programs were made for. Split it with any "
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
    # All devices follow their rows, in lock-step.
    time_step = 0
    while num_left:
        time_step += 1
        actions: list[Action] = []
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
                actions.append(action)
            elif _is_ready(action, before, after, num_forwards, num_backwards):
                actions.append(action)
            else:
                continue
            positions[ipu] += 1
        if not actions and not num_idle:
            raise ScheduleError(_describe_deadlock(frozen, positions, time_step))
        for action in actions:  # only now: results of a time-step are there for the next one
            kind, stage = action.kind, action.stage
            if kind is ActionKind.FORWARD:
                num_forwards[stage] += 1
            elif kind is ActionKind.WEIGHT_GRADIENTS:
                num_weights[stage] += 1
            else:
                num_backwards[stage] += 1
            between = num_backwards[stage] - num_weights[stage] if stage in halved else 0
            num_held = num_forwards[stage] - num_backwards[stage]
            fullest[stage].add((num_held, between))
            in_flight[stage] = max(in_flight[stage], num_held + between)
        order += actions
        time_steps += [time_step] * len(actions)
        num_left -= len(actions) + num_idle
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
    """The moments of which no other moment has more of both numbers."""
    maxima: list[tuple[int, int]] = []
    for moment in sorted(moments, reverse=True):
        if not maxima or moment[1] > maxima[-1][1]:
            maxima.append(moment)
    return tuple(maxima)


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
    # Micro-batches in order: random keys, assigned variables and RUNNING_MEAN depend on it.
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
    """Puts parallel stages of a device in turn, so that every value has the same last reader."""
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
        for (kind, _level, _micro_batch), places in alike.items():
            actions = [action for _position, action in places]
            actions.sort(key=lambda action: action.stage, reverse=kind is not ActionKind.FORWARD)
            for (position, _action), action in zip(places, actions, strict=True):
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
        counts, sources = num_forwards, before[stage]
    else:
        counts, sources = num_backwards, after[stage]
        if num_forwards[stage] <= micro_batch:
            return False
    for source in sources:  # noqa: SIM110  # `all` takes twice as long, and this is asked for every action
        if counts[source] <= micro_batch:
            return False
    return True


def _describe_deadlock(rows: Rows, positions: Sequence[int], time_step: int) -> str:
    waiting = [(ipu, position) for ipu, position in enumerate(positions) if position < len(rows[ipu])]
    lines = [f"device {ipu} waits with the {rows[ipu][position]}" for ipu, position in waiting]
    return (
        f"Schedule: deadlock at time-step {time_step}: " + "; ".join(lines) + ". None of them has its "
        f"inputs.\n{format_rows(rows, waiting[0])}"
    )


# Timetables as text.

_GAP = "..."


class Ramp(NamedTuple):
    """A part of a timetable.

    Attributes:
      name: "ramp-up", "main" or "ramp-down".
      first: its first time-step, from 1.
      last: its last time-step; less than `first` if it has none.
    """

    name: str
    first: int
    last: int


def find_ramps(timetable: Timetable, device_mapping: Sequence[int]) -> tuple[Ramp, Ramp, Ramp]:
    """Finds the phases of a timetable: ramp-up, main and ramp-down.

    Ramp-up ends when the last device begins its first action. Ramp-down begins after the first device has
    finished its last action. With only a few forwards there may be no main phase between them.

    Example:
      >>> timetable = schedules.timetable("grouped", 2, 4, (0, 1), training=True)
      >>> ramp_up, steady, ramp_down = schedules.find_ramps(timetable, [0, 1])

    Args:
      timetable: the timetable of a schedule.
      device_mapping: the device of each stage.
    """
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for action, time_step in zip(timetable.order, timetable.time_steps, strict=True):
        ipu = device_mapping[action.stage]
        firsts.setdefault(ipu, time_step)
        lasts[ipu] = time_step
    begin = max(firsts.values())
    end = max(min(lasts.values()), begin - 1)
    return (
        Ramp("ramp-up", 1, begin - 1),
        Ramp("main", begin, end),
        Ramp("ramp-down", end + 1, timetable.num_time_steps),
    )


def find_slots(
    timetable: Timetable, device_mapping: Sequence[int], time_steps: Sequence[int]
) -> list[list[Action | None]]:
    """Returns the actions of each device in some time-steps; None if it waits.

    Example:
      >>> timetable = schedules.timetable("grouped", 2, 2, (0, 1), training=True)
      >>> [[str(action) for action in slots] for slots in schedules.find_slots(timetable, [0, 1], [1, 2])]
      [['forward of stage 0, micro-batch 0', 'forward of stage 0, micro-batch 1'],
       ['None', 'forward of stage 1, micro-batch 0']]
    """
    columns = {time_step: column for column, time_step in enumerate(time_steps)}
    slots: list[list[Action | None]] = [[None] * len(columns) for _row in timetable.rows]
    for action, time_step in zip(timetable.order, timetable.time_steps, strict=True):
        column = columns.get(time_step)
        if column is not None:
            slots[device_mapping[action.stage]][column] = action
    return slots


def format_staircase(timetable: Timetable, device_mapping: Sequence[int], width: int | None = None) -> str:
    """Formats a timetable as lines of text.

    `F3` is the forward of micro-batch 3, `B3` its backward, `I3` its input gradients and `W3` its weight
    gradients. If a device has several stages, `F2.3` is the forward of stage 2. A dot is a time-step of
    waiting, and a bar separates the phases. If the lines are too long, time-steps in the middle are left
    out, and the last line says so.

    Example:
      >>> timetable = schedules.timetable("grouped", 2, 3, (0, 1), training=True)
      >>> print(schedules.format_staircase(timetable, [0, 1]))
      time-step 1  | 2  3  4  5  6  7  | 8
      device 0  F0 | F1 .  F2 B0 .  B1 | B2
      device 1  .  | F0 B0 F1 B1 F2 B2 | .
      phases: ramp-up 1, main 2..7, ramp-down 8

    Args:
      timetable: the timetable of a schedule.
      device_mapping: the device of each stage.
      width: the most characters per line; None: no limit. The first and the last time-step are always
        shown.
    """
    has_stages = len(set(device_mapping)) < len(device_mapping)
    phases = find_ramps(timetable, device_mapping)
    total = timetable.num_time_steps
    most = max(action.micro_batch for action in timetable.order)
    longest = f"F{len(device_mapping) - 1}.{most}" if has_stages else f"F{most}"
    cell = max(len(longest), len(str(total)))
    head = max(len("time-step"), len(f"device {len(timetable.rows) - 1}"))
    time_steps = list(range(1, total + 1))
    if width is not None:
        # Two bars, a space before each cell, and the gap with its space.
        room = width - head - 4
        if total * (cell + 1) > room:
            number = max(2, (room - len(_GAP) - 1) // (cell + 1))
            time_steps = [*time_steps[: (number + 1) // 2], *time_steps[total - number // 2 :]]
    slots = find_slots(timetable, device_mapping, time_steps)

    def name(action: Action | None) -> str:
        if action is None:
            return "."
        stage = f"{action.stage}." if has_stages else ""
        return f"{action.kind.letter}{stage}{action.micro_batch}"

    def line(title: str, cells: Sequence[str], gap: str) -> str:
        parts = [title.ljust(head)]
        for column, text in enumerate(cells):
            if column and time_steps[column] != time_steps[column - 1] + 1:
                parts.append(gap)
            if any(phase.first == time_steps[column] > 1 and phase.last >= phase.first for phase in phases):
                parts.append("|")
            parts.append(text.ljust(cell))
        return " ".join(parts).rstrip()

    lines = [line("time-step", [str(time_step) for time_step in time_steps], _GAP)]
    for ipu, row in enumerate(slots):
        lines.append(line(f"device {ipu}", [name(action) for action in row], _GAP))
    spans = [
        f"{phase.name} {phase.first}" + (f"..{phase.last}" if phase.last > phase.first else "")
        for phase in phases
        if phase.last >= phase.first
    ]
    lines.append(f"phases: {', '.join(spans)}")
    left_out = [(a, b) for a, b in itertools.pairwise(time_steps) if b != a + 1]
    if left_out:
        ((before, after),) = left_out
        lines.append(
            f"Time-steps {before + 1}..{after - 1} do not fit in {width} characters, and are left out."
        )
    return "\n".join(lines)
