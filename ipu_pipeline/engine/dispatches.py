"""From a schedule to dispatches: what the executor starts, with every argument's place worked out.

An action of a schedule says which stage handles which micro-batch. A dispatch is a jitted program, a
`Template`, which is the same for all micro-batches: arguments that stay the same during a step are filled
in once a step, the others are numbers of slots. A micro-batch's values live in a list of slots, from the
program that makes them to the last one that reads them. Where programs handle chunks of micro-batches, a
chunk takes a micro-batch's place here.

A dispatch is one action, or two of a stage that follow each other on an IPU: the backward of one
micro-batch and the forward of a later one, fused. The last stage's forward and backward are one program,
dispatched where the schedule has the forward; a backward with nothing to compute is no dispatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from ipu_pipeline.engine.compiler_options import CompilerOptions, Options
from ipu_pipeline.engine.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.engine.placement import Row
from ipu_pipeline.engine.programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.schedules import Action, ActionKind, Timetable
from ipu_pipeline.engine.simulator import Unit, simulate
from ipu_pipeline.engine.traced import Source, TracedPipeline
from ipu_pipeline.engine.updates import UpdateProgram

__all__ = ["Dispatch", "FeedSlot", "Part", "Plan", "Template", "find_units", "jit_update", "make_plan"]


class FeedSlot(NamedTuple):
    """Where a leaf of a micro-batch goes: on which stage's row, into which slot."""

    leaf: int
    row: Row
    slot: int


@dataclass(eq=False)
class Part:
    """What a dispatch does for one micro-batch.

    Attributes:
      kind: forward or backward.
      stage: whose.
      micro_batches: arguments that are the micro-batch's index.
      accumulated: arguments that are the number of micro-batches in the accumulators.
      loads: (argument, slot).
      stores: (result, slot).
      transfers: (row, results, slots).
      releases: slots that nobody reads afterwards.
      kept: slots that only backwards read from now on.
    """

    kind: ActionKind
    stage: int
    micro_batches: tuple[int, ...] = ()
    accumulated: tuple[int, ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    transfers: tuple[tuple[Row, tuple[int, ...], tuple[int, ...]], ...] = ()
    releases: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()


@dataclass(eq=False)
class Template:
    """One program, ready for dispatch.

    Attributes:
      index: its place among the plan's templates.
      function: the jitted program.
      row: where it runs.
      num_arguments: how many there are.
      parts: one, or of a fused program two, the backward and then the forward.
      accumulators: keys of accumulators, in the order of the first arguments and the first results.
      variables: (argument, full name).
      inputs: (argument, position among the pipeline's inputs).
      keys: arguments that are the session's key.
      execution_counts: arguments that are the execution count.
      loss_scales: arguments that are the scale that the backward starts from.
      assigned: (result, full name).
    """

    index: int
    function: Callable[..., list[Any]]
    row: Row
    num_arguments: int
    parts: tuple[Part, ...]
    accumulators: tuple[str, ...]
    variables: tuple[tuple[int, str], ...] = ()
    inputs: tuple[tuple[int, int], ...] = ()
    keys: tuple[int, ...] = ()
    execution_counts: tuple[int, ...] = ()
    loss_scales: tuple[int, ...] = ()
    assigned: tuple[tuple[int, str], ...] = ()


# What runs, and the micro-batch of each part.
Dispatch: TypeAlias = "tuple[Template, tuple[int, ...]]"


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step dispatches.

    Attributes:
      templates: one per program, by the kinds of its parts and its stage.
      last_forward: the template of the last stage's forward.
      collected: where the last stage's outputs, and then the loss, are found after it: ("slot", number) or
        ("input", position).
      feed_slots: where a micro-batch's leaves go.
      slot_rows: the row that each of a micro-batch's slots is on.
      is_fused: whether there are fused programs.
      levels: the level of each stage.
    """

    templates: dict[tuple[tuple[ActionKind, ...], int], Template]
    last_forward: Template
    collected: tuple[tuple[str, int], ...]
    feed_slots: tuple[FeedSlot, ...]
    slot_rows: tuple[Row, ...]
    is_fused: bool
    levels: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """How many slots a micro-batch has."""
        return len(self.slot_rows)

    def dispatches(self, timetable: Timetable) -> list[Dispatch]:
        """What the host starts, in that order."""
        is_known = self.templates.__contains__
        if self.is_fused:
            rows = find_units(timetable, is_known)
            order: Sequence[Unit] = simulate(rows, self.levels, lambda _unit: 1.0).order
        else:
            order = [(action,) for action in timetable.order]
        found = []
        for unit in order:
            template = self.templates.get(_key(unit))
            if template is not None:
                found.append((template, tuple(action.micro_batch for action in unit)))
        return found


def _key(unit: Unit) -> tuple[tuple[ActionKind, ...], int]:
    return tuple(action.kind for action in unit), unit[0].stage


def find_units(
    timetable: Timetable, is_known: Callable[[tuple[tuple[ActionKind, ...], int]], bool]
) -> list[list[Unit]]:
    """The actions of each IPU, in order, with a stage's backward and the forward behind it as one.

    Args:
      timetable: the schedule.
      is_known: whether there is a program for a backward and forward of a stage, named as in
        `Plan.templates`.
    """
    rows: list[list[Unit]] = []
    for row in timetable.rows:
        units: list[Unit] = []
        for action in row:
            if action is None:
                continue
            unit: Unit = (action,)
            if units and len(units[-1]) == 1 and _may_fuse(units[-1][0], action):
                both: Unit = (units[-1][0], action)
                if is_known(_key(both)):
                    units.pop()
                    unit = both
            units.append(unit)
        rows.append(units)
    return rows


def _may_fuse(first: Action, second: Action) -> bool:
    kinds = (first.kind, second.kind)
    return first.stage == second.stage and kinds == (ActionKind.BACKWARD, ActionKind.FORWARD)


class _Work(NamedTuple):
    """A stage's program for one direction."""

    kind: ActionKind
    stage: int
    program: StageProgram


def make_plan(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    rows: Sequence[Row],
    accumulator_keys: Mapping[tuple[int, str], str],
    options: CompilerOptions,
    donate_accumulators: bool = True,
    is_fused: bool = False,
) -> Plan:
    """Works out the templates of a step's dispatches, and jits the programs.

    Args:
      traced: the pipeline.
      programs: the programs of its stages.
      rows: where its stages live.
      accumulator_keys: (stage, full name of a variable) -> the key of the accumulator.
      options: XLA's, per program.
      donate_accumulators: whether programs that accumulate may destroy what they add to.
      is_fused: whether stages also have a program of a backward and a forward.

    Returns:
      The plan.
    """
    order = [_Work(ActionKind.FORWARD, index, stage.forward) for index, stage in enumerate(programs)]
    for index, stage in reversed(list(enumerate(programs))):
        if stage.backward is not None:
            order.append(_Work(ActionKind.BACKWARD, index, stage.backward))
    slots = _SlotNumbers()

    # Who reads which value where. Within a micro-batch the programs run in this order, whatever the
    # schedule, so a slot is free after the last program here that reads it.
    last_use: dict[int, int] = {}
    for number, work in enumerate(order):
        for value in work.program.arguments:
            key = _slot_key(traced, rows, work.stage, value)
            if key is not None:
                last_use[slots[key]] = number
    last_stage = len(programs) - 1
    collected: list[tuple[str, int]] = []
    for source in [*traced.outputs, *([] if traced.loss is None else [traced.loss])]:
        if source.kind == "input":
            collected.append(("input", source.index))
            continue
        slot = slots["value", source, rows[last_stage]]
        collected.append(("slot", slot))
        last_use[slot] = max(last_use.get(slot, 0), last_stage)

    make = functools.partial(_make_template, traced, rows, slots, accumulator_keys)
    jit = functools.partial(_jit, donate_accumulators=donate_accumulators)
    templates: dict[tuple[tuple[ActionKind, ...], int], Template] = {}
    for work in order:
        own = options.of_forward if work.kind is ActionKind.FORWARD else options.of_backward
        templates[(work.kind,), work.stage] = make([work], functools.partial(jit, options=own(work.stage)))
    alone = [template.parts[0] for template in templates.values()]
    for number, part in enumerate(alone):
        part.releases = tuple(slot for slot, last in last_use.items() if last == number)
    last_forward = templates[(ActionKind.FORWARD,), last_stage]
    _find_kept(alone, {slot: last_forward.parts[0] for kind, slot in collected if kind == "slot"})
    if is_fused:
        for works in _find_fused(order, options):
            both = functools.partial(jit, options=options.of_backward(works[0].stage))
            template = make(works, both)
            for part in template.parts:
                same = templates[(part.kind,), part.stage].parts[0]
                part.releases, part.kept = same.releases, same.kept
            templates[tuple(work.kind for work in works), works[0].stage] = template
    for number, template in enumerate(templates.values()):
        template.index = number
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
        is_fused=is_fused,
        levels=traced.levels,
    )


def _find_fused(order: Sequence[_Work], options: CompilerOptions) -> list[list[_Work]]:
    """The pairs of a backward and a forward that one program can do: both have the same options."""
    forwards = {work.stage: work for work in order if work.kind is ActionKind.FORWARD}
    return [
        [work, forwards[work.stage]]
        for work in order
        if work.kind is ActionKind.BACKWARD
        and dict(options.of_backward(work.stage)) == dict(options.of_forward(work.stage))
    ]


def _find_kept(parts: Sequence[Part], collected: Mapping[int, Part]) -> None:
    """Enters into forwards which slots are kept for backwards from then on.

    Args:
      parts: in the order of a micro-batch.
      collected: the slots that are read as what the last stage returns, and after which forward.
    """
    last_forward: dict[int, Part] = {}  # slot -> the last forward that makes or reads it
    for part in parts:
        if part.kind is ActionKind.FORWARD:
            used = [slot for _place, slot in (*part.loads, *part.stores)]
            used += [slot for _row, _results, slots in part.transfers for slot in slots]
            last_forward.update(dict.fromkeys(used, part))
    last_forward.update(collected)
    read = {slot for p in parts if p.kind is ActionKind.BACKWARD for _place, slot in p.loads}
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
    slots: _SlotNumbers,
    accumulator_keys: Mapping[tuple[int, str], str],
    works: Sequence[_Work],
    jit: Callable[..., Callable[..., list[Any]]],
) -> Template:
    """The template of one program, or of two of the same stage as one."""
    index = works[0].stage
    stage, row = traced.stages[index], rows[index]
    names = [spec.name for spec in stage.variables]

    # An argument that is the same for all micro-batches is given once.
    labels: list[Value] = []
    places_of: list[list[int]] = []
    for work in works:
        own = []
        for value in work.program.arguments:
            differs = value.kind in _DIFFERENT or _slot_key(traced, rows, index, value) is not None
            if not differs and value in labels:
                own.append(labels.index(value))
            else:
                own.append(len(labels))
                labels.append(value)
        places_of.append(own)

    parts = []
    assigned: list[tuple[int, str]] = []
    first_result = 0
    for work, own in zip(works, places_of, strict=True):
        stores, transfers, now_assigned = _results(traced, rows, slots, work, first_result)
        assigned += [(place, names[position]) for place, position in now_assigned]
        arguments = list(zip(own, work.program.arguments, strict=True))
        loads = [(place, _slot_key(traced, rows, index, value)) for place, value in arguments]
        parts.append(
            Part(
                kind=work.kind,
                stage=index,
                micro_batches=tuple(p for p, v in arguments if v.kind is ValueKind.MICRO_BATCH),
                accumulated=tuple(p for p, v in arguments if v.kind is ValueKind.ACCUMULATED),
                loads=tuple((place, slots[key]) for place, key in loads if key is not None),
                stores=stores,
                transfers=transfers,
            )
        )
        first_result += len(work.program.results)

    def places(kind: ValueKind) -> tuple[int, ...]:
        return tuple(place for place, value in enumerate(labels) if value.kind is kind)

    inputs = [(place, stage.inputs[labels[place].index]) for place in places(ValueKind.INPUT)]
    accumulators = places(ValueKind.ACCUMULATOR)
    assert accumulators == tuple(range(len(accumulators)))
    return Template(
        index=-1,
        function=jit(works, places_of, row, len(accumulators)),
        row=row,
        num_arguments=len(labels),
        parts=tuple(parts),
        accumulators=tuple(accumulator_keys[index, names[labels[place].index]] for place in accumulators),
        variables=tuple((place, names[labels[place].index]) for place in places(ValueKind.VARIABLE)),
        inputs=tuple((place, source.index) for place, source in inputs if source.kind == "input"),
        keys=places(ValueKind.KEY),
        execution_counts=places(ValueKind.EXECUTION_COUNT),
        loss_scales=places(ValueKind.LOSS_SCALE),
        assigned=tuple(assigned),
    )


_DIFFERENT = (ValueKind.MICRO_BATCH, ValueKind.ACCUMULATED)


def _results(
    traced: TracedPipeline, rows: Sequence[Row], slots: _SlotNumbers, work: _Work, first: int
) -> tuple[tuple[tuple[int, int], ...], tuple[Any, ...], list[tuple[int, int]]]:
    """Where a program's results go.

    Args:
      traced: the pipeline.
      rows: where its stages live.
      slots: the numbers of those that somebody reads.
      work: the program.
      first: the number of its first result.

    Returns:
      `Part.stores`, `Part.transfers`, and (result, position among the stage's variables) of those assigned.
    """
    index = work.stage
    stage, row = traced.stages[index], rows[index]
    stores: list[tuple[int, int]] = []
    assigned: list[tuple[int, int]] = []
    transfers: dict[Row, list[tuple[int, int]]] = {}

    def send(place: int, slot: int, target: Row) -> None:
        if target is row:
            stores.append((place, slot))
        else:
            transfers.setdefault(target, []).append((place, slot))

    for place, values in enumerate(work.program.results, first):
        for value in values:
            if value.kind is ValueKind.ASSIGNED:
                assigned.append((place, value.index))
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
    moved = tuple(
        (target, tuple(place for place, _slot in pairs), tuple(slot for _place, slot in pairs))
        for target, pairs in transfers.items()
    )
    return tuple(stores), moved, assigned


def _jit(
    works: Sequence[_Work],
    places_of: Sequence[Sequence[int]],
    row: Row,
    num_accumulators: int,
    *,
    options: Options,
    donate_accumulators: bool,
) -> Callable[..., list[Any]]:
    """Jits one program, or several as one; `places_of` are the arguments of each."""

    def function(*arguments: Any) -> list[Any]:
        results: list[Any] = []
        for work, places in zip(works, places_of, strict=True):
            results += work.program.function(*(arguments[place] for place in places))
        return results

    function.__name__ = function.__qualname__ = "_and_".join(work.program.name for work in works)
    jitted: Callable[..., list[Any]] = jax.jit(
        function,
        donate_argnums=tuple(range(num_accumulators)) if donate_accumulators else (),
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
