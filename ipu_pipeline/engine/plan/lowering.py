"""Lowering: the programs of a step, jitted, and the code of a micro-batch and of a weight update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ipu_pipeline.engine.devices.device_groups import WHOLE, DeviceGroup, NotRun, over_replicas
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.devices.xla_settings import CompilerOptions, Options
from ipu_pipeline.engine.plan.plan import ALL, Instruction, Op, Program, Value
from ipu_pipeline.engine.programs.accumulation import count_dtype
from ipu_pipeline.engine.programs.stage_programs import (
    Binding,
    BindingKind,
    Bindings,
    StageProgram,
    StagePrograms,
    ValueKind,
)
from ipu_pipeline.engine.schedules.timetables import ActionKind
from ipu_pipeline.engine.tracing.stage_meshes import REPLICA
from ipu_pipeline.engine.tracing.stages import Source
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.engine.updates.update_programs import UpdateProgram, variable_of

# Programs.


class Programs:
    """The programs of a pipeline's plans; those that are asked for twice are made once."""

    def __init__(self, options: CompilerOptions, donates_accumulators: bool) -> None:
        """Begins without any. `donates_accumulators`: whether backwards may take their memory."""
        self.options, self.donates_accumulators = options, donates_accumulators
        self._programs: dict[Any, Program] = {}

    def of_stage(
        self,
        key: Any,
        kind: ActionKind,
        stage: int,
        source: StageProgram,
        binds: Sequence[Binding],
        results: Sequence[Sequence[Binding]],
        placement: StatePlacement,
        is_joint: bool = False,
    ) -> Program:
        """The program of a stage, on the devices of one replica, or on those of all of them at once."""
        group = placement.groups[stage]
        num_accumulators = sum(binding.kind is BindingKind.ACCUMULATOR for binding in binds)
        is_forward = kind is ActionKind.FORWARD
        options = (self.options.of_forward if is_forward else self.options.of_backward)(stage)
        function: Callable[..., Any] = source.function
        shardings: Any = group.replicated
        if is_joint:
            function = over_replicas(group.replicated.mesh, source.function)
        elif group.is_divided:
            shardings = [_find_sharding(bound, group, placement) for bound in results]
        return self.add(
            (key, kind, stage, group),
            source.name,
            group,
            function,
            shardings,
            range(num_accumulators if self.donates_accumulators else 0),
            options,
            kind=kind,
            stage=stage,
            binds=tuple(binds),
            results=tuple(map(tuple, results)),
        )

    def of_update(self, number: int, placement: StatePlacement, donate: bool, may_raise: bool) -> Program:
        """A program of the weight update, which may take the memory of what it makes anew."""
        assert placement.updates is not None
        updates = placement.updates.updates
        program, group = updates[number], placement.groups[updates[number].stage]

        def is_donated(value: UpdateValue) -> bool:
            is_read_later = any(value in later.arguments for later in updates[number + 1 :])
            if value not in program.results or is_read_later:
                return False
            return not may_raise and (donate or value.kind == UpdateKind.GRADIENT)

        donated = [place for place, value in enumerate(program.arguments) if is_donated(value)]
        program = _returning_first(program, [program.arguments[place] for place in donated])
        return self.add(
            ("update", number),
            program.name,
            group,
            program.function,
            placement.results_of(program).get("out_shardings"),
            donated,
            self.options.update,
            stage=program.stage,
            binds=program.arguments,
            results=program.results,
        )

    def of_init(self, number: int, placement: StatePlacement) -> Program:
        """A program that makes a part of the optimizer's first state."""
        assert placement.updates is not None
        program = placement.updates.inits[number]
        return self.add(
            ("init", number),
            program.name,
            placement.groups[program.stage],
            program.function,
            placement.results_of(program).get("out_shardings"),
            stage=program.stage,
            binds=program.arguments,
            results=program.results,
        )

    def between(
        self,
        group: DeviceGroup,
        source: Callable[..., Any],
        name: str,
        shardings: Sequence[Any] | None = None,
        donated: Sequence[int] = (),
    ) -> Program:
        """A program that a pass needs; all pipelines share those of one source and place."""
        frozen = None if shardings is None else tuple(shardings)
        return self.add((source, group, frozen), name, group, source, frozen, donated, is_shared=True)

    def add(
        self,
        key: Any,
        name: str,
        group: DeviceGroup,
        source: Callable[..., Any],
        shardings: Any = None,
        donated: Sequence[int] = (),
        options: Options = MappingProxyType({}),
        is_shared: bool = False,
        **details: Any,
    ) -> Program:
        """Jits a function of arrays that returns a list. Without `shardings`, results lie as JAX finds."""
        if key not in self._programs:
            jit = _jit_once if is_shared else _jit
            jitted = jit(source, name, shardings, tuple(donated), tuple(options.items()))
            self._programs[key] = program = Program(
                name, group, jitted, jitted, source, shardings, options, tuple(donated), **details
            )
            self.forget_compiled(program)
        return self._programs[key]

    @staticmethod
    def forget_compiled(program: Program) -> None:
        """Resets a program: it calls what was jitted, or nothing where another process runs it."""
        program.function, program.is_compiled = program.jitted, False
        if not program.group.is_here:
            replicated, shardings = program.group.replicated, program.shardings
            if isinstance(shardings, (list, tuple)):
                shardings = [sharding or replicated for sharding in shardings]
            program.function = NotRun(program.jitted, shardings or replicated)

    def keep_stages(self, scope: Any) -> None:
        """Drops stages' programs for other shapes or sizes of chunks."""
        self._programs = {
            key: program
            for key, program in self._programs.items()
            if program.kind is None or key[0] == scope
        }

    def __iter__(self) -> Iterator[Program]:
        """The programs made so far."""
        return iter(self._programs.values())


def _jit(
    source: Callable[..., Any],
    name: str,
    shardings: Any,
    donated: tuple[int, ...],
    options: tuple[tuple[str, Any], ...],
) -> Callable[..., list[Any]]:
    def function(*arguments: Any) -> list[Any]:
        return list(source(*arguments))

    function.__name__ = function.__qualname__ = name
    placed: dict[str, Any] = {} if shardings is None else {"out_shardings": shardings}
    if isinstance(shardings, tuple):
        placed = {"out_shardings": list(shardings)}
    jitted: Callable[..., list[Any]] = jax.jit(
        function, donate_argnums=donated, compiler_options=dict(options), **placed
    )
    return jitted


def _returning_first(program: UpdateProgram, values: Sequence[UpdateValue]) -> UpdateProgram:
    """The program with some results first, in an order.

    JAX gives a result the memory of the first donated argument that fits. If that is another value's, XLA
    copies both: updates of Adam take twice as long.
    """
    results = (*values, *(value for value in program.results if value not in values))
    places = [program.results.index(value) for value in results]

    def function(*arguments: Any) -> list[Any]:
        made = program.function(*arguments)
        return [made[place] for place in places]

    return dataclasses.replace(program, function=function, results=results)


_jit_once = functools.lru_cache(maxsize=512)(_jit)


def _find_sharding(bound: Sequence[Binding], group: DeviceGroup, placement: StatePlacement) -> Any:
    """The sharding of a result on an IPU's devices; None for residuals: the partitioner chooses."""
    for binding in bound:
        if binding.kind in (BindingKind.ASSIGNED, BindingKind.ACCUMULATOR):
            return placement.sharding_in_program(variable_of(binding.key), group)
    return None if all(binding.kind is BindingKind.RESIDUAL for binding in bound) else group.replicated


# Sources of the programs that passes put between. All take and return arrays; accumulators give their
# memory away.


@functools.lru_cache(maxsize=256)
def mean_over_replicas(mesh: Any, partitions: Sequence[Any], num_accumulators: int) -> Callable[..., Any]:
    """Means of accumulators, means or the first replica's of assigned variables; zeros for accumulators.

    `partitions` says how each lies within a replica.
    """

    def reduce(*values: Any) -> list[Any]:
        accumulators, assigned = values[:num_accumulators], values[num_accumulators:]
        joined = [_mean(v) if jnp.issubdtype(v.dtype, jnp.floating) else _first(v) for v in assigned]
        return [*map(_mean, accumulators), *joined, *map(jnp.zeros_like, accumulators)]

    specs = tuple(partitions)
    return over_replicas(mesh, reduce, specs, [*specs, *specs[:num_accumulators]])


@functools.lru_cache(maxsize=256)
def first_replica(mesh: Any) -> Callable[..., Any]:
    """The first replica's values, in all replicas."""
    return over_replicas(mesh, lambda *values: [_first(value) for value in values])


def add_parts(total: Any, part: Any) -> list[Any]:
    """The sum of two accumulators."""
    return [total + part.astype(total.dtype)]


def clear_accumulators(value: Any) -> list[Any]:
    """Zeros for an accumulator."""
    return [jnp.zeros_like(value)]


def add_collected(*values: Any) -> list[Any]:
    """Adds to sums, which come first, what was collected of a micro-batch or chunk."""
    half = len(values) // 2

    def one(total: Any, part: Any) -> Any:  # the dtype is told, else JAX sums integers in 64 bits
        return total + part.sum(tuple(range(part.ndim - total.ndim)), dtype=total.dtype)

    return list(map(one, values[:half], values[half:]))


@functools.cache
def pick(place: int) -> Callable[..., Any]:
    """A function that returns a micro-batch's values, of a chunk."""
    return lambda *stacks: [stack[place] for stack in stacks]


@functools.lru_cache(maxsize=256)
def spread(size: int) -> Callable[..., Any]:
    """A function that repeats values that all micro-batches of a chunk have, as if each had its own."""
    return lambda *values: [jnp.broadcast_to(value, (size, *value.shape)) for value in values]


def _mean(value: Any) -> Any:
    """The mean over replicas, in at least 32 bits: a sum of 16-bit values may overflow 16 bits."""
    return jax.lax.pmean(value.astype(count_dtype(value.dtype)), REPLICA).astype(value.dtype)


def _first(value: Any) -> Any:
    return jax.lax.all_gather(value, REPLICA)[0]


# The code of one micro-batch and of a weight update, as if everything were on the devices of one replica.
# Where a value is made elsewhere, or lies in host memory, is not asked here: passes put the copies in
# between.

Key: TypeAlias = "tuple[ActionKind, int]"  # a program's kind and stage
Code: TypeAlias = "dict[Key, list[Instruction]]"  # of a micro-batch, by program
COUNTED = (ValueKind.MICRO_BATCH, ValueKind.ACCUMULATED)  # scalars that each micro-batch has its own of


@dataclass(frozen=True, eq=False)
class Layout:
    """The placement of a step."""

    whole: StatePlacement  # where state lives, on the devices of all replicas
    homes: Sequence[StatePlacement]  # where each replica runs
    joins_assigned: bool = True  # whether variables that stages assign become the same in all replicas

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.homes)

    def home(self, name: str, replica: int = ALL) -> DeviceGroup:
        """The group where a variable lives."""
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
        """The partition of a value on the devices of an IPU while a program uses it."""
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
    listed = [
        ((ActionKind.FORWARD, stage), stage_programs.forward)
        for stage, stage_programs in enumerate(programs)
    ]
    for stage, stage_programs in reversed(list(enumerate(programs))):
        if stage_programs.backward is not None:
            kind = ActionKind.INPUT_GRADIENTS if stage_programs.is_halved else ActionKind.BACKWARD
            listed.append(((kind, stage), stage_programs.backward))
        if stage_programs.weights is not None:
            listed.append(((ActionKind.WEIGHT_GRADIENTS, stage), stage_programs.weights))
    return listed


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
        assigned_names = {spec.name for spec in placement.traced.stages[stage].assigned}
        arguments, results = bindings.arguments(stage, source), bindings.results(stage, source)
        reads = [value_at(_as_it_is_now(binding, assigned_names), group, replica) for binding in arguments]
        named = [[value_at(binding, group, replica) for binding in bound] for bound in results]
        program = find_program(kind, stage, source, arguments, results)
        run = Instruction(
            Op.RUN, tuple(reads), tuple(first for first, *_copies in named), group, program, replica, 0
        )
        renames = [
            Instruction(Op.SAME, (first,), (copy,), group, None, replica, 0)
            for first, *copies in named
            for copy in copies
        ]
        code[kind, stage] = [run, *renames]
    return code


def _as_it_is_now(binding: Binding, assigned: set[str]) -> Binding:
    """Makes a stage read the value that the last micro-batch has assigned to a variable."""
    is_changing = binding.kind is BindingKind.VARIABLE and binding.key in assigned
    return Binding(BindingKind.ASSIGNED, binding.key) if is_changing else binding


def value_at(binding: Binding, group: DeviceGroup, replica: int) -> Value:
    """The value that a binding of a stage's program stands for on a group."""
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
    """The value that stages of a replica have assigned to a variable."""
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
    placement, code = layout.whole, list[Instruction]()
    extra = placement.accumulator_plan.extra
    merged = {key: value for key, value in gradients.items() if key not in extra}
    for key in [key for key in extra if key in gradients]:
        name, home = extra[key].variable, layout.home(extra[key].variable)
        total = Value(("merged", name, key), home)
        lies = placement.sharding_in_program(name, home)
        add = programs.between(home, add_parts, "add", [lies], [0])
        code.append(Instruction(Op.RUN, (merged[name], gradients[key]), (total,), home, add))
        merged[name] = total
        if layout.num_replicas == 1:  # otherwise joining them left zeros
            place = gradients[key].group
            clear = programs.between(
                place, clear_accumulators, "clear", [placement.sharding_in_program(name, place)], [0]
            )
            zeros = Value(("zeros", key), place)
            code.append(Instruction(Op.RUN, (gradients[key],), (zeros,), place, clear))
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
        group, program = placement.groups[update.stage], find_program(number)
        sent |= {value: Value(value, group) for value in update.results if value.kind == UpdateKind.SENT}
        reads = tuple(read(value, group) for value in update.arguments)
        writes = tuple(sent.get(value) or Value(("new", value), group) for value in program.results)
        code.append(Instruction(Op.RUN, reads, writes, group, program))
    return code


def update_results(code: Sequence[Instruction]) -> dict[Any, Value]:
    """The new values of a weight update, by `UpdateValue`; and zeros, by the accumulator's key."""
    return {
        value.what[1]: value
        for instruction in code
        for value in instruction.writes
        if type(value.what) is tuple and value.what[0] in ("new", "zeros")
    }
