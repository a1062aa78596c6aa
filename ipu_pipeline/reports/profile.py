"""A trace as data: events and pipelines, as `profile.json`, and as `trace.json` for Perfetto."""

from __future__ import annotations

import dataclasses
import enum
import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.engine.inspect import Edge, Flow, IpuMemory, LayerFacts, PipelineFacts, StageFacts

# Events.

# Spans that are not the user's: work that is done only once, or only because a trace is recorded.
COMPILING, REHEARSAL = "compiling", "rehearsal for the trace"


class EventKind(enum.StrEnum):
    """The kinds of events."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENTS = "input gradients"  # the first half of a backward
    WEIGHT_GRADIENTS = "weight gradients"  # and the second
    UPDATE = "update"
    TRANSFER = "transfer"  # from IPU to IPU
    INFEED_WAIT = "infeed wait"  # the host waits for micro-batches
    OUTFEED = "outfeed"  # the host takes or copies what was enqueued
    SPAN = "span"  # on the host: named by the user's program, as with poptorch.profiling.Channel
    OTHER = "other"  # a program that belongs to no stage, such as one of the user's own

    @property
    def is_computation(self) -> bool:
        """Whether the event keeps an IPU busy."""
        return self in (*ACTIONS, EventKind.UPDATE, EventKind.OTHER)


# What stages do with micro-batches.
ACTIONS = (
    EventKind.FORWARD,
    EventKind.BACKWARD,
    EventKind.INPUT_GRADIENTS,
    EventKind.WEIGHT_GRADIENTS,
)


@dataclass(frozen=True)
class Event:
    """An activity of an IPU or the host. Times are in microseconds from the beginning of the trace.

    Attributes:
      kind: what it was.
      begin: when it began.
      end: when it ended.
      ipu: the IPU; for a transfer, the one that received; None for the host's events.
      pipeline: the number of the pipeline in the trace; None if it belongs to none.
      stage: the stage; for a transfer, the one that made what was sent; None if it belongs to none.
      micro_batch: its number within the step, or a loop's iteration; None for updates and the like.
      step: the number of the weight update, or execution in inference; None if it belongs to none.
      num_bytes: the bytes that a transfer moved, or the host took; 0 for computations.
      source: for a transfer, the IPU that sent.
      program: the number of the program's run. Events of one number are shared: one program did them all.
      is_shared: whether its begin or its end within the program was not observed, but computed from the
        estimated operations of the events that share the program.
      is_bounded: for a transfer, whether its end was not observed: it is then the latest possible time.
      name: the name of a program that belongs to no stage, or of a span.
      process: the process whose host or device it was.
    """

    kind: EventKind
    begin: float
    end: float
    ipu: int | None
    pipeline: int | None = None
    stage: int | None = None
    micro_batch: int | None = None
    step: int | None = None
    num_bytes: int = 0
    source: int | None = None
    program: int | None = None
    is_shared: bool = False
    is_bounded: bool = False
    name: str = ""
    process: int = 0

    @property
    def length(self) -> float:
        """The time that it took."""
        return self.end - self.begin


def busy_time(events: Iterable[Event]) -> float:
    """The time, in microseconds, in which at least one of the events went on: overlaps count once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted((event.begin, event.end) for event in events):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


# `profile.json`, which docs/profiling.md describes.

# Version 1 had no replicas and processes, 2 no spans, 3 no halves of backwards, 4 no costs. In 5, layers
# were innermost scopes by name, without operations.
FORMAT, VERSION = "ipu_pipeline profile", 6

# The names of an event's fields in the file.
_COLUMNS = (
    "kind", "begin", "end", "ipu", "pipeline", "stage", "micro_batch", "step", "num_bytes", "source",
    "program", "is_shared", "is_bounded", "name", "process",
)  # fmt: skip
_DECIMALS = 3  # in microseconds, so the last one is nanoseconds


@dataclass(frozen=True)
class DeviceFacts:
    """A device.

    Attributes:
      ipu: the number of the IPU that it is.
      id: JAX's id.
      kind: what JAX calls the kind, such as "cpu".
      platform: JAX's platform.
      process: the number of the process that it belongs to.
    """

    ipu: int
    id: int
    kind: str
    platform: str
    process: int = 0


@dataclass(frozen=True)
class Profile:
    """A trace, with the program, packages and devices that it was recorded with.

    Attributes:
      program: the program that was traced, as it was started.
      created: when it was recorded, in ISO 8601.
      versions: the versions of packages.
      num_cores: the number of the host's processor cores that the program may use.
      devices: the devices that ran something.
      pipelines: the pipelines that ran; events refer to them by their numbers.
      events: in the order of their begins.
      num_lost: programs whose runs the profiler of the devices did not note.
      num_dropped: actions that were not recorded, because there were too many.
      notes: other remarks, in sentences.
    """

    program: str
    created: str
    versions: Mapping[str, str]
    num_cores: int
    devices: tuple[DeviceFacts, ...]
    pipelines: tuple[PipelineFacts, ...]
    events: tuple[Event, ...]
    num_lost: int = 0
    num_dropped: int = 0
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """The text of `profile.json`."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in ("program", "created", "num_cores")},
            "versions": dict(self.versions),
            "num_lost": self.num_lost,
            "num_dropped": self.num_dropped,
            "notes": list(self.notes),
            "devices": [dataclasses.asdict(device) for device in self.devices],
            "pipelines": [_describe(pipeline) for pipeline in self.pipelines],
            "events": {"columns": list(_COLUMNS), "rows": [_row(event) for event in self.events]},
        }
        return json.dumps(document, allow_nan=False)


def _describe(pipeline: PipelineFacts) -> dict[str, Any]:
    costs = None if pipeline.costs is None else pipeline.costs.as_dict()
    return {**dataclasses.asdict(pipeline), "costs": costs}


def _row(event: Event) -> list[Any]:
    row: list[Any] = [getattr(event, name) for name in _COLUMNS]
    row[1], row[2] = round(event.begin, _DECIMALS), round(event.end, _DECIMALS)
    return row


def read_profile(text: str) -> Profile:
    """Reads a profile from the text of `profile.json`."""
    try:
        document = json.loads(text)
        file_format, version = document["format"], document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"profile.json: this is no profile of ipu_pipeline ({error!r}).") from error
    if file_format != FORMAT or not isinstance(version, int):
        raise ValueError(f"profile.json: the format must be {FORMAT!r}; got {file_format!r}.")
    if version > VERSION:
        raise ValueError(
            f"profile.json: it was written by a later ipu_pipeline (version {version} of the format; this "
            f"one reads up to {VERSION}). Read it with that one."
        )
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"profile.json: it is damaged ({error!r}). Record the trace again.") from error


def _parse(document: Mapping[str, Any]) -> Profile:
    columns = document["events"]["columns"]
    return Profile(
        program=document["program"],
        created=document["created"],
        versions=document["versions"],
        num_cores=document["num_cores"],
        devices=tuple(DeviceFacts(**device) for device in document["devices"]),
        pipelines=tuple(_parse_pipeline(pipeline) for pipeline in document["pipelines"]),
        events=tuple(_parse_event(columns, row) for row in document["events"]["rows"]),
        num_lost=document["num_lost"],
        num_dropped=document["num_dropped"],
        notes=tuple(document["notes"]),
    )


def _parse_pipeline(pipeline: Mapping[str, Any]) -> PipelineFacts:
    from ipu_pipeline.engine.schedules import Costs  # with NumPy, which `ipu-pipeline --help` spares

    stages = [
        StageFacts(**{**stage, "layers": tuple(LayerFacts(**layer) for layer in stage["layers"])})
        for stage in pipeline["stages"]
    ]
    edges = tuple(Edge(**edge) for edge in pipeline["edges"])
    flows = [
        Flow(**{**flow, "readers": tuple(flow["readers"]), "holders": tuple(flow["holders"])})
        for flow in pipeline["flows"]
    ]
    memory = tuple(IpuMemory(**ipu) for ipu in pipeline["memory"])
    costs = None if pipeline.get("costs") is None else Costs.from_dict(pipeline["costs"])
    if costs is not None and costs.num_stages != len(stages):
        raise ValueError(f"costs of {costs.num_stages} of {len(stages)} stages")
    if pipeline.get("device_word", "IPU") not in ("IPU", "device"):  # pages have it in markup
        raise ValueError(f"device_word {pipeline['device_word']!r}")
    return PipelineFacts(
        **{
            **pipeline,
            "stages": tuple(stages),
            "edges": edges,
            "flows": tuple(flows),
            "memory": memory,
            "costs": costs,
        }
    )


def _parse_event(columns: Sequence[str], row: Sequence[Any]) -> Event:
    values = dict(zip(columns, row, strict=True))
    if not (math.isfinite(values["begin"]) and values["begin"] <= values["end"]):
        raise ValueError(f"an event lasts from {values['begin']} to {values['end']}")
    return Event(**{**values, "kind": EventKind(values["kind"])})


# `trace.json`, which Perfetto and chrome://tracing open. Source of the format: "Trace Event Format" of the
# Chromium project. Times are in microseconds.

_LANES = 100  # tracks that an IPU can have: numbers of threads are the IPU's times this


def to_chrome_trace(profile: Profile) -> str:
    """The text of `trace.json`: a process for the IPUs, with a track for each, and one for the host."""
    ipus: dict[int, list[Event]] = defaultdict(list)
    transfers: dict[int, list[Event]] = defaultdict(list)
    hosts: dict[int, list[Event]] = defaultdict(list)
    for event in profile.events:
        if event.ipu is None:
            hosts[event.process].append(event)
        elif event.kind is EventKind.TRANSFER:
            transfers[event.ipu].append(event)
        else:
            ipus[event.ipu].append(event)
    (word, *other_words) = {facts.device_word for facts in profile.pipelines} or {"IPU"}
    word = "IPU" if other_words else word
    trace_events: list[dict[str, Any]] = [
        _name("process_name", 1, 0, f"{word[0].upper()}{word[1:]}s"),
        _name("process_name", 2, 0, f"Transfers, by the {word} that receives"),
        _name("process_name", 3, 0, "Host"),
    ]
    for process, tracks in ((1, ipus), (2, transfers), (3, hosts or {0: []})):
        for number, events in sorted(tracks.items()):
            title = f"{word} {number}"
            if process == 3:
                title = f"Host of process {number}" if set(hosts) - {0} else "Host"
            for lane, lane_events in enumerate(_lanes(events)):
                thread = number * _LANES + lane
                trace_events.append(_name("thread_name", process, thread, title))
                trace_events += [_complete(profile, event, process, thread) for event in lane_events]
    document = {
        "traceEvents": trace_events,
        "displayTimeUnit": "ms",
        "otherData": {"program": profile.program, "created": profile.created},
    }
    return json.dumps(document, allow_nan=False)


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(profile: Profile, event: Event, process: int, thread: int) -> dict[str, Any]:
    details = {
        "pipeline": None if event.pipeline is None else profile.pipelines[event.pipeline].name,
        "stage": event.stage,
        "micro-batch": event.micro_batch,
        "step": event.step,
        "bytes": event.num_bytes or None,
        "from IPU": event.source,
        "shared": event.is_shared or None,
        "end not seen": event.is_bounded or None,
    }
    return {
        "ph": "X",
        "name": describe_event(event),
        "cat": event.kind.value,
        "ts": round(event.begin, 3),
        "dur": round(event.length, 3),
        "pid": process,
        "tid": thread,
        "args": {name: value for name, value in details.items() if value is not None},
    }


def describe_event(event: Event) -> str:
    """The name of an event for people, such as "forward of stage 1, micro-batch 2"."""
    words = event.name or event.kind.value
    if event.stage is not None:
        words += f" of stage {event.stage}"
    if event.micro_batch is not None:
        words += f", micro-batch {event.micro_batch}"
    return words


def _lanes(events: Sequence[Event]) -> list[list[Event]]:
    """Sorts events into lanes without overlaps, because tracks cannot show those."""
    lanes: list[list[Event]] = [[]]
    ends: list[tuple[float, int]] = [(float("-inf"), 0)]
    for event in sorted(events, key=lambda event: (event.begin, event.end)):
        end, lane = ends[0]
        if end <= event.begin or len(lanes) == _LANES:
            heapq.heapreplace(ends, (max(end, event.end), lane))
        else:
            lane = len(lanes)
            lanes.append([])
            heapq.heappush(ends, (event.end, lane))
        lanes[lane].append(event)
    return lanes
