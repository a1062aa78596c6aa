"""Lowers a schedule to the actions of a step.

The schedule is a checked list of forwards and backwards, or halves of these. Each becomes the program's
`Compute`, with what must come before and after it. The last stage's forward and backward are one program,
which stands where the schedule has the forward; with halves, this program does the first one. A backward or
half with nothing to compute is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.replicas import Replicas
from ipu_pipeline.engine.execution.steps import (
    ALL,
    Compute,
    ComputeTogether,
    Gather,
    Observe,
    Observer,
    Order,
    Reduce,
    SendOn,
    StepAction,
    Store,
    end_phase,
    feed,
    make_dispatch,
    wait,
)
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.schedules.actions import Action, ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases

__all__ = ["Lowering", "ProgramKey"]

ProgramKey: TypeAlias = "tuple[ActionKind, int]"  # a program's kind and stage
_MAX_ORDERS = 8  # orders kept, where the number of micro-batches is only known when the pipeline runs


class Lowering:
    """Makes the actions of steps, and keeps them.

    Attributes:
      observer: is called after each program and its transfers; see `observe`.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        replicas: Replicas,
        make_timetable: Callable[[int], Timetable],
        phases: ExecutionPhases | None,
        waits: bool,
        actions: Mapping[ProgramKey, tuple[StepAction, ...]] | None = None,
        feed: StepAction = feed,
    ) -> None:
        """Makes the actions of each program, or takes those that are given.

        Args:
          columns: each runs the micro-batches of a replica.
          replicas: these columns.
          make_timetable: makes the timetable of a number of micro-batches or chunks.
          phases: the execution phases; None if there are none.
          waits: whether a step waits for its programs before the weight update.
          actions: the actions of each program; None: they are made for the columns.
          feed: takes a micro-batch or chunk from the feed.
        """
        self._columns, self._replicas, self._phases, self._waits = columns, replicas, phases, waits
        self._make_timetable, self._feed = make_timetable, feed
        self._templates = columns[0].plan.templates
        self.observer: Observer | None = None
        if actions is None:
            actions = {key: tuple(self._make_actions(key)) for key in self._templates}
        self._actions = actions
        self._groups = self._find_reduced() if len(columns) > 1 else {}
        self._known: dict[tuple[int, bool, int], Order] = {}

    @property
    def actions(self) -> Mapping[ProgramKey, tuple[StepAction, ...]]:
        """The actions of each program, by kind and stage, including those of the observer."""
        if (observer := self.observer) is None:
            return self._actions
        return {
            key: (*own, Observe(observer, tuple(column.plan.templates[key] for column in self._columns)))
            for key, own in self._actions.items()
        }

    @property
    def micro_batch(self) -> Order:
        """The actions of one micro-batch or chunk in the order of its programs, without a schedule."""
        return self._order([Action(kind, stage, 0) for kind, stage in self._templates], self._actions)

    def follow(self, make_timetable: Callable[[int], Timetable]) -> None:
        """Follows other timetables from the next step on."""
        self._make_timetable = make_timetable
        self._known.clear()

    def observe(self, observer: Observer | None) -> None:
        """Sets the observer, which is called from the next step on. None removes it."""
        self.observer = observer
        self._known.clear()

    def find(self, num_chunks: int, reduces: bool = True, num_done: int = 0) -> Order:
        """The actions of a step.

        Args:
          num_chunks: micro-batches or chunks of the step.
          reduces: whether a weight update follows.
          num_done: how many of them are complete already. The actions are those of the others, in the same
            order, and count from there.
        """
        key = num_chunks, reduces, num_done
        if key not in self._known:
            if len(self._known) == _MAX_ORDERS:
                del self._known[next(iter(self._known))]
            self._known[key] = self._make(num_chunks, reduces, num_done)
        return self._known[key]

    def planned(self, num_chunks: int) -> Order:
        """The actions of the micro-batches of a step, without observers and waits."""
        return self._order(self._make_timetable(num_chunks).order, self._actions, self._phases)

    def _make(self, num_chunks: int, reduces: bool, num_done: int) -> Order:
        scheduled: Sequence[Action] = self._make_timetable(num_chunks).order
        if num_done:
            others = (action for action in scheduled if action.micro_batch >= num_done)
            scheduled = [one._replace(micro_batch=one.micro_batch - num_done) for one in others]
        groups = self._groups if reduces else {}
        # Programs in which Python may raise come before memory is taken. Where several processes join their
        # values, starting that may wait for all of them, so everything else is started first.
        is_late = self._waits or self._phases is not None
        left = [group for group, keys in groups.items() if is_late or group.is_joined or not keys]
        waiting = {group: keys for group, keys in groups.items() if group not in left}
        ends: dict[int, tuple[StepAction, ...]] = {}  # number of a scheduled action -> joins behind it
        for number in reversed(range(len(scheduled) if waiting else 0)):
            key = scheduled[number].kind, scheduled[number].stage
            if ended := [group for group, keys in waiting.items() if key in keys]:
                ends[number] = tuple(map(Reduce, ended))
                waiting = {group: keys for group, keys in waiting.items() if group not in ended}
                if not waiting:
                    break
        order = self._order(scheduled, self.actions, self._phases, ends)
        last: list[StepAction] = [*([wait] if self._waits else []), *map(Reduce, left)]
        return [*order, (tuple(last), ALL)] if last else order

    def _order(
        self,
        scheduled: Iterable[Action],
        actions_of: Mapping[ProgramKey, tuple[StepAction, ...]],
        phases: ExecutionPhases | None = None,
        ends: Mapping[int, tuple[StepAction, ...]] = MappingProxyType({}),
    ) -> list[tuple[tuple[StepAction, ...], int]]:
        """The actions for a schedule. `ends`: by an action's number, further actions that follow it."""
        feeding = {key: (self._feed, *actions) for key, actions in actions_of.items()}
        order: list[tuple[tuple[StepAction, ...], int]] = []
        levels = self._columns[0].placement.traced.levels
        fed, now = set[int](), None
        for number, (kind, stage, chunk) in enumerate(scheduled):
            key = kind, stage
            if key not in actions_of:
                continue
            actions = actions_of[key]
            if chunk not in fed:
                fed.add(chunk)
                actions = feeding[key]
            if phases is not None:
                if actions is feeding[key]:  # while the previous phase still runs
                    order.append(((self._feed,), chunk))
                    actions = actions_of[key]
                phase = chunk, *phases.find(kind, levels[stage])
                if now is not None and now != phase:
                    order.append(((end_phase,), now[0]))
                now = phase
            order.append((actions, chunk))
            if number in ends:
                order.append((ends[number], ALL))
        if now is not None:
            order.append(((end_phase,), now[0]))
        return order

    def _make_actions(self, key: ProgramKey) -> list[StepAction]:
        """A program with what goes before and after it."""
        columns, placement = self._columns, self._replicas.placement
        templates = tuple(column.plan.templates[key] for column in columns)
        first, gathered = templates[0], placement.sharded
        found: list[StepAction] = []
        names = [name for _place, name in first.taken(BindingKind.VARIABLE) if name in gathered]
        if names:
            found.append(Gather(first.stage, tuple(names)))
        kind = ComputeTogether if first.index in self._replicas.joint else Compute
        found.append(
            kind(
                tuple(
                    make_dispatch(template, column.plan, column.placement, gathered, self._phases)
                    for template, column in zip(templates, columns, strict=True)
                )
            )
        )
        for number in range(len(first.sends)):
            found.append(_make_send(columns, templates, number))
        if self._phases is None and columns[0].placement.offloads_activations and first.kept:
            found.append(Store(tuple(map(_find_kept, columns, templates))))
        return found

    def _find_reduced(self) -> dict[DeviceGroup, set[ProgramKey]]:
        """All groups, each with the programs whose results are joined there, which may be none."""
        replicas = self._replicas
        groups, owners = replicas.placement.groups, replicas.placement.traced.owners
        found: dict[DeviceGroup, set[ProgramKey]] = {group: set() for group in groups}
        for key, template in self._templates.items():
            stages = [replicas.stage_of(accumulator) for accumulator in template.accumulators]
            stages += [owners[name] for _place, name in template.given(BindingKind.ASSIGNED)]
            for stage in stages:
                found[groups[stage]].add(key)
        return found


def _make_send(columns: Sequence[Column], templates: Sequence[Template], number: int) -> SendOn:
    sends = tuple(template.sends[number] for template in templates)
    kind, stage, target = templates[0].kind.name, templates[0].stage, sends[0].target.ipu
    edge = f"{kind} of stage {stage} to {target}"
    homes = [column.placement for column in columns]
    tags = tuple(functools.partial(home.tag, edge) if home.has_peers else None for home in homes)
    return SendOn(sends, tags)


def _find_kept(column: Column, template: Template) -> dict[DeviceGroup, list[int]]:
    of_groups: dict[DeviceGroup, list[int]] = {}
    for slot in template.kept:
        of_groups.setdefault(column.plan.slot_groups[slot], []).append(slot)
    return of_groups
