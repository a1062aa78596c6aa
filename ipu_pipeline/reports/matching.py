"""Makes events by matching what the host started with what the devices ran.

Runs are matched with launches per device and program: both are in the order in which they were started.
Runs from before the trace began, which only the devices noted, come first and are skipped.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.inspect import Launch
from ipu_pipeline.engine.processes import is_here
from ipu_pipeline.reports.device_profile import DeviceProfile, ProgramRun, group_runs
from ipu_pipeline.reports.events import Event, EventKind
from ipu_pipeline.reports.recorder import Launched, Recorder

__all__ = ["Matched", "match"]

# In nanoseconds.
_LEAST_COPY = 500.0  # shorter ones are XLA's bookkeeping
_LATEST_COPY = 2e6  # after it could begin; one that begins later is another copy
_CLOCKS_DIFFER = 100e3  # the accuracy of the profiler's clock

_MOST_FUNCTIONS = 6  # functions with the same program that are distinguished


@dataclass(frozen=True)
class Matched:
    """Events, and the number of programs that were not found.

    Attributes:
      events: in the order of their begins.
      num_lost: programs that the host started, but whose runs the devices' profiler did not note.
      origin: the time 0 of the events, in nanoseconds since the epoch.
    """

    events: tuple[Event, ...]
    num_lost: int
    origin: float


def match(recorder: Recorder, profile: DeviceProfile) -> Matched:
    """Finds when each action ran."""
    found, strangers, num_lost = _find_runs(recorder, profile)
    ipus = _number_devices(recorder)
    times = [run.begin for launched, runs in found.items() for run in runs if not launched.is_rehearsal]
    times += [one.begin for one in recorder.host if one.kind is not EventKind.SPAN]
    origin = min(times, default=0.0)

    def since(time: float) -> float:
        return (time - origin) / 1e3

    events: list[Event] = []
    for number, (launched, runs) in enumerate(found.items()):
        if launched.is_rehearsal:
            continue
        place = recorder.find(launched.launch.runner)
        assert place is not None
        for run in runs:
            begin, end = since(run.begin), since(run.end)
            shares, ipu = recorder.introduced[place].shares, ipus[run.device]
            events += shares.divide(launched.launch, ipu, place, number, begin, end)
    for run in strangers:
        if run.device in ipus and since(run.begin) >= 0:
            events.append(
                Event(EventKind.OTHER, since(run.begin), since(run.end), ipus[run.device], name=run.module)
            )
    launches = {launched.launch: runs for launched, runs in found.items()}
    events += _transfers(recorder, profile, launches, ipus, since)
    for one in recorder.host:
        if one.end < origin:  # a span before the trace
            continue
        events.append(
            Event(
                one.kind,
                max(0.0, since(one.begin)),
                since(one.end),
                None,
                micro_batch=one.micro_batch,
                step=one.step,
                num_bytes=one.num_bytes,
                name=one.name,
            )
        )
    return Matched(tuple(sorted(events, key=lambda event: (event.begin, event.end))), num_lost, origin)


def _number_devices(recorder: Recorder) -> dict[int, int]:
    """The IPU of each device, by the device's id."""
    return {device.id: ipu for one in recorder.introduced for device, ipu in one.runner.find_ipus().items()}


def _find_runs(
    recorder: Recorder, profile: DeviceProfile
) -> tuple[dict[Launched, list[ProgramRun]], list[ProgramRun], int]:
    """The runs of each launch, one per device; runs without a launch; how many launches have no runs."""
    wanted: dict[tuple[int, str], dict[int, list[Launched]]] = defaultdict(lambda: defaultdict(list))
    modules: dict[int, str] = {}
    for launched in recorder.launched:
        function = id(launched.function)
        if function not in modules:
            modules[function] = _module_of(launched)
        for device in filter(is_here, launched.launch.devices):
            wanted[device.id, modules[function]][function].append(launched)
    noted: dict[tuple[int, str], list[list[ProgramRun]]] = defaultdict(list)
    for runs in group_runs(profile.runs):
        noted[runs[0].device, runs[0].module].append(runs)

    found: dict[Launched, list[ProgramRun]] = {launched: [] for launched in recorder.launched}
    strangers: list[ProgramRun] = []
    for place, groups in noted.items():
        lists = list(wanted.get(place, {}).values())
        for runs in sorted(groups, key=lambda runs: min(run.begin for run in runs)):
            chosen = _choose(lists, runs)
            lists = [launches for launches in lists if launches not in chosen]
            together = _merge(chosen)
            if not together:
                strangers += runs
            for launched, run in zip(together, runs[max(0, len(runs) - len(together)) :], strict=False):
                found[launched].append(run)
    num_lost = sum(
        len(runs) < sum(map(is_here, launched.launch.devices)) for launched, runs in found.items()
    )
    return found, strangers, num_lost


def _choose(lists: Sequence[list[Launched]], runs: Sequence[ProgramRun]) -> list[list[Launched]]:
    """Chooses the launches of these runs, by function: the fewest functions that fit their number best.

    There are more runs than launches if some were started before the trace, and fewer if the last ones had
    not run at its end.
    """
    fitting = [
        list(some)
        for size in range(1, min(len(lists), _MOST_FUNCTIONS) + 1)
        for some in itertools.combinations(lists, size)
        if _fits(_merge(some), runs)
    ]
    return min(fitting, key=lambda some: abs(sum(map(len, some)) - len(runs)), default=[])


def _merge(lists: Iterable[list[Launched]]) -> list[Launched]:
    """All launches in the order in which they were started."""
    return sorted(itertools.chain(*lists), key=lambda launched: launched.begin)


def _module_of(launched: Launched) -> str:
    """XLA's name of the program that was started."""
    if launched.launch.is_moved:
        executable = launched.function.runtime_executable()
        return str(executable.hlo_modules()[0].name)
    return f"jit_{launched.launch.name}"


def _fits(launches: Sequence[Launched], runs: Sequence[ProgramRun]) -> bool:
    """Whether, if these runs are the launches', no program ran before it was started."""
    skipped = max(0, len(runs) - len(launches))
    pairs = zip(launches, runs[skipped:], strict=False)
    return all(run.begin >= launched.begin - _CLOCKS_DIFFER for launched, run in pairs)


def _transfers(
    recorder: Recorder,
    profile: DeviceProfile,
    found: Mapping[Launch, Sequence[ProgramRun]],
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
    taken = [False] * len(copies)
    sent = []
    for moved in recorder.moved_arrays:
        runs = found.get(moved.launch)
        if runs:
            sent.append((max(runs[0].end, moved.time), moved))
    events = []
    for ready, moved in sorted(sent, key=lambda one: one[0]):
        place = bisect.bisect_left(begins, ready - _CLOCKS_DIFFER)
        while place < len(copies) and taken[place]:
            place += 1
        begin = end = ready
        is_bounded = place == len(copies) or begins[place] > ready + _LATEST_COPY
        if not is_bounded:
            taken[place] = True
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
