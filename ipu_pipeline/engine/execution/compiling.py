"""Compiles the programs of a step before its first run, several at a time.

A jitted function compiles at its first call, one after another as the step goes along. Here each is lowered
with the shapes that it will be called with, and XLA compiles them in threads; the calls find them compiled
(JAX keeps an executable with what was lowered). Programs that are the same but for their device are
compiled once; for the others a loaded executable takes the place of the jitted function.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from ipu_pipeline.engine import jax_compat
from ipu_pipeline.engine.devices.compiler_options import CompilerOptions, Options
from ipu_pipeline.engine.devices.elsewhere import NotRun
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.devices.rows import Row
from ipu_pipeline.engine.execution.dispatches import Plan
from ipu_pipeline.engine.execution.executables import Executable, is_portable
from ipu_pipeline.engine.execution.kept import KeptPrograms, Key, identify, text_of
from ipu_pipeline.engine.execution.templates import Joint
from ipu_pipeline.engine.execution.weight_updates import WeightUpdate
from ipu_pipeline.engine.jaxprs.shapes import num_bytes
from ipu_pipeline.engine.programs.chunks import ChunkForm
from ipu_pipeline.engine.progress import Compilation, compiling
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.updates.accumulators import variable_of
from ipu_pipeline.engine.updates.environment import UpdateCounts, UpdateEnvironment
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind

__all__ = ["Column", "Compiled", "compile_ahead"]


class Compiled(NamedTuple):
    """What is known of programs once they have been compiled. All sizes are in bytes.

    Attributes:
      temporary_bytes: by IPU, the most that a program takes besides its arguments and results.
      residual_bytes: by stage, what a device holds of what the forward leaves for the backward of a
        micro-batch; only of stages that several devices compute together.
    """

    temporary_bytes: dict[int, int]
    residual_bytes: dict[int, int]


class _Lowered(NamedTuple):
    """A program before XLA, where it runs, and what puts the compiled one in its place."""

    lowered: Any
    row: Row
    install: Callable[[Any], None]
    key: Key | None = None  # to keep it by


class _Divided(NamedTuple):
    """A result whose sharding XLA's partitioner may choose, while its program is being compiled."""

    struct: jax.ShapeDtypeStruct
    compiled: Future[Any]
    place: int

    def wait(self) -> jax.ShapeDtypeStruct:
        """Its shape, dtype and sharding."""
        sharding = self.compiled.result().output_shardings[self.place]
        return jax.ShapeDtypeStruct(self.struct.shape, self.struct.dtype, sharding=sharding)

    @property
    def num_bytes(self) -> int:
        """How much a device has of it."""
        known = self.wait()
        return num_bytes([jax.ShapeDtypeStruct(known.sharding.shard_shape(known.shape), known.dtype)])


class _Programs:
    """Compiles programs in threads; one of those that are the same."""

    def __init__(self, is_shared: bool, told: Compilation, kept: KeptPrograms | None) -> None:
        self._told = told
        self._kept = kept
        self.threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
        self._is_shared = is_shared
        self._started: list[tuple[Future[Any], list[_Lowered]]] = []  # each, and the same elsewhere
        self._known: dict[Any, list[_Lowered]] = {}
        self._joint: set[Joint] = set()
        self.divided: dict[int, list[_Divided]] = {}  # by stage

    def start(
        self,
        function: Any,
        arguments: Sequence[Any],
        row: Row,
        options: Options,
        install: Callable[[Any], None] | None,
    ) -> Future[Any] | None:
        """Starts to compile a program, unless the same one was started for another device, or is kept.

        Args:
          function: jitted.
          arguments: what it will be called with, or their shapes.
          row: where.
          options: XLA's.
          install: takes what is to be called in place of the function, if it is not to be called itself;
            None if it always is.

        Returns:
          What will be the compiled program; None if that is loaded from another one.
        """
        program = function.lower(*arguments)
        is_portable_here = self._is_shared and install is not None and is_portable(row.devices)
        key, text = None, ""
        if is_portable_here or (self._kept is not None and install is not None):
            text = text_of(program)
        if self._kept is not None and install is not None:
            key = identify(program, text, row.devices, options)
        lowered = _Lowered(program, row, install or (lambda _loaded: None), key)
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
            read = jax_compat.kept_arguments(program)  # which the text does not say
            same = self._known.setdefault((digest, read, tuple(sorted(options.items()))), same)
            if same[0] is not lowered:
                same.append(lowered)
                return None
        future = self.threads.submit(self._compile, lowered)
        self._started.append((future, same))
        return future

    def start_joint(self, joint: Joint, arguments: Sequence[Any], options: Options) -> None:
        """Starts to compile a program for all replicas at once, unless a column of theirs did.

        Args:
          joint: the program.
          arguments: what one replica will call it with, or their shapes.
          options: XLA's.
        """
        if joint not in self._joint and joint.row.is_here:
            self._joint.add(joint)
            structs = [_struct(value.shape, value.dtype, joint.row) for value in arguments]
            self.start(joint.jitted, structs, joint.row, options, None)

    def _compile(self, program: _Lowered) -> Any:
        with self._told.program():
            return program.lowered.compile()

    def finish(self, chunk_size: int) -> Compiled:
        """Waits for what was started, and puts the same on other devices.

        Args:
          chunk_size: how many micro-batches a program handles.
        """
        temporary_bytes: dict[int, int] = {}
        compiled = [(future.result(), same) for future, same in self._started]
        waiting = [
            (same[1:], self.threads.submit(self._load, one, same[1:]))
            for one, same in compiled
            if len(same) > 1
        ]
        for one, same in compiled:
            for lowered in same:
                note_temporaries(temporary_bytes, lowered.row, one)
            self._keep(same[0], one)
        loaded = [(programs, future.result()) for programs, future in waiting]
        for programs, functions in loaded:  # when all is there: what came before can be done again
            for program, function in zip(programs, functions, strict=False):
                program.install(function)
                self._keep(program, function)
        residual_bytes = {
            stage: sum(one.num_bytes for one in divided) // chunk_size
            for stage, divided in self.divided.items()
        }
        return Compiled(temporary_bytes, residual_bytes)

    def _keep(self, program: _Lowered, compiled: Any) -> None:
        if self._kept is not None:
            self._kept.keep(program.key, compiled)

    def _load(self, compiled: Any, programs: Sequence[_Lowered]) -> list[Any]:
        """A compiled program, loaded for the others' devices.

        Where that cannot be done, they are compiled; then nothing is returned, as JAX finds them.
        """
        try:
            executable = Executable(compiled)
            loaded = [executable.load(program.row.devices[0]) for program in programs]
        except Exception:  # of JAX or XLA, whatever it is: loading only saves time
            for program in programs:
                self._compile(program)
            return []
        self._told.note_loaded(len(loaded))
        return loaded


def note_temporaries(temporary_bytes: dict[int, int], row: Row, compiled: Any) -> None:
    """Enters by IPU the most that a compiled program takes besides its arguments and results."""
    analysis = compiled.memory_analysis()  # of some backends None
    if analysis is not None:
        known = temporary_bytes.get(row.ipu, 0)
        temporary_bytes[row.ipu] = max(known, int(analysis.temp_size_in_bytes))


class Column(NamedTuple):
    """The micro-batches of a replica, before their programs are compiled.

    Attributes:
      plan: the programs.
      prepared: of each, the arguments that stay the same during a step, None for others.
      accumulators: by key.
      residence: where state lives.
      gathered: full names of the variables that are gathered for each program.
    """

    plan: Plan
    prepared: Sequence[Sequence[Any]]
    accumulators: Mapping[str, Any]
    residence: Residence
    gathered: frozenset[str] = frozenset()


def compile_ahead(
    columns: Sequence[Column],
    weight_update: WeightUpdate,
    chunk: ChunkForm,
    options: CompilerOptions,
    is_shared: bool,
    kept: KeptPrograms | None = None,
) -> Compiled:
    """Compiles what a step dispatches, and its weight update.

    Args:
      columns: the micro-batches of each replica.
      weight_update: what follows them.
      chunk: how many micro-batches a program handles.
      options: XLA's, per program.
      is_shared: whether programs that are the same on several devices may be compiled once.
      kept: has compiled programs of earlier pipelines, and gets those of this one.
    """
    updates = weight_update.residence.updates
    rows = [template.row for column in columns for template in column.plan.templates.values()]
    if updates is not None:
        rows += [weight_update.residence.rows[program.stage] for program in updates.updates]
    with compiling(sum(row.is_here for row in rows)) as told:
        programs = _Programs(is_shared, told, kept)
        try:
            for column in columns:
                results = _start_templates(column, chunk, options, programs)
            if updates is not None:
                accumulators = columns[0].accumulators
                _start_updates(accumulators, weight_update, results, options.update, programs)
            return programs.finish(chunk.size)
        finally:  # after an error or an interrupt, what has not begun is not waited for
            programs.threads.shutdown(wait=False, cancel_futures=True)


def _start_templates(
    column: Column, chunk: ChunkForm, options: CompilerOptions, programs: _Programs
) -> list[Any]:
    """Starts the programs of micro-batches. Returns what the last stage returns, for one micro-batch."""
    plan, prepared, accumulators, residence, _gathered = column
    traced = residence.traced
    element = jax.tree.leaves(traced.element)
    slots: list[Any] = [None] * plan.num_slots
    for leaf, row, slot in plan.feed_slots:
        slots[slot] = _struct((*chunk.axes, *element[leaf].shape), element[leaf].dtype, row)
    for template in plan.templates.values():
        row = template.row
        arguments = list(prepared[template.index])
        for place, key in enumerate(template.accumulators):
            sharding = residence.sharding_in_program(variable_of(key), row)
            known = accumulators[key]
            arguments[place] = jax.ShapeDtypeStruct(known.shape, known.dtype, sharding=sharding)
        for place, name in template.variables:
            if name in residence.offloaded or name in column.gathered:
                spec, sharding = traced.variables[name], residence.sharding_in_program(name, row)
                arguments[place] = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)
        for place, slot in template.loads:
            if isinstance(slots[slot], _Divided):
                slots[slot] = slots[slot].wait()
            arguments[place] = slots[slot]
        for place in (*template.micro_batches, *template.accumulated):
            arguments[place] = _struct((), np.int32, row)
        is_forward = template.kind is ActionKind.FORWARD
        own = (options.of_forward if is_forward else options.of_backward)(template.stage)
        install = functools.partial(setattr, template, "function")
        results = jax.eval_shape(template.jitted, *arguments)
        compiled = None
        if template.joint is not None:
            programs.start_joint(template.joint, arguments, own)
        elif row.is_here:
            compiled = programs.start(template.jitted, arguments, row, own, install)
        else:
            shardings = jax.tree.map(
                lambda own, whole=row.replicated: whole if own is None else own,
                template.shardings,
                is_leaf=lambda own: own is None,
            )
            template.function = NotRun(template.jitted, shardings, results)
        moved = [
            (place, slot)
            for _row, places, to in template.transfers
            for place, slot in zip(places, to, strict=True)
        ]
        for place, slot in (*template.stores, *moved):
            slots[slot] = results[place].update(sharding=plan.slot_rows[slot].replicated)
            if compiled is not None and row.is_divided and template.shardings[place] is None:
                slots[slot] = _Divided(results[place], compiled, place)
        if compiled is not None and row.is_divided and template.residuals:
            programs.divided[template.stage] = [
                _Divided(results[place], compiled, place) for place in template.residuals
            ]
    return list(traced.output_avals)


def _start_updates(
    accumulators: Mapping[str, Any],
    weight_update: WeightUpdate,
    outputs: Sequence[Any],
    options: Options,
    programs: _Programs,
) -> None:
    residence = weight_update.residence
    updates = residence.updates
    assert updates is not None
    leaves = [leaf.aval for leaf in updates.state_leaves]
    count = jax.ShapeDtypeStruct((), np.int32)
    known = UpdateEnvironment(
        residence.traced.variables, accumulators, leaves, outputs, UpdateCounts(count, count)
    )
    for number, (program, jitted) in enumerate(zip(updates.updates, weight_update.jitted, strict=True)):
        row = residence.rows[program.stage]
        arguments = [
            jax.ShapeDtypeStruct(
                known[value].shape, known[value].dtype, sharding=residence.sharding_in_update(value, row)
            )
            for value in program.arguments
        ]
        install = functools.partial(weight_update.functions.__setitem__, number)
        if row.is_here:
            programs.start(jitted, arguments, row, options, install)
        for value, result in zip(program.results, jax.eval_shape(jitted, *arguments), strict=True):
            if value.kind == UpdateKind.SENT:
                known[value] = result


def _struct(shape: Sequence[int], dtype: Any, row: Row) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=row.replicated)
