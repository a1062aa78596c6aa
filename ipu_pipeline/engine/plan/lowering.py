"""The code of one micro-batch and of a weight update, as if everything were on the devices of one replica.

Programs read and write `Value`s on the group of their stage. Where a value is made elsewhere, or lies in
host memory, is not asked here: passes put the copies in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from ipu_pipeline.engine.devices.device_groups import WHOLE, DeviceGroup
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.plan import programs as functions
from ipu_pipeline.engine.plan.plan import ALL, Instruction, Op, Program, Value
from ipu_pipeline.engine.plan.programs import Programs
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind, Bindings
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms, ValueKind
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.tracing.traced import Source
from ipu_pipeline.engine.updates.cutting import UpdateProgram
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = [
    "COUNTED",
    "Code",
    "Key",
    "Layout",
    "accumulator",
    "assigned",
    "list_programs",
    "lower_micro_batch",
    "lower_update",
    "source_at",
    "state_leaf",
    "update_results",
    "value_at",
]

Key: TypeAlias = "tuple[ActionKind, int]"  # a program's kind and stage
Code: TypeAlias = "dict[Key, list[Instruction]]"  # of a micro-batch, by program
COUNTED = (ValueKind.MICRO_BATCH, ValueKind.ACCUMULATED)  # scalars that each micro-batch has its own of


@dataclass(frozen=True, eq=False)
class Layout:
    """Where a step runs."""

    whole: StatePlacement  # where state lives, on the devices of all replicas
    homes: Sequence[StatePlacement]  # where each replica runs
    joins_assigned: bool = True  # whether variables that stages assign become the same in all replicas

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.homes)

    def home(self, name: str, replica: int = ALL) -> DeviceGroup:
        """Where a variable lives."""
        placement = self.whole if replica == ALL else self.homes[replica]
        return placement.groups[placement.traced.owners[name]]

    def stage_of(self, key: str) -> int:
        """The stage on whose group an accumulator lies."""
        extra = self.whole.accumulator_plan.extra
        return extra[key].stage if key in extra else self.whole.traced.owners[key]

    def variable_of(self, key: str) -> str:
        """The variable of an accumulator."""
        extra = self.whole.accumulator_plan.extra
        return extra[key].variable if key in extra else key

    def partition(self, value: Value) -> PartitionSpec:
        """How a value lies on the devices of an IPU while a program uses it."""
        what, name = value.what, None
        if isinstance(what, UpdateValue):
            return self.whole.partition_of_leaf(what.key) if what.kind == UpdateKind.STATE else WHOLE
        if isinstance(what, Binding) and what.kind in _OF_VARIABLES:
            name = self.variable_of(what.key)
        elif type(what) is tuple and what[0] in ("mean", "merged"):
            name = self.variable_of(what[1])
        return WHOLE if name is None else self.whole.partitions.get(name, WHOLE)


_OF_VARIABLES = (BindingKind.VARIABLE, BindingKind.ASSIGNED, BindingKind.ACCUMULATOR)


def list_programs(programs: Sequence[StagePrograms]) -> list[tuple[Key, StageProgram]]:
    """The programs of a micro-batch, each behind all that it waits for."""
    found = [((ActionKind.FORWARD, stage), own.forward) for stage, own in enumerate(programs)]
    for stage, own in reversed(list(enumerate(programs))):
        if own.backward is not None:
            kind = ActionKind.INPUT_GRADIENTS if own.is_halved else ActionKind.BACKWARD
            found.append(((kind, stage), own.backward))
        if own.weights is not None:
            found.append(((ActionKind.WEIGHT_GRADIENTS, stage), own.weights))
    return found


def lower_micro_batch(
    layout: Layout,
    replica: int,
    stage_programs: Sequence[StagePrograms],
    find_program: Callable[..., Program],
) -> Code:
    """The code of a replica's micro-batch, program by program, whatever the schedule.

    `find_program` takes the kind, the stage, its program, and what its arguments and results stand for.
    """
    placement = layout.homes[replica]
    bindings = Bindings(placement.traced, placement.accumulator_plan.keys)
    code: Code = {}
    for (kind, stage), source in list_programs(stage_programs):
        group = placement.groups[stage]
        own = {spec.name for spec in placement.traced.stages[stage].assigned}
        arguments, results = bindings.arguments(stage, source), bindings.results(stage, source)
        reads = [value_at(_as_it_is_now(binding, own), group, replica) for binding in arguments]
        named = [[value_at(binding, group, replica) for binding in bound] for bound in results]
        program = find_program(kind, stage, source, arguments, results)
        run = Instruction(
            Op.RUN, tuple(reads), tuple(first for first, *_same in named), group, program, replica, 0
        )
        same = [
            Instruction(Op.SAME, (first,), (other,), group, None, replica, 0)
            for first, *others in named
            for other in others
        ]
        code[kind, stage] = [run, *same]
    return code


def _as_it_is_now(binding: Binding, assigned: set[str]) -> Binding:
    """What a stage reads of a variable that it assigns: the value of the last micro-batch."""
    is_changing = binding.kind is BindingKind.VARIABLE and binding.key in assigned
    return Binding(BindingKind.ASSIGNED, binding.key) if is_changing else binding


def value_at(binding: Binding, group: DeviceGroup, replica: int) -> Value:
    """What a program of a stage on a group means by a binding."""
    is_own = binding.is_of_micro_batch or binding.kind is BindingKind.ENQUEUED
    is_counted = binding.kind is BindingKind.SCALAR and binding.key in COUNTED
    return Value(binding, group, replica, 0 if is_own or is_counted else ALL)


def source_at(source: Source, group: DeviceGroup, replica: int) -> Value:
    """A value between stages, on a group."""
    is_input = source.kind == "input"
    binding = Binding(
        BindingKind.INPUT if is_input else BindingKind.VALUE, source.index if is_input else source
    )
    return value_at(binding, group, replica)


def accumulator(layout: Layout, key: str, replica: int) -> Value:
    """A replica's accumulator."""
    group = layout.homes[replica].groups[layout.stage_of(key)]
    return value_at(Binding(BindingKind.ACCUMULATOR, key), group, replica)


def assigned(layout: Layout, name: str, replica: int) -> Value:
    """What stages of a replica have assigned to a variable."""
    return value_at(Binding(BindingKind.ASSIGNED, name), layout.home(name, replica), replica)


def state_leaf(layout: Layout, number: int) -> Value:
    """A leaf of the optimizer's state before the update."""
    assert layout.whole.updates is not None
    leaf = layout.whole.updates.state_leaves[number]
    return Value(UpdateValue(UpdateKind.STATE, number), layout.whole.groups[leaf.stage])


def lower_update(
    layout: Layout,
    updates: Sequence[UpdateProgram],
    find_program: Callable[[int], Program],
    programs: Programs,
    gradients: Mapping[str, Value],
    outputs: Mapping[int, Value],
) -> list[Instruction]:
    """The code of a weight update."""
    whole, code = layout.whole, list[Instruction]()
    extra = whole.accumulator_plan.extra
    merged = {key: value for key, value in gradients.items() if key not in extra}
    for key in [key for key in extra if key in gradients]:
        name, home = extra[key].variable, layout.home(extra[key].variable)
        total = Value(("merged", name, key), home)
        lies = whole.sharding_in_program(name, home)
        add = programs.between(home, functions.add, "add", [lies], [0])
        code.append(Instruction(Op.RUN, (merged[name], gradients[key]), (total,), home, add))
        merged[name] = total
        if layout.num_replicas == 1:  # otherwise joining them left zeros
            own = gradients[key].group
            clear = programs.between(
                own, functions.clear, "clear", [whole.sharding_in_program(name, own)], [0]
            )
            zeros = Value(("zeros", key), own)
            code.append(Instruction(Op.RUN, (gradients[key],), (zeros,), own, clear))
    sent: dict[UpdateValue, Value] = {}

    def read(value: UpdateValue, group: DeviceGroup) -> Value:
        if value.kind == UpdateKind.GRADIENT:
            return merged[value.key]
        if value.kind == UpdateKind.OUTPUT:
            return outputs[value.key]
        if value.kind == UpdateKind.PARAMETER:
            return Value(Binding(BindingKind.VARIABLE, value.key), layout.home(value.key))
        if value.kind in (UpdateKind.COUNT, UpdateKind.UPDATE_COUNT):
            return Value(value, group)
        return sent[value] if value.kind == UpdateKind.SENT else state_leaf(layout, value.key)

    for number, update in enumerate(updates):
        group = whole.groups[update.stage]
        sent |= {value: Value(value, group) for value in update.results if value.kind == UpdateKind.SENT}
        reads = tuple(read(value, group) for value in update.arguments)
        writes = tuple(sent.get(value) or Value(("new", value), group) for value in update.results)
        code.append(Instruction(Op.RUN, reads, writes, group, find_program(number)))
    return code


def update_results(code: Sequence[Instruction]) -> dict[Any, Value]:
    """What a weight update makes anew, by `UpdateValue`; and zeros, by the accumulator's key."""
    return {
        value.what[1]: value
        for one in code
        for value in one.writes
        if type(value.what) is tuple and value.what[0] in ("new", "zeros")
    }
