"""A trace as data: the events, and the pipelines that they belong to; `profile.json` holds the same.

docs/profiling.md describes the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.engine.inspect import Edge, Flow, IpuMemory, LayerFacts, PipelineFacts, StageFacts
from ipu_pipeline.reports.events import Event, EventKind

__all__ = ["FORMAT", "DeviceFacts", "Profile", "read_profile"]

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
        found, version = document["format"], document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"profile.json: this is no profile of ipu_pipeline ({error!r}).") from error
    if found != FORMAT or not isinstance(version, int):
        raise ValueError(f"profile.json: the format must be {FORMAT!r}; got {found!r}.")
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
