"""Compiles the programs of a step before it first runs; keeps them for other devices and pipelines."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.xla_settings import Options
from ipu_pipeline.engine.jaxprs.equality import identify as identify_jaxpr
from ipu_pipeline.engine.jaxprs.flat import calls_back
from ipu_pipeline.engine.plan.lowering import Layout
from ipu_pipeline.engine.plan.memory import find_shapes, trace
from ipu_pipeline.engine.plan.plan import Plan, Program, Value
from ipu_pipeline.engine.programs.stage_programs import BindingKind
from ipu_pipeline.engine.progress import Compilation, compiling
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.context_variables import bound
from ipu_pipeline.ground.pytrees import num_bytes

# Code that builds a pipeline anew, as an estimator does at each call, cannot know that it is the same: its
# functions may have closed over other values. So it is traced again, and compared by what XLA would
# compile: the program's text, constants included, its devices and its options. Of programs that are equal
# but for their devices, only the first one's text is made.

Key: TypeAlias = "tuple[Any, ...]"

_current: contextvars.ContextVar[KeptPrograms | None] = contextvars.ContextVar("kept", default=None)


class KeptPrograms:
    """The compiled programs of successive pipelines, without those that the last one did not use."""

    def __init__(self) -> None:
        """Begins without any programs."""
        self._used: dict[Key, Any] = {}
        self._earlier: dict[Key, Any] = {}

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Makes pipelines built inside the `with` block take programs from here, whenever they compile."""
        if self._used:  # else the last block ended without compiling anything
            self._earlier, self._used = self._used, {}
        with bound(_current, self):
            yield

    def find(self, key: Key | None) -> Any:
        """The program, ready to be called; None if there is none."""
        if key is None:
            return None
        compiled = self._used.get(key, self._earlier.get(key))
        if compiled is not None:
            self._used[key] = compiled
        return compiled

    def keep(self, key: Key | None, compiled: Any) -> None:
        """Keeps a compiled program. Without a key it does nothing."""
        if key is not None:
            self._used[key] = compiled


def current_programs() -> KeptPrograms | None:
    """The programs that a pipeline being built may take; None outside of `KeptPrograms.building`."""
    return _current.get()


def text_of(lowered: Any) -> str:
    """The text of a program before XLA, without the first line, which has its name."""
    _name, text = lowered.as_text().split("\n", 1)
    return str(text)


def identify(lowered: Any, text: str, devices: Sequence[Any], options: Options) -> Key | None:
    """The key of a program to keep it by: equal programs on the same devices have equal keys."""
    if "callback" in text:
        return None
    numbers = jax_compat.kept_arguments(lowered)
    if numbers is None:
        begin = text.find("@main(")
        numbers = tuple(range(text.count("%arg", begin, text.find("\n", begin))))  # its first line's
        if len(numbers) != len(jax.tree.leaves(lowered.in_avals)):
            return None
    digest = hashlib.sha256(text.encode()).digest()  # texts hold constants, which may be large
    trees = lowered.in_tree, lowered.out_tree
    return digest, numbers, tuple(sorted(options.items())), *trees, _name_places(devices)


def _name_places(devices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((device.platform, device.id) for device in devices)


def jit_zeros(avals: Sequence[Any], sharding: Any) -> Callable[[], list[jax.Array]]:
    """A function that makes zeros of these shapes and dtypes; all pipelines share it: it compiles once."""
    return _jit_zeros(tuple((aval.shape, aval.dtype) for aval in avals), sharding)


@functools.lru_cache(maxsize=256)
def _jit_zeros(avals: tuple[tuple[tuple[int, ...], Any], ...], sharding: Any) -> Callable[[], Any]:
    def make_zeros() -> list[jax.Array]:
        return [jnp.zeros(shape, dtype) for shape, dtype in avals]

    return jax.jit(make_zeros, out_shardings=sharding)


# XLA compiles a program anew for each device, even where stages compute the same, as the blocks of a
# transformer do. To write out what it made for one device and read it in for another takes about a tenth of
# the time or less. XLA's profiles then show the name of the stage that it was compiled for.

_LEAST_OPERATIONS = 1000  # XLA's own bound: `cheap_computation` of its CPU client


def is_portable(devices: Sequence[Any]) -> bool:
    """Whether programs compiled for such devices can be loaded for others.

    It cannot with JAX's persistent compilation cache: XLA does not write out again what came from there.
    Only CPUs have been tried.
    """
    if len(devices) > 1:
        return False
    (device,) = devices
    return device.platform == "cpu" and jax_compat.can_move_executables(device.client)


class Executable:
    """A compiled program, written out."""

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        """Writes a compiled program out."""
        costs = compiled.cost_analysis() or {}
        if costs.get("flops", 0) < _LEAST_OPERATIONS:
            raise ValueError("The program is run where it is started, and must be compiled for that.")
        self._written = jax_compat.write_executable(compiled)

    def load(self, device: Any) -> jax.stages.Compiled:
        """The program for a device of the same kind, where its arguments must lie."""
        return jax_compat.read_executable(self._written, device)


# Jitted functions would compile at their first calls, one after another as the step goes along. Here they
# are lowered with the shapes that they will be called with, in the caller's thread, whose settings of JAX
# count. XLA compiles them in threads, and the calls find them compiled (JAX keeps an executable with what
# was lowered). Of equal ones, the others are loaded.


class CompiledSizes(NamedTuple):
    """The sizes of compiled programs, in bytes."""

    # by device, the most that a program takes besides its arguments and results
    temporary_bytes: dict[int, int]
    # by stage, what a device holds of a micro-batch's residuals; only for stages that several devices
    # compute together
    residual_bytes: dict[int, int]


class _Traced(NamedTuple):
    """A program that JAX has traced."""

    program: Program
    traced: Any
    key: Key | None  # the key to keep it by


class _Started(NamedTuple):
    """A program that is being compiled, and its equals for other devices behind it."""

    future: Future[Any]
    programs: list[_Traced]


class _Divided(NamedTuple):
    """A result whose sharding XLA's partitioner may choose, while its program is being compiled.

    What a forward leaves for its backward is such a result, so backwards are lowered after all forwards.
    """

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
        struct = self.wait()
        return num_bytes([jax.ShapeDtypeStruct(struct.sharding.shard_shape(struct.shape), struct.dtype)])


class _Compiler:
    """Compiles programs in threads; equal programs only once."""

    def __init__(self, is_shared: bool, compilation: Compilation, earlier: KeptPrograms | None) -> None:
        self._compilation = compilation
        self._programs = earlier
        self.threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
        self._is_shared = is_shared
        self._started: list[_Started] = []
        # By what programs compute: the one that is compiled, and the key of one on some device.
        self._by_content: dict[Any, _Started] = {}
        self._keys: dict[Any, Key | None] = {}
        self.divided: dict[tuple[int, str], list[_Divided]] = {}  # by stage and kind of program

    def start(
        self, program: Program, arguments: Sequence[Any], results: Sequence[Any]
    ) -> Future[Any] | None:
        """Starts to compile a program, unless an equal one was started for another device, or is kept."""
        traced: Any = program.jitted.trace(*arguments)
        devices, options = program.group.devices, tuple(sorted(program.options.items()))
        # Programs between others take values of several shapes, an executable does not.
        is_joint = program.kind is not None and program.group.num_replicas > 1
        is_fixed = bool(program.binds) and not is_joint
        content = None
        is_shared = self._is_shared and is_fixed and is_portable(devices)
        if is_shared and not _reaches_python(traced.jaxpr.jaxpr):
            kinds = tuple(value.sharding.memory_kind for value in (*arguments, *results))
            content = identify_jaxpr(traced.jaxpr), program.donated, options, kinds
        lowered, key, equal = None, self._keys.get(content), self._by_content.get(content)
        if key is not None:
            key = (*key[:-1], _name_places(devices))
        elif self._programs is not None and is_fixed:
            lowered = traced.lower()
            key = identify(lowered, text_of(lowered), devices, program.options)
        if content is not None:
            self._keys.setdefault(content, key)
        started = _Started(Future[Any](), [_Traced(program, traced, key)])
        if self._programs is not None and (compiled := self._programs.find(key)) is not None:
            started.future.set_result(compiled)
            program.function = compiled
            self._compilation.note_kept()
        elif equal is not None:
            equal.programs.extend(started.programs)
            return None
        else:
            future = self.threads.submit(self._compile, traced.lower() if lowered is None else lowered)
            started = started._replace(future=future)
            if content is not None:  # not of kept ones: what was loaded cannot be written out again
                self._by_content[content] = started
        self._started.append(started)
        return started.future

    def _compile(self, lowered: Any) -> Any:
        with self._compilation.program():
            return lowered.compile()

    def finish(self, chunk_size: int) -> CompiledSizes:
        """Waits for what was started, and loads equal programs for other devices."""
        temporary_bytes: dict[int, int] = {}
        compiled = [(started.future.result(), *started.programs) for started in self._started]
        waiting = [
            (others, self.threads.submit(self._load, executable, others))
            for executable, _first, *others in compiled
            if others
        ]
        for executable, *equals in compiled:
            for traced in equals:
                note_temporaries(temporary_bytes, traced.program.group, executable)
            self._keep(equals[0], executable)
        loaded = [(others, future.result()) for others, future in waiting]
        # Those that cannot be loaded are compiled as well, where JAX finds them.
        left = [traced for others, functions in loaded if not functions for traced in others]
        futures = [self.threads.submit(self._compile, traced.traced.lower()) for traced in left]
        for future in futures:
            future.result()
        for others, functions in loaded:  # only when all is there: until here it can be repeated
            for traced, function in zip(others, functions, strict=False):
                traced.program.function = function
                self._keep(traced, function)
        residual_bytes: dict[int, int] = {}
        for (stage, _kind), divided in self.divided.items():
            size = sum(residual.num_bytes for residual in divided) // chunk_size
            residual_bytes[stage] = residual_bytes.get(stage, 0) + size
        return CompiledSizes(temporary_bytes, residual_bytes)

    def _keep(self, traced: _Traced, compiled: Any) -> None:
        if self._programs is not None:
            self._programs.keep(traced.key, compiled)

    def _load(self, compiled: Any, programs: Sequence[_Traced]) -> list[Any]:
        """Loads a compiled program for other programs' devices. Returns nothing where it cannot."""
        try:
            executable = Executable(compiled)
            loaded = [executable.load(traced.program.group.devices[0]) for traced in programs]
        except Exception:  # any error of JAX or XLA: loading only saves time
            return []
        self._compilation.note_loaded(len(loaded))
        return loaded


def _reaches_python(jaxpr: Any) -> bool:
    return bool(jaxpr.effects) or any(map(calls_back, jaxpr.eqns))


def note_temporaries(temporary_bytes: dict[int, int], group: DeviceGroup, compiled: Any) -> None:
    """Notes, by device, the most that a compiled program takes besides arguments and results."""
    analysis = compiled.memory_analysis()  # None on some backends
    if analysis is not None:
        size = temporary_bytes.get(group.ipu, 0)
        temporary_bytes[group.ipu] = max(size, int(analysis.temp_size_in_bytes))


def compile_ahead(
    plan: Plan,
    layout: Layout,
    find_struct: Callable[[Value], Any],
    chunk_size: int,
    is_shared: bool,
    earlier: KeptPrograms | None,
    note: str = "",
) -> CompiledSizes:
    """Compiles all programs of a plan; returns when all are compiled.

    Returns:
      The sizes of the compiled programs.
    """
    blocks = dict.fromkeys(numbered.block for numbered in plan.blocks)
    code = [instruction for block in blocks for instruction in block.code]
    programs = dict.fromkeys(instruction.program for instruction in code if instruction.program)
    new = [program for program in programs if program.group.is_here and not program.is_compiled]
    started: dict[Program, Any] = {}
    with compiling(len(new), note) as compilation:
        compiler = _Compiler(is_shared, compilation, earlier)

        def launch(program: Program, arguments: Sequence[Any]) -> list[Any]:
            arguments = [value.wait() if isinstance(value, _Divided) else value for value in arguments]
            results: list[Any] = trace(program, arguments)
            if program not in started and not program.is_compiled and program.group.is_here:
                started[program] = compiler.start(program, arguments, results)
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
            find_shapes(plan, layout, find_struct, launch)
            compiled = compiler.finish(chunk_size)
            for program in started:
                program.is_compiled = True
            return compiled
        finally:  # after an error, compilations that have not begun are not waited for
            compiler.threads.shutdown(wait=False, cancel_futures=True)
