"""What programs take, each alone: measured once on a kind of device, and kept for later processes.

Programs are told apart by what XLA would compile, the versions, the kind of device, on a CPU the number of
cores, and by how much their pipelines read: equal programs of one pipeline are measured once, and so are
those of others that read as much. What was measured
stays (`kept_measurements`), and what is chosen by it is chosen again in the next run.

In a step the programs of a pipeline take turns, and what one of them reads has left the caches when it runs
again, if the others read much. So where all that are timed together read more than a small cache holds, a
program is run on several copies of its arguments in turn, which together have about as many bytes as those
of all, up to some times what a large cache holds.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.placing import copy_to
from ipu_pipeline.engine.execution.kept import jit_zeros, text_of
from ipu_pipeline.engine.execution.kept_measurements import (
    describe_device,
    digest,
    find_directory,
    keep,
    read,
)
from ipu_pipeline.engine.planning.choosing import nominal_speed
from ipu_pipeline.engine.progress import compiling
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.cores import count_cores
from ipu_pipeline.ground.shapes import num_bytes

__all__ = [
    "ProgramTime",
    "TimedProgram",
    "time_copy",
    "time_programs",
    "time_shortest",
]

_PASSES = 2  # over all programs: what disturbs one measurement of a program has ended by the other
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 25, 0.05  # of each
_SHORT = 1e-3  # seconds; what takes less is called several times in a row
_IN_A_ROW = 8
_CACHED = 1 << 20  # bytes that stay in a cache close to a core
_MOST_READ = 64 << 20  # bytes of all copies: few caches have more
_MOST_COPIES = 64
_SHORTEST = (
    2048  # numbers; XLA runs programs of fewer than 1,000 operations where they are started, on CPUs
)
_LEAST_CORES = 0.01  # that a program keeps busy: one that only waits

_known: dict[str, ProgramTime] = {}  # by key
_alone = threading.Lock()  # held while a program is timed: two at a time would slow each other


class ProgramTime(NamedTuple):
    """What a program takes alone.

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
        timed = [(programs[place], own, copies[place]) for place, own in zip(new, compiled, strict=True)]
        passes = [[_time(*own) for own in timed] for _pass in range(_PASSES)]
        for place, *found in zip(new, *passes, strict=True):
            _known[keys[place]] = _keep(keys[place], min(found), directory)
    return [_known[key] for key in keys]


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
            found = min(_repeat(call) for _pass in range(_PASSES))
        _known[key] = _keep(key, ProgramTime(*found, 0), directory)
    return _known[key].seconds


def time_shortest(group: DeviceGroup) -> float:
    """Times a program that does next to nothing, in seconds: what every program takes at least."""
    struct = jax.ShapeDtypeStruct((_SHORTEST,), np.float32, sharding=group.replicated)
    jitted = jax.jit(lambda x: [x + 1])
    (found,) = time_programs([TimedProgram(jitted, [struct], {}, group.devices[0], {})])
    return found.seconds


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
    def compile_one(own: Any) -> Any:
        with told.program():
            return own.compile()

    with compiling(len(lowered)) as told:
        threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
        try:
            return list(threads.map(compile_one, lowered))
        finally:  # after an error or an interrupt, compilations that have not begun are not waited for
            threads.shutdown(wait=False, cancel_futures=True)


def _time(program: TimedProgram, compiled: Any, num_copies: int) -> ProgramTime:
    shardings = [struct.sharding for struct in program.arguments]
    copies = itertools.cycle([_make_zeros(program.arguments, shardings) for _copy in range(num_copies)])

    def call(number: int) -> None:
        for given in itertools.islice(copies, number):
            results = compiled(*given)
            for place, result in program.carried.items():
                given[place] = results[result]
        jax.block_until_ready(results)

    with _alone, jax.debug_nans(False), jax.debug_infs(False):  # which zeros may well make
        seconds, cores = _repeat(call)
    analysis = compiled.memory_analysis()  # None on some backends
    return ProgramTime(seconds, cores, 0 if analysis is None else int(analysis.temp_size_in_bytes))


def _make_zeros(avals: Sequence[Any], shardings: Sequence[Any]) -> list[jax.Array]:
    """Zeros, even while a function is being traced; by a program for each shape, which are few."""
    with jax.ensure_compile_time_eval():
        pairs = zip(avals, shardings, strict=True)
        made = [zeros for aval, sharding in pairs for zeros in jit_zeros([aval], sharding)()]
        jax.block_until_ready(made)
    return made


def _repeat(call: Callable[[int], None]) -> tuple[float, float]:
    """The median time of a call, and the cores that are busy meanwhile."""
    call(1)
    begin, worked = time.perf_counter(), time.process_time()
    call(1)
    first = time.perf_counter() - begin
    number, taken = (1, [first]) if first > _SHORT else (_IN_A_ROW, [])
    while len(taken) < _LEAST_ROUNDS or (
        len(taken) < _MOST_ROUNDS and time.perf_counter() - begin < _SECONDS
    ):
        before = time.perf_counter()
        call(number)
        taken.append((time.perf_counter() - before) / number)
    cores = (time.process_time() - worked) / (time.perf_counter() - begin)
    return statistics.median(taken), min(max(cores, _LEAST_CORES), float(count_cores()))


def _find(key: str, directory: Path | None) -> ProgramTime | None:
    found = _known.get(key)
    if found is None:
        found = read(directory, key, _parse)
        if found is not None:
            _known[key] = found
    return found


def _parse(fields: Any) -> ProgramTime | None:
    """A time from the fields of a file; None if they say nothing that can be."""
    found = ProgramTime(**fields)
    is_usable = all(math.isfinite(value) and value >= 0 for value in found) and found.cores > 0
    return found._replace(num_temporary_bytes=int(found.num_temporary_bytes)) if is_usable else None


def _keep(key: str, found: ProgramTime, directory: Path | None) -> ProgramTime:
    """Keeps what was measured. Returns what counts: what another process wrote meanwhile, if any did."""
    return keep(directory, key, found._asdict(), _parse) or found
