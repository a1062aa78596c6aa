"""Reads from the notes of JAX's profiler when programs ran on the devices.

XLA notes every operation that a device carries out, with the module, the device and the number of the run.
A program runs from the beginning of its first operation to the end of its last one.

Source of the names: XLA's tsl/profiler (`hlo_module`, `run_id`, `device_ordinal`, `profile_start_time`), as
seen with jaxlib 0.10.2. Runs that a device's profiler does not name this way are reported as lost.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

__all__ = ["DeviceProfile", "DeviceProfiler", "ProgramRun", "group_runs"]

_FARTHEST = 1 << 14  # runs of one counter on a device have closer numbers; others' may be between
_COPY_THREADS = "tf_XLAPjRt"  # threads of XLA's CPU client, which copy between devices


@dataclass
class ProgramRun:
    """A run of a program on a device.

    Attributes:
      module: XLA's name of the program.
      device: the id of the device.
      number: the number of the run; it rises with each start of the same program.
      begin: when the first operation began, in nanoseconds since the epoch.
      end: when the last one ended.
    """

    module: str
    device: int
    number: int
    begin: float
    end: float


@dataclass(frozen=True)
class DeviceProfile:
    """The notes of a profiler.

    Attributes:
      runs: runs of programs, in no order.
      copies: (begin, end) of what may have been copies between devices, in nanoseconds since the epoch.
    """

    runs: tuple[ProgramRun, ...]
    copies: tuple[tuple[float, float], ...]


class DeviceProfiler:
    """JAX's profiler, from `start` to `stop`."""

    def __init__(self) -> None:
        """Does not start it."""
        self._directory: Path | None = None

    @property
    def is_running(self) -> bool:
        """Whether the profiler is running."""
        return self._directory is not None

    def start(self) -> None:
        """Starts it."""
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 1  # the least that has operations
        options.python_tracer_level = 0
        options.enable_hlo_proto = False
        directory = Path(tempfile.mkdtemp(prefix="ipu_pipeline_"))
        try:
            jax.profiler.start_trace(str(directory), profiler_options=options)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, RuntimeError):
                raise RuntimeError(
                    "A trace needs JAX's profiler, which runs already: end jax.profiler.start_trace or "
                    f"jax.profiler.trace first ({error})."
                ) from error
            raise
        self._directory = directory

    def stop(self) -> DeviceProfile:
        """Stops it, and reads what it noted: nothing if it did not run."""
        directory, self._directory = self._directory, None
        if directory is None:
            return DeviceProfile((), ())
        try:
            jax.profiler.stop_trace()
            found = sorted(directory.rglob("*.xplane.pb"))
            if not found:
                return DeviceProfile((), ())
            with warnings.catch_warnings():
                # On Python 3.13 jaxlib's types warn when they are made; as an error, that aborts Python.
                warnings.simplefilter("ignore", DeprecationWarning)
                return _read(jax.profiler.ProfileData.from_file(str(found[0])))
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass
class _Thread:
    """The work of a thread, in the order of time."""

    operations: list[tuple[float, float]] = field(default_factory=list)
    marks: list[tuple[float, bool]] = field(default_factory=list)  # where regions begin (True) and end


def _read(data: Any) -> DeviceProfile:
    origin = next(
        (value for plane in data.planes for name, value in plane.stats if name == "profile_start_time"), 0
    )
    runs: dict[tuple[int, str, int], ProgramRun] = {}
    copies: list[tuple[float, float]] = []
    for plane in data.planes:
        for line in plane.lines:
            thread = _Thread()
            is_copier = line.name.startswith(_COPY_THREADS)
            for event in line.events:
                name = event.name
                if name.startswith("end: "):  # a mark of the operation's end, which the operation has, too
                    continue
                begin, end = event.start_ns, event.end_ns
                if name.startswith(("ThreadpoolListener::", "Threadpool")):
                    if is_copier and name.endswith(("StartRegion", "StopRegion")):
                        thread.marks.append((begin, name.endswith("StartRegion")))
                    continue
                if "Memcpy" in name:  # on an accelerator
                    copies.append((origin + begin, origin + end))
                    continue
                run = _find_run(event, plane.name)
                if run is None:
                    continue
                if is_copier:
                    thread.operations.append((begin, end))
                known = runs.get(run)
                if known is None:
                    device, module, number = run
                    runs[run] = ProgramRun(module, device, number, origin + begin, origin + end)
                else:
                    known.begin = min(known.begin, origin + begin)
                    known.end = max(known.end, origin + end)
            copies += [(origin + begin, origin + end) for begin, end in _find_idle_regions(thread)]
    return DeviceProfile(tuple(runs.values()), tuple(sorted(copies)))


def _find_run(event: Any, plane: str) -> tuple[int, str, int] | None:
    """(device, module, number) of the run that an operation belongs to; None if it belongs to none."""
    module = number = device = None
    for name, value in event.stats:
        if name == "hlo_module":
            module = value
        elif name == "run_id":
            number = value
        elif name == "device_ordinal":
            device = value
            if module is not None and number is not None:
                break  # the rest takes as long to read, and is not needed
    if module is None or number is None:
        return None
    if device is None:  # accelerators have a plane for each device, such as /device:GPU:0
        last = plane.rsplit(":", 1)[-1]
        if not last.isdigit():
            return None
        device = last
    return int(device), str(module), int(number)


def _find_idle_regions(thread: _Thread) -> Iterator[tuple[float, float]]:
    """Regions of a thread of XLA's CPU client without any operation in them: these are copies."""
    operations = sorted(thread.operations)
    place, opened = 0, None
    for time, begins in sorted(thread.marks):
        if begins:
            opened = time
        elif opened is not None:
            while place < len(operations) and operations[place][1] <= opened:
                place += 1
            if place == len(operations) or operations[place][0] >= time:
                yield opened, time
            opened = None


def group_runs(runs: Sequence[ProgramRun]) -> list[list[ProgramRun]]:
    """Groups runs by counter and device, in the order in which they were started.

    XLA numbers the runs of equal programs together, starting at a random number, even if they were compiled
    or loaded several times. Other programs of the same name have another counter.
    """
    named: dict[tuple[int, str], list[ProgramRun]] = defaultdict(list)
    for run in runs:
        named[run.device, run.module].append(run)
    groups: list[list[ProgramRun]] = []
    for together in named.values():
        together.sort(key=lambda run: run.number)
        first = 0
        for place in range(1, len(together) + 1):
            is_last = place == len(together)
            if is_last or together[place].number - together[place - 1].number > _FARTHEST:
                groups.append(together[first:place])
                first = place
    return groups
