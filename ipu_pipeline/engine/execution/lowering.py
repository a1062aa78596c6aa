"""From a schedule to the actions of a step.

The schedule is a checked list of forwards and backwards. Each becomes the program's `Compute`, with what
must come before it and behind it; the last stage's forward and backward are one program, which stands where
the schedule has the forward, and a backward with nothing to compute is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from ipu_pipeline.engine.devices.rows import Row
from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.replicas import Replicas
from ipu_pipeline.engine.execution.steps import (
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
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases

__all__ = ["Lowering"]

_MAX_ORDERS = 8  # that are kept, where the number of micro-batches is known at run only


class Lowering:
    """Makes the actions of steps, and keeps them."""

    def __init__(
        self,
        columns: Sequence[Column],
        replicas: Replicas,
        make_timetable: Callable[[int], Timetable],
        phases: ExecutionPhases | None,
        waits: bool,
    ) -> None:
        """Makes the actions of each program."""
        self._columns, self._replicas, self._phases, self._waits = columns, replicas, phases, waits
        self._make_timetable = make_timetable
        self._templates = columns[0].plan.templates
        self._observer: Observer | None = None
        self._actions = {key: self._make_actions(key) for key in self._templates}
        self._rows = self._find_reduced() if len(columns) > 1 else {}
        self._known: dict[tuple[int, bool], Order] = {}

    @property
    def micro_batch(self) -> Order:
        """One micro-batch or chunk, program after program, in whatever order the schedule has them."""
        return self._order([(key, 0) for key in self._templates])

    def observe(self, observer: Observer | None) -> None:
        """Has somebody told from the next step on; None: nobody any more."""
        self._observer = observer
        self._known.clear()

    def find(self, num_chunks: int, reduces: bool = True) -> Order:
        """The actions of a step; what a weight update needs is joined if one follows."""
        key = num_chunks, reduces
        if key not in self._known:
            if len(self._known) == _MAX_ORDERS:
                del self._known[next(iter(self._known))]
            self._known[key] = self._make(num_chunks, reduces)
        return self._known[key]

    def planned(self, num_chunks: int) -> Order:
        """The actions of the micro-batches of a step, for who only counts: nobody is told or waited for."""
        return self._order(self._dispatched(num_chunks), self._phases)

    def _make(self, num_chunks: int, reduces: bool) -> Order:
        dispatched, rows = self._dispatched(num_chunks), self._rows if reduces else {}
        last: dict[tuple[ActionKind, int], int] = {}  # program -> where it is dispatched for the last time
        for number, (key, _chunk) in enumerate(dispatched):
            last[key] = number
        ends: dict[int, list[Row]] = {}
        left = []
        for row, keys in rows.items():
            # What Python may raise comes before memory is taken; and where several processes join what they
            # have, starting that may be to wait for all of them, so that all else is started before.
            if self._waits or self._phases is not None or row.is_joined or not keys:
                left.append(row)
            else:
                ends.setdefault(max(last[key] for key in keys), []).append(row)
        order = self._order(dispatched, self._phases, self._observer, ends)
        return [*order, *([(wait, 0)] if self._waits else []), *((Reduce(row), 0) for row in left)]

    def _dispatched(self, num_chunks: int) -> list[tuple[tuple[ActionKind, int], int]]:
        order = self._make_timetable(num_chunks).order
        found = [((action.kind, action.stage), action.micro_batch) for action in order]
        return [one for one in found if one[0] in self._templates]

    def _order(
        self,
        dispatched: Iterable[tuple[tuple[ActionKind, int], int]],
        phases: ExecutionPhases | None = None,
        observer: Observer | None = None,
        ends: Mapping[int, Sequence[Row]] = MappingProxyType({}),
    ) -> list[tuple[StepAction, int]]:
        """The actions of programs; behind some of them, by number, rows are joined."""
        order: list[tuple[StepAction, int]] = []
        observers: dict[tuple[ActionKind, int], StepAction] = {}
        if observer is not None:
            for key in self._templates:
                templates = tuple(column.plan.templates[key] for column in self._columns)
                observers[key] = Observe(observer, templates)
        levels = self._columns[0].residence.traced.levels
        fed, now = set[int](), None
        for number, (key, chunk) in enumerate(dispatched):
            if chunk not in fed:
                fed.add(chunk)
                order.append((feed, chunk))
            if phases is not None:
                phase = chunk, *phases.find(key[0], levels[key[1]])
                if now is not None and now != phase:
                    order.append((end_phase, now[0]))
                now = phase
            order += [(action, chunk) for action in self._actions[key]]
            if observers:
                order.append((observers[key], chunk))
            order += [(Reduce(row), 0) for row in ends.get(number, ())]
        if now is not None:
            order.append((end_phase, now[0]))
        return order

    def _make_actions(self, key: tuple[ActionKind, int]) -> list[StepAction]:
        """A program with what goes before and behind it."""
        columns, residence = self._columns, self._replicas.residence
        templates = tuple(column.plan.templates[key] for column in columns)
        first, gathered = templates[0], residence.sharded
        found: list[StepAction] = []
        names = [name for _place, name in first.taken(BindingKind.VARIABLE) if name in gathered]
        if names:
            found.append(Gather(first.stage, tuple(names)))
        kind = ComputeTogether if first.index in self._replicas.joint else Compute
        found.append(
            kind(
                tuple(
                    make_dispatch(template, column.plan, column.residence, gathered, self._phases)
                    for template, column in zip(templates, columns, strict=True)
                )
            )
        )
        for number in range(len(first.sends)):
            found.append(_make_send(columns, templates, number))
        if self._phases is None and columns[0].residence.offloads_activations and first.kept:
            found.append(Store(tuple(map(_find_kept, columns, templates))))
        return found

    def _find_reduced(self) -> dict[Row, set[tuple[ActionKind, int]]]:
        """All rows, and the programs that make what is joined there; of some variables none does."""
        replicas = self._replicas
        rows, owners = replicas.residence.rows, replicas.residence.traced.owners
        found: dict[Row, set[tuple[ActionKind, int]]] = {row: set() for row in rows}
        for key, template in self._templates.items():
            stages = [replicas.stage_of(accumulator) for accumulator in template.accumulators]
            stages += [owners[name] for _place, name in template.given(BindingKind.ASSIGNED)]
            for stage in stages:
                found[rows[stage]].add(key)
        return found


def _make_send(columns: Sequence[Column], templates: Sequence[Template], number: int) -> SendOn:
    sends = tuple(template.sends[number] for template in templates)
    kind, stage, target = templates[0].kind.name, templates[0].stage, sends[0].target.ipu
    edge = f"{kind} of stage {stage} to {target}"
    homes = [column.residence for column in columns]
    tags = tuple(functools.partial(home.tag, edge) if home.has_peers else None for home in homes)
    return SendOn(sends, tags)


def _find_kept(column: Column, template: Template) -> dict[Row, list[int]]:
    of_rows: dict[Row, list[int]] = {}
    for slot in template.kept:
        of_rows.setdefault(column.plan.slot_rows[slot], []).append(slot)
    return of_rows
