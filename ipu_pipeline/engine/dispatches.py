"""From a schedule to dispatches: what the executor starts, with every argument's place worked out.

An action of a schedule says which stage handles which micro-batch. A dispatch is a jitted program for it,
a `Template`, which is the same for all micro-batches: arguments that stay the same during a step are filled
in once a step, the others are numbers of slots. A micro-batch's values live in a list of slots, from the
program that makes them to the last one that reads them.

One dispatch is one program here. The last stage's forward and backward are one program, dispatched where
the schedule has the forward; a backward with nothing to compute is no dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.compiler_options import CompilerOptions, Options
from ipu_pipeline.engine.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.engine.placement import Row
from ipu_pipeline.engine.programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.schedules import ActionKind, Timetable
from ipu_pipeline.engine.traced import Source, TracedPipeline
from ipu_pipeline.engine.updates import UpdateProgram

__all__ = ["FeedSlot", "Plan", "Template", "jit_update", "make_plan"]


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
      accumulators: keys of accumulators, in the order of the first arguments and the first results.
      variables: (argument, full name).
      inputs: (argument, position among the pipeline's inputs).
      keys: arguments that are the session's key.
      execution_counts: arguments that are the execution count.
      micro_batches: arguments that are the micro-batch's index.
      accumulated: arguments that are the number of micro-batches in the accumulators.
      loss_scales: arguments that are the scale that the backward starts from.
      loads: (argument, slot).
      is_backward: whether it is a backward, which reads what its stage has kept.
      kept: slots that only backwards read from now on.
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
    loss_scales: tuple[int, ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    is_backward: bool = False
    kept: tuple[int, ...] = ()
    assigned: tuple[tuple[int, str], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    transfers: tuple[tuple[Row, tuple[int, ...], tuple[int, ...]], ...] = ()
    releases: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step dispatches.

    Attributes:
      templates: one per program, by its kind and stage.
      last_forward: the template of the last stage's forward.
      collected: where the last stage's outputs, and then the loss, are found after it: ("slot", number) or
        ("input", position).
      feed_slots: where a micro-batch's leaves go.
      slot_rows: the row that each of a micro-batch's slots is on.
    """

    templates: dict[tuple[ActionKind, int], Template]
    last_forward: Template
    collected: tuple[tuple[str, int], ...]
    feed_slots: tuple[FeedSlot, ...]
    slot_rows: tuple[Row, ...]

    @property
    def num_slots(self) -> int:
        """How many slots a micro-batch has."""
        return len(self.slot_rows)

    def dispatches(self, timetable: Timetable) -> list[tuple[Template, int]]:
        """(template, micro-batch), in the order in which the host starts them."""
        return [
            (self.templates[action.kind, action.stage], action.micro_batch)
            for action in timetable.order
            if (action.kind, action.stage) in self.templates
        ]


def make_plan(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    rows: Sequence[Row],
    accumulator_keys: Mapping[tuple[int, str], str],
    options: CompilerOptions,
    donate_accumulators: bool = True,
) -> Plan:
    """Works out the templates of a step's dispatches, and jits the programs.

    Args:
      traced: the pipeline.
      programs: the programs of its stages.
      rows: where its stages live.
      accumulator_keys: (stage, full name of a variable) -> the key of the accumulator.
      options: XLA's, per program.
      donate_accumulators: whether programs that accumulate may destroy what they add to.

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
        own_options = options.of_forward if kind is ActionKind.FORWARD else options.of_backward
        function = _jit(program, rows[index], own_options(index), donate_accumulators)
        template = _make_template(traced, rows, index, program, function, slots, accumulator_keys)
        template.index = number
        template.loads = loads[number]
        template.is_backward = kind is ActionKind.BACKWARD
        template.releases = tuple(slot for slot, last in last_use.items() if last == number)
        templates[kind, index] = template
    last_forward = templates[ActionKind.FORWARD, last_stage]
    _find_kept(list(templates.values()), {slot: last_forward for kind, slot in collected if kind == "slot"})
    return Plan(
        templates=templates,
        last_forward=last_forward,
        collected=tuple(collected),
        feed_slots=tuple(
            FeedSlot(source.index, row, number)
            for (kind, source, row), number in slots.numbers.items()
            if kind == "value" and source.kind == "element"
        ),
        slot_rows=tuple(_row_of(rows, key) for key in slots.numbers),
    )


def _find_kept(templates: Sequence[Template], collected: Mapping[int, Template]) -> None:
    """Enters into forwards which slots are kept for backwards from then on.

    Args:
      templates: in the order of a micro-batch.
      collected: the slots that are read as what the last stage returns, and after which forward.
    """
    last_forward: dict[int, Template] = {}  # slot -> the last forward that makes or reads it
    for template in templates:
        if not template.is_backward:
            used = [slot for _place, slot in (*template.loads, *template.stores)]
            used += [slot for _row, _results, slots in template.transfers for slot in slots]
            last_forward.update(dict.fromkeys(used, template))
    last_forward.update(collected)
    read = {slot for t in templates if t.is_backward for _place, slot in t.loads}
    for slot in sorted(read & last_forward.keys()):
        last_forward[slot].kept += (slot,)


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


def _row_of(rows: Sequence[Row], key: tuple[str, Any, Any]) -> Row:
    """The row of the slot with a name, see `_slot_key`."""
    kind, of, third = key
    if kind == "value":
        assert isinstance(third, Row)
        return third
    index: int = of if kind == "residual" else of.stage
    return rows[index]


def _make_template(
    traced: TracedPipeline,
    rows: Sequence[Row],
    index: int,
    program: StageProgram,
    function: Callable[..., list[Any]],
    slots: _SlotNumbers,
    accumulator_keys: Mapping[tuple[int, str], str],
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
        function=function,
        row=row,
        num_arguments=len(program.arguments),
        accumulators=tuple(
            accumulator_keys[index, names[v.index]] for v in program.arguments[: program.num_accumulators]
        ),
        variables=tuple(
            (place, names[program.arguments[place].index]) for place in places(ValueKind.VARIABLE)
        ),
        inputs=tuple((place, s.index) for place, s in input_sources if s.kind == "input"),
        keys=places(ValueKind.KEY),
        execution_counts=places(ValueKind.EXECUTION_COUNT),
        micro_batches=places(ValueKind.MICRO_BATCH),
        accumulated=places(ValueKind.ACCUMULATED),
        loss_scales=places(ValueKind.LOSS_SCALE),
        assigned=tuple(assigned),
        stores=tuple(stores),
        transfers=tuple(
            (target, tuple(p for p, _slot in moved), tuple(slot for _p, slot in moved))
            for target, moved in transfers.items()
        ),
    )


def _jit(
    program: StageProgram, row: Row, options: Options, donate_accumulators: bool
) -> Callable[..., list[Any]]:
    def function(*arguments: Any) -> list[Any]:
        return program.function(*arguments)

    function.__name__ = function.__qualname__ = program.name
    jitted: Callable[..., list[Any]] = jax.jit(
        function,
        donate_argnums=tuple(range(program.num_accumulators)) if donate_accumulators else (),
        out_shardings=row.replicated,
        compiler_options=dict(options),
    )
    return jitted


def jit_update(
    program: UpdateProgram, later: Sequence[UpdateProgram], donate: bool, options: Options
) -> Callable[..., list[Any]]:
    """Jits an update program. It donates the accumulators, and with `donate` what else it returns anew.

    Args:
      program: the program.
      later: those that run after it, whose arguments must still be there.
      donate: whether the variables and optimizer state may be destroyed.
      options: XLA's.
    """

    def is_donated(value: UpdateValue) -> bool:
        if value not in program.results or any(value in other.arguments for other in later):
            return False
        return donate or value.kind == UpdateKind.GRADIENT

    donated = tuple(place for place, value in enumerate(program.arguments) if is_donated(value))

    def function(*arguments: Any) -> list[Any]:
        return program.function(*arguments)

    function.__name__ = function.__qualname__ = program.name
    jitted: Callable[..., list[Any]] = jax.jit(
        function, donate_argnums=donated, compiler_options=dict(options)
    )
    return jitted
