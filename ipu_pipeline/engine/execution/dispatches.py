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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ipu_pipeline.engine.devices.compiler_options import CompilerOptions
from ipu_pipeline.engine.devices.rows import Row
from ipu_pipeline.engine.execution.templates import (
    Part,
    SlotNumbers,
    Template,
    TemplateMaker,
    Work,
    jit,
    slot_of,
)
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind, Bindings
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.simulator import simulate
from ipu_pipeline.engine.schedules.units import Unit, find_units, key_of
from ipu_pipeline.engine.tracing.traced import TracedPipeline

__all__ = ["Dispatch", "FeedSlot", "Plan", "make_plan"]


class FeedSlot(NamedTuple):
    """Where a leaf of a micro-batch goes: on which stage's row, into which slot."""

    leaf: int
    row: Row
    slot: int


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
            template = self.templates.get(key_of(unit))
            if template is not None:
                found.append((template, tuple(action.micro_batch for action in unit)))
        return found


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
    order = [Work(ActionKind.FORWARD, index, stage.forward) for index, stage in enumerate(programs)]
    for index, stage in reversed(list(enumerate(programs))):
        if stage.backward is not None:
            order.append(Work(ActionKind.BACKWARD, index, stage.backward))
    slots, bindings = SlotNumbers(), Bindings(traced, accumulator_keys)

    # Who reads which value where. Within a micro-batch the programs run in this order, whatever the
    # schedule, so a slot is free after the last program here that reads it.
    last_use: dict[int, int] = {}
    for number, work in enumerate(order):
        for binding in bindings.arguments(work.stage, work.program):
            read = slot_of(binding, rows[work.stage])
            if read is not None:
                last_use[slots[read]] = number
    last_stage = len(programs) - 1
    collected: list[tuple[str, int]] = []
    for source in [*traced.outputs, *([] if traced.loss is None else [traced.loss])]:
        if source.kind == "input":
            collected.append(("input", source.index))
            continue
        slot = slots[Binding(BindingKind.VALUE, source), rows[last_stage]]
        collected.append(("slot", slot))
        last_use[slot] = max(last_use.get(slot, 0), last_stage)

    make = TemplateMaker(bindings, rows, slots).make
    jitted = functools.partial(jit, donate_accumulators=donate_accumulators)
    templates: dict[tuple[tuple[ActionKind, ...], int], Template] = {}
    for work in order:
        own = options.of_forward if work.kind is ActionKind.FORWARD else options.of_backward
        templates[(work.kind,), work.stage] = make(
            [work], functools.partial(jitted, options=own(work.stage))
        )
    alone = [template.parts[0] for template in templates.values()]
    for number, part in enumerate(alone):
        part.releases = tuple(slot for slot, last in last_use.items() if last == number)
    last_forward = templates[(ActionKind.FORWARD,), last_stage]
    _find_kept(alone, {slot: last_forward.parts[0] for kind, slot in collected if kind == "slot"})
    if is_fused:
        for works in _find_fused(order, options):
            both = functools.partial(jitted, options=options.of_backward(works[0].stage))
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
            FeedSlot(binding.key.index, row, number)
            for (binding, row), number in slots.numbers.items()
            if binding.kind is BindingKind.VALUE and binding.key.kind == "element"
        ),
        slot_rows=tuple(row for _binding, row in slots.numbers),
        is_fused=is_fused,
        levels=traced.levels,
    )


def _find_fused(order: Sequence[Work], options: CompilerOptions) -> list[list[Work]]:
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
