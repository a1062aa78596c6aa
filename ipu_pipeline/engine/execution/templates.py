"""The programs of a step, ready to be started: jitted, with every argument's place worked out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import NamedSharding

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, over_replicas
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind, Bindings
from ipu_pipeline.engine.programs.stage_programs import StageProgram
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.updates.accumulators import variable_of
from ipu_pipeline.engine.updates.cutting import UpdateProgram
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = [
    "Send",
    "SlotNumbers",
    "Template",
    "TemplateMaker",
    "Work",
    "jit_update",
    "slot_of",
]


class Send(NamedTuple):
    """A transfer from a program's group to another one, once the program has been started."""

    target: DeviceGroup  # the other group
    sources: tuple[int, ...]  # slots on the program's group
    targets: tuple[int, ...]  # slots on the other group
    releases: tuple[int, ...] = ()  # sources that are not read afterwards


@dataclass(eq=False)
class Template:
    """One program, ready for dispatch."""

    index: int  # its place among the plan's templates
    kind: ActionKind  # what it does
    stage: int  # the stage that it belongs to
    group: DeviceGroup  # where it runs
    options: Options  # XLA's options that it is compiled with
    jitted: Any  # the jitted program
    # its results' shardings; with tensor parallelism, a list with None for those left to the
    # partitioner
    shardings: Any
    function: Callable[..., list[Any]]  # the function to call: `jitted`, or what was loaded in its place
    # jits it for all replicas at once, for a group with their devices
    jit_jointly: Callable[[DeviceGroup], Callable[..., list[Any]]]
    arguments: tuple[Binding, ...]  # what the arguments stand for; accumulators come first
    results: tuple[tuple[Binding, ...], ...]  # what each result stands for, accumulators first again
    loads: tuple[tuple[int, int], ...]  # (argument, slot)
    stores: tuple[tuple[int, int], ...]  # (result, slot)
    sends: tuple[Send, ...]  # what goes to other groups
    # slots that are not read after it, without the slots that it sends: these are in `sends`
    releases: tuple[int, ...] = ()
    # slots that it reads, which are free after all their readers; see `Plan.num_readers`
    shared: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()  # slots that only backwards read once it and its sends have been started

    def taken(self, kind: BindingKind) -> tuple[tuple[int, Any], ...]:
        """The arguments of a kind, as (place, the binding's key)."""
        return tuple((place, own.key) for place, own in enumerate(self.arguments) if own.kind is kind)

    def given(self, kind: BindingKind) -> tuple[tuple[int, Any], ...]:
        """The results of a kind, as (place, the binding's key)."""
        return tuple(
            (place, own.key)
            for place, bound in enumerate(self.results)
            for own in bound
            if own.kind is kind
        )

    def reads(self, name: str) -> tuple[int, ...]:
        """The places of the arguments that are a given variable."""
        return tuple(place for place, read in self.taken(BindingKind.VARIABLE) if read == name)

    @functools.cached_property
    def accumulators(self) -> tuple[str, ...]:
        """The keys of the accumulators that it adds to, in the order of its first arguments and results."""
        return tuple(key for _place, key in self.taken(BindingKind.ACCUMULATOR))


class Work(NamedTuple):
    """A stage's program for one kind of action."""

    kind: ActionKind
    stage: int
    program: StageProgram


Slot: TypeAlias = "tuple[Binding, DeviceGroup]"  # a value of a micro-batch, on the group where it is read


class SlotNumbers:
    """Numbers slots as they are asked for."""

    def __init__(self) -> None:
        self.numbers: dict[Slot, int] = {}

    def __getitem__(self, slot: Slot) -> int:
        return self.numbers.setdefault(slot, len(self.numbers))

    def __contains__(self, slot: Slot) -> bool:
        return slot in self.numbers


def slot_of(binding: Binding, group: DeviceGroup) -> Slot | None:
    """The slot of a value on a group; None if it is in no slot."""
    return (binding, group) if binding.is_of_micro_batch else None


@dataclass(frozen=True, eq=False)
class TemplateMaker:
    """Makes templates of the programs of a pipeline."""

    bindings: Bindings  # what the programs' values stand for
    groups: Sequence[DeviceGroup]  # where the stages live
    slots: SlotNumbers  # the numbers of the slots that are read
    # how a variable and its gradient lie on a group, by its full name
    sharding_of: Callable[[str, DeviceGroup], NamedSharding]

    def make(self, index: int, work: Work, options: Options, donate_accumulators: bool) -> Template:
        """Jits a program. Returns its template."""
        group = self.groups[work.stage]
        arguments = self.bindings.arguments(work.stage, work.program)
        results = self.bindings.results(work.stage, work.program)
        accumulating = [place for place, own in enumerate(arguments) if own.kind is BindingKind.ACCUMULATOR]
        assert accumulating == list(range(len(accumulating)))
        loads = [(place, slot_of(binding, group)) for place, binding in enumerate(arguments)]
        num_donated = len(accumulating) if donate_accumulators else 0
        shardings = self._shardings(results, group)
        jitted = _jit(work.program, group, num_donated, options, shardings)
        stores, sends = self._find_stored(results, group)
        return Template(
            index=index,
            kind=work.kind,
            stage=work.stage,
            group=group,
            options=options,
            jitted=jitted,
            shardings=shardings,
            function=jitted,
            jit_jointly=lambda group: _jit(
                work.program, group, num_donated, options, group.replicated, is_joint=True
            ),
            arguments=tuple(arguments),
            results=tuple(map(tuple, results)),
            loads=tuple((place, self.slots[slot]) for place, slot in loads if slot is not None),
            stores=stores,
            sends=sends,
        )

    def _shardings(self, results: Sequence[Sequence[Binding]], group: DeviceGroup) -> Any:
        """The shardings of a program's results; None where they are left to the partitioner."""
        if not group.is_divided:
            return group.replicated

        def of(bound: Sequence[Binding]) -> NamedSharding | None:
            for binding in bound:
                if binding.kind is BindingKind.ASSIGNED:
                    return self.sharding_of(binding.key, group)
                if binding.kind is BindingKind.ACCUMULATOR:
                    return self.sharding_of(variable_of(binding.key), group)
            return None if all(b.kind is BindingKind.RESIDUAL for b in bound) else group.replicated

        return list(map(of, results))

    def _find_stored(
        self, results: Sequence[Sequence[Binding]], group: DeviceGroup
    ) -> tuple[tuple[tuple[int, int], ...], tuple[Send, ...]]:
        """Finds the results that go to slots, and the transfers from these slots to other groups."""
        stores: list[tuple[int, int]] = []
        sent: dict[DeviceGroup, list[tuple[int, int]]] = {}
        for place, bound in enumerate(results):
            for binding in bound:
                targets = [
                    target
                    for target in dict.fromkeys(self.groups)
                    if binding.is_of_micro_batch and (binding, target) in self.slots
                ]
                if targets:
                    stores.append((place, self.slots[binding, group]))
                for target in targets:
                    if target is not group:
                        slots = self.slots[binding, group], self.slots[binding, target]
                        sent.setdefault(target, []).append(slots)
        sends = [
            Send(target, tuple(source for source, _to in pairs), tuple(to for _source, to in pairs))
            for target, pairs in sent.items()
        ]
        return tuple(stores), tuple(sends)


def _jit(
    program: StageProgram,
    group: DeviceGroup,
    num_donated: int,
    options: Options,
    shardings: Any,
    is_joint: bool = False,
) -> Callable[..., list[Any]]:
    """Jits a stage's program, which may destroy its first arguments; a joint one for all of a group."""
    called = over_replicas(group.replicated.mesh, program.function) if is_joint else program.function

    def function(*arguments: Any) -> list[Any]:
        made: list[Any] = called(*arguments)
        return made

    function.__name__ = function.__qualname__ = program.name
    jitted: Callable[..., list[Any]] = jax.jit(
        function,
        donate_argnums=tuple(range(num_donated)),
        out_shardings=shardings,
        compiler_options=dict(options),
    )
    return jitted


def jit_update(
    program: UpdateProgram,
    later: Sequence[UpdateProgram],
    donate: bool,
    may_raise: bool,
    options: Options,
    results: Mapping[str, Any],
) -> Callable[..., list[Any]]:
    """Jits an update program, which may reuse the memory of the accumulators."""

    def is_donated(value: UpdateValue) -> bool:
        if value not in program.results or any(value in other.arguments for other in later):
            return False
        return not may_raise and (donate or value.kind == UpdateKind.GRADIENT)

    donated = tuple(place for place, value in enumerate(program.arguments) if is_donated(value))

    def function(*arguments: Any) -> list[Any]:
        return program.function(*arguments)

    function.__name__ = function.__qualname__ = program.name
    jitted: Callable[..., list[Any]] = jax.jit(
        function, donate_argnums=donated, compiler_options=dict(options), **results
    )
    return jitted
