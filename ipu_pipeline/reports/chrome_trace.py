"""`trace.json`: a trace in Chrome's format, which Perfetto and chrome://tracing open.

Source of the format: "Trace Event Format" of the Chromium project. Times are in microseconds.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ipu_pipeline.reports.events import Event, EventKind
from ipu_pipeline.reports.profile import Profile

__all__ = ["describe_event", "to_chrome_trace"]

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
    (word, *others) = {facts.device_word for facts in profile.pipelines} or {"IPU"}
    word = "IPU" if others else word
    written: list[dict[str, Any]] = [
        _name("process_name", 1, 0, f"{word[0].upper()}{word[1:]}s"),
        _name("process_name", 2, 0, f"Transfers, by the {word} that receives"),
        _name("process_name", 3, 0, "Host"),
    ]
    for process, tracks in ((1, ipus), (2, transfers), (3, hosts or {0: []})):
        for number, events in sorted(tracks.items()):
            title = f"{word} {number}"
            if process == 3:
                title = f"Host of process {number}" if set(hosts) - {0} else "Host"
            for lane, some in enumerate(_lanes(events)):
                thread = number * _LANES + lane
                written.append(_name("thread_name", process, thread, title))
                written += [_complete(profile, event, process, thread) for event in some]
    document = {
        "traceEvents": written,
        "displayTimeUnit": "ms",
        "otherData": {"program": profile.program, "created": profile.created},
    }
    return json.dumps(document, allow_nan=False)


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


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
