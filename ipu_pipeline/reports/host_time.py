"""Measures how long all IPUs waited for the host, and says what it did meanwhile and what to do about it.

The time that counts goes from the start of a pipeline's first step to the end of its last one, without
compilations and rehearsals for the trace. In it, IPUs waited for the host whenever no IPU computed, for any
pipeline, and nothing was on its way between IPUs. Waiting for another IPU is the pipeline's own affair:
`predictions` has advice on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ipu_pipeline.engine.inspect import PipelineFacts
from ipu_pipeline.reports.analysis import PipelineAnalysis
from ipu_pipeline.reports.events import COMPILING, REHEARSAL, EventKind
from ipu_pipeline.reports.profile import Profile
from ipu_pipeline.reports.wording import describe_share, describe_time

__all__ = ["HostTime", "find_host_time"]

_LEAST_SHARE = 0.1  # of the time; from this share on, waiting is reported
_LEAST_PART = 0.25  # of the waiting time; from this share on, a cause gets advice
_LEAST_TOLD = 0.01
# By the attribute of `HostTime`: what the host did, and what to do about it.
_CAUSES = {
    "data": (
        "waited for the data set",
        "Make the data set faster: prepare elements in several threads or processes, or keep prepared "
        "ones. A larger prefetch_depth of the infeed helps if only some elements take long.",
    ),
    "dequeuing": (
        "dequeued",
        "Dequeue less often or less: do more weight updates in a run (repeat_count), enqueue sums "
        "(accumulate_outfeed), or keep the last element only (IPUOutfeedMode.LAST).",
    ),
    "between_steps": (
        "ran the program's own Python between steps",
        "Do less between steps, or do it in another thread. In the interfaces of Graphcore's IPUs, one run "
        "may do several steps (repeat_count, the count of a loop, deviceIterations).",
    ),
    "within_steps": (
        "started programs within steps",
        "Give each program more to do: larger micro-batches or, if it handles one of them, several "
        "(dispatch_plan).",
    ),
}

_Spans: TypeAlias = "list[tuple[float, float]]"  # without overlaps, in the order of time


@dataclass(frozen=True)
class HostTime:
    """The time that IPUs waited for the host, in microseconds.

    Attributes:
      length: from the start of the first step to the end of the last one, without compiling.
      data: the part in which no IPU had work, and the host waited for micro-batches.
      dequeuing: the part in which no IPU had work, and the host took what was enqueued.
      between_steps: the part in which no IPU had work, and the host did something else between steps.
      within_steps: the part in which no IPU had work, and the host did something else during a step.
      others: how long an IPU of the pipeline waited while another one had work; the mean of its IPUs.
    """

    length: float
    data: float
    dequeuing: float
    between_steps: float
    within_steps: float
    others: float

    @property
    def idle(self) -> float:
        """The time in which no IPU had work."""
        return self.data + self.dequeuing + self.between_steps + self.within_steps

    @property
    def share(self) -> float:
        """The share of the time in which no IPU had work; 0 to 1."""
        return self.idle / self.length if self.length else 0.0

    @property
    def is_told(self) -> bool:
        """Whether the waiting is long enough to be reported."""
        return self.share >= _LEAST_SHARE

    @property
    def is_first(self) -> bool:
        """Whether the host is what IPUs wait for most."""
        return self.is_told and self.idle >= self.others

    @property
    def sentence(self) -> str:
        """A sentence about what was measured, and what to do."""
        parts = sorted(((getattr(self, name), name) for name in _CAUSES), key=lambda part: -part[0])
        did = [
            f"{_CAUSES[name][0]} for {describe_time(time)}"
            for time, name in parts
            if time >= _LEAST_TOLD * self.length
        ]
        listed = did[0] if len(did) == 1 else f"{', '.join(did[:-1])} and {did[-1]}"
        mends = [_CAUSES[name][1] for time, name in parts if time >= _LEAST_PART * self.idle]
        return (
            f"{describe_share(self.share)} of the time from the start of the first step to the end of the "
            f"last one ({describe_time(self.idle)} of {describe_time(self.length)}) no IPU had work, "
            f"because the host {listed}. {' '.join(mends)}"
        )


def find_host_time(profile: Profile, analyses: Sequence[PipelineAnalysis]) -> tuple[HostTime | None, ...]:
    """Measures how long the IPUs waited for the host, for each pipeline and loop of a profile.

    Returns:
      One entry per pipeline; None where no step was recorded.
    """
    working, data, dequeuing, passed_over = [], [], [], []
    for event in profile.events:
        span = (event.begin, event.end)
        if event.kind.is_computation or event.kind is EventKind.TRANSFER:
            working.append(span)
        elif event.kind is EventKind.INFEED_WAIT:
            data.append(span)
        elif event.kind is EventKind.OUTFEED:
            dequeuing.append(span)
        elif event.kind is EventKind.SPAN and event.name in (COMPILING, REHEARSAL):
            passed_over.append(span)
    busy, apart = _join(working), _join(passed_over)
    steps = _join((step.begin, step.end) for analysis in analyses for step in analysis.steps)
    waits, takes = _join(data), _join(dequeuing)
    found: list[HostTime | None] = []
    for facts, analysis in zip(profile.pipelines, analyses, strict=True):
        if not analysis.steps:
            found.append(None)
            continue
        begin = min(step.begin for step in analysis.steps)
        end = max(step.end for step in analysis.steps)
        counted = _without([(begin, end)], apart)
        idle = _without(counted, busy)
        rest = _without(idle, waits)
        own = _without(rest, takes)
        between = _without(own, steps)
        length = _length(counted)
        used = _mean_use(profile, facts, counted)
        found.append(
            HostTime(
                length,
                _length(idle) - _length(rest),
                _length(rest) - _length(own),
                _length(between),
                _length(own) - _length(between),
                max(0.0, length - _length(idle) - used),
            )
        )
    return tuple(found)


def _mean_use(profile: Profile, facts: PipelineFacts, counted: _Spans) -> float:
    """The mean time that an IPU of a pipeline computed."""
    by_ipu: dict[int, list[tuple[float, float]]] = {ipu: [] for ipu in facts.ipus}
    for event in profile.events:
        if event.kind.is_computation and event.ipu in by_ipu:
            by_ipu[event.ipu].append((event.begin, event.end))
    total = _length(counted)
    return sum(total - _length(_without(counted, _join(spans))) for spans in by_ipu.values()) / len(by_ipu)


def _join(spans: Iterable[tuple[float, float]]) -> _Spans:
    """Joins spans that overlap."""
    found: _Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _without(spans: _Spans, taken: _Spans) -> _Spans:
    """Removes the times of other spans from spans."""
    found: _Spans = []
    place = 0
    for begin, end in spans:
        while place < len(taken) and taken[place][1] <= begin:
            place += 1
        number = place
        while number < len(taken) and taken[number][0] < end:
            if taken[number][0] > begin:
                found.append((begin, taken[number][0]))
            begin = max(begin, taken[number][1])
            number += 1
        if begin < end:
            found.append((begin, end))
    return found


def _length(spans: _Spans) -> float:
    return sum(end - begin for begin, end in spans)
