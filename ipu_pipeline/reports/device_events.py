"""Events of devices: when programs ran, by JAX's profiler, matched with what the host started."""

from __future__ import annotations

import bisect
import itertools
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine.inspect import Launch
from ipu_pipeline.engine.processes import is_here
from ipu_pipeline.reports.profile import Event, EventKind
from ipu_pipeline.reports.recorder import LaunchedProgram, Recorder

# JAX's profiler. XLA notes every operation that a device carries out, with the module, the device and the
# number of the run: a program runs from the beginning of its first operation to the end of its last one. A
# thread that waits for each result would see ends only, late, and would keep results alive.
#
# Source of the names: XLA's tsl/profiler (`hlo_module`, `run_id`, `device_ordinal`, `profile_start_time`),
# as seen with jaxlib 0.10.2. Runs that a device's profiler does not name this way are reported as lost.

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
        """Makes a profiler that is not running."""
        self._directory: Path | None = None

    @property
    def is_running(self) -> bool:
        """Whether the profiler is running."""
        return self._directory is not None

    def start(self) -> None:
        """Starts the profiler."""
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
        """Stops the profiler. Returns its notes, none if it did not run."""
        directory, self._directory = self._directory, None
        if directory is None:
            return DeviceProfile((), ())
        try:
            jax.profiler.stop_trace()
            files = sorted(directory.rglob("*.xplane.pb"))
            if not files:
                return DeviceProfile((), ())
            with warnings.catch_warnings():
                # On Python 3.13 jaxlib's types warn when they are made; as an error, that aborts Python.
                warnings.simplefilter("ignore", DeprecationWarning)
                return _read(jax.profiler.ProfileData.from_file(str(files[0])))
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
                program_run = runs.get(run)
                if program_run is None:
                    device, module, number = run
                    runs[run] = ProgramRun(module, device, number, origin + begin, origin + end)
                else:
                    program_run.begin = min(program_run.begin, origin + begin)
                    program_run.end = max(program_run.end, origin + end)
            copies += [(origin + begin, origin + end) for begin, end in _find_idle_regions(thread)]
    return DeviceProfile(tuple(runs.values()), tuple(sorted(copies)))


def _find_run(event: Any, plane: str) -> tuple[int, str, int] | None:
    """The run that an operation belongs to, as (device, module, number); None if it belongs to none."""
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
    for same_program in named.values():
        same_program.sort(key=lambda run: run.number)
        first = 0
        for place in range(1, len(same_program) + 1):
            is_last = place == len(same_program)
            if is_last or same_program[place].number - same_program[place - 1].number > _FARTHEST:
                groups.append(same_program[first:place])
                first = place
    return groups


# Matching. Runs are matched with launches per device and program: both are in the order in which they were
# started. Runs from before the trace began, which only the devices noted, come first and are skipped.

# In nanoseconds.
_LEAST_COPY = 500.0  # shorter ones are XLA's bookkeeping
_LATEST_COPY = 2e6  # after it could begin; one that begins later is another copy
_CLOCKS_DIFFER = 100e3  # the accuracy of the profiler's clock

_MOST_FUNCTIONS = 6  # functions with the same program that are distinguished
_Launches: TypeAlias = list[LaunchedProgram]


@dataclass(frozen=True)
class Matching:
    """Events, and the number of programs that were not found.

    Attributes:
      events: in the order of their begins.
      num_lost: programs that the host started, but whose runs the devices' profiler did not note.
      origin: the time 0 of the events, in nanoseconds since the epoch.
    """

    events: tuple[Event, ...]
    num_lost: int
    origin: float


def match(recorder: Recorder, profile: DeviceProfile) -> Matching:
    """Finds when each action ran."""
    matches, unmatched_runs, num_lost = _find_runs(recorder, profile)
    ipus = _number_devices(recorder)
    times = [run.begin for launched, runs in matches.items() for run in runs if not launched.is_rehearsal]
    times += [work.begin for work in recorder.host if work.kind is not EventKind.SPAN]
    origin = min(times, default=0.0)

    def since(time: float) -> float:
        return (time - origin) / 1e3

    events: list[Event] = []
    for number, (launched, runs) in enumerate(matches.items()):
        if launched.is_rehearsal:
            continue
        place = recorder.find(launched.launch.runner)
        assert place is not None
        for run in runs:
            begin, end = since(run.begin), since(run.end)
            shares, ipu = recorder.introduced[place].shares, ipus[run.device]
            events += shares.divide(launched.launch, ipu, place, number, begin, end)
    for run in unmatched_runs:
        if run.device in ipus and since(run.begin) >= 0:
            events.append(
                Event(EventKind.OTHER, since(run.begin), since(run.end), ipus[run.device], name=run.module)
            )
    launches = {launched.launch: runs for launched, runs in matches.items()}
    events += _transfers(recorder, profile, launches, ipus, since)
    for work in recorder.host:
        if work.end < origin:  # a span before the trace
            continue
        events.append(
            Event(
                work.kind,
                max(0.0, since(work.begin)),
                since(work.end),
                None,
                micro_batch=work.micro_batch,
                step=work.step,
                num_bytes=work.num_bytes,
                name=work.name,
            )
        )
    return Matching(tuple(sorted(events, key=lambda event: (event.begin, event.end))), num_lost, origin)


def _number_devices(recorder: Recorder) -> dict[int, int]:
    """The IPU of each device, by the device's id."""
    runners = [record.runner for record in recorder.introduced]
    return {device.id: ipu for runner in runners for device, ipu in runner.find_ipus().items()}


def _find_runs(
    recorder: Recorder, profile: DeviceProfile
) -> tuple[dict[LaunchedProgram, list[ProgramRun]], list[ProgramRun], int]:
    """The runs of each launch, one per device; runs without a launch; how many launches have no runs."""
    by_device: dict[tuple[int, str], dict[int, _Launches]] = defaultdict(lambda: defaultdict(list))
    modules: dict[int, str] = {}
    # Launches by device and program's name, then by function.
    for launched in recorder.launched:
        function = id(launched.function)
        if function not in modules:
            modules[function] = _module_of(launched)
        for device in filter(is_here, launched.launch.devices):
            by_device[device.id, modules[function]][function].append(launched)
    # Runs in the same way; several pipelines may have programs of one name.
    noted: dict[tuple[int, str], list[list[ProgramRun]]] = defaultdict(list)
    for runs in group_runs(profile.runs):
        noted[runs[0].device, runs[0].module].append(runs)

    matches: dict[LaunchedProgram, list[ProgramRun]] = {launched: [] for launched in recorder.launched}
    unmatched_runs: list[ProgramRun] = []
    for place, groups in noted.items():
        lists = list(by_device.get(place, {}).values())
        for runs in sorted(groups, key=lambda runs: min(run.begin for run in runs)):
            chosen = _choose(lists, runs)
            lists = [launches for launches in lists if launches not in chosen]
            together = _merge(chosen)
            if not together:
                unmatched_runs += runs
            for launched, run in zip(together, runs[max(0, len(runs) - len(together)) :], strict=False):
                matches[launched].append(run)
    num_lost = sum(
        len(runs) < sum(map(is_here, launched.launch.devices)) for launched, runs in matches.items()
    )
    return matches, unmatched_runs, num_lost


def _choose(lists: Sequence[_Launches], runs: Sequence[ProgramRun]) -> list[_Launches]:
    """Chooses the launches of these runs, by function: the fewest functions that fit their number best.

    There are more runs than launches if some were started before the trace, and fewer if the last ones had
    not run at its end.
    """
    fitting = [
        list(combination)
        for size in range(1, min(len(lists), _MOST_FUNCTIONS) + 1)
        for combination in itertools.combinations(lists, size)
        if _fits(_merge(combination), runs)
    ]
    return min(fitting, key=lambda combination: abs(sum(map(len, combination)) - len(runs)), default=[])


def _merge(lists: Iterable[_Launches]) -> _Launches:
    """All launches in the order in which they were started."""
    return sorted(itertools.chain(*lists), key=lambda launched: launched.begin)


def _module_of(launched: LaunchedProgram) -> str:
    """XLA's name of the program that was started."""
    if launched.launch.is_moved:
        executable = launched.function.runtime_executable()
        return str(executable.hlo_modules()[0].name)
    return f"jit_{launched.launch.name}"


def _fits(launches: Sequence[LaunchedProgram], runs: Sequence[ProgramRun]) -> bool:
    """Whether, if these runs are the launches', no program ran before it was started."""
    skipped = max(0, len(runs) - len(launches))
    pairs = zip(launches, runs[skipped:], strict=False)
    return all(run.begin >= launched.begin - _CLOCKS_DIFFER for launched, run in pairs)


def _transfers(
    recorder: Recorder,
    profile: DeviceProfile,
    runs_of_launches: Mapping[Launch, Sequence[ProgramRun]],
    ipus: Mapping[int, int],
    since: Callable[[float], float],
) -> list[Event]:
    """Makes the events of transfers between IPUs.

    A transfer begins when the program that makes its data has ended, or when the host asks for it. It ends
    with the first copy from then on that belongs to no other transfer. Without one, it ends at the latest
    when the next program of its target that waits for it begins; as that is not known here, it has no
    length.
    """
    copies = [copy for copy in profile.copies if copy[1] - copy[0] >= _LEAST_COPY]
    begins = [begin for begin, _end in copies]
    is_used = [False] * len(copies)
    sent = []
    for moved in recorder.moved_arrays:
        runs = runs_of_launches.get(moved.launch)
        if runs:
            sent.append((max(runs[0].end, moved.time), moved))
    events = []
    for ready, moved in sorted(sent, key=lambda pair: pair[0]):
        place = bisect.bisect_left(begins, ready - _CLOCKS_DIFFER)
        while place < len(copies) and is_used[place]:
            place += 1
        begin = end = ready
        is_bounded = place == len(copies) or begins[place] > ready + _LATEST_COPY
        if not is_bounded:
            is_used[place] = True
            begin, end = copies[place]
        launch = moved.launch
        number, source = recorder.find(launch.runner), ipus[launch.devices[0].id]
        assert number is not None
        events.append(
            Event(
                EventKind.TRANSFER,
                since(begin),
                since(end),
                ipus[moved.device],
                number,
                launch.stage,
                recorder.introduced[number].facts.element(launch.first, source),
                launch.step,
                num_bytes=moved.num_bytes,
                source=source,
                is_bounded=is_bounded,
            )
        )
    return events
