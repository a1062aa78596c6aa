"""A first look at a trace: how busy IPUs were, what limits them, how long they waited for the host."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ipu_pipeline.engine.inspect import PipelineFacts
from ipu_pipeline.ground.tables import describe_share, describe_time
from ipu_pipeline.reports.profile import ACTIONS, COMPILING, REHEARSAL, Event, EventKind, Profile, busy_time

# Figures of pipelines. They are medians over steps; figures of actions are medians of the means of steps.
# So a step during which something else happened (a compilation, an evaluation) counts no more than another
# one.

_EVEN = 1.02  # times as busy as another
_LAST_ACTIONS = (*ACTIONS, EventKind.UPDATE)


@dataclass(frozen=True)
class StepTime:
    """A step. Times are in microseconds.

    Attributes:
      number: the number of the weight update, or of the execution in inference.
      begin: when its first action begins.
      end: when its last action ends.
      length: from its begin, or from the end of the step before if that is later, to its end.
      num_micro_batches: how many micro-batches were seen.
      is_whole: whether no other step has more actions; a step at the edge of a trace may have fewer.
    """

    number: int
    begin: float
    end: float
    length: float
    num_micro_batches: int
    is_whole: bool


@dataclass(frozen=True)
class IpuUse:
    """The work of an IPU in a step.

    Attributes:
      ipu: its number.
      utilisation: the share of the step in which it computed for the pipeline; 0 to 1.
      busy: how long it did so, in microseconds.
      update: how long its weight update took, in microseconds; 0 without one.
    """

    ipu: int
    utilisation: float
    busy: float
    update: float


@dataclass(frozen=True)
class StageUse:
    """The work of a stage for a micro-batch.

    Attributes:
      stage: its number.
      forward: how long its forward takes on the mean, in microseconds; None if none was seen.
      backward: the same for its backward, of which both halves count.
      num_sent_bytes: the size of the results and gradients that it sends to other IPUs.
      weight_gradients: how long the second half of its backward takes; None where there are no halves.
    """

    stage: int
    forward: float | None
    backward: float | None
    num_sent_bytes: float
    weight_gradients: float | None = None

    @property
    def length(self) -> float:
        """The time of forward and backward together."""
        return (self.forward or 0.0) + (self.backward or 0.0)


@dataclass(frozen=True)
class LinkUse:
    """The data that a stage sends to another one on another IPU.

    Attributes:
      source: the stage that sends.
      target: the stage that receives; if several stages on that IPU do, the nearest one.
      length: how long sending a program's results takes, in microseconds; None if no end was seen.
      num_bytes: the size of these results.
    """

    source: int
    target: int
    length: float | None
    num_bytes: float


@dataclass(frozen=True)
class PipelineAnalysis:
    """The figures of a pipeline or loop that ran.

    Attributes:
      pipeline: its number in the profile.
      steps: in the order of their begins.
      step_time: how long a step takes, in microseconds; 0 without a step.
      time_between: how long nothing ran between two steps, in microseconds.
      utilisation: the mean utilisation of its IPUs.
      balanced_utilisation: the utilisation if all stages took equally long and nothing else took time;
        None if there is no formula for it.
      ipus: the IPUs that it has stages on, of all replicas.
      stages: all of them.
      links: between stages, by source and target.
      num_micro_batches: micro-batches in a step of all replicas, as they were seen.
      micro_batches_per_second: the speed while steps run.
      samples_per_second: the same in samples; None if it is not known how many samples a micro-batch has.
      limiting_ipu: the busiest IPU.
      limiting_stage: the stage that takes longest on that IPU.
      num_shared: how many actions shared a program with others, so that their times are estimates.
      num_actions: the number of all actions.
    """

    pipeline: int
    steps: tuple[StepTime, ...]
    step_time: float
    time_between: float
    utilisation: float
    balanced_utilisation: float | None
    ipus: tuple[IpuUse, ...]
    stages: tuple[StageUse, ...]
    links: tuple[LinkUse, ...]
    num_micro_batches: int
    micro_batches_per_second: float
    samples_per_second: float | None
    limiting_ipu: int
    limiting_stage: int
    num_shared: int
    num_actions: int

    @property
    def bubble(self) -> float:
        """The share of the step in which IPUs were idle; 0 to 1."""
        return 1.0 - self.utilisation

    @property
    def is_even(self) -> bool:
        """Whether all IPUs were about equally busy, so that no stage holds the others back."""
        busy = [use.busy for use in self.ipus]
        return max(busy) <= _EVEN * min(busy)

    @property
    def typical_step(self) -> StepTime | None:
        """The whole step whose length is nearest to `step_time`; None without one."""
        steps = [step for step in self.steps if step.is_whole] or self.steps
        return min(steps, key=lambda step: abs(step.length - self.step_time), default=None)


def analyse(profile: Profile) -> tuple[PipelineAnalysis, ...]:
    """Analyses each pipeline and loop of a profile, in their order."""
    events: dict[int, list[Event]] = defaultdict(list)
    counts = [len(facts.stages) for facts in profile.pipelines]
    for event in profile.events:
        if event.pipeline is None:
            continue
        if not 0 <= event.pipeline < len(counts) or not 0 <= (event.stage or 0) < counts[event.pipeline]:
            raise ValueError(
                f"profile.json: it is damaged (it has an event of stage {event.stage} of pipeline "
                f"{event.pipeline}, and pipelines with {counts} stages). Record the trace again."
            )
        events[event.pipeline].append(event)
    return tuple(_analyse(index, facts, events[index]) for index, facts in enumerate(profile.pipelines))


def _analyse(index: int, facts: PipelineFacts, events: Sequence[Event]) -> PipelineAnalysis:
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.step is not None:
            by_step[event.step].append(event)
    steps = _find_steps(by_step)
    typical = [step for step in steps if step.is_whole]
    lengths = [step.length for step in typical]
    step_time = statistics.median(lengths) if lengths else 0.0
    ipus = _find_use(facts, typical, by_step)
    stages = _find_stages(facts, typical, by_step)
    numbers = [step.num_micro_batches for step in typical]
    num_micro_batches = (facts.num_micro_batches or 1) * facts.num_replicas
    if numbers:
        num_micro_batches = round(statistics.median(numbers))
    speed = num_micro_batches / step_time * 1e6 if step_time else 0.0
    limiting = max(ipus, key=lambda use: (use.busy, -use.ipu)).ipu
    limiting_stages = [stages[index] for index in facts.stages_on(limiting)]
    actions = [event for event in events if event.kind in _LAST_ACTIONS]
    gaps = [max(0.0, after.begin - before.end) for before, after in itertools.pairwise(steps)]
    return PipelineAnalysis(
        pipeline=index,
        steps=steps,
        step_time=step_time,
        time_between=statistics.median(gaps) if gaps else 0.0,
        utilisation=statistics.fmean(use.utilisation for use in ipus),
        balanced_utilisation=balanced_utilisation(facts, num_micro_batches),
        ipus=ipus,
        stages=stages,
        links=_find_links(facts, events),
        num_micro_batches=num_micro_batches,
        micro_batches_per_second=speed,
        samples_per_second=None if facts.micro_batch_size is None else speed * facts.micro_batch_size,
        limiting_ipu=limiting,
        limiting_stage=max(limiting_stages, key=lambda stage: (stage.length, -stage.stage)).stage,
        num_shared=sum(event.is_shared for event in actions),
        num_actions=len(actions),
    )


def _find_steps(by_step: Mapping[int, Sequence[Event]]) -> tuple[StepTime, ...]:
    counts = {
        number: sum(event.kind in _LAST_ACTIONS for event in events) for number, events in by_step.items()
    }
    most = max(counts.values(), default=0)
    step_times = []
    last_end = float("-inf")
    spans = [
        (min(event.begin for event in events), max(event.end for event in events), number)
        for number, events in by_step.items()
    ]
    for begin, end, number in sorted(spans):
        micro_batches = {
            event.micro_batch for event in by_step[number] if event.kind is EventKind.FORWARD
        } - {None}
        length = max(0.0, end - max(begin, last_end))
        step_times.append(StepTime(number, begin, end, length, len(micro_batches), counts[number] == most))
        last_end = max(last_end, end)
    return tuple(step_times)


def _find_use(
    facts: PipelineFacts, steps: Sequence[StepTime], by_step: Mapping[int, Sequence[Event]]
) -> tuple[IpuUse, ...]:
    shares, busy, updates = defaultdict(list), defaultdict(list), defaultdict(list)
    for step in steps:
        computations: dict[int, list[Event]] = defaultdict(list)
        for event in by_step[step.number]:
            if event.kind.is_computation and event.ipu is not None:
                computations[event.ipu].append(event)
        for ipu, events in computations.items():
            busy_length = busy_time(events)
            busy[ipu].append(busy_length)
            shares[ipu].append(min(1.0, busy_length / step.length) if step.length else 0.0)
            updates[ipu].append(busy_time(event for event in events if event.kind is EventKind.UPDATE))
    return tuple(
        IpuUse(ipu, *(_median(values[ipu]) or 0.0 for values in (shares, busy, updates)))
        for ipu in facts.ipus
    )


def _find_stages(
    facts: PipelineFacts, steps: Sequence[StepTime], by_step: Mapping[int, Sequence[Event]]
) -> tuple[StageUse, ...]:
    means: dict[tuple[EventKind, int], list[float]] = defaultdict(list)  # means of the steps
    sent: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        lengths: dict[tuple[EventKind, int], list[float]] = defaultdict(list)
        sizes: dict[int, int] = defaultdict(int)
        for event in by_step[step.number]:
            if event.stage is None:
                continue
            if event.kind is EventKind.TRANSFER:
                sizes[event.stage] += event.num_bytes
            else:
                lengths[event.kind, event.stage].append(event.length)
        for key, values in lengths.items():
            means[key].append(statistics.fmean(values))
        for stage, size in sizes.items():
            sent[stage].append(size / max(1, step.num_micro_batches))
    uses = []
    for stage_facts in facts.stages:
        forward, *back = (_median(means[kind, stage_facts.index]) for kind in ACTIONS)
        backward_lengths = [length for length in back if length is not None]
        uses.append(
            StageUse(
                stage_facts.index,
                forward,
                sum(backward_lengths) if backward_lengths else None,
                _median(sent[stage_facts.index]) or 0.0,
                (back[-1] or 0.0) if stage_facts.is_halved else None,
            )
        )
    return tuple(uses)


def _find_links(facts: PipelineFacts, events: Sequence[Event]) -> tuple[LinkUse, ...]:
    transfers: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        source = event.stage
        if event.kind is EventKind.TRANSFER and source is not None and event.ipu is not None:
            targets = [(abs(index - source), index) for index in facts.stages_on(event.ipu)]
            if targets:
                transfers[source, min(targets)[1]].append(event)
    return tuple(
        LinkUse(
            source,
            target,
            _median(event.length for event in sent if not event.is_bounded),
            statistics.median(event.num_bytes for event in sent),
        )
        for (source, target), sent in sorted(transfers.items())
    )


def balanced_utilisation(facts: PipelineFacts, num_micro_batches: int) -> float | None:
    """The utilisation of a pipeline whose stages all take equally long, if nothing else takes time.

    With M micro-batches (or chunks of them) in a replica and N levels, each on IPUs of its own, it is
    M / (M + N - 1) under Grouped and Interleaved, and 1 / N under Sequential.

    Source: the bubble of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
    2021, which is (N - 1) / M of the remaining time.

    Returns:
      A number from 0 to 1; None if an IPU has several stages among several IPUs, or the schedule is the
      user's own.
    """
    ipus = {stage.ipu for stage in facts.stages}
    if len(ipus) == 1:
        return 1.0
    if len(ipus) < len(facts.stages):
        return None
    num_levels = len({stage.level for stage in facts.stages})
    if facts.schedule == "sequential":
        return 1.0 / num_levels
    if facts.schedule not in ("grouped", "interleaved"):
        return None
    number = max(1, num_micro_batches // (facts.chunk_size * facts.num_replicas))
    return number / (number + num_levels - 1)


def _median(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return statistics.median(numbers) if numbers else None


# Waiting for the host. The time that counts goes from the start of a pipeline's first step to the end of
# its last one, without compilations and rehearsals for the trace. In it, IPUs waited for the host whenever
# no IPU computed, for any pipeline, and nothing was on its way between IPUs. Waiting for another IPU is the
# pipeline's own affair: `predictions` has advice on that.

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
    busy, skipped = _join(working), _join(passed_over)
    steps = _join((step.begin, step.end) for analysis in analyses for step in analysis.steps)
    waits, takes = _join(data), _join(dequeuing)
    host_times: list[HostTime | None] = []
    for facts, analysis in zip(profile.pipelines, analyses, strict=True):
        if not analysis.steps:
            host_times.append(None)
            continue
        begin = min(step.begin for step in analysis.steps)
        end = max(step.end for step in analysis.steps)
        counted = _without([(begin, end)], skipped)
        # The causes are taken in a fixed order, each from what those before left, so that parts add up.
        idle = _without(counted, busy)
        after_waits = _without(idle, waits)
        after_takes = _without(after_waits, takes)
        between = _without(after_takes, steps)
        length = _length(counted)
        mean_use = _mean_use(profile, facts, counted)
        host_times.append(
            HostTime(
                length,
                _length(idle) - _length(after_waits),
                _length(after_waits) - _length(after_takes),
                _length(between),
                _length(after_takes) - _length(between),
                max(0.0, length - _length(idle) - mean_use),
            )
        )
    return tuple(host_times)


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
    joined: _Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _without(spans: _Spans, removed: _Spans) -> _Spans:
    """Removes the times of some spans from others."""
    remaining: _Spans = []
    place = 0
    for begin, end in spans:
        while place < len(removed) and removed[place][1] <= begin:
            place += 1
        number = place
        while number < len(removed) and removed[number][0] < end:
            if removed[number][0] > begin:
                remaining.append((begin, removed[number][0]))
            begin = max(begin, removed[number][1])
            number += 1
        if begin < end:
            remaining.append((begin, end))
    return remaining


def _length(spans: _Spans) -> float:
    return sum(end - begin for begin, end in spans)
