"""A trace as data: the events, and the pipelines that they are of; `profile.json` holds the same.

docs/profiling.md describes the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.engine.inspect import IpuMemory
from ipu_pipeline.reports.events import Event, EventKind

__all__ = [
    "FORMAT",
    "DeviceFacts",
    "EdgeFacts",
    "FlowFacts",
    "LayerFacts",
    "PipelineFacts",
    "Profile",
    "StageFacts",
    "read_profile",
]

FORMAT, VERSION = "ipu_pipeline profile", 3  # 1 had no replicas and processes, 2 no spans

# Of an event in the file: the names of its fields.
_COLUMNS = (
    "kind", "begin", "end", "ipu", "pipeline", "stage", "micro_batch", "step", "num_bytes", "source",
    "program", "is_shared", "is_bounded", "name", "process",
)  # fmt: skip
_DECIMALS = 3  # of microseconds: nanoseconds


@dataclass(frozen=True)
class DeviceFacts:
    """A device.

    Attributes:
      ipu: the number of the IPU that it is.
      id: JAX's.
      kind: what JAX calls the kind, such as "cpu".
      platform: JAX's.
      process: the number of the process whose it is.
    """

    ipu: int
    id: int
    kind: str
    platform: str
    process: int = 0


@dataclass(frozen=True)
class LayerFacts:
    """The variables of a layer, which is what their names have in common up to the last slash.

    Attributes:
      name: the layer's; empty of variables outside of any scope.
      num_parameters: elements of the variables.
      num_bytes: what they take.
    """

    name: str
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True)
class EdgeFacts:
    """What goes from one IPU to another per micro-batch, in bytes.

    Attributes:
      source: the IPU that sends; None for the host's feed.
      target: the IPU that receives.
      num_forward_bytes: values for later stages.
      num_backward_bytes: gradients for earlier ones.
    """

    source: int | None
    target: int
    num_forward_bytes: int
    num_backward_bytes: int


@dataclass(frozen=True)
class FlowFacts:
    """What a stage makes for others on an IPU, once per micro-batch; see `engine.inspect.crossings.Flow`.

    Attributes:
      stage: the stage that makes it.
      is_backward: whether it is gradients, on their way back.
      target: the IPU where it is read.
      readers: the stages there that read it and do not hold it any longer.
      holders: the stages there that hold it between forward and backward, among `num_held_bytes`.
      num_bytes: how much it is.
    """

    stage: int
    is_backward: bool
    target: int
    readers: tuple[int, ...]
    holders: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class StageFacts:
    """A stage.

    Attributes:
      index: its number.
      name: what errors call it.
      ipu: where it runs.
      level: which stages run at the same time as it.
      layers: its variables; those that it shares with an earlier stage are that one's.
      forward_operations: estimated floating-point operations of its forward for a micro-batch.
      backward_operations: likewise of its backward; 0 without one.
      is_fused: whether one program does both.
      num_held_bytes: what it holds of a micro-batch between its forward and its backward.
      in_flight: of how many micro-batches it does so at most.
    """

    index: int
    name: str
    ipu: int
    level: int
    layers: tuple[LayerFacts, ...]
    forward_operations: float
    backward_operations: float
    is_fused: bool
    num_held_bytes: int
    in_flight: int

    @property
    def num_parameters(self) -> int:
        """Elements of its variables."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_parameter_bytes(self) -> int:
        """What they take."""
        return sum(layer.num_bytes for layer in self.layers)


@dataclass(frozen=True)
class PipelineFacts:
    """A pipeline or loop that ran.

    Attributes:
      name: its name.
      kind: "training", "inference" or "loop".
      schedule: the name of the schedule, or of the user's function.
      num_micro_batches: per step of each replica, as they were seen; of a loop 1.
      num_serialized: how many of them a stage handles before the next one starts.
      chunk_size: micro-batches per program.
      is_one_program: whether all stages are on one device.
      micro_batch_size: samples in a micro-batch; None if its arrays have no first axis in common.
      stages: its stages.
      edges: what goes from IPU to IPU, those with anything on them.
      flows: what goes from stage to stage, also on one IPU.
      memory: what the IPUs of each replica take by the plan; empty where that could not be found.
      num_replicas: how many there are; a file without it has one. IPUs are those of the first replica here;
        in events IPU i of replica r is r times `num_ipus` plus i, and micro-batches are the elements of all
        replicas: the k-th one of replica r is number k times `num_replicas` plus r.
    """

    name: str
    kind: str
    schedule: str
    num_micro_batches: int
    num_serialized: int
    chunk_size: int
    is_one_program: bool
    micro_batch_size: int | None
    stages: tuple[StageFacts, ...]
    edges: tuple[EdgeFacts, ...]
    flows: tuple[FlowFacts, ...]
    memory: tuple[IpuMemory, ...]
    num_replicas: int = 1

    @property
    def num_ipus(self) -> int:
        """How many IPUs a replica has, with those that have no stage."""
        return max(stage.ipu for stage in self.stages) + 1

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs with stages, in all replicas."""
        own = sorted({stage.ipu for stage in self.stages})
        return tuple(replica * self.num_ipus + ipu for replica in range(self.num_replicas) for ipu in own)

    def stages_on(self, ipu: int) -> list[int]:
        """The stages on an IPU of any replica."""
        return [stage.index for stage in self.stages if stage.ipu == ipu % self.num_ipus]

    @property
    def trains(self) -> bool:
        """Whether there are weight updates."""
        return any(stage.backward_operations for stage in self.stages)


@dataclass(frozen=True)
class Profile:
    """A trace, with what it is of.

    Attributes:
      program: the program that was traced, as it was started.
      created: when, in ISO 8601.
      versions: of packages.
      num_cores: of the host's processor.
      devices: those that ran something.
      pipelines: those that ran; events name them by their numbers.
      events: in the order of their begins.
      num_lost: programs whose runs the profiler of the devices did not note.
      num_dropped: actions that were not recorded, since there were too many.
      notes: what else is to be known, in sentences.
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
            "pipelines": [dataclasses.asdict(pipeline) for pipeline in self.pipelines],
            "events": {"columns": list(_COLUMNS), "rows": [_row(event) for event in self.events]},
        }
        return json.dumps(document, allow_nan=False)


def _row(event: Event) -> list[Any]:
    row: list[Any] = [getattr(event, name) for name in _COLUMNS]
    row[1], row[2] = round(event.begin, _DECIMALS), round(event.end, _DECIMALS)
    return row


def read_profile(text: str) -> Profile:
    """A profile from the text of `profile.json`.

    Raises:
      ValueError: it is none, or one of a later version.
    """
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
    stages = [
        StageFacts(**{**stage, "layers": tuple(LayerFacts(**layer) for layer in stage["layers"])})
        for stage in pipeline["stages"]
    ]
    edges = tuple(EdgeFacts(**edge) for edge in pipeline["edges"])
    flows = [
        FlowFacts(**{**flow, "readers": tuple(flow["readers"]), "holders": tuple(flow["holders"])})
        for flow in pipeline["flows"]
    ]
    memory = tuple(IpuMemory(**ipu) for ipu in pipeline["memory"])
    return PipelineFacts(
        **{**pipeline, "stages": tuple(stages), "edges": edges, "flows": tuple(flows), "memory": memory}
    )


def _parse_event(columns: Sequence[str], row: Sequence[Any]) -> Event:
    values = dict(zip(columns, row, strict=True))
    if not (math.isfinite(values["begin"]) and values["begin"] <= values["end"]):
        raise ValueError(f"an event lasts from {values['begin']} to {values['end']}")
    return Event(**{**values, "kind": EventKind(values["kind"])})
