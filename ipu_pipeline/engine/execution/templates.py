"""The programs of a step, ready to be started: jitted, with every argument's place worked out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import NamedSharding

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.rows import Row, over_replicas
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind, Bindings
from ipu_pipeline.engine.programs.stage_programs import StageProgram, ValueKind
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.updates.accumulators import variable_of
from ipu_pipeline.engine.updates.cutting import UpdateProgram
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = [
    "Joint",
    "SlotNumbers",
    "Template",
    "TemplateMaker",
    "Work",
    "jit_update",
    "slot_of",
]


@dataclass(frozen=True, eq=False)
class Joint:
    """A program that runs on all replicas at once.

    Attributes:
      jitted: the program; its arguments and results are one for all, see `rows.join`.
      row: where it runs.
    """

    jitted: Callable[..., list[Any]]
    row: Row


@dataclass(eq=False)
class Template:
    """One program, ready for dispatch.

    Attributes:
      index: its place among the plan's templates.
      kind: forward or backward.
      stage: whose.
      jitted: the jitted program.
      shardings: of its results; where an IPU is several devices a list, with None for what the partitioner
        decides on.
      function: what is called: that, or what was loaded in its place.
      jit_jointly: jits it for all replicas at once, for a row with their devices.
      row: where it runs.
      num_arguments: how many there are.
      accumulators: keys of accumulators, in the order of the first arguments and the first results.
      variables: (argument, full name).
      inputs: (argument, position among the pipeline's inputs).
      keys: arguments that are the session's key.
      execution_counts: arguments that are the execution count.
      update_counts: arguments that are the number of weight updates.
      loss_scales: arguments that are the scale that the backward starts from.
      assigned: (result, full name).
      enqueued: (result, number of the leaf).
      micro_batches: arguments that are the micro-batch's index.
      accumulated: arguments that are the number of micro-batches in the accumulators.
      loads: (argument, slot).
      stores: (result, slot).
      transfers: (row, results, slots).
      releases: slots that nobody reads afterwards.
      kept: slots that only backwards read from now on.
      joint: what is called for all replicas at once, in place of `function` for each; None for most.
    """

    index: int
    kind: ActionKind
    stage: int
    jitted: Any
    shardings: Any
    function: Callable[..., list[Any]]
    jit_jointly: Callable[[Row], Callable[..., list[Any]]]
    row: Row
    num_arguments: int
    accumulators: tuple[str, ...]
    variables: tuple[tuple[int, str], ...] = ()
    inputs: tuple[tuple[int, int], ...] = ()
    keys: tuple[int, ...] = ()
    execution_counts: tuple[int, ...] = ()
    update_counts: tuple[int, ...] = ()
    loss_scales: tuple[int, ...] = ()
    assigned: tuple[tuple[int, str], ...] = ()
    enqueued: tuple[tuple[int, int], ...] = ()
    micro_batches: tuple[int, ...] = ()
    accumulated: tuple[int, ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    transfers: tuple[tuple[Row, tuple[int, ...], tuple[int, ...]], ...] = ()
    releases: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    joint: Joint | None = None


class Work(NamedTuple):
    """A stage's program for one direction."""

    kind: ActionKind
    stage: int
    program: StageProgram


Slot: TypeAlias = "tuple[Binding, Row]"  # a value of a micro-batch, on the row where it is read


class SlotNumbers:
    """Numbers for slots, given out as they are asked for."""

    def __init__(self) -> None:
        self.numbers: dict[Slot, int] = {}

    def __getitem__(self, slot: Slot) -> int:
        return self.numbers.setdefault(slot, len(self.numbers))

    def __contains__(self, slot: Slot) -> bool:
        return slot in self.numbers


def slot_of(binding: Binding, row: Row) -> Slot | None:
    """What names the slot of a value on a row; None if it is in no slot."""
    return (binding, row) if binding.is_of_micro_batch else None


@dataclass(frozen=True, eq=False)
class TemplateMaker:
    """Makes templates of the programs of a pipeline.

    Attributes:
      bindings: what the programs' values stand for.
      rows: where the stages live.
      slots: the numbers of the slots that somebody reads.
      sharding_of: how a variable and its gradient lie on a row, by its full name.
    """

    bindings: Bindings
    rows: Sequence[Row]
    slots: SlotNumbers
    sharding_of: Callable[[str, Row], NamedSharding]

    def make(self, index: int, work: Work, options: Options, donate_accumulators: bool) -> Template:
        """The template of a program, which it jits.

        Args:
          index: the template's.
          work: the program.
          options: XLA's.
          donate_accumulators: whether the program may destroy what it adds to.
        """
        row = self.rows[work.stage]
        arguments = list(enumerate(self.bindings.arguments(work.stage, work.program)))

        def named(kind: BindingKind) -> tuple[tuple[int, Any], ...]:
            return tuple((place, binding.key) for place, binding in arguments if binding.kind is kind)

        def scalars(kind: ValueKind) -> tuple[int, ...]:
            return tuple(place for place, key in named(BindingKind.SCALAR) if key is kind)

        accumulators = named(BindingKind.ACCUMULATOR)
        assert [place for place, _key in accumulators] == list(range(len(accumulators)))
        loads = [(place, slot_of(binding, row)) for place, binding in arguments]
        num_donated = len(accumulators) if donate_accumulators else 0
        shardings = self._shardings(work, row)
        jitted = _jit(work.program, row, num_donated, options, shardings)
        template = Template(
            index=index,
            kind=work.kind,
            stage=work.stage,
            jitted=jitted,
            shardings=shardings,
            function=jitted,
            jit_jointly=lambda row: _jit(
                work.program, row, num_donated, options, row.replicated, is_joint=True
            ),
            row=row,
            num_arguments=len(arguments),
            accumulators=tuple(key for _place, key in accumulators),
            variables=named(BindingKind.VARIABLE),
            inputs=named(BindingKind.INPUT),
            keys=scalars(ValueKind.KEY),
            execution_counts=scalars(ValueKind.EXECUTION_COUNT),
            update_counts=scalars(ValueKind.UPDATE_COUNT),
            loss_scales=scalars(ValueKind.LOSS_SCALE),
            micro_batches=scalars(ValueKind.MICRO_BATCH),
            accumulated=scalars(ValueKind.ACCUMULATED),
            loads=tuple((place, self.slots[slot]) for place, slot in loads if slot is not None),
        )
        self._add_results(template, work)
        return template

    def _shardings(self, work: Work, row: Row) -> Any:
        """Where the results of a program lie; None where the partitioner decides, of what only it reads."""
        if not row.is_divided:
            return row.replicated

        def of(bound: Sequence[Binding]) -> NamedSharding | None:
            for binding in bound:
                if binding.kind is BindingKind.ASSIGNED:
                    return self.sharding_of(binding.key, row)
                if binding.kind is BindingKind.ACCUMULATOR:
                    return self.sharding_of(variable_of(binding.key), row)
            return None if all(b.kind is BindingKind.RESIDUAL for b in bound) else row.replicated

        return [of(bound) for bound in self.bindings.results(work.stage, work.program)]

    def _add_results(self, template: Template, work: Work) -> None:
        """Enters where a program's results go."""
        row = template.row
        stores: list[tuple[int, int]] = []
        assigned: list[tuple[int, str]] = []
        enqueued: list[tuple[int, int]] = []
        transfers: dict[Row, list[tuple[int, int]]] = {}
        for place, bound in enumerate(self.bindings.results(work.stage, work.program)):
            for binding in bound:
                if binding.kind is BindingKind.ASSIGNED:
                    assigned.append((place, binding.key))
                if binding.kind is BindingKind.ENQUEUED:
                    enqueued.append((place, binding.key))
                if not binding.is_of_micro_batch:
                    continue
                for target in dict.fromkeys(self.rows):
                    if (binding, target) not in self.slots:
                        continue
                    slot = self.slots[binding, target]
                    if target is row:
                        stores.append((place, slot))
                    else:
                        transfers.setdefault(target, []).append((place, slot))
        template.stores = tuple(stores)
        template.assigned = tuple(assigned)
        template.enqueued = tuple(enqueued)
        template.transfers = tuple(
            (target, tuple(place for place, _slot in pairs), tuple(slot for _place, slot in pairs))
            for target, pairs in transfers.items()
        )


def _jit(
    program: StageProgram,
    row: Row,
    num_donated: int,
    options: Options,
    shardings: Any,
    is_joint: bool = False,
) -> Callable[..., list[Any]]:
    """Jits a stage's program, which may destroy its first arguments; if it is joint, for all of a row."""
    called = over_replicas(row.replicated.mesh, program.function) if is_joint else program.function

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
    """Jits an update program, which may reuse the memory of the accumulators.

    Args:
      program: the program.
      later: those that run after it, whose arguments must still be there.
      donate: whether the variables and optimizer state may be destroyed, too.
      may_raise: whether Python may raise meanwhile: then nothing is destroyed.
      options: XLA's.
      results: arguments of `jax.jit` that say where results lie.
    """

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
