"""The memory of each IPU over time: a plan laid along the times of measured or simulated actions.

The permanent part is the plan's: variables, optimizer state, accumulators, and micro-batches that wait. The
rest comes and goes with actions:

* **activations**: what a stage holds of a micro-batch, from the beginning of its forward to the end of its
  backward; and what goes from stage to stage on one IPU, until it has been read;
* **transfers**: what goes to another IPU. The sender holds it from the beginning of its program until it
  has been sent; the receiver from when it is sent until it has been read, or is held by a stage;
* **temporaries**: while an IPU computes, the most that one of its programs takes besides.

On one IPU, all stages are one program, whose temporaries include what they hold. If execution phases bring
state from host memory, the plan of the fullest moment is taken for all the time: state and activations.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ipu_pipeline.engine.inspect import Flow, IpuMemory, StageMemory
from ipu_pipeline.reports.profile import Profile

CATEGORIES = (
    "variables",
    "optimizer state",
    "accumulators",
    "feed",
    "activations",
    "transfers",
    "temporaries",
)
_ACTIVATIONS, _TRANSFERS, _TEMPORARIES = 4, 5, 6
_COMPUTING = ("forward", "backward", "input gradients", "weight gradients", "update")

Array: TypeAlias = "npt.NDArray[Any]"
_Key: TypeAlias = "tuple[int | None, int | None]"  # micro-batch, step


class TimedAction(Protocol):
    """An action and its times. `reports.profile.Event` and `Interval` of a `Timeline` are such actions.

    A transfer also has the `ipu` that received, and an update of no stage has the one that did it.
    An action may have the number of its `step`.
    """

    @property
    def kind(self) -> str:
        """One of "forward", "backward", "input gradients", "weight gradients", "update" and "transfer".

        Others are ignored.
        """

    @property
    def stage(self) -> int | None:
        """The stage that did it; for a transfer, the stage that made what was sent."""

    @property
    def micro_batch(self) -> int | None:
        """The number of the micro-batch; None for an update."""

    @property
    def begin(self) -> float:
        """When it began, in any unit."""

    @property
    def end(self) -> float:
        """When it ended."""


@dataclass(frozen=True)
class Peak:
    """The most that an IPU holds.

    Attributes:
      time: when the IPU first holds it.
      num_bytes: the bytes of all categories.
      parts: the bytes of each category.
      kind: what the IPU is doing then, as in `TimedAction.kind`; None if it waits.
      stage: the stage that is doing it; if the IPU waits, the one that holds most; None without any, and
        for an update of everything that the IPU has.
      micro_batch: its micro-batch; None for an update, and if the IPU waits.
    """

    time: float
    num_bytes: int
    parts: Mapping[str, int]
    kind: str | None
    stage: int | None
    micro_batch: int | None


@dataclass(frozen=True, eq=False)
class MemoryOverTime:
    """The memory of an IPU over time.

    Attributes:
      ipu: its number.
      times: the times at which something changes, ascending, in the unit of the actions.
      parts: bytes of each category of `CATEGORIES`, each from the time at its position until the next.
      peak: the most that it holds.
      planned_bytes: its bytes in the plan (`IpuMemory.num_device_bytes`), which has no transfers between
        IPUs.
      knows_temporaries: whether the programs had been compiled, so that their temporaries are known.
    """

    ipu: int
    times: Array
    parts: Mapping[str, Array]
    peak: Peak
    planned_bytes: int
    knows_temporaries: bool

    @property
    def total(self) -> Array:
        """Bytes of all categories together."""
        return np.sum(list(self.parts.values()), axis=0)

    def num_bytes_at(self, time: float) -> int:
        """The bytes that the IPU holds at a time."""
        return int(self.total[max(0, bisect.bisect_right(self.times, time) - 1)])


class _Span(NamedTuple):
    """A time in which an IPU holds something."""

    begin: float
    end: float
    category: int
    num_bytes: int
    stage: int | None


def profile_memory_over_time(profile: Profile, pipeline: int) -> tuple[MemoryOverTime, ...]:
    """The memory of each IPU while a pipeline of a trace ran, by the plan and the times of its events.

    Returns:
      One entry per IPU of the pipeline, with times in microseconds; empty if there is no plan.
    """
    facts = profile.pipelines[pipeline]
    if not facts.memory:
        return ()
    stages = [
        StageMemory(
            stage.index, stage.ipu, stage.in_flight, stage.num_held_bytes, 0, stage.num_between_bytes
        )
        for stage in facts.stages
    ]
    events = [
        event
        for event in profile.events
        if event.pipeline == pipeline and (event.stage is None or 0 <= event.stage < len(stages))
    ]
    if facts.num_replicas == 1:
        return lay_out_memory(stages, facts.memory, facts.flows, events)
    memories: list[MemoryOverTime] = []
    for replica in range(facts.num_replicas):
        first = replica * facts.num_ipus_each
        replica_events = [
            dataclasses.replace(event, ipu=event.ipu - first)
            for event in events
            if event.ipu is not None and event.ipu // facts.num_ipus_each == replica
        ]
        laid_out = lay_out_memory(stages, facts.memory, facts.flows, replica_events)
        memories += [dataclasses.replace(memory, ipu=memory.ipu + first) for memory in laid_out]
    return tuple(memories)


def lay_out_memory(
    stages: Sequence[StageMemory],
    ipus: Sequence[IpuMemory],
    flows: Sequence[Flow],
    actions: Iterable[TimedAction],
) -> tuple[MemoryOverTime, ...]:
    """Lays a plan of memory along the times of actions.

    Returns:
      One entry per IPU, in the order of `ipus`.
    """
    timed = _Times(stages, actions)
    spans: dict[int, list[_Span]] = {memory.ipu: [] for memory in ipus}
    if len({stage.ipu for stage in stages}) > 1 and not any(memory.num_brought_bytes for memory in ipus):
        for stage in stages:
            spans[stage.ipu] += timed.held(stage)
        for flow in flows:
            for ipu, span in timed.flowing(flow, stages[flow.stage].ipu):
                spans[ipu].append(span)
    else:
        for memory in ipus:
            number = memory.num_activation_bytes  # 0 if all is one program
            spans[memory.ipu] += [_Span(timed.begin, timed.end, _ACTIVATIONS, number, None)] * bool(number)
    memories = []
    for memory in ipus:
        ipu_actions = timed.computing(memory.ipu)
        size = memory.num_temporary_bytes or 0
        temporary = [
            _Span(begin, end, _TEMPORARIES, size, stage)
            for begin, end, _kind, stage, _mb in _without_overlaps(ipu_actions)
        ]
        memories.append(_lay_out(memory, [*spans[memory.ipu], *temporary], ipu_actions, timed.begin))
    return tuple(memories)


_Action: TypeAlias = "tuple[float, float, str, int | None, int | None]"


class _Times:
    """The times of actions."""

    def __init__(self, stages: Sequence[StageMemory], actions: Iterable[TimedAction]) -> None:
        self.stages = stages
        self._computations: dict[tuple[str, int], dict[_Key, list[tuple[float, float]]]] = {}
        self._transfers: dict[tuple[int, int], dict[_Key, list[tuple[float, float]]]] = {}
        self._updates: dict[int, list[tuple[float, float]]] = {}  # for an IPU's stages together
        self.begin, self.end = math.inf, -math.inf
        for action in actions:
            kind, stage = str(action.kind), action.stage
            if kind != "transfer" and kind not in _COMPUTING:
                continue
            is_update = kind == "update" and stage is None and getattr(action, "ipu", None) is not None
            if not is_update and (stage is None or not 0 <= stage < len(stages)):
                raise ValueError(f"actions: stage must be from 0 to {len(stages) - 1}; got {action!r}.")
            if not -math.inf < action.begin <= action.end < math.inf:
                raise ValueError(f"actions: an action must not end before it begins; got {action!r}.")
            key = action.micro_batch, getattr(action, "step", None)
            span = (action.begin, action.end)
            if stage is None:
                self._updates.setdefault(getattr(action, "ipu", -1), []).append(span)
            elif kind == "transfer":
                target = getattr(action, "ipu", -1)
                self._transfers.setdefault((stage, target), {}).setdefault(key, []).append(span)
            else:
                self._computations.setdefault((kind, stage), {}).setdefault(key, []).append(span)
            self.begin, self.end = min(self.begin, action.begin), max(self.end, action.end)
        for spans_by_key in (*self._computations.values(), *self._transfers.values()):
            for spans in spans_by_key.values():
                spans.sort()
        if self.begin > self.end:
            self.begin = self.end = 0.0

    def computing(self, ipu: int) -> list[_Action]:
        """The actions of an IPU, by begin."""
        actions: list[_Action] = [(*span, "update", None, None) for span in self._updates.get(ipu, ())]
        actions += [
            (begin, end, kind, stage, micro_batch)
            for (kind, stage), spans_by_key in self._computations.items()
            if self.stages[stage].ipu == ipu
            for (micro_batch, _step), spans in spans_by_key.items()
            for begin, end in spans
        ]
        return sorted(actions, key=lambda action: action[:2])

    def held(self, stage: StageMemory) -> list[_Span]:
        """The memory that a stage holds from forwards to backwards, and between the halves of these."""
        seconds = self._computations.get(("weight gradients", stage.stage), {})
        spans = []
        for key, times in self._computations.get(("forward", stage.stage), {}).items():
            for number, (begin, _end) in enumerate(times):
                first = self._end_of_first(stage.stage, key, number)
                spans.append(_Span(begin, first, _ACTIVATIONS, stage.num_held_bytes, stage.stage))
                if seconds:
                    second = self._nth(seconds, key, number)[1]
                    size = stage.num_between_bytes
                    spans.append(_Span(first, max(first, second), _ACTIVATIONS, size, stage.stage))
        return [span for span in spans if span.num_bytes]

    def flowing(self, flow: Flow, source: int) -> list[tuple[int, _Span]]:
        """The data that goes from stage to stage: the IPU, and when the data is there."""
        spans = []
        all_sent = self._transfers.get((flow.stage, flow.target), {})
        size, stage = flow.num_bytes, flow.stage
        for key, times in self._of(flow.stage, flow.is_backward).items():
            for number, (begin, end) in enumerate(times):
                last_read = self._last_read(flow, key, number)
                if flow.target == source:
                    spans.append((source, _Span(begin, max(end, last_read), _ACTIVATIONS, size, stage)))
                    continue
                sent = all_sent.get(key, ())
                departs, arrives = next((span for span in sent if span[1] > end), (end, end))
                received = max(begin, min(departs, arrives))
                spans.append((source, _Span(begin, max(end, arrives), _TRANSFERS, size, stage)))
                spans.append(
                    (flow.target, _Span(received, max(arrives, last_read), _TRANSFERS, size, stage))
                )
        return spans

    def _last_read(self, flow: Flow, key: _Key, number: int) -> float:
        """The time when all stages have read a flow's data, or others hold it."""
        reads = [
            self._end_of_first(stage, key, number)
            if flow.is_backward and self._backwards_of(stage)
            else self._nth(self._of(stage, flow.is_backward), key, number)[1]
            for stage in flow.readers
        ]
        holds = [self._nth(self._of(stage, flow.is_backward), key, number)[0] for stage in flow.holders]
        return max((*reads, *holds), default=self.begin)

    def _of(self, stage: int, is_backward: bool) -> dict[_Key, list[tuple[float, float]]]:
        """A stage's actions in a direction; a stage without backwards does everything in its forwards."""
        backwards = self._backwards_of(stage) if is_backward else None
        return backwards or self._computations.get(("forward", stage), {})

    def _end_of_first(self, stage: int, key: _Key, number: int) -> float:
        """The time when a stage's backward ends, or the first half of it.

        Without a program for the first half, it is over when the second one begins.
        """
        backwards = self._backwards_of(stage) or {}
        is_second = backwards is self._computations.get(("weight gradients", stage))
        return self._nth(backwards, key, number)[0 if is_second else 1]

    def _backwards_of(self, stage: int) -> dict[_Key, list[tuple[float, float]]] | None:
        """A stage's backwards, or the first that it has of their halves."""
        kinds = ("backward", "input gradients", "weight gradients")
        return next(filter(None, (self._computations.get((kind, stage)) for kind in kinds)), None)

    def _nth(
        self, spans_by_key: Mapping[_Key, Sequence[tuple[float, float]]], key: _Key, number: int
    ) -> tuple[float, float]:
        spans = spans_by_key.get(key, ())
        return spans[number] if number < len(spans) else (self.end, self.end)


def _without_overlaps(actions: Sequence[_Action]) -> list[_Action]:
    """Joins actions that overlap, such as events that share a program: temporaries are counted once."""
    joined: list[_Action] = []
    for begin, end, *action in actions:
        if joined and begin < joined[-1][1]:
            begin = joined[-1][1]
        if end > begin:
            joined.append((begin, end, *action))  # type: ignore[arg-type]  # the rest of a tuple has no types
    return joined


def _lay_out(
    memory: IpuMemory, spans: Sequence[_Span], actions: Sequence[_Action], start: float
) -> MemoryOverTime:
    begins, ends = [span.begin for span in spans], [span.end for span in spans]
    times, places = np.unique(np.array([start, *begins, *ends], float), return_inverse=True)
    changes = np.zeros((len(CATEGORIES), len(times)), np.int64)
    constant = (*memory.num_state_bytes, memory.num_feed_bytes)
    changes[: len(constant), 0] = constant
    categories = np.array([span.category for span in spans], int)
    sizes = np.array([span.num_bytes for span in spans], np.int64)
    np.add.at(changes, (categories, places[1 : 1 + len(spans)]), sizes)
    np.add.at(changes, (categories, places[1 + len(spans) :]), -sizes)
    levels = np.cumsum(changes, axis=1)
    total = levels.sum(axis=0)
    place = int(np.argmax(total))
    time = float(times[place])
    kind, stage, micro_batch = _find_action(actions, spans, time)
    parts = {name: int(row[place]) for name, row in zip(CATEGORIES, levels, strict=True)}
    return MemoryOverTime(
        memory.ipu,
        times,
        dict(zip(CATEGORIES, levels, strict=True)),
        Peak(time, int(total[place]), parts, kind, stage, micro_batch),
        memory.num_device_bytes,
        memory.num_temporary_bytes is not None,
    )


def _find_action(
    actions: Sequence[_Action], spans: Sequence[_Span], time: float
) -> tuple[str | None, int | None, int | None]:
    """The action of an IPU at a time; if there is none, the stage that holds most memory."""
    for begin, end, kind, stage, micro_batch in actions:
        if begin <= time < end:
            return kind, stage, micro_batch
    bytes_by_stage: dict[int, int] = {}
    for span in spans:
        if span.stage is not None and span.begin <= time < span.end:
            bytes_by_stage[span.stage] = bytes_by_stage.get(span.stage, 0) + span.num_bytes
    return None, max(bytes_by_stage, key=lambda stage: (bytes_by_stage[stage], -stage), default=None), None
