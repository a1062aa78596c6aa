"""The programs of a column, and the slots of what they exchange.

A program is a `Template`, which is the same for all micro-batches: arguments that stay the same during a
step are filled in once a step, the others are numbers of slots. A micro-batch's values live in a list of
slots, from the program that makes them to the last one that reads them. A value that goes to another group
has a slot on each. Where programs handle chunks of micro-batches, a chunk takes a micro-batch's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import NamedSharding

from ipu_pipeline.engine.devices.compiler_options import CompilerOptions
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.execution.templates import SlotNumbers, Template, TemplateMaker, Work, slot_of
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind, Bindings
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.tracing.traced import TracedPipeline

__all__ = ["FeedSlot", "Plan", "make_plan"]

_BACK = frozenset(ActionKind) - {ActionKind.FORWARD}


class FeedSlot(NamedTuple):
    """Where a leaf of a micro-batch goes: the stage whose group it is put on, and the slot."""

    leaf: int
    group: DeviceGroup
    slot: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step dispatches."""

    templates: dict[tuple[ActionKind, int], Template]  # one per program, by its kind and stage
    last_forward: Template  # the template of the last stage's forward
    # where the last stage's outputs, and then the loss, are found after it: ("slot", number) or ("input",
    # position)
    collected: tuple[tuple[str, int], ...]
    feed_slots: tuple[FeedSlot, ...]  # where a micro-batch's leaves go
    slot_groups: tuple[DeviceGroup, ...]  # the group that each of a micro-batch's slots is on
    slot_values: tuple[Binding, ...]  # what each of them holds
    # slots whose last reader depends on the schedule -> the number of programs that read them
    num_readers: Mapping[int, int]

    @property
    def num_slots(self) -> int:
        """The number of slots of a micro-batch."""
        return len(self.slot_groups)


def make_plan(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    groups: Sequence[DeviceGroup],
    accumulator_keys: Mapping[tuple[int, str], str],
    options: CompilerOptions,
    sharding_of: Callable[[str, DeviceGroup], NamedSharding],
    donate_accumulators: bool = True,
) -> Plan:
    """Works out the templates of a step's dispatches, and jits the programs."""
    order = [Work(ActionKind.FORWARD, index, stage.forward) for index, stage in enumerate(programs)]
    for index, stage in reversed(list(enumerate(programs))):
        if stage.backward is not None:
            kind = ActionKind.INPUT_GRADIENTS if stage.is_halved else ActionKind.BACKWARD
            order.append(Work(kind, index, stage.backward))
        if stage.weights is not None:
            order.append(Work(ActionKind.WEIGHT_GRADIENTS, index, stage.weights))
    slots, bindings = SlotNumbers(), Bindings(traced, accumulator_keys)

    # Within a micro-batch the programs run in this order, whatever the schedule, but for weight gradients.
    # So a slot is free after the last program here that reads it, or after the last of several.
    readers: dict[int, list[int]] = {}
    for number, work in enumerate(order):
        for binding in bindings.arguments(work.stage, work.program):
            read = slot_of(binding, groups[work.stage])
            if read is not None and number not in readers.setdefault(slots[read], []):
                readers[slots[read]].append(number)
    shared = {slot: own for slot, own in readers.items() if _may_end_anywhere(order, own)}
    last_use = {slot: len(order) if slot in shared else own[-1] for slot, own in readers.items()}
    last_stage = len(programs) - 1
    collected: list[tuple[str, int]] = []
    for source in [*traced.outputs, *([] if traced.loss is None else [traced.loss])]:
        if source.kind == "input":
            collected.append(("input", source.index))
            continue
        slot = slots[Binding(BindingKind.VALUE, source), groups[last_stage]]
        collected.append(("slot", slot))
        last_use[slot] = max(last_use.get(slot, 0), last_stage)

    make = TemplateMaker(bindings, groups, slots, sharding_of).make
    templates: dict[tuple[ActionKind, int], Template] = {}
    for number, work in enumerate(order):
        own = options.of_forward if work.kind is ActionKind.FORWARD else options.of_backward
        template = make(number, work, own(work.stage), donate_accumulators)
        _add_releases(template, number, last_use)
        template.shared = tuple(slot for slot, own_readers in shared.items() if number in own_readers)
        templates[work.kind, work.stage] = template
    last_forward = templates[ActionKind.FORWARD, last_stage]
    _find_kept(list(templates.values()), {slot: last_forward for kind, slot in collected if kind == "slot"})
    return Plan(
        templates=templates,
        last_forward=last_forward,
        collected=tuple(collected),
        feed_slots=tuple(
            FeedSlot(binding.key.index, group, number)
            for (binding, group), number in slots.numbers.items()
            if binding.kind is BindingKind.VALUE and binding.key.kind == "element"
        ),
        slot_groups=tuple(group for _binding, group in slots.numbers),
        slot_values=tuple(binding for binding, _group in slots.numbers),
        num_readers={slot: len(own) for slot, own in shared.items()},
    )


def _may_end_anywhere(order: Sequence[Work], readers: Sequence[int]) -> bool:
    """Whether the schedule says which of a slot's readers is the last.

    A stage's weight gradients come after its input gradients, and so after all that these wait for.
    """
    behind = [order[number] for number in readers]
    return any(
        one.kind is ActionKind.WEIGHT_GRADIENTS and other.stage < one.stage and other.kind in _BACK
        for one in behind
        for other in behind
    )


def _add_releases(template: Template, number: int, last_use: Mapping[int, int]) -> None:
    """Enters which slots are free behind a template, and behind what it sends: the last send frees them."""
    sent = {slot for send in template.sends for slot in send.sources}
    ended = [slot for slot, last in last_use.items() if last == number]
    template.releases = tuple(slot for slot in ended if slot not in sent)
    left = {slot for slot in sent if last_use.get(slot, number) == number}
    sends = []
    for send in reversed(template.sends):
        own = tuple(slot for slot in dict.fromkeys(send.sources) if slot in left)
        left -= set(own)
        sends.append(send._replace(releases=own))
    template.sends = tuple(reversed(sends))


def _find_kept(templates: Sequence[Template], collected: Mapping[int, Template]) -> None:
    """Enters into forwards which slots are kept for backwards from then on."""
    last_forward: dict[int, Template] = {}  # slot -> the last forward that makes or reads it
    for template in templates:
        if template.kind is ActionKind.FORWARD:
            used = [slot for _place, slot in (*template.loads, *template.stores)]
            used += [slot for send in template.sends for slot in send.targets]
            last_forward.update(dict.fromkeys(used, template))
    last_forward.update(collected)
    read = {slot for t in templates if t.kind is not ActionKind.FORWARD for _place, slot in t.loads}
    for slot in sorted(read & last_forward.keys()):
        last_forward[slot].kept += (slot,)
