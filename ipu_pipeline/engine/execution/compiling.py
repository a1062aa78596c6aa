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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.execution.executables import Executable, is_portable
from ipu_pipeline.engine.execution.kept import KeptPrograms, Key, identify, text_of
from ipu_pipeline.engine.plan.lowering import Layout
from ipu_pipeline.engine.plan.plan import Plan, Program, Value
from ipu_pipeline.engine.plan.readers.shapes import find_shapes, trace
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.progress import Compilation, compiling
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["Compiled", "compile_ahead"]


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


class _Compiler:
    """Compiles programs in threads; equal programs only once."""

    def __init__(self, is_shared: bool, told: Compilation, kept: KeptPrograms | None) -> None:
        self._told = told
        self._kept = kept
        self.threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
        self._is_shared = is_shared
        self._started: list[tuple[Future[Any], list[_Lowered]]] = []  # each and its equals elsewhere
        self._known: dict[Any, list[_Lowered]] = {}
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


def compile_ahead(
    plan: Plan,
    layout: Layout,
    given: Callable[[Value], Any],
    chunk_size: int,
    is_shared: bool,
    kept: KeptPrograms | None,
    note: str = "",
) -> Compiled:
    """Compiles all programs of a plan; returns when all are compiled.

    Returns:
      What is known of the programs then.
    """
    blocks = dict.fromkeys(numbered.block for numbered in plan.blocks)
    programs = dict.fromkeys(one.program for block in blocks for one in block.code if one.program)
    new = [program for program in programs if program.group.is_here and not program.is_compiled]
    started: dict[Program, Any] = {}
    with compiling(len(new), note) as told:
        compiler = _Compiler(is_shared, told, kept)

        def launch(program: Program, arguments: Sequence[Any]) -> list[Any]:
            arguments = [value.wait() if isinstance(value, _Divided) else value for value in arguments]
            results: list[Any] = trace(program, arguments)
            group = program.group
            if program not in started and not program.is_compiled and group.is_here:
                install = functools.partial(setattr, program, "function")
                is_joint = program.kind is not None and group.num_replicas > 1
                # Programs between others take values of several shapes, an executable does not.
                is_fixed = bool(program.binds) and not is_joint
                started[program] = compiler.start(
                    program.jitted, arguments, group, program.options, install if is_fixed else None
                )
            is_chosen = program.kind is not None and isinstance(program.shardings, list)
            if is_chosen and (compiled := started.get(program)) is not None:
                residuals = [
                    _Divided(results[place], compiled, place)
                    for place, bound in enumerate(program.results)
                    if any(binding.kind is BindingKind.RESIDUAL for binding in bound)
                ]
                for place, sharding in enumerate(program.shardings):
                    if sharding is None:
                        results[place] = _Divided(results[place], compiled, place)
                if residuals:
                    compiler.divided[program.stage, program.kind.name] = residuals
            return results

        try:
            find_shapes(plan, layout, given, launch)
            compiled = compiler.finish(chunk_size)
            for program in started:
                program.is_compiled = True
            return compiled
        finally:  # after an error, compilations that have not begun are not waited for
            compiler.threads.shutdown(wait=False, cancel_futures=True)
