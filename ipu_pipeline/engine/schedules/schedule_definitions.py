"""The schedules that have names: the layout of a pipeline in, rows of actions out.

A schedule is one row of slots per device. A slot holds an `Action` or, in a lock-step schedule, None for a
time-step in which the device waits. `check` follows the rows and makes a `Timetable` of them.

Time-steps are counted from 1, stages, devices and micro-batches from 0. Below, p is the number of devices,
v the number of stages on each and m the number of micro-batches. F is a forward and B a backward, which may
be split in two: I for the input gradients, W for the weight gradients. "Equal times" are those of a stage's
F, I and W, one time-step each; the bubble "across steps" is for steps that follow each other at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast

from ipu_pipeline.engine.schedules.timetables import Action, ActionKind, Rows, ScheduleError, number_actions

F, B, I, W = ActionKind  # noqa: E741  # as in grids

# The names in `SCHEDULES`, and of a search. Type checkers know no others, nor the path of a file as a text.
ScheduleName: TypeAlias = Literal[
    "grouped",
    "eager_1f1b",
    "interleaved",
    "1f1b",
    "one_forward_one_backward",
    "non_interleaved",
    "pipedream_flush",
    "dapple",
    "sequential",
    "all_forwards",
    "gpipe",
    "afab",
    "f_then_b",
    "fill_drain",
    "looped_bfs",
    "breadth_first",
    "looped",
    "interleaved_1f1b",
    "megatron_interleaved",
    "virtual_pipeline",
    "vpp",
    "zero_bubble",
    "zb_h1",
    "zb1p",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zb_h2",
    "zb2p",
    "looped_zero_bubble",
    "interleaved_zero_bubble",
    "zero_bubble_v",
    "zbv",
    "v_zb",
    "zbv_zero_bubble",
    "v_half",
    "v_min",
    "dual_pipe_v",
    "searched",
]


@dataclass(frozen=True)
class Layout:
    """The stages and micro-batches that rows are made for; see `_ARGUMENTS`."""

    num_micro_batches: int
    device_mapping: Sequence[int]
    levels: Sequence[int]

    @cached_property
    def stages_of(self) -> tuple[list[int], ...]:
        """The stages of each device, ascending."""
        stages: tuple[list[int], ...] = tuple([] for _ipu in range(max(self.device_mapping) + 1))
        for stage, ipu in enumerate(self.device_mapping):
            stages[ipu].append(stage)
        return stages

    @property
    def num_ipus(self) -> int:
        """The number of devices."""
        return len(self.stages_of)

    @property
    def num_levels(self) -> int:
        """The number of levels."""
        return self.levels[-1] + 1


class RowsFunction(Protocol):
    """A schedule's function, as users call it."""

    __name__: str

    def __call__(
        self,
        num_stages: int,
        num_micro_batches: int,
        device_mapping: Sequence[int],
        training: bool = True,
        levels: Sequence[int] | None = None,
    ) -> Rows:
        """Orders the actions of each device."""


_ARGUMENTS = """
    Args:
      num_stages: the number of stages.
      num_micro_batches: micro-batches per weight update: m.
      device_mapping: the device of each stage, from 0; p devices have v stages each.
      training: whether there are backwards.
      levels: the level of each stage, ascending from 0; stages of one level run in the same time-steps.
        None: each stage has its own.

    Returns:
      One row per device.
    """
_ERRORS = """
    Raises:
      ScheduleError: the schedule needs another device_mapping, or some stages are parallel.
    """


class _Form(NamedTuple):
    """A form of device_mapping that some schedules need, without parallel stages."""

    words: str  # what the mapping does
    mapping: Callable[[int, int], list[int]]  # of so many stages on so many devices; empty if there is none

    def check(self, name: str, num_stages: int, layout: Layout) -> None:
        """Raises a ScheduleError if a layout has another form, or parallel stages."""
        mapping = list(layout.device_mapping)
        if mapping != self.mapping(num_stages, layout.num_ipus) or len(mapping) != num_stages:
            raise ScheduleError(
                f"Schedule: {name} needs a device_mapping that {self.words}, such as {self.mapping(4, 2)} "
                f"for four stages on two devices; got {mapping}. With one stage per device, take "
                "Interleaved or ZeroBubble."
            )
        if len(set(layout.levels)) < num_stages:
            raise ScheduleError(
                f"Schedule: {name} has no parallel stages; got levels {list(layout.levels)}. Take Grouped, "
                "Interleaved or ZeroBubble."
            )


_AROUND = _Form(
    "goes around the devices several times",
    lambda n, p: [stage % p for stage in range(n)] if n % p == 0 and n > p else [],
)
_IN_V = _Form("goes from the first device to the last and back", lambda _n, p: [*range(p), *range(p)[::-1]])


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule that has a name.

    Example:
      >>> [schedule.member for schedule in schedules.SCHEDULES[:3]]
      ['Grouped', 'Interleaved', 'Sequential']

    Attributes:
      function: makes its rows, from the arguments of `grouped`.
      member: its name in the fronts' enumerations.
      others: its names in other libraries.
      purpose: when to use it, in one line.
    """

    function: RowsFunction
    member: str
    others: tuple[str, ...]
    purpose: str

    @property
    def name(self) -> ScheduleName:
        """The name in this library."""
        return cast("ScheduleName", self.function.__name__)


_schedules: list[NamedSchedule] = []


def _in_lock_step(layout: Layout, times: Mapping[ActionKind, Callable[[int], Iterable[int]]]) -> Rows:
    """Makes rows from the time-steps that actions of a level have when every stage has its own device.

    A device with one stage keeps those time-steps. A device with several stages does their actions in that
    order, one after another, and then no device has fixed time-steps: each waits only for data. `times` has
    a function from a level to the time-steps of its micro-batches, ascending; excess ones are left out.
    """
    counts = range(layout.num_micro_batches)
    has_own_ipu = len(set(layout.device_mapping)) == len(layout.levels)
    rows: list[list[Action | None]] = [[] for _ipu in layout.stages_of]
    for row, stages in zip(rows, layout.stages_of, strict=True):
        timed: list[tuple[int, int, Action]] = []
        for stage, (kind, find_times) in itertools.product(stages, times.items()):
            time_steps = list(itertools.islice(find_times(layout.levels[stage]), len(counts)))
            actions = map(Action._make, zip(repeat(kind), repeat(stage), counts, strict=False))
            if has_own_ipu:
                row += [None] * (time_steps[-1] - len(row))
                for time_step, action in zip(time_steps, actions, strict=True):
                    row[time_step - 1] = action
            else:
                timed += zip(time_steps, repeat(stage), actions, strict=False)
        row += [action for _time_step, _stage, action in sorted(timed)]
    return tuple(map(tuple, rows))


def _infer(layout: Layout) -> Rows:
    """Rows without backwards: a level takes each micro-batch one time-step after the level before."""
    return _in_lock_step(layout, {F: lambda level: itertools.count(level + 1)})


def _named(
    member: str,
    *aliases: str,
    purpose: str,
    form: _Form | None = None,
    infer: Callable[[Layout], Rows] = _infer,
) -> Callable[[Callable[[Layout], Rows]], RowsFunction]:
    """Names a function that makes rows for training, and makes the function of it that users call.

    `form` is the form of device_mapping that it needs; None is any, also with parallel stages. `infer`
    makes the rows without backwards.
    """

    def name(train: Callable[[Layout], Rows]) -> RowsFunction:
        def make_rows(
            num_stages: int,
            num_micro_batches: int,
            device_mapping: Sequence[int],
            training: bool = True,
            levels: Sequence[int] | None = None,
        ) -> Rows:
            layout = Layout(num_micro_batches, device_mapping, levels or range(len(device_mapping)))
            if form is not None:
                form.check(member, num_stages, layout)
            return (train if training else infer)(layout)

        make_rows.__name__ = make_rows.__qualname__ = train.__name__
        if train.__doc__:  # not with python -OO
            make_rows.__doc__ = train.__doc__ + _ARGUMENTS + (_ERRORS if form else "")
        _schedules.append(NamedSchedule(make_rows, member, aliases, purpose))
        return make_rows

    return name


# Whole backwards.


@_named(
    "Grouped",
    "eager_1f1b",
    purpose="The default, as on Graphcore's IPUs: forwards run together, then backwards.",
)
def grouped(layout: Layout) -> Rows:
    """Returns the rows of the Grouped schedule.

    With one stage per device, time-steps 1..p are for forwards; then backward and forward time-steps
    alternate, and after the last stage's last forward only backwards remain, up to time-step 2(m+p-1).
    Stage i holds at most 2(p-i)-1 micro-batches. Source: Graphcore's "Targeting the IPU from TensorFlow 1".

    Example:
      >>> print(schedules.format_rows(schedules.grouped(2, 3, device_mapping=[0, 1])))
      device 0: F0.0 F0.1 .    F0.2 B0.0 .    B0.1 B0.2
      device 1: .    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """
    number, count = layout.num_levels, layout.num_micro_batches

    def find_forwards(level: int) -> Iterable[int]:
        """Time-steps without a pause while the pipeline fills, and then every other one."""
        return itertools.chain(range(level + 1, number + 1), itertools.count(number + 2, 2))

    def find_backwards(level: int) -> Iterable[int]:
        """Time-steps after the last level's: one for each hop, or two while there are forwards between."""
        hops = number - 1 - level
        return (number + 1 + 2 * k + hops + min(hops, count - 1 - k) for k in range(count))

    return _in_lock_step(layout, {F: find_forwards, B: find_backwards})


@_named(
    "Interleaved",
    "1f1b",
    "one_forward_one_backward",
    "non_interleaved",
    "pipedream_flush",
    "dapple",
    purpose="1F1B: the bubble of Grouped with half of its activation memory.",
)
def interleaved(layout: Layout) -> Rows:
    """Returns the rows of the Interleaved schedule.

    With one stage per device, stage i runs forwards at time-steps i+1, i+3, ... and backwards at 2p-i,
    2p-i+2, ..., so that neighbours never do the same. It ends when Grouped does; stage i holds at most p-i
    micro-batches. This is Graphcore's name for 1F1B, the schedule of PipeDream-Flush (Narayanan et al.,
    "Memory-Efficient Pipeline-Parallel DNN Training", 2021). Megatron's "interleaved" is Looped.

    Example:
      >>> print(schedules.format_rows(schedules.interleaved(2, 3, device_mapping=[0, 1])))
      device 0: F0.0 .    F0.1 B0.0 F0.2 B0.1 .    B0.2
      device 1: .    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """
    end = 2 * layout.num_levels
    return _in_lock_step(
        layout,
        {F: lambda level: itertools.count(level + 1, 2), B: lambda level: itertools.count(end - level, 2)},
    )


@_named(
    "Sequential",
    purpose="To find a fault, or to save memory: nothing overlaps.",
    infer=lambda layout: _in_lock_step(
        layout, {F: lambda level: itertools.count(level + 1, layout.num_levels)}
    ),
)
def sequential(layout: Layout) -> Rows:
    """Returns the rows of the Sequential schedule.

    A micro-batch goes forward through all stages and back before the next one starts.

    Example:
      >>> print(schedules.format_rows(schedules.sequential(2, 2, device_mapping=[0, 1])))
      device 0: F0.0 .    .    B0.0 F0.1 .    .    B0.1
      device 1: .    F1.0 B1.0 .    .    F1.1 B1.1
    """
    period = 2 * layout.num_levels
    return _in_lock_step(
        layout,
        {
            F: lambda level: itertools.count(level + 1, period),
            B: lambda level: itertools.count(period - level, period),
        },
    )


def _group_by_group(kind: ActionKind, stages: Iterable[int], groups: Iterable[range]) -> list[Action]:
    """A device's actions of one kind: each group of micro-batches goes through one stage after another."""
    return [Action(kind, stage, number) for group in groups for stage in stages for number in group]


@_named(
    "AllForwards",
    "gpipe",
    "afab",
    "f_then_b",
    "fill_drain",
    "looped_bfs",
    "breadth_first",
    purpose="GPipe, for comparisons and few micro-batches: all forwards come first.",
)
def all_forwards(layout: Layout) -> Rows:
    """Returns the rows of the AllForwards schedule.

    All micro-batches run in a device's first stage, then in its next one, and backwards in reverse order.
    The bubble per step is (p-1)(F+B), as with Interleaved; with v stages on each device, mapped as for
    Looped, and m >= p, it is that of one such stage. A device holds v m stage activations. Grouped differs:
    its forwards and backwards take turns as soon as there is a backward.

    Sources: GPipe (Huang et al., 2018, arXiv 1811.06965); with several stages on a device, Breadth-First
    Pipeline Parallelism (Lamy-Poirier, 2022, arXiv 2211.05953).

    Example:
      >>> print(schedules.format_rows(schedules.all_forwards(2, 3, device_mapping=[0, 1])))
      device 0: F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
      device 1: F1.0 F1.1 F1.2 B1.0 B1.1 B1.2
    """
    groups = [range(layout.num_micro_batches)]
    return tuple(
        (*_group_by_group(F, stages, groups), *_group_by_group(B, stages[::-1], groups))
        for stages in layout.stages_of
    )


def _find_groups(layout: Layout) -> list[range]:
    """Groups of at least p micro-batches, as many and as equal as possible; the larger ones first."""
    number = max(1, layout.num_micro_batches // layout.num_ipus)
    size, remainder = divmod(layout.num_micro_batches, number)
    ends = [0, *itertools.accumulate(size + (place < remainder) for place in range(number))]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def _infer_in_groups(layout: Layout) -> Rows:
    groups = _find_groups(layout)
    return tuple(tuple(_group_by_group(F, stages, groups)) for stages in layout.stages_of)


@_named(
    "Looped",
    "interleaved_1f1b",
    "megatron_interleaved",
    "virtual_pipeline",
    "vpp",
    purpose="Megatron's interleaved: a smaller bubble, for more transfers and memory.",
    form=_AROUND,
    infer=_infer_in_groups,
)
def looped(layout: Layout) -> Rows:
    """Returns the rows of the Looped schedule.

    Stage i is on device i mod p. Groups of micro-batches go once around the devices, then again, up to the
    last stages, and back in the same way. With groups of g micro-batches, device r does its first 2(p-r-1)
    + (v-1)g forwards and then alternates forwards and backwards. If each stage takes 1/v of F and B, the
    bubble per step is (p-1)(F+B)/v, 1/v of Interleaved's, and (v-1)(p-m)(F+B)/v longer if m < p; a device
    holds up to 2(p-r-1) + (v-1)g + 1 stage activations. There are as many groups of at least p
    micro-batches as possible, whose sizes differ by at most one: g is p if p divides m.

    Source: the interleaved schedule of Megatron (Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters", 2021, arXiv 2104.04473), which needs a multiple of p.

    Example:
      >>> print(schedules.format_rows(schedules.looped(4, 2, device_mapping=[0, 1, 0, 1])))
      device 0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1
      device 1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
    """
    groups = _find_groups(layout)
    rows = []
    for ipu, stages in enumerate(layout.stages_of):
        forwards = _group_by_group(F, stages, groups)
        backwards = _group_by_group(B, stages[::-1], groups)
        num_first = 2 * (layout.num_ipus - ipu - 1) + (len(stages) - 1) * len(groups[0])
        first, then = forwards[:num_first], forwards[num_first:]
        alternating = itertools.chain.from_iterable(zip(then, backwards, strict=False))
        rows.append((*first, *alternating, *backwards[len(then) :]))
    # The engine does the last stage's forward and backward at once: they stand beside each other.
    last = len(layout.device_mapping) - 1
    rows[-1] = tuple(
        itertools.chain.from_iterable(
            (action,) if action.stage != last else (action._replace(kind=F), action)
            for action in rows[-1]
            if action[:2] != (F, last)
        )
    )
    return tuple(rows)


# Split backwards.


@_named(
    "ZeroBubble",
    "zb_h1",
    "zb1p",
    "zero_bubble_h1",
    purpose="Split backward: a third of Interleaved's bubble, in the same memory.",
)
def zero_bubble(layout: Layout) -> Rows:
    """Returns the rows of the ZeroBubble schedule.

    It is ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241): weight gradients fill
    what would be bubble, and no device holds more micro-batches than the first one does with Interleaved.
    With one stage per device, m >= p and equal times, the last stage's row is

        F0 I0 F1 I1 ... Fp-1 Ip-1 W0 | Fp Ip W1 | Fp+1 Ip+1 W2 | ... Wm-p+1 ... Wm-1

    without a pause, once the first micro-batch has arrived. The other stages follow it: each does a forward
    no later than the last stage needs it, and weight gradients early enough to free memory for it. A step
    takes 3m + p-1 time-steps. The bubble per step is (p-1)(F + I - W), and 2p-1-m time-steps if m < p.

    Example:
      >>> print(schedules.format_rows(schedules.zero_bubble(2, 3, device_mapping=[0, 1])))
      device 0: F0.0 F0.1 .    I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2
      device 1: .    F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2
    """
    number, count = layout.num_levels, layout.num_micro_batches
    # The time-steps of each level's actions, by micro-batch, as if each level had its own device.
    forwards, inputs, weights = (list[list[int]]([] for _level in range(number)) for _kind in range(3))

    def has_arrived(times: Sequence[int], micro_batch: int, now: int) -> bool:
        return micro_batch < len(times) and times[micro_batch] < now

    def choose(level: int, now: int) -> list[int] | None:
        """Chooses what a level does, as the list that the time-step goes to; None: it waits."""
        next_forward, next_input = len(forwards[level]), len(inputs[level])
        # When the last level needs the next forward; those behind the first p wait for weight gradients.
        due = level + 1 + 2 * next_forward + max(0, next_forward - number + 1)
        is_full = next_forward - len(weights[level]) == number
        has_forward = next_forward < count and (
            not level or has_arrived(forwards[level - 1], next_forward, now)
        )
        can_forward = has_forward and not is_full
        has_weights = len(weights[level]) < next_input
        if can_forward and now >= due:
            return forwards[level]
        if is_full and has_weights and next_forward < count and now + 1 >= due:
            return weights[level]
        if next_input < next_forward and (
            level + 1 == number or has_arrived(inputs[level + 1], next_input, now)
        ):
            return inputs[level]
        if can_forward and not next_input:
            return forwards[level]
        if has_weights:
            return weights[level]
        return forwards[level] if can_forward else None

    now = 0
    while len(weights[0]) < count:
        now += 1
        for times in [choose(level, now) for level in range(number)]:
            if times is not None:
                times.append(now)
    return _in_lock_step(layout, {F: forwards.__getitem__, I: inputs.__getitem__, W: weights.__getitem__})


@_named(
    "ZeroBubbleH2",
    "zb_h2",
    "zb2p",
    purpose="Split backward: almost no bubble, for twice Interleaved's memory.",
)
def zero_bubble_h2(layout: Layout) -> Rows:
    """Returns the rows of the ZeroBubbleH2 schedule.

    It is ZB-H2 of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241). With one stage per
    device, m >= 2p-1 and equal times, device r starts r time-steps after device 0, runs without a pause,
    and ends r time-steps after it. The bubble across steps is (p-1)(F+I-2W), here 0, as long as W takes no
    longer than F and I; for a single step it is p-1 time-steps longer. If m < 2p-1, the missing
    micro-batches are left out of the rows, and the bubble across steps is 2p-1-m time-steps. Each device
    holds up to 2p-1 stage activations, nearly twice as many as device 0 with Interleaved.

    Example:
      >>> print(schedules.format_rows(schedules.zero_bubble_h2(2, 4, device_mapping=[0, 1])))
      device 0: F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3
      device 1: F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 F1.3 I1.3 W1.1 W1.2 W1.3
    """
    number = layout.num_levels
    num_steady = max(0, layout.num_micro_batches - 2 * number + 1)

    def find_times(letter: str, level: int) -> Iterable[int]:
        outer = 2 * (number - level) - 1  # at either end
        pattern = "F" * outer + "IF" * (2 * level) + "IWF" * num_steady + "IW" * outer + "W" * (2 * level)
        return (time_step for time_step, symbol in enumerate(pattern, level + 1) if symbol == letter)

    rows = _in_lock_step(layout, {kind: partial(find_times, kind.letter) for kind in (F, I, W)})
    # After a first wait none is needed: there is always something to do, or data to wait for.
    return tuple(tuple(action for action in row if action is not None) for row in rows)


def _fill(due: Sequence[Iterable[tuple[int, Action]]], limit: int) -> Rows:
    """Fills idle time of devices with weight gradients, by following time-steps of equal length.

    Each device does its forwards and its input gradients in their given orders, and weight gradients in the
    order of the input gradients. In each time-step it takes the first of these that it can:

    1. weight gradients, if its next forward is ready but it holds as many micro-batches as it may,
    2. of its next forward and its next input gradients, the one that is due first,
    3. weight gradients.

    There is no deadlock if doing all actions of all devices in the order in which they are due is one of
    the possible ways: of what is left, the one due first can always be done, now or after weight gradients.
    `due` has the forwards and input gradients of each device, with a number that is less for what goes
    first, `limit` is the most micro-batches that it may hold from a forward to the weight gradients.
    """
    forwards, inputs = (
        [[entry for entry in entries if entry[1].kind is kind] for entries in due] for kind in (F, I)
    )
    # How many micro-batches each stage has done, which is the number of its next one. The last entry is for
    # what is before the first stage and after the last one: nothing waits there.
    num_stages = 1 + max(action.stage for entries in due for _time, action in entries)
    num_forwards, num_inputs = ([0] * num_stages + [math.inf] for _kind in range(2))
    rows: list[list[Action]] = [[] for _ipu in due]
    places = [[0, 0, 0] for _ipu in due]  # of the next forward, input gradients and weight gradients
    num_left = 3 * sum(map(len, forwards))
    while num_left:
        actions: list[Action] = []
        for row, place, own_forwards, own_inputs in zip(rows, places, forwards, inputs, strict=True):
            f, i, w = place
            # When the next ones are due, if they can be done now.
            next_forward = next_inputs = math.inf
            if f < len(own_forwards):
                time, (_kind, stage, number) = own_forwards[f]
                if num_forwards[stage - 1] > number:
                    next_forward = time
            if i < len(own_inputs):
                time, (_kind, stage, number) = own_inputs[i]
                if num_forwards[stage] > number and num_inputs[stage + 1] > number:
                    next_inputs = time
            if next_forward < math.inf and f - w >= limit:
                next_forward = math.inf
                if w < i:
                    next_inputs = math.inf
            if next_forward < next_inputs:
                place[0] += 1
                action = own_forwards[f][1]
            elif next_inputs < math.inf:
                place[1] += 1
                action = own_inputs[i][1]
            elif w < i:
                place[2] += 1
                action = own_inputs[w][1]._replace(kind=W)
            else:
                continue
            row.append(action)
            actions.append(action)
        assert actions, "the order in which actions are due is not possible"
        for kind, stage, _number in actions:  # only now: results are there for the next time-step
            if kind is F:
                num_forwards[stage] += 1
            elif kind is I:
                num_inputs[stage] += 1
        num_left -= len(actions)
    return tuple(map(tuple, rows))


@_named(
    "LoopedZeroBubble",
    "interleaved_zero_bubble",
    purpose="Looped with a split backward: almost no bubble, for more memory.",
    form=_AROUND,
    infer=_infer_in_groups,
)
def looped_zero_bubble(layout: Layout) -> Rows:
    """Returns the rows of the LoopedZeroBubble schedule.

    Micro-batches go around in groups as in Looped. Device 0 can do its first backward after
    (v-1)g + 2(p-1) + 1 forwards. In Looped only device 0 holds so many stage activations; here every device
    may, as in ZeroBubbleH2. A device does input gradients as soon as it can, then forwards if it holds less
    than this limit, then weight gradients. With equal times, the bubble across steps is 0 for m >= 2p-1,
    2p-1-m time-steps for p <= m < 2p-1, and longer for m < p.

    Sources: the groups are from Megatron's interleaved schedule (arXiv 2104.04473), the split backward from
    Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241). PyTorch's
    ScheduleInterleavedZeroBubble holds less, (v-1)g + p on device 0, and has a larger bubble.

    Example:
      >>> print(schedules.format_rows(schedules.looped_zero_bubble(4, 2, device_mapping=[0, 1, 0, 1])))
      device 0: F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 I2.1 I0.0 I0.1 W2.1 W0.0 W0.1
      device 1: F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 I1.0 I1.1 W3.0 W3.1 W1.0 W1.1
    """
    groups, num_ipus = _find_groups(layout), layout.num_ipus
    due = [
        [
            *((0, action) for action in _group_by_group(I, stages[::-1], groups)),
            *((1, action) for action in _group_by_group(F, stages, groups)),
        ]
        for stages in layout.stages_of
    ]
    num_turns, size = len(layout.stages_of[0]), max(num_ipus, len(groups[0]))
    return _fill(due, limit=(num_turns - 1) * size + 2 * (num_ipus - 1) + 1)


# Split backwards of two stages on each device in a V shape: device r has the stages r (F, I, W) and 2p-1-r
# (f, i, w). So the first and the last stage are on the first device, and micro-batches turn on the last.


def _in_v(layout: Layout, find_pattern: Callable[[int, int], str]) -> Rows:
    """Makes rows of patterns of letters, each found from r and the number of devices after device r."""
    rows = []
    for ipu, (down, up) in enumerate(layout.stages_of):
        steps = {letter: (kind, down) for letter, kind in zip("FIW", (F, I, W), strict=True)}
        steps |= {letter.lower(): (kind, up) for letter, (kind, _down) in steps.items()}
        pattern = map(steps.__getitem__, find_pattern(ipu, layout.num_ipus - 1 - ipu))
        rows.append(number_actions(pattern, layout.num_micro_batches))
    return tuple(rows)


@_named(
    "ZeroBubbleV",
    "zbv",
    "v_zb",
    "zbv_zero_bubble",
    purpose="Split backward: almost no bubble, in Interleaved's memory.",
    form=_IN_V,
)
def zero_bubble_v(layout: Layout) -> Rows:
    """Returns the rows of the ZeroBubbleV schedule.

    It is ZB-V of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, section 6): two stages on
    each device in a V shape. With m >= 2p-1 and equal times, device r starts r time-steps after device 0,
    runs without a pause, and ends r time-steps after it: across steps there is no bubble. If m < 2p-1, the
    missing micro-batches are left out, and the bubble is 2(2p-1-m) time-steps. Each device holds up to 2p
    activations of such a stage, as much as device 0 with Interleaved.

    Example:
      >>> print(schedules.format_rows(schedules.zero_bubble_v(4, 2, device_mapping=[0, 1, 1, 0])))
      device 0: F0.0 F0.1 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 I0.1 W0.1
      device 1: F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1
    """
    num_steady = max(0, layout.num_micro_batches - 2 * layout.num_ipus + 1)

    def find_pattern(r: int, after: int) -> str:
        pattern = "F" * (2 * after + 1) + "fF" * r + "fiw" * (after + 1)
        pattern += "FIWfiw" * (num_steady + r) + "IWfiw" * after
        return pattern + "Ii" * r + "IW" * (after + 1) + "w" * r + "W" * r

    return _in_v(layout, find_pattern)


def _interlock(layout: Layout, down: int, pauses: tuple[int, int, int], limit: int) -> Rows:
    """Makes rows in which all micro-batches have the same timing, their block: see `v_half`.

    A hop takes one time-step up, and `down` down: for forwards of the first half of the stages and input
    gradients of the second one. `pauses` are the time-steps from the last action of each way to the first
    one of the next: on the last device, on the first one, and on the last one again.
    """
    last = layout.num_ipus - 1
    back = last * down + last + pauses[0] + pauses[1]  # when the last stage's input gradients are due
    due = []
    for ipu, (first_stage, last_stage) in enumerate(layout.stages_of):
        way_down, way_up = ipu * down, last * down + last - ipu
        block = (
            (F, first_stage, way_down),
            (F, last_stage, way_up + pauses[0]),
            (I, last_stage, back + way_down),
            (I, first_stage, back + way_up + pauses[2]),
        )
        due.append(
            sorted(
                (time_step + 6 * number, Action(kind, stage, number))
                for kind, stage, time_step in block
                for number in range(layout.num_micro_batches)
            )
        )
    return _fill(due, limit)


@_named("VHalf", purpose="Half of ZeroBubbleV's memory, for a small bubble.", form=_IN_V)
def v_half(layout: Layout) -> Rows:
    """Returns the rows of the VHalf schedule.

    Every micro-batch goes forward down and up the devices, and backward down and up, with the same timing,
    its block. Blocks start 6 time-steps apart, 3 for each of a device's stages. A block's actions on one
    device are at different time-steps modulo 6, so that blocks interlock. Idle time is filled with weight
    gradients. The longer a block, the more activations are held: in VMin each hop takes one time-step, in
    VHalf hops down take two, which shortens the bubble at both ends of a step.

    A device holds at most 2 ((p+2) // 2) stage activations, half of ZeroBubbleV's and 1 or 2. With equal
    times, p > 1 and m >= p, the bubble, also across steps, is 3p-4 of 6m time-steps if p is odd, and
    max(3p-6, 1) if p is even. If times are not equal, every block has a bubble.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), whose search
    finds blocks; the distances here are our own, the least with which no two places are equal.

    Example:
      >>> print(schedules.format_rows(schedules.v_half(4, 2, device_mapping=[0, 1, 1, 0])))
      device 0: F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1
      device 1: F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W1.0 W2.1 W1.1
    """
    pauses = (2, 1, 1) if layout.num_ipus % 2 else (4, 1, 5)
    return _interlock(layout, 2, pauses, limit=2 * ((layout.num_ipus + 2) // 2))


@_named("VMin", purpose="A third of ZeroBubbleV's memory, for a larger bubble.", form=_IN_V)
def v_min(layout: Layout) -> Rows:
    """Returns the rows of the VMin schedule.

    It has the shortest blocks: see `v_half`. A device holds at most 2 ((p+4) // 3) stage activations, a
    third of ZeroBubbleV's and 2 at most. With equal times, p > 1 and m >= p, the bubble, also across steps,
    is 4p-3 of 6m time-steps if 3 divides p, and 4p-5 otherwise.

    Example:
      >>> print(schedules.format_rows(schedules.v_min(4, 2, device_mapping=[0, 1, 1, 0])))
      device 0: F0.0 F3.0 I3.0 F0.1 W3.0 I0.0 W0.0 F3.1 I3.1 W3.1 I0.1 W0.1
      device 1: F1.0 F2.0 I2.0 I1.0 F1.1 F2.1 W2.0 W1.0 I2.1 I1.1 W2.1 W1.1
    """
    pauses = (1, 1 if layout.num_ipus % 3 else 3, 1)
    return _interlock(layout, 1, pauses, limit=2 * ((layout.num_ipus + 4) // 3))


@_named(
    "DualPipeV",
    purpose="For slow transfers: forwards alternate with backwards of other micro-batches.",
    form=_IN_V,
)
def dual_pipe_v(layout: Layout) -> Rows:
    """Returns the rows of the DualPipeV schedule.

    Forwards alternate with backwards of other micro-batches. DeepSeek computes one while it sends data of
    the other; here they run one after the other. So the schedule suits slow transfers.

    With equal times, the bubble per step is p-1 time-steps if m >= 2p; with fewer micro-batches, where the
    missing ones are left out of the rows, it is longer. (DeepSeek's formula is (p-1)(F&B + B - 3W), where
    F&B is the time of an overlapped pair.) A device holds up to 2p+1 activations of such a stage.

    Source: DualPipe of DeepSeek-V3 (arXiv 2412.19437), cut in half as DualPipeV in DualPipe's repository.

    Example:
      >>> print(schedules.format_rows(schedules.dual_pipe_v(4, 2, device_mapping=[0, 1, 1, 0])))
      device 0: F0.0 F0.1 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 I0.1 W0.1
      device 1: F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1
    """
    num_steady = max(0, layout.num_micro_batches - 2 * layout.num_ipus)

    def find_pattern(r: int, after: int) -> str:
        pattern = "FF" * after + "Ff" * (r + 1) + "iwf" * after
        pattern += "FiwfIW" * (num_steady + r + 1) + "iwfIW" * after
        # Then backwards of both stages in turn. From the middle on, weight gradients come later.
        pattern += ("iwIW" * (r + 1))[: 2 * (r + 1)] + ("iI" * (r + 1))[r + 1 :]
        weights = ("wW" * (r + 1))[r + 1 :] + "W" * after
        return pattern + "".join(f"{letter}I" for letter in weights[:after]) + weights[after:]

    return _in_v(layout, find_pattern)


SCHEDULES = tuple(_schedules)
