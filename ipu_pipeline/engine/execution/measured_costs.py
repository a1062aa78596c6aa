"""Costs of programs, stages and transfers, measured one at a time, and kept for later processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.placement import copy_to
from ipu_pipeline.engine.execution.compilation import jit_zeros, text_of
from ipu_pipeline.engine.plan.plan import ALL, Op, Plan, Value
from ipu_pipeline.engine.planning.dispatch_plans import nominal_speed
from ipu_pipeline.engine.programs.stage_programs import Binding, BindingKind, StagePrograms
from ipu_pipeline.engine.progress import compiling
from ipu_pipeline.engine.schedules.scenarios import Costs, StageEdge
from ipu_pipeline.engine.schedules.timetables import ActionKind
from ipu_pipeline.engine.updates.update_programs import Updates
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.host import count_cores
from ipu_pipeline.ground.pytrees import num_bytes

T = TypeVar("T")

# Each measurement has a file of its own, in JSON. The first process to measure writes it, and others keep
# to that: no lock is needed.

_FOLDER = "program_times"


def find_directory() -> Path | None:
    """The directory where times are kept: in that of JAX's compiled programs, else in the user's cache.

    Returns:
      The directory, which need not exist; None if there is no place for it.
    """
    cache_directory = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # not in JAX's annotations
    if cache_directory and "://" not in cache_directory:
        return Path(cache_directory) / _FOLDER
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:  # the user has none
            return None
    return cache / "ipu_pipeline" / _FOLDER


def describe_device(device: Any) -> str:
    """A text of all that a measurement depends on besides the program."""
    cores = (_cpu_model(), count_cores()) if device.platform == "cpu" else None
    settings = os.environ.get("XLA_FLAGS", ""), jax.config.read("jax_disable_most_optimizations")
    kind = device.platform, device.device_kind, device.client.platform_version
    return str((*kind, cores, jax.__version__, *settings))


@functools.cache
def _cpu_model() -> str:
    """The model of the processor: machines that share a directory may differ."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return f"{platform.machine()} {platform.processor()}"


def digest(*texts: str) -> str:
    """A name that differs where the texts differ."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def read_measurement(directory: Path | None, key: str, parse: Callable[[Any], T | None]) -> T | None:
    """Reads the file of a key; None if there is none, or it holds nothing usable."""
    if directory is None:
        return None
    try:
        return parse(json.loads((directory / f"{key}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def keep_measurement(
    directory: Path | None, key: str, fields: Mapping[str, Any], parse: Callable[[Any], T | None]
) -> T | None:
    """Writes the file of a key, unless another process did; arguments as in `read_measurement`.

    A directory that cannot be written is not used: what was measured is then known in this process only.

    Returns:
      What another process wrote meanwhile, which counts; None if there is nothing usable.
    """
    if directory is None:
        return None
    path = directory / f"{key}.json"
    written = directory / f"{key}.{os.getpid()}.{threading.get_ident()}"
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            written.write_text(json.dumps(fields))
            os.link(written, path)
        except FileExistsError:
            if (measured := read_measurement(directory, key, parse)) is not None:
                return measured
            os.replace(written, path)  # it says nothing usable
        except OSError:  # a file system without links
            os.replace(written, path)
        finally:
            written.unlink(missing_ok=True)
    return None


# In a step the programs of a pipeline take turns, and what one of them reads has left the caches when it
# runs again, if the others read much. So where all that are timed together read more than a small cache
# holds, a program is run on several copies of its arguments in turn, which together have about as many
# bytes as those of all. How much a pipeline reads is therefore part of a measurement's key.

_PASSES = 2  # over all programs: what disturbs one measurement of a program has ended by the other
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 25, 0.05  # of each
_SHORT = 1e-3  # seconds; what takes less is called several times in a row
_IN_A_ROW = 8
_CACHED = 1 << 20  # bytes that stay in a cache close to a core
_MOST_READ = 64 << 20  # bytes of all copies: few caches have more
_MOST_COPIES = 64
_SHORTEST = 2048  # numbers; on CPUs, XLA runs programs below 1,000 operations where they are started
_LEAST_CORES = 0.01  # that a program keeps busy: one that only waits

_measured: dict[str, ProgramTime] = {}  # by key
_alone = threading.Lock()  # held while a program is timed: two at a time would slow each other


class ProgramTime(NamedTuple):
    """The time and memory of a program that runs alone.

    Attributes:
      seconds: the time of a call: the median of several, and of two such medians the lesser.
      cores: the number of cores that the process keeps busy meanwhile. It matters on CPUs only.
      num_temporary_bytes: the memory that it takes besides arguments and results, by XLA.
    """

    seconds: float
    cores: float
    num_temporary_bytes: int


class TimedProgram(NamedTuple):
    """A program that is to be timed.

    Attributes:
      jitted: the jitted program.
      arguments: shapes, dtypes and shardings of its arguments.
      carried: arguments that it may destroy -> the results that are their new values.
      device: a device that it runs on.
      options: XLA's options for it.
    """

    jitted: Any
    arguments: Sequence[jax.ShapeDtypeStruct]
    carried: Mapping[int, int]
    device: Any
    options: Mapping[str, Any]


def time_programs(programs: Sequence[TimedProgram]) -> list[ProgramTime]:
    """Times programs on zeros, each alone. Those that have been timed before, anywhere, are not run.

    They must end on zeros, whatever these make of them, and not print or call back into Python.

    Returns:
      What each takes.
    """
    directory = find_directory()
    sizes = [num_bytes(program.arguments) for program in programs]
    copies = [_count_copies(size, sum(sizes)) for size in sizes]
    lowered = [program.jitted.lower(*program.arguments) for program in programs]
    keys = list(map(_identify, programs, lowered, copies))
    first = {key: place for place, key in reversed(list(enumerate(keys)))}
    new = [place for key, place in sorted(first.items(), key=lambda item: item[1])]
    new = [place for place in new if _find(keys[place], directory) is None]
    if new:
        compiled = _compile([lowered[place] for place in new])
        pairs = list(zip(new, compiled, strict=True))
        passes = [
            [_time(programs[place], executable, copies[place]) for place, executable in pairs]
            for _pass in range(_PASSES)
        ]
        for place, *times in zip(new, *passes, strict=True):
            _measured[keys[place]] = _keep(keys[place], min(times), directory)
    return [_measured[key] for key in keys]


def time_copy(avals: Sequence[Any], source: DeviceGroup, target: DeviceGroup) -> float:
    """Times a transfer of arrays from group to group, in seconds; once for the same shapes and kinds.

    Where both are the same device, what a transfer takes is not known, and the nominal time counts.
    """
    if source.devices == target.devices:
        speed = nominal_speed(source.devices[0].platform)
        return speed.per_transfer + num_bytes(avals) * speed.per_byte
    directory = find_directory()
    shapes = [(tuple(aval.shape), str(aval.dtype)) for aval in avals]
    number = len(target.devices)
    key = digest(
        "copy", str(shapes), str(number), *map(describe_device, (source.devices[0], target.devices[0]))
    )
    if _find(key, directory) is None:
        zeros = _make_zeros(avals, [source.replicated] * len(avals))

        def call(number: int) -> None:
            for _call in range(number):
                copies = copy_to(zeros, target)
            jax.block_until_ready(copies)

        with _alone, jax.ensure_compile_time_eval():
            times = min(_repeat(call) for _pass in range(_PASSES))
        _measured[key] = _keep(key, ProgramTime(*times, 0), directory)
    return _measured[key].seconds


def time_shortest(group: DeviceGroup) -> float:
    """Times a program that does next to nothing, in seconds: the least that any program takes."""
    struct = jax.ShapeDtypeStruct((_SHORTEST,), np.float32, sharding=group.replicated)
    jitted = jax.jit(lambda x: [x + 1])
    (program_time,) = time_programs([TimedProgram(jitted, [struct], {}, group.devices[0], {})])
    return program_time.seconds


def _count_copies(size: int, total: int) -> int:
    """The number of copies of a program's arguments: a power of two, so that pipelines agree on it."""
    most = math.ceil(min(total, _MOST_READ) / max(size, 1))
    return 1 if total <= _CACHED else min(1 << (most - 1).bit_length(), _MOST_COPIES)


def _identify(program: TimedProgram, lowered: Any, num_copies: int) -> str:
    # Random keys are folded with the number of the call and the hash of the scope: layers that are equal
    # but for these take as long.
    text = re.sub(r"dense<\d+> : tensor<ui32>", "dense<_> : tensor<ui32>", text_of(lowered))
    return digest(
        text,
        str(jax_compat.kept_arguments(lowered)),
        str(sorted(program.options.items())),
        str(num_copies),
        describe_device(program.device),
    )


def _compile(lowered: Sequence[Any]) -> list[Any]:
    def compile_one(program: Any) -> Any:
        with compilation.program():
            return program.compile()

    with compiling(len(lowered)) as compilation:
        threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
        try:
            return list(threads.map(compile_one, lowered))
        finally:  # after an error or an interrupt, compilations that have not begun are not waited for
            threads.shutdown(wait=False, cancel_futures=True)


def _time(program: TimedProgram, compiled: Any, num_copies: int) -> ProgramTime:
    shardings = [struct.sharding for struct in program.arguments]
    copies = itertools.cycle([_make_zeros(program.arguments, shardings) for _copy in range(num_copies)])

    def call(number: int) -> None:
        for arguments in itertools.islice(copies, number):
            results = compiled(*arguments)
            for place, result in program.carried.items():
                arguments[place] = results[result]
        jax.block_until_ready(results)

    with _alone, jax.debug_nans(False), jax.debug_infs(False):  # which zeros may well make
        seconds, cores = _repeat(call)
    analysis = compiled.memory_analysis()  # None on some backends
    return ProgramTime(seconds, cores, 0 if analysis is None else int(analysis.temp_size_in_bytes))


def _make_zeros(avals: Sequence[Any], shardings: Sequence[Any]) -> list[jax.Array]:
    """Makes zeros, even while a function is being traced; by a program for each shape, which are few."""
    with jax.ensure_compile_time_eval():
        pairs = zip(avals, shardings, strict=True)
        arrays = [zeros for aval, sharding in pairs for zeros in jit_zeros([aval], sharding)()]
        jax.block_until_ready(arrays)
    return arrays


def _repeat(call: Callable[[int], None]) -> tuple[float, float]:
    """The median time of a call, and the cores that are busy meanwhile."""
    call(1)
    begin, worked = time.perf_counter(), time.process_time()
    call(1)
    first = time.perf_counter() - begin
    number, durations = (1, [first]) if first > _SHORT else (_IN_A_ROW, [])
    while len(durations) < _LEAST_ROUNDS or (
        len(durations) < _MOST_ROUNDS and time.perf_counter() - begin < _SECONDS
    ):
        before = time.perf_counter()
        call(number)
        durations.append((time.perf_counter() - before) / number)
    cores = (time.process_time() - worked) / (time.perf_counter() - begin)
    return statistics.median(durations), min(max(cores, _LEAST_CORES), float(count_cores()))


def _find(key: str, directory: Path | None) -> ProgramTime | None:
    measured = _measured.get(key)
    if measured is None:
        measured = read_measurement(directory, key, _parse)
        if measured is not None:
            _measured[key] = measured
    return measured


def _parse(fields: Any) -> ProgramTime | None:
    """The time that a file's fields hold; None if they hold none that is possible."""
    measured = ProgramTime(**fields)
    is_usable = all(math.isfinite(value) and value >= 0 for value in measured) and measured.cores > 0
    return measured._replace(num_temporary_bytes=int(measured.num_temporary_bytes)) if is_usable else None


def _keep(key: str, measured: ProgramTime, directory: Path | None) -> ProgramTime:
    """Keeps a measurement. Returns the one that counts: another process's, if that wrote meanwhile."""
    return keep_measurement(directory, key, measured._asdict(), _parse) or measured


# Programs of stages, and transfers between them.

CALLBACKS = "functions that print or call back into Python would notice"
_NO_PROGRAM = ProgramTime(0.0, 1.0, 0)

StageTimes: TypeAlias = "dict[tuple[ActionKind, int], ProgramTime]"  # by kind and stage


def why_not_timed(programs: Sequence[StagePrograms]) -> str:
    """The reason why stages cannot be run on zeros to time them; empty if they can."""
    all_programs = [program for stage in programs for program in (stage.forward, *stage.backwards)]
    if any(program.reaches_python for program in all_programs):
        return CALLBACKS
    endless = next((program.name for program in all_programs if program.loops_by_data), None)
    if endless is not None:
        return (
            "a loop that ends when its data says so may not end on them, and "
            f"{endless} has one (jax.lax.while_loop)"
        )
    return ""


def time_stages(plan: Plan, structs: Mapping[Value, Any]) -> StageTimes:
    """Times the programs of the first replica's stages, each alone, on zeros; `structs`: of all values."""
    timed = {
        (run.program.kind, run.program.stage): _timed_program(run, structs)
        for run in _run_instructions(plan)
        if run.program.kind is not None and run.replica in (0, ALL)
    }
    return dict(zip(timed, time_programs(list(timed.values())), strict=True))


def time_updates(
    plan: Plan, updates: Updates | None, structs: Mapping[Value, Any]
) -> dict[int, ProgramTime]:
    """Times the programs of a weight update, each alone, on zeros.

    Returns:
      The time of each stage's update programs together; nothing if they call back into Python, or have a
      loop that may not end on zeros.
    """
    if updates is None or updates.has_callbacks or any(update.loops_by_data for update in updates.updates):
        return {}
    timed = [run for run in _run_instructions(plan) if run.program.kind is None and run.program.binds]
    times: dict[int, ProgramTime] = {}
    parts = time_programs([_timed_program(run, structs) for run in timed])
    for stage, part in zip((run.program.stage for run in timed), parts, strict=True):
        times[stage] = join_times([times[stage], part] if stage in times else [part])
    return times


def _run_instructions(plan: Plan) -> list[Any]:
    """The instructions that start programs, over values."""
    blocks = dict.fromkeys(numbered.block for numbered in plan.blocks)
    return [instruction for block in blocks for instruction in block.code if instruction.op is Op.RUN]


def _timed_program(run: Any, structs: Mapping[Value, Any]) -> TimedProgram:
    program, arguments = run.program, [structs[value] for value in run.reads]
    carried = {
        place: result
        for place, bind in enumerate(program.binds)
        for result, bound in enumerate(program.results)
        if _is_new(bind, bound)
    }
    return TimedProgram(program.jitted, arguments, carried, program.group.devices[0], program.options)


def _is_new(argument: Any, result: Any) -> bool:
    """Whether a result is an argument's new value."""
    if isinstance(argument, Binding):
        return argument.kind is BindingKind.ACCUMULATOR and argument in result
    return bool(argument == result)


def time_transfers(
    plan: Plan, groups: Sequence[DeviceGroup], structs: Mapping[Value, Any], *, with_skips: bool
) -> dict[StageEdge, float]:
    """Times the transfers from stage to stage, in seconds, each alone."""
    last = len(groups) - 1
    durations: dict[StageEdge, float] = {}
    blocks = dict.fromkeys(numbered.block for numbered in plan.blocks)
    of_stages = [block for block in blocks if isinstance(block.name, tuple)]
    sends = [(block.name, send) for block in of_stages for send in block.code if send.op is Op.SEND]
    for (kind, stage), send in sends:
        if send.replica != 0:
            continue
        goes_back = kind is not ActionKind.FORWARD or stage == last
        way = range(stage - 1, -1, -1) if goes_back else range(stage + 1, last + 1)
        reader = next((later for later in way if groups[later] is send.group), None)
        if reader is None or (abs(reader - stage) > 1 and not with_skips):
            continue
        # Stages of one device stand for stages of others where layers are measured on two devices.
        source = groups[stage]
        away = (group for group in groups if group.devices != source.devices)
        target = send.group if send.group.devices != source.devices else next(away, send.group)
        seconds = time_copy([structs[value] for value in send.reads], source, target)
        durations[stage, reader] = durations.get((stage, reader), 0.0) + seconds
    return durations


class Measured(NamedTuple):
    """The measurements of a pipeline.

    Attributes:
      costs: what a micro-batch and an update take, in seconds.
      num_temporary_bytes: the most that a program of each stage takes besides arguments and results.
    """

    costs: Costs
    num_temporary_bytes: tuple[int, ...]


def make_measured(
    num_stages: int,
    times: StageTimes,
    transfers: Mapping[StageEdge, float],
    updates: Mapping[int, ProgramTime],
    chunk_size: int,
    host: float = 0.0,
) -> Measured:
    """Makes the costs of a micro-batch from the times of chunks.

    If a stage's backward is not split, half of it counts as weight gradients.
    """

    def of(kind: ActionKind) -> list[ProgramTime]:
        return [times.get((kind, stage), _NO_PROGRAM) for stage in range(num_stages)]

    forward, weights = of(ActionKind.FORWARD), of(ActionKind.WEIGHT_GRADIENTS)
    halves = zip(of(ActionKind.BACKWARD), of(ActionKind.INPUT_GRADIENTS), weights, strict=True)
    backward = [join_times(parts) for parts in halves]
    update = [updates.get(stage, _NO_PROGRAM) for stage in range(num_stages)]
    costs = Costs.of(
        num_stages,
        forward=[part.seconds / chunk_size for part in forward],
        backward=[part.seconds / chunk_size for part in backward],
        update=[part.seconds for part in update],
        weight_gradients=[
            (halved.seconds + joint.seconds / 2) / chunk_size
            for halved, joint in zip(weights, of(ActionKind.BACKWARD), strict=True)
        ],
        transfer={edge: seconds / chunk_size for edge, seconds in transfers.items()},
        host=host,
        forward_cores=[part.cores for part in forward],
        backward_cores=[part.cores for part in backward],
    )
    together = zip(forward, backward, update, strict=True)
    return Measured(costs, tuple(max(part.num_temporary_bytes for part in parts) for parts in together))


def divide_last(costs: Costs, forward: float, backward: float, *, is_halved: bool) -> Costs:
    """Divides what the last stage's program takes into its forward and its backward or first half."""
    joint_seconds, weights = costs.forward[-1], costs.weight_gradients[-1]
    forward_seconds = joint_seconds * forward / (forward + backward)
    first_half = joint_seconds - forward_seconds
    backward_seconds = first_half + weights
    busy = first_half * costs.forward_cores[-1] + weights * costs.backward_cores[-1]
    cores = busy / backward_seconds if backward_seconds else 1.0
    return dataclasses.replace(
        costs,
        forward=(*costs.forward[:-1], forward_seconds),
        backward=(*costs.backward[:-1], backward_seconds),
        backward_cores=(*costs.backward_cores[:-1], cores),
        weight_gradients=(*costs.weight_gradients[:-1], weights if is_halved else first_half / 2),
    )


def join_times(parts: Sequence[ProgramTime]) -> ProgramTime:
    """The time of programs that run one after another."""
    seconds = sum(part.seconds for part in parts)
    busy = sum(part.seconds * part.cores for part in parts)
    return ProgramTime(
        seconds, busy / seconds if seconds else 1.0, max(part.num_temporary_bytes for part in parts)
    )
