"""Captures a trace of what runs, merges those of several processes, and writes the reports."""

from __future__ import annotations

import atexit
import base64
import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import os
import platform
import shlex
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ipu_pipeline.engine import processes
from ipu_pipeline.engine.inspect import (
    IpuMemory,
    Launch,
    LaunchKind,
    PipelineFacts,
    StageFacts,
    select_fields,
    watching,
)
from ipu_pipeline.engine.planning import plan_ipu_memory, plan_memory
from ipu_pipeline.engine.processes import Peers
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.ground.errors import ProcessError
from ipu_pipeline.ground.host import count_cores
from ipu_pipeline.processes.launcher import JobHistory, useful_seconds
from ipu_pipeline.reports.device_events import DeviceProfile, DeviceProfiler, match
from ipu_pipeline.reports.page import write_page
from ipu_pipeline.reports.page.sections import as_html
from ipu_pipeline.reports.profile import DeviceFacts, Profile, read_profile, to_chrome_trace
from ipu_pipeline.reports.recorder import IntroducedRunner, Recorder
from ipu_pipeline.reports.report_files import PAGE, REPORTS, check_directory, remove_report, write_reports

# Several processes: at the end, each sends its trace to the others. Processes on one machine have the same
# clock. Clocks of different machines are compared once, when all processes have met: these go on within
# about a millisecond of each other, so clocks differ by the difference between the times that they show
# then.

_PIECE = 1 << 19  # characters that are sent at once; the store's messages have a limit


@dataclasses.dataclass(frozen=True)
class Part:
    """The recording of a process.

    Attributes:
      profile: its trace; None if nothing ran.
      origin: when its times begin, in nanoseconds since the epoch by its clock.
      clock: identifies the clock: equal texts are the same clock.
      now: the time of that clock when all processes had met.
    """

    profile: Profile | None
    origin: float
    clock: str
    now: float


def exchange(peers: Peers, profile: Profile | None, origin: float) -> list[Part]:
    """Returns the parts of all processes, by their numbers. Every process calls it."""
    peers.meet("report")
    message = {"clock": _name_clock(), "now": time.time_ns(), "origin": origin}
    message["profile"] = None if profile is None else profile.to_json()
    text = base64.b64encode(zlib.compress(json.dumps(message).encode())).decode()
    pieces = [text[place : place + _PIECE] for place in range(0, len(text), _PIECE)]
    number = max(map(int, peers.exchange("report", str(len(pieces)))))
    rounds = [peers.exchange("report", (pieces[place : place + 1] or [""])[0]) for place in range(number)]
    return [_read("".join(texts)) for texts in zip(*rounds, strict=True)]


def _read(text: str) -> Part:
    message = json.loads(zlib.decompress(base64.b64decode(text)))
    profile = None if message["profile"] is None else read_profile(message["profile"])
    return Part(profile, message["origin"], message["clock"], message["now"])


def _name_clock() -> str:
    """Identifies the clock: the machine, since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def merge(parts: Sequence[Part]) -> Profile | None:
    """Merges the traces of all processes, by the clock of the first; None if nothing ran in any."""
    begins = [(number, part.profile, _begin(part, parts[0])) for number, part in enumerate(parts)]
    recorded = [(number, profile, begin) for number, profile, begin in begins if profile is not None]
    if not recorded:
        return None
    first = min(begin for _number, _profile, begin in recorded)
    profiles = [profile for _number, profile, _begin in recorded]
    events, num_programs = [], 0
    for number, profile, begin in recorded:
        shift = (begin - first) / 1e3
        last = num_programs
        for event in profile.events:
            program = None if event.program is None else event.program + last
            num_programs = max(num_programs, (program or 0) + 1)
            moved = (event.begin + shift, event.end + shift)
            events.append(
                dataclasses.replace(event, begin=moved[0], end=moved[1], program=program, process=number)
            )
    return dataclasses.replace(
        profiles[0],
        devices=tuple(
            sorted(
                {device for recording in profiles for device in recording.devices},
                key=lambda device: (device.ipu, device.id),
            )
        ),
        pipelines=tuple(_merge_facts(facts) for facts in _facts_by_pipeline(profiles)),
        events=tuple(sorted(events, key=lambda event: (event.begin, event.end))),
        num_lost=sum(recording.num_lost for recording in profiles),
        num_dropped=sum(recording.num_dropped for recording in profiles),
        notes=tuple(
            f"Process {number}: {note}"
            for number, recording, _begin in recorded
            for note in recording.notes
        ),
    )


def _begin(part: Part, first: Part) -> float:
    """The origin of a part, by the clock of another one."""
    return part.origin if part.clock == first.clock else part.origin - part.now + first.now


def _facts_by_pipeline(profiles: Sequence[Profile]) -> Iterator[list[PipelineFacts]]:
    """Yields, for each pipeline, the facts of each process that has it."""
    for facts_of_processes in itertools.zip_longest(*(profile.pipelines for profile in profiles)):
        yield [facts for facts in facts_of_processes if facts is not None]


def _merge_facts(parts: Sequence[PipelineFacts]) -> PipelineFacts:
    def merge_memory(plans: Sequence[IpuMemory]) -> IpuMemory:
        """Merges plans of one IPU: only the process that compiled the programs knows the temporaries."""
        return next((plan for plan in plans if plan.num_temporary_bytes is not None), plans[0])

    memories: list[tuple[Any, ...]] = list(zip(*(facts.memory for facts in parts), strict=False))
    return dataclasses.replace(
        parts[0],
        num_micro_batches=max(facts.num_micro_batches or 1 for facts in parts),
        memory=tuple(merge_memory(plans) for plans in memories),
    )


# Captures.

MAX_ACTIONS = 40_000
VARIABLE = "POPLAR_ENGINE_OPTIONS"
_PREFIX = "autoReport."
_PACKAGES = ("ipu_pipeline", "jax", "jaxlib")

_logger = logging.getLogger("ipu_pipeline")


class Capture:
    """A trace that is being recorded; see `capture`. In Jupyter, a cell that ends with it shows its report.

    Example:
      >>> def model(x):
      ...     return ipu.loops.repeat(3, lambda x: layers.Dense(8)(x), [x])
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.ones([2, 8], np.float32)])
      >>> with ipu.Session() as session, ipu.reports.capture("profile_run") as capture:
      ...     _ = session.run(program)
      >>> [pipeline.kind for pipeline in capture.profile.pipelines]
      ['loop']

    Attributes:
      directory: where the reports are, or will be; with several processes, in the first one.
      profile: the recorded trace; None until the end, and if nothing ran.
    """

    def __init__(self, directory: str | os.PathLike[str], max_actions: int) -> None:
        """Records nothing yet. Takes the same arguments as `capture`."""
        self.directory = Path(directory).absolute()  # wherever the program goes
        self.profile: Profile | None = None
        self._max_actions = max_actions
        self._profiler = DeviceProfiler()
        self._noted = DeviceProfile((), ())
        self._recorder = Recorder(max_actions, self._profiler.start, self._end_recording)
        self._is_ended = False
        self._lock = threading.RLock()

    def _repr_html_(self) -> str | None:
        """The report in a frame for Jupyter, with its own plotly.js: the notebook grows by about 5.6 MB."""
        if self.profile is None:
            return None
        try:
            page = write_page(self.profile)
        except RuntimeError as error:  # there is no Plotly
            return as_html(error)
        return f'<iframe srcdoc="{as_html(page)}" style="width: 100%; height: 60em; border: 0"></iframe>'

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records what runs in the block."""
        with watching.watching(self._recorder):
            yield

    def _end_recording(self) -> None:
        """Waits for the devices, and takes what their profiler noted."""
        with self._lock:
            if not self._is_ended:
                self._is_ended = True
                self._recorder.wait()
                self._noted = self._profiler.stop()

    def finish(self, *, is_whole: bool = True) -> None:
        """Ends the recording, and writes the reports; with several processes, the first one writes for all.

        Args:
          is_whole: whether the other processes come here, too. If not, this one writes its own recording.
        """
        self._end_recording()
        recorder, origin = self._recorder, 0.0
        if recorder.launched:
            self.profile, origin = _make_profile(recorder, self._noted, self._max_actions)
        self._noted = DeviceProfile((), ())
        recorder.forget()
        process = processes.current()
        if process is not None:
            try:
                if not is_whole:
                    raise ProcessError("it ended with an error")
                self.profile = merge(exchange(process, self.profile, origin))
            except ProcessError as error:
                self.directory /= f"process_{process.index}"
                check_directory(self.directory, REPORTS)
                _logger.warning("The trace has only what process %d recorded: %s", process.index, error)
            else:
                if process.index:  # the first process writes
                    return
        if self.profile is None:
            warnings.warn(
                f"reports.capture: nothing was run, so there is no report in {str(self.directory)!r}. Run "
                "a pipeline or a loop within it.",
                stacklevel=2,
            )
            return
        self.profile = dataclasses.replace(self.profile, notes=(*self.profile.notes, *_note_of_job()))
        texts = {"profile.json": self.profile.to_json(), "trace.json": to_chrome_trace(self.profile)}
        write_reports(self.directory, texts)
        self._write_page(self.profile)
        for note in self.profile.notes:
            _logger.warning("%s", note)
        _logger.info("The reports are in %s.", self.directory)

    def _write_page(self, profile: Profile) -> None:
        """Writes the page for people, if Plotly is installed; otherwise removes an older one."""
        try:
            write_reports(self.directory, {PAGE: write_page(profile)})
        except RuntimeError as error:
            remove_report(self.directory, PAGE)
            _logger.warning("%s", error)


@contextlib.contextmanager
def capture(directory: str | os.PathLike[str], *, max_actions: int = MAX_ACTIONS) -> Iterator[Capture]:
    """Records what runs in the block, and writes the reports at its end, also after an error.

    The first program that runs starts the recording, without the time it takes to compile. Programs run as
    they do otherwise: docs/profiling.md says how much longer they take. To record a whole program, set the
    environment variable
    POPLAR_ENGINE_OPTIONS='{"autoReport.all": "true", "autoReport.directory": "./directory"}'.

    Example:
      >>> def model(x):
      ...     return ipu.loops.repeat(3, lambda x: layers.Dense(8)(x), [x])
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.ones([2, 8], np.float32)])
      >>> with ipu.Session() as session, ipu.reports.capture("profile_run") as capture:
      ...     _ = session.run(program)
      >>> "profile.json" in os.listdir("profile_run")
      True

    Args:
      directory: where the reports go: `report.html` (with the extra `reports`), `trace.json` for Perfetto
        or chrome://tracing, `profile.json` (docs/profiling.md has its schema), and `manifest.json`, which
        lists them. It is created if it does not exist; older reports in it are replaced.
      max_actions: after this number of actions (a forward or backward of a micro-batch, a weight update)
        the recording ends, and programs run on.

    Yields:
      The `Capture`; its `profile` is there after the block.

    Raises:
      RuntimeError: something is being recorded already, or another profiler of JAX runs.
      ValueError: `max_actions` is below 1, or the directory has a file with the name of a report that this
        library did not write.
      OSError: the directory cannot be written to.
    """
    if not is_int(max_actions, 1):
        raise ValueError(f"max_actions must be an integer of at least 1; got {max_actions!r}.")
    if watching.current() is not None:
        raise RuntimeError(
            "reports.capture: a trace is recorded already, in this or another thread, or for "
            f"{VARIABLE}. Only one trace can be recorded at a time."
        )
    check_directory(Path(directory), REPORTS)
    captured = Capture(directory, max_actions)
    try:
        with captured.recording():
            yield captured
    except BaseException:
        with contextlib.suppress(Exception):  # the error itself says more
            captured.finish(is_whole=False)
        raise
    captured.finish()


def _make_profile(recorder: Recorder, noted: DeviceProfile, max_actions: int) -> tuple[Profile, float]:
    """The trace, and when its times begin, in nanoseconds since the epoch."""
    matched = match(recorder, noted)
    pipelines = [
        _describe_pipeline(
            record,
            [started.launch for started in recorder.launched if started.launch.runner is record.runner],
        )
        for record in recorder.introduced
    ]
    notes = []
    if recorder.num_dropped:
        notes.append(
            f"The recording ended after {recorder.num_actions} actions (max_actions={max_actions}); at "
            f"least {recorder.num_dropped} more followed."
        )
    if matched.num_lost:
        notes.append(
            f"Of {len(recorder.launched)} programs {matched.num_lost} are missing: the devices' profiler "
            "did not note them."
        )
    profile = Profile(
        program="a notebook" if sys.argv[0].endswith("ipykernel_launcher.py") else shlex.join(sys.argv),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={name: metadata.version(name) for name in _PACKAGES},
        num_cores=count_cores(),
        devices=_describe_devices(recorder.introduced),
        pipelines=tuple(pipelines),
        events=matched.events,
        num_lost=matched.num_lost,
        num_dropped=recorder.num_dropped,
        notes=tuple(notes),
    )
    return profile, matched.origin


def _note_of_job() -> list[str]:
    """A note of the job's restarts and goodput, if its processes have been started again."""
    history = JobHistory.of_environment()
    if history is None or not history.num_restarts:
        return []
    goodput = history.goodput(useful_seconds())
    part = "" if goodput is None else f" Its runs took {goodput:.0%} of its time until now (goodput)."
    return [f"{history.describe()}{part}"]


_has_read_environment = False


def start_automatic_report() -> None:
    """Follows POPLAR_ENGINE_OPTIONS, the first time it is called."""
    global _has_read_environment
    if _has_read_environment:
        return
    _has_read_environment = True
    directory = _read_options(os.environ.get(VARIABLE))
    if directory is None:
        return
    check_directory(directory, REPORTS)
    captured = Capture(directory, MAX_ACTIONS)
    recording = captured.recording()
    recording.__enter__()
    process = os.getpid()

    def finish() -> None:
        if os.getpid() == process:  # not in a fork of it
            recording.__exit__(None, None, None)
            captured.finish()

    atexit.register(finish)


def _read_options(text: str | None) -> Path | None:
    """The directory for reports; None if there are to be none. Warns of options that have no effect."""
    if not text:
        return None
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'{VARIABLE} must be a JSON object such as {{"autoReport.all": "true"}}; got {text!r} '
            f"({error})."
        ) from error
    if not isinstance(options, dict):
        raise ValueError(
            f'{VARIABLE} must be a JSON object such as {{"autoReport.all": "true"}}; got {text!r}.'
        )
    directory = options.pop(f"{_PREFIX}directory", ".")
    wishes = [_is_true(name, options.pop(name)) for name in list(options) if name.startswith(_PREFIX)]
    if options:
        warnings.warn(
            f"{VARIABLE}: {', '.join(map(repr, options))} has no effect here; only the options "
            f"'{_PREFIX}...' have.",
            stacklevel=2,
        )
    return Path(str(directory)) if any(wishes) else None


def _is_true(name: str, value: object) -> bool:
    words = {"true": True, "false": False}
    if str(value).lower() not in words:
        raise ValueError(f'{VARIABLE}: {name} must be "true" or "false"; got {value!r}.')
    return words[str(value).lower()]


def _describe_devices(introduced: Sequence[IntroducedRunner]) -> tuple[DeviceFacts, ...]:
    """The devices of some pipelines, by IPU."""
    ipus = {(ipu, device) for record in introduced for device, ipu in record.runner.find_ipus().items()}
    facts = {DeviceFacts(ipu, d.id, d.device_kind, d.platform, d.process_index) for ipu, d in ipus}
    return tuple(sorted(facts, key=lambda device: (device.ipu, device.id)))


def _describe_pipeline(record: IntroducedRunner, launches: Sequence[Launch]) -> PipelineFacts:
    """Describes a pipeline or loop that ran."""
    facts, owner = record.facts, record.owner
    count = 1 if facts.kind == "loop" else _count_micro_batches(launches)
    number = None if owner.options.num_micro_batches is not None else max(1, count // facts.num_serialized)
    stages = [
        select_fields(
            StageFacts,
            stage,
            layers=stage.whole_layers,
            num_held_bytes=memory.num_held_bytes,
            in_flight=memory.in_flight,
            num_between_bytes=memory.num_between_bytes,
        )
        for stage, memory in zip(facts.stages, plan_memory(owner, number), strict=True)
    ]
    return select_fields(
        PipelineFacts,
        facts,
        name=record.name,
        num_micro_batches=count,
        stages=tuple(stages),
        memory=tuple(plan_ipu_memory(owner, number)),
    )


def _count_micro_batches(launches: Sequence[Launch]) -> int:
    """Micro-batches per step of each replica, as they were seen."""
    everies = [launch.every for launch in launches if launch.kind == LaunchKind.BLOCK]
    numbers = [launch.first + launch.count for launch in launches if launch.kind != LaunchKind.BLOCK]
    return max([*everies, *numbers], default=1)
