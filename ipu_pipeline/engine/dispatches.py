"""From a schedule to dispatches: what the executor starts, with every argument's place worked out.

An action of a schedule says which stage handles which micro-batch. A dispatch is a jitted program for it,
a `Template`, which is the same for all micro-batches: arguments that stay the same during a step are filled
in once a step, the others are numbers of slots. A micro-batch's values live in a list of slots, from the
program that makes them to the last one that reads them.

One dispatch is one program here. The last stage's forward and backward are one program, dispatched where
the schedule has the forward; a backward with nothing to compute is no dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.placement import Row
from ipu_pipeline.engine.programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.schedules import ActionKind, Timetable
from ipu_pipeline.engine.stages import Source, TracedPipeline

__all__ = ["FeedSlot", "Plan", "Template", "make_plan"]


class FeedSlot(NamedTuple):
    """Where a leaf of a micro-batch goes: on which stage's row, into which slot."""

    leaf: int
    row: Row
    slot: int


@dataclass(eq=False)
class Template:
    """One program, ready for dispatch.

    Attributes:
      index: its place among the plan's templates.
      function: the jitted program.
      row: where it runs.
      num_arguments: how many there are.
      accumulators: full names, in the order of the first arguments and the first results.
      variables: (argument, full name).
      inputs: (argument, position among the pipeline's inputs).
      keys: arguments that are the session's key.
      execution_counts: arguments that are the execution count.
      micro_batches: arguments that are the micro-batch's index.
      accumulated: arguments that are the number of micro-batches in the accumulators.
      loads: (argument, slot).
      assigned: (result, full name).
      stores: (result, slot).
      transfers: (row, results, slots).
      releases: slots that nobody reads afterwards.
    """

    index: int
    function: Callable[..., list[Any]]
    row: Row
    num_arguments: int
    accumulators: tuple[str, ...]
    variables: tuple[tuple[int, str], ...] = ()
    inputs: tuple[tuple[int, int], ...] = ()
    keys: tuple[int, ...] = ()
    execution_counts: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    accumulated: tuple[int, ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    assigned: tuple[tuple[int, str], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    transfers: tuple[tuple[Row, tuple[int, ...], tuple[int, ...]], ...] = ()
    releases: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """The dispatches of a step.

    Attributes:
      templates: one per program.
      dispatches: (template, micro-batch), in the order in which the host starts them.
      last_forward: the template of the last stage's forward.
      collected: where the last stage's outputs, and then the loss, are found after it: ("slot", number) or
        ("input", position).
      feed_slots: where a micro-batch's leaves go.
      num_slots: how many slots a micro-batch has.
    """

    templates: tuple[Template, ...]
    dispatches: list[tuple[Template, int]]
    last_forward: Template
    collected: tuple[tuple[str, int], ...]
    feed_slots: tuple[FeedSlot, ...]
    num_slots: int


def make_plan(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    rows: Sequence[Row],
    timetable: Timetable,
) -> Plan:
    """Works out the dispatches of a step, and jits the programs.

    Args:
      traced: the pipeline.
      programs: the programs of its stages.
      rows: where its stages live.
      timetable: the checked schedule.

    Returns:
      The plan.
    """
    order = [(ActionKind.FORWARD, index, stage.forward) for index, stage in enumerate(programs)]
    for index, stage in reversed(list(enumerate(programs))):
        if stage.backward is not None:
            order.append((ActionKind.BACKWARD, index, stage.backward))
    slots = _SlotNumbers()

    # Who reads which value where. Within a micro-batch the programs run in this order, whatever the
    # schedule, so a slot is free after the last program here that reads it.
    last_use: dict[int, int] = {}
    loads: list[tuple[tuple[int, int], ...]] = []
    for number, (_kind, index, program) in enumerate(order):
        loaded = []
        for place, value in enumerate(program.arguments):
            key = _slot_key(traced, rows, index, value)
            if key is not None:
                loaded.append((place, slots[key]))
                last_use[slots[key]] = number
        loads.append(tuple(loaded))
    last_stage = len(programs) - 1
    collected: list[tuple[str, int]] = []
    for source in [*traced.outputs, *([] if traced.loss is None else [traced.loss])]:
        if source.kind == "input":
            collected.append(("input", source.index))
            continue
        slot = slots["value", source, rows[last_stage]]
        collected.append(("slot", slot))
        last_use[slot] = max(last_use.get(slot, 0), last_stage)

    templates: dict[tuple[ActionKind, int], Template] = {}
    for number, (kind, index, program) in enumerate(order):
        template = _make_template(traced, rows, index, program, slots)
        template.index = number
        template.loads = loads[number]
        template.releases = tuple(slot for slot, last in last_use.items() if last == number)
        templates[kind, index] = template
    return Plan(
        templates=tuple(templates.values()),
        dispatches=[
            (templates[action.kind, action.stage], action.micro_batch)
            for action in timetable.order
            if (action.kind, action.stage) in templates
        ],
        last_forward=templates[ActionKind.FORWARD, last_stage],
        collected=tuple(collected),
        feed_slots=tuple(
            FeedSlot(source.index, row, number)
            for (kind, source, row), number in slots.numbers.items()
            if kind == "value" and source.kind == "element"
        ),
        num_slots=len(slots.numbers),
    )


class _SlotNumbers:
    """Numbers for slots, given out as they are asked for."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __getitem__(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def __contains__(self, key: Any) -> bool:
        return key in self.numbers


def _slot_key(traced: TracedPipeline, rows: Sequence[Row], index: int, value: Value) -> Any:
    """What names the slot of an argument of stage `index`; None if it is in no slot."""
    stage = traced.stages[index]
    if value.kind is ValueKind.INPUT and stage.inputs[value.index].kind != "input":
        return ("value", stage.inputs[value.index], rows[index])
    if value.kind is ValueKind.RESIDUAL:
        return ("residual", index, value.index)
    if value.kind is ValueKind.COTANGENT:
        return ("cotangent", stage.outputs[value.index], value.consumer)
    return None


def _make_template(
    traced: TracedPipeline, rows: Sequence[Row], index: int, program: StageProgram, slots: _SlotNumbers
) -> Template:
    stage = traced.stages[index]
    row = rows[index]
    names = [spec.name for spec in stage.variables]

    def places(kind: ValueKind) -> tuple[int, ...]:
        return tuple(p for p, value in enumerate(program.arguments) if value.kind is kind)

    stores: list[tuple[int, int]] = []
    assigned: list[tuple[int, str]] = []
    transfers: dict[Row, list[tuple[int, int]]] = {}

    def send(place: int, slot: int, target: Row) -> None:
        if target is row:
            stores.append((place, slot))
        else:
            transfers.setdefault(target, []).append((place, slot))

    for place, values in enumerate(program.results):
        for value in values:
            if value.kind is ValueKind.ASSIGNED:
                assigned.append((place, names[value.index]))
            elif value.kind is ValueKind.RESIDUAL:
                send(place, slots["residual", index, value.index], row)
            elif value.kind is ValueKind.OUTPUT:
                source = Source("output", value.index, index)
                for target in dict.fromkeys(rows):
                    if ("value", source, target) in slots:
                        send(place, slots["value", source, target], target)
            elif value.kind is ValueKind.INPUT_COTANGENT:
                source = stage.inputs[value.index]
                if ("cotangent", source, index) in slots:
                    send(place, slots["cotangent", source, index], rows[source.stage])

    input_sources = [
        (place, stage.inputs[program.arguments[place].index]) for place in places(ValueKind.INPUT)
    ]
    return Template(
        index=-1,
        function=_jit(program, row),
        row=row,
        num_arguments=len(program.arguments),
        accumulators=tuple(names[v.index] for v in program.arguments[: program.num_accumulators]),
        variables=tuple(
            (place, names[program.arguments[place].index]) for place in places(ValueKind.VARIABLE)
        ),
        inputs=tuple((place, s.index) for place, s in input_sources if s.kind == "input"),
        keys=places(ValueKind.KEY),
        execution_counts=places(ValueKind.EXECUTION_COUNT),
        micro_batches=places(ValueKind.MICRO_BATCH),
        accumulated=places(ValueKind.ACCUMULATED),
        assigned=tuple(assigned),
        stores=tuple(stores),
        transfers=tuple(
            (target, tuple(p for p, _slot in moved), tuple(slot for _p, slot in moved))
            for target, moved in transfers.items()
        ),
    )


def _jit(program: StageProgram, row: Row) -> Callable[..., list[Any]]:
    def function(*arguments: Any) -> list[Any]:
        return program.function(*arguments)

    function.__name__ = function.__qualname__ = program.name
    jitted: Callable[..., list[Any]] = jax.jit(
        function,
        donate_argnums=tuple(range(program.num_accumulators)),
        out_shardings=row.replicated,
    )
    return jitted
