"""The programs of a step, ready to be started: jitted, with every argument's place worked out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.rows import Row
from ipu_pipeline.engine.programs.stage_programs import StageProgram, Value, ValueKind
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline
from ipu_pipeline.engine.updates.cutting import UpdateProgram
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = [
    "Part",
    "SlotNumbers",
    "Template",
    "Work",
    "jit",
    "jit_update",
    "make_template",
    "row_of",
    "slot_key",
]


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


class Work(NamedTuple):
    """A stage's program for one direction."""

    kind: ActionKind
    stage: int
    program: StageProgram


class SlotNumbers:
    """Numbers for slots, given out as they are asked for."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __getitem__(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def __contains__(self, key: Any) -> bool:
        return key in self.numbers


def slot_key(traced: TracedPipeline, rows: Sequence[Row], index: int, value: Value) -> Any:
    """What names the slot of an argument of stage `index`; None if it is in no slot."""
    stage = traced.stages[index]
    if value.kind is ValueKind.INPUT and stage.inputs[value.index].kind != "input":
        return ("value", stage.inputs[value.index], rows[index])
    if value.kind is ValueKind.RESIDUAL:
        return ("residual", index, value.index)
    if value.kind is ValueKind.COTANGENT:
        return ("cotangent", stage.outputs[value.index], value.consumer)
    return None


def row_of(rows: Sequence[Row], key: tuple[str, Any, Any]) -> Row:
    """The row of the slot with a name, see `slot_key`."""
    kind, of, third = key
    if kind == "value":
        assert isinstance(third, Row)
        return third
    index: int = of if kind == "residual" else of.stage
    return rows[index]


def make_template(
    traced: TracedPipeline,
    rows: Sequence[Row],
    slots: SlotNumbers,
    accumulator_keys: Mapping[tuple[int, str], str],
    works: Sequence[Work],
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
            differs = value.kind in _DIFFERENT or slot_key(traced, rows, index, value) is not None
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
        loads = [(place, slot_key(traced, rows, index, value)) for place, value in arguments]
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
    traced: TracedPipeline, rows: Sequence[Row], slots: SlotNumbers, work: Work, first: int
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


def jit(
    works: Sequence[Work],
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
