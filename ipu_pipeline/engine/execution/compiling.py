"""Compiles the programs of a step before its first run, several at a time.

A jitted function compiles at its first call, one after another as the step goes along. Here each is lowered
with the shapes that it will be called with, and XLA compiles them in threads; the calls find them compiled
(JAX keeps an executable with what was lowered). Programs that differ only in their device are compiled
once; on the other devices, a loaded executable takes the place of the jitted function.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.device_groups import HOST_MEMORY, WHOLE, DeviceGroup
from ipu_pipeline.engine.devices.remote import NotRun
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.devices.underway import Underway
from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.executables import Executable, is_portable
from ipu_pipeline.engine.execution.kept import KeptPrograms, Key, identify, text_of
from ipu_pipeline.engine.execution.replicas import Joint, Replicas
from ipu_pipeline.engine.execution.steps import Call, ColumnRun, Order, StepRun, follow
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.execution.weight_updates import WeightUpdate
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.programs.chunks import ChunkForm
from ipu_pipeline.engine.progress import Compilation, compiling
from ipu_pipeline.engine.state import RunState
from ipu_pipeline.engine.updates.environment import UpdateCounts, UpdateEnvironment
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["Compiled", "compile_ahead", "update_arguments"]


class Compiled(NamedTuple):
    """What is known of programs once they have been compiled. All sizes are in bytes."""

    # by device, the most that a program takes besides its arguments and results
    temporary_bytes: dict[int, int]
    # by stage, what a device holds of a micro-batch's residuals; only for stages that several devices
    # compute together
    residual_bytes: dict[int, int]


class _Lowered(NamedTuple):
    """A program before XLA, where it runs, and a function that puts the compiled one in its place."""

    lowered: Any
    group: DeviceGroup
    install: Callable[[Any], None]
    key: Key | None = None  # the key to keep it by


class _Divided(NamedTuple):
    """A result whose sharding XLA's partitioner may choose, while its program is being compiled."""

    struct: jax.ShapeDtypeStruct
    compiled: Future[Any]
    place: int

    def wait(self) -> jax.ShapeDtypeStruct:
        """Waits for XLA's choice. Returns the result's shape, dtype and sharding."""
        sharding = self.compiled.result().output_shardings[self.place]
        return jax.ShapeDtypeStruct(self.struct.shape, self.struct.dtype, sharding=sharding)

    @property
    def num_bytes(self) -> int:
        """The size of a device's part of it."""
        known = self.wait()
        return num_bytes([jax.ShapeDtypeStruct(known.sharding.shard_shape(known.shape), known.dtype)])


class _Programs:
    """Compiles programs in threads; equal programs only once."""

    def __init__(self, is_shared: bool, told: Compilation, kept: KeptPrograms | None) -> None:
        self._told = told
        self._kept = kept
        self.threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
        self._is_shared = is_shared
        self._started: list[tuple[Future[Any], list[_Lowered]]] = []  # each and its equals elsewhere
        self._known: dict[Any, list[_Lowered]] = {}
        self._joint: set[Joint] = set()
        self.divided: dict[tuple[int, str], list[_Divided]] = {}  # by stage and kind of program

    def start(
        self,
        function: Any,
        arguments: Sequence[Any],
        group: DeviceGroup,
        options: Options,
        install: Callable[[Any], None] | None,
    ) -> Future[Any] | None:
        """Starts to compile a program, unless the same one was started for another device, or is kept."""
        program = function.lower(*arguments)
        is_portable_here = self._is_shared and install is not None and is_portable(group.devices)
        key, text = None, ""
        if is_portable_here or (self._kept is not None and install is not None):
            text = text_of(program)
        if self._kept is not None and install is not None:
            key = identify(program, text, group.devices, options)
        lowered = _Lowered(program, group, install or (lambda _loaded: None), key)
        same = [lowered]
        if self._kept is not None and (known := self._kept.find(key)) is not None:
            future: Future[Any] = Future()
            future.set_result(known)
            lowered.install(known)
            self._told.note_kept()
            self._started.append((future, same))
            return future
        if is_portable_here:
            digest = hashlib.sha256(text.encode()).digest()  # texts hold constants, which may be large
            read = jax_compat.kept_arguments(program)  # the text does not say which these are
            same = self._known.setdefault((digest, read, tuple(sorted(options.items()))), same)
            if same[0] is not lowered:
                same.append(lowered)
                return None
        future = self.threads.submit(self._compile, lowered)
        self._started.append((future, same))
        return future

    def start_joint(self, joint: Joint, arguments: Sequence[Any], options: Options) -> None:
        """Starts to compile a program for all replicas at once, unless one of their columns did."""
        if joint not in self._joint and joint.group.is_here:
            self._joint.add(joint)
            structs = [_struct(value.shape, value.dtype, joint.group) for value in arguments]
            self.start(joint.jitted, structs, joint.group, options, None)

    def _compile(self, program: _Lowered) -> Any:
        with self._told.program():
            return program.lowered.compile()

    def finish(self, chunk_size: int) -> Compiled:
        """Waits for what was started, and loads equal programs for other devices."""
        temporary_bytes: dict[int, int] = {}
        compiled = [(future.result(), same) for future, same in self._started]
        waiting = [
            (same[1:], self.threads.submit(self._load, one, same[1:]))
            for one, same in compiled
            if len(same) > 1
        ]
        for one, same in compiled:
            for lowered in same:
                note_temporaries(temporary_bytes, lowered.group, one)
            self._keep(same[0], one)
        loaded = [(programs, future.result()) for programs, future in waiting]
        for programs, functions in loaded:  # only when all is there: until here it can be repeated
            for program, function in zip(programs, functions, strict=False):
                program.install(function)
                self._keep(program, function)
        residual_bytes: dict[int, int] = {}
        for (stage, _kind), divided in self.divided.items():
            size = sum(one.num_bytes for one in divided) // chunk_size
            residual_bytes[stage] = residual_bytes.get(stage, 0) + size
        return Compiled(temporary_bytes, residual_bytes)

    def _keep(self, program: _Lowered, compiled: Any) -> None:
        if self._kept is not None:
            self._kept.keep(program.key, compiled)

    def _load(self, compiled: Any, programs: Sequence[_Lowered]) -> list[Any]:
        """Loads a compiled program for the other programs' devices.

        Where that cannot be done, they are compiled. Then it returns nothing, as JAX finds them.
        """
        try:
            executable = Executable(compiled)
            loaded = [executable.load(program.group.devices[0]) for program in programs]
        except Exception:  # any error of JAX or XLA: loading only saves time
            for program in programs:
                self._compile(program)
            return []
        self._told.note_loaded(len(loaded))
        return loaded


def note_temporaries(temporary_bytes: dict[int, int], group: DeviceGroup, compiled: Any) -> None:
    """Enters by device the most that a compiled program takes besides its arguments and results."""
    analysis = compiled.memory_analysis()  # None on some backends
    if analysis is not None:
        known = temporary_bytes.get(group.ipu, 0)
        temporary_bytes[group.ipu] = max(known, int(analysis.temp_size_in_bytes))


class Shapes:
    """The reading that compiles a step: values are shapes."""

    def __init__(self, placement: StatePlacement, programs: _Programs) -> None:
        """Begins with a column, whose state lives at `placement` and whose programs go to `programs`."""
        self._placement, self._programs = placement, programs

    def scalar(self, number: int, group: DeviceGroup) -> Any:
        """Returns the shape of an int32 scalar."""
        del number
        return _struct((), np.int32, group)

    def put(
        self, values: Sequence[Any], group: DeviceGroup, partitions: Sequence[PartitionSpec] | None = None
    ) -> list[Any]:
        """Returns the shapes of values on a group."""
        given = [WHOLE] * len(values) if partitions is None else partitions
        return [_on_group(value, group, partition) for value, partition in zip(values, given, strict=True)]

    def store(
        self, values: Sequence[Any], group: DeviceGroup, leavers: Sequence[Template | None] | None = None
    ) -> list[Any]:
        """Returns the values as they are: programs take them on their group only."""
        del group, leavers
        return list(values)

    def copy_to(self, values: Sequence[Any], group: DeviceGroup, tag: Any = None) -> list[Any]:
        """Returns the shapes of values on another group."""
        del tag
        return [_struct(value.shape, value.dtype, group) for value in values]

    def underway(self, limit: int | None) -> Underway:
        """Returns a counter that does not wait."""
        del limit
        return Underway(None)

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> Sequence[Any]:
        """Starts to compile a program."""
        del chunk
        group = template.group
        arguments = [value.wait() if isinstance(value, _Divided) else value for value in arguments]
        if not group.is_here:  # this process does not load what is in host memory
            for place, name in template.taken(BindingKind.VARIABLE):
                if arguments[place] is None:
                    arguments[place] = self._placement.struct_in_program(name, group)
            arguments = [_on_group(value, group, WHOLE) for value in arguments]
        found = jax.eval_shape(template.jitted, *arguments)
        if not group.is_here:
            shardings = jax.tree.map(
                lambda own, whole=group.replicated: whole if own is None else own,
                template.shardings,
                is_leaf=lambda own: own is None,
            )
            template.function = NotRun(template.jitted, shardings, found)
            return self._place(template, found)
        install = functools.partial(setattr, template, "function")
        compiled = self._programs.start(template.jitted, arguments, group, template.options, install)
        results = self._place(template, found)
        if not group.is_divided or compiled is None:
            return results
        chosen = [place for place, sharding in enumerate(template.shardings) if sharding is None]
        for place in chosen:
            results[place] = _Divided(found[place], compiled, place)
        residuals = dict(template.given(BindingKind.RESIDUAL))
        if residuals:
            self._programs.divided[template.stage, template.kind.name] = [
                _Divided(found[place], compiled, place) for place in residuals
            ]
        return results

    def launch_jointly(self, joint: Joint, template: Template, arguments: Sequence[Any]) -> Sequence[Any]:
        """Starts to compile a program for all replicas at once."""
        self._programs.start_joint(joint, arguments, template.options)
        return self._place(template, jax.eval_shape(template.jitted, *arguments))

    def _place(self, template: Template, found: Sequence[Any]) -> list[Any]:
        """Results with their shardings, as far as these are known."""
        group, given = template.group, template.shardings
        known = given if isinstance(given, list) else [given] * len(found)
        return [
            result.update(sharding=group.replicated if sharding is None else sharding)
            for result, sharding in zip(found, known, strict=True)
        ]


class ShapesTogether:
    """What is done for all columns at once, with shapes; see `steps.Together`."""

    def __init__(self, replicas: Replicas) -> None:
        """Takes the columns from `replicas`."""
        self._replicas = replicas

    def gather(self, stage: int, names: Sequence[str]) -> list[list[Any]]:
        """Returns the shapes of whole variables of a stage."""
        homes = [column.placement for column in self._replicas.columns]
        return [[home.struct_in_program(name, home.groups[stage]) for name in names] for home in homes]

    def launch(self, calls: Sequence[Call], chunk: int) -> list[Sequence[Any]]:
        """Starts to compile one program for all replicas."""
        del chunk
        joint = self._replicas.joint[calls[0].template.index]
        return [
            cast(Shapes, column.reading).launch_jointly(joint, template, arguments)
            for column, template, arguments in calls
        ]

    def reduce(self, group: DeviceGroup, columns: Sequence[ColumnRun]) -> None:
        """Does nothing: what joins the columns is compiled in the first step."""


def compile_ahead(
    replicas: Replicas,
    states: Sequence[RunState],
    prepared: Sequence[list[list[Any]]],
    order: Order,
    weight_update: WeightUpdate | None,
    chunk: ChunkForm,
    update_options: Options,
    is_shared: bool,
    kept: KeptPrograms | None,
    note: str = "",
) -> Compiled:
    """Compiles all programs of a step; returns when all are compiled.

    Programs that differ only in their device are compiled once. Without a `weight_update`, its programs
    have been compiled for other shapes of micro-batches. `note` is told meanwhile.
    """
    updates = None if weight_update is None else weight_update.placement.updates
    groups = [template.group for column in replicas.columns for template in column.plan.templates.values()]
    if weight_update is not None and updates is not None:
        groups += [weight_update.placement.groups[program.stage] for program in updates.updates]
    with compiling(sum(group.is_here for group in groups), note) as told:
        programs = _Programs(is_shared, told, kept)
        try:
            runs = [
                column.run_of(
                    Shapes(column.placement, programs), state, own, None, _make_fed(column, chunk)
                )
                for column, state, own in zip(replicas.columns, states, prepared, strict=True)
            ]
            run = StepRun(runs, ShapesTogether(replicas))
            follow(order, run)
            if weight_update is not None and updates is not None:
                outputs = list(weight_update.placement.traced.output_avals)
                _start_updates(states[0].accumulators, weight_update, outputs, update_options, programs)
            return programs.finish(chunk.size)
        finally:  # after an error or an interrupt, compilations that have not begun are not waited for
            programs.threads.shutdown(wait=False, cancel_futures=True)


def _make_fed(column: Column, chunk: ChunkForm) -> Callable[[], Sequence[Any]]:
    """Returns a function that gives the shapes of a micro-batch or chunk where it is read."""
    element = jax.tree.leaves(column.placement.traced.element)
    fed = [
        _struct((*chunk.axes, *element[leaf].shape), element[leaf].dtype, group)
        for leaf, group, _slot in column.plan.feed_slots
    ]
    return lambda: fed


def _start_updates(
    accumulators: Mapping[str, Any],
    weight_update: WeightUpdate,
    outputs: Sequence[Any],
    options: Options,
    programs: _Programs,
) -> None:
    for number, (group, arguments) in enumerate(update_arguments(accumulators, weight_update, outputs)):
        install = functools.partial(weight_update.functions.__setitem__, number)
        if group.is_here:
            programs.start(weight_update.jitted[number], arguments, group, options, install)


def update_arguments(
    accumulators: Mapping[str, Any], weight_update: WeightUpdate, outputs: Sequence[Any]
) -> Iterator[tuple[DeviceGroup, list[jax.ShapeDtypeStruct]]]:
    """Finds what the programs of a weight update are called with.

    Args:
      accumulators: by key, or their shapes and dtypes.
      weight_update: the programs.
      outputs: shapes and dtypes of what the last stage returns.

    Yields:
      The group of each program, and the shapes, dtypes and shardings of its arguments.
    """
    placement = weight_update.placement
    updates = placement.updates
    assert updates is not None
    leaves = [leaf.aval for leaf in updates.state_leaves]
    count = jax.ShapeDtypeStruct((), np.int32)
    known = UpdateEnvironment(
        placement.traced.variables, accumulators, leaves, outputs, UpdateCounts(count, count)
    )
    for program, jitted in zip(updates.updates, weight_update.jitted, strict=True):
        group = placement.groups[program.stage]
        arguments = [
            jax.ShapeDtypeStruct(
                known[value].shape, known[value].dtype, sharding=placement.sharding_in_update(value, group)
            )
            for value in program.arguments
        ]
        yield group, arguments
        for value, result in zip(program.results, jax.eval_shape(jitted, *arguments), strict=True):
            if value.kind == UpdateKind.SENT:
                known[value] = result


def _on_group(value: Any, group: DeviceGroup, partition: PartitionSpec) -> Any:
    """The shape of a value on a group, if it is in host memory; other values are on their group already."""
    if isinstance(value, _Divided) or value.sharding.memory_kind != HOST_MEMORY:
        return value
    sharding = group.divided(partition)
    if value.sharding.mesh == group.replicated.mesh:
        sharding = value.sharding.with_memory_kind(group.replicated.memory_kind)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def _struct(shape: Sequence[int], dtype: Any, group: DeviceGroup) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=group.replicated)
